"""Thin calls of the native attention ops (kernels/attention.h) on tensors; shapes are asserted, nothing is computed.

Shapes: T token rows, S page-table rows, P pages per table row, Hq query heads, Hk key/value heads, D head dimension.
"""

import ctypes
from typing import ClassVar

import torch

from zerogap.ops.cpu.library import Arguments, Operation, empty, pointer, submit
from zerogap.types import ForwardContext, LayerKV

_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
TILE_ROWS = 64  # rows of a gradient tile


class KVWriteArguments(Arguments):
    _fields_: ClassVar = [
        ("rows", _INT64),
        *[(name, _POINTER) for name in ("k", "v", "positions", "sequences", "page_table")],
        ("table_width", _INT64),
        *[(name, _POINTER) for name in ("key_pages", "value_pages")],
        *[(name, _INT32) for name in ("num_kv_heads", "head_dim", "page_size", "storage")],
    ]


class AttentionArguments(Arguments):
    _fields_: ClassVar = [
        ("rows", _INT64),
        *[(name, _POINTER) for name in ("q", "positions", "sequences", "page_table")],
        ("table_width", _INT64),
        *[(name, _POINTER) for name in ("key_pages", "value_pages", "out", "lse")],
        *[(name, _INT32) for name in ("num_heads", "num_kv_heads", "head_dim", "page_size", "kv_split", "storage")],
        ("scale", _FLOAT),
    ]


class AttentionGradArguments(Arguments):
    _fields_: ClassVar = [
        ("rows", _INT64),
        *[(name, _POINTER) for name in ("q", "k", "v", "out", "d_out", "lse", "sample_starts")],
        *[(name, _INT64) for name in ("num_samples", "num_tiles")],
        *[(name, _POINTER) for name in ("dq", "dk", "dv", "workspace")],
        *[(name, _INT32) for name in ("num_heads", "num_kv_heads", "head_dim", "leaves", "storage")],
        ("scale", _FLOAT),
    ]


KV_WRITE = Operation("kv_write", KVWriteArguments)
ATTENTION = Operation("attention", AttentionArguments)
ATTENTION_GRAD = Operation("attention_grad", AttentionGradArguments)
_STORAGE = {torch.float32: 0, torch.bfloat16: 1}


def _require_rows(context: ForwardContext, num_rows: int) -> None:
    for name in ("positions", "sequences"):
        tensor = getattr(context, name)
        assert tensor.dtype == torch.int32 and tensor.shape == (num_rows,), f"{name}: int32 [{num_rows}]"
    assert context.page_table.dtype == torch.int32 and context.page_table.dim() == 2, "page_table: int32 [S, P]"


def kv_write(k: torch.Tensor, v: torch.Tensor, kv: LayerKV, context: ForwardContext) -> None:
    """Store k, v [T, Hk * D] of every row in the pages of its sequence, at its absolute position."""
    num_kv_heads, head_dim = kv.codec.num_kv_heads, kv.codec.head_dim
    assert k.shape == v.shape == (k.shape[0], num_kv_heads * head_dim), "k, v: [T, Hk * D]"
    assert k.dtype == v.dtype == kv.keys.dtype == kv.values.dtype, "rows and pages have one dtype"
    _require_rows(context, k.shape[0])
    arguments = KVWriteArguments(
        rows=k.shape[0],
        k=pointer(k),
        v=pointer(v),
        positions=pointer(context.positions),
        sequences=pointer(context.sequences),
        page_table=pointer(context.page_table),
        table_width=context.page_table.shape[1],
        key_pages=pointer(kv.keys),
        value_pages=pointer(kv.values),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=context.page_size,
        storage=_STORAGE[k.dtype],
    )
    submit(KV_WRITE, arguments, k, keep=(context.page_table, kv.keys, kv.values))


def attention(
    q: torch.Tensor,
    kv: LayerKV,
    context: ForwardContext,
    *,
    num_heads: int,
    scale: float,
    kv_split: int,
    want_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q [T, Hq * D] against the pages -> out [T, Hq * D] and, if wanted, the log-sum-exp FP32 [T, Hq]."""
    head_dim = kv.codec.head_dim
    assert q.shape == (q.shape[0], num_heads * head_dim), "q: [T, Hq * D]"
    assert q.dtype == kv.keys.dtype == kv.values.dtype, "rows and pages have one dtype"
    _require_rows(context, q.shape[0])
    out = empty(q, (num_heads * head_dim,), q.dtype)
    lse = empty(q, (num_heads,), torch.float32) if want_lse else None
    arguments = AttentionArguments(
        rows=q.shape[0],
        q=pointer(q),
        positions=pointer(context.positions),
        sequences=pointer(context.sequences),
        page_table=pointer(context.page_table),
        table_width=context.page_table.shape[1],
        key_pages=pointer(kv.keys),
        value_pages=pointer(kv.values),
        out=pointer(out),
        lse=pointer(lse),
        num_heads=num_heads,
        num_kv_heads=kv.codec.num_kv_heads,
        head_dim=head_dim,
        page_size=context.page_size,
        kv_split=kv_split,
        storage=_STORAGE[q.dtype],
        scale=scale,
    )
    submit(ATTENTION, arguments, q, keep=(context.page_table, kv.keys, kv.values))
    return out, lse


def attention_grad(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor,
    sample_starts: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    leaves: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, in their shapes and dtype."""
    assert d_out.shape == out.shape == q.shape and d_out.dtype == q.dtype, "d_out: like q"
    assert sample_starts.dtype == torch.int32, "sample_starts: int32 [S + 1]"
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    lengths = sample_starts[1:] - sample_starts[:-1]
    num_tiles = int(((lengths + (TILE_ROWS - 1)) // TILE_ROWS).sum())
    # Mirrors attention_grad_bytes: four packed tiles, FP32 sums of dq, log-sum-exp and delta, a line for progress.
    item_bytes = TILE_ROWS * head_dim * (4 * q.element_size() + 4) + 2 * TILE_ROWS * 4 + 64
    workspace = torch.empty(num_tiles * num_heads * item_bytes, dtype=torch.uint8)
    arguments = AttentionGradArguments(
        rows=q.shape[0],
        q=pointer(q),
        k=pointer(k),
        v=pointer(v),
        out=pointer(out),
        d_out=pointer(d_out),
        lse=pointer(lse),
        sample_starts=pointer(sample_starts),
        num_samples=lengths.shape[0],
        num_tiles=num_tiles,
        dq=pointer(dq),
        dk=pointer(dk),
        dv=pointer(dv),
        workspace=pointer(workspace),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        leaves=leaves,
        storage=_STORAGE[q.dtype],
        scale=scale,
    )
    submit(ATTENTION_GRAD, arguments, q)
    return dq, dk, dv
