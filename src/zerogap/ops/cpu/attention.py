"""Thin calls of the native attention ops (kernels/attention.h) on tensors; shapes are asserted, nothing is computed.

Shapes: T token rows, S page-table rows, P pages per table row, Hq query heads, Hk key/value heads, D head dimension.
"""

import ctypes
import dataclasses
from typing import ClassVar

import torch

from zerogap.numerics import DType
from zerogap.ops.cpu.library import Arguments, Operation, empty, pointer, submit
from zerogap.types import ForwardContext, KVCodec, LayerKV

_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
TILE_ROWS = 64  # rows of a gradient tile


class KVWriteArguments(Arguments):
    _fields_: ClassVar = [
        ("rows", _INT64),
        *[(name, _POINTER) for name in ("k", "v", "positions", "sequences", "page_table")],
        ("table_width", _INT64),
        *[(name, _POINTER) for name in ("key_pages", "value_pages", "key_scales", "value_scales")],
        ("page_stride", _INT64),
        *[(name, _INT32) for name in ("num_kv_heads", "head_dim", "page_size", "storage", "format", "pow2")],
    ]


class KVAmaxArguments(Arguments):
    _fields_: ClassVar = [
        ("rows", _INT64),
        *[(name, _POINTER) for name in ("k", "amax")],
        *[(name, _INT32) for name in ("num_kv_heads", "head_dim", "storage")],
    ]


class AttentionArguments(Arguments):
    _fields_: ClassVar = [
        ("rows", _INT64),
        *[(name, _POINTER) for name in ("q", "positions", "sequences", "page_table")],
        ("table_width", _INT64),
        *[(name, _POINTER) for name in ("key_pages", "value_pages", "key_scales", "value_scales")],
        ("page_stride", _INT64),
        *[(name, _POINTER) for name in ("out", "lse")],
        *[(name, _INT32) for name in ("num_heads", "num_kv_heads", "head_dim", "page_size", "kv_split", "storage")],
        *[(name, _INT32) for name in ("format", "pow2", "fp8_math")],
        ("scale", _FLOAT),
    ]


class AttentionGradArguments(Arguments):
    _fields_: ClassVar = [
        ("rows", _INT64),
        *[(name, _POINTER) for name in ("q", "k", "v", "out", "d_out")],
        *[(name, _POINTER) for name in ("key_scales", "value_scales", "lse", "sample_starts")],
        *[(name, _INT64) for name in ("num_samples", "num_tiles")],
        *[(name, _POINTER) for name in ("dq", "dk", "dv", "workspace")],
        *[(name, _INT32) for name in ("num_heads", "num_kv_heads", "head_dim", "leaves", "storage")],
        *[(name, _INT32) for name in ("format", "pow2", "fp8_math")],
        ("scale", _FLOAT),
    ]


KV_WRITE = Operation("kv_write", KVWriteArguments)
KV_AMAX = Operation("kv_amax", KVAmaxArguments)
ATTENTION = Operation("attention", AttentionArguments)
ATTENTION_GRAD = Operation("attention_grad", AttentionGradArguments)
_STORAGE = {torch.float32: 0, torch.bfloat16: 1}


@dataclasses.dataclass(frozen=True)
class Format:
    """How a codec's pages are to be read: mirror of `zg::KVFormat` and the flags that go with it."""

    format: int = 0  # 0 dense, 1 codes with scales per token and head, 2 codes with calibrated scales
    pow2: bool = False
    fp8_math: bool = False

    @classmethod
    def of(cls, codec: KVCodec) -> "Format":
        """The format of a `DenseCodec` or `FP8Codec`."""
        number = {"none": 0, "per_token_head": 1, "calibrated": 2}[codec.kv_scale]
        return cls(number, codec.scale_format == "pow2", codec.attention_math is DType.FP8)

    def pages(self, kv: LayerKV, rows_dtype: torch.dtype, page_size: int) -> dict[str, int | None]:
        """Pointers to pages and scales, and the stride they share; asserts this format's dtypes, shapes and strides."""
        dtype = torch.uint8 if self.format else rows_dtype
        stride = kv.keys.stride(1) * dtype.itemsize
        row = (kv.keys.shape[0], kv.codec.num_kv_heads, page_size * kv.codec.head_dim)
        found: dict[str, int | None] = {"page_stride": stride}
        for name, tensor in (("key_pages", kv.keys), ("value_pages", kv.values)):
            found[name] = _paged(name, tensor, row, dtype, stride)
        if self.format:
            assert rows_dtype == torch.bfloat16, "FP8 pages take BF16 rows"
        for name, scales in (("key_scales", kv.key_scales), ("value_scales", kv.value_scales)):
            if self.format == 2:
                assert scales is not None and scales.shape == row[1:2], f"{name}: [{row[1]}]"
                assert scales.dtype == torch.float32, f"{name}: FP32"
                found[name] = pointer(scales)
            elif self.format == 1:
                assert scales is not None, f"{name} of every token"
                found[name] = _paged(name, scales, (*row[:2], page_size), torch.float32, stride)
        return found


def _paged(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, stride: int) -> int:
    """Address of a tensor of pages, `stride` bytes from one KV head's part to the next one's."""
    assert tensor.dtype == dtype and tensor.shape == shape, f"{name}: {dtype} {shape}"
    steps = [step * dtype.itemsize for step in tensor.stride()]
    assert steps == [shape[1] * stride, stride, dtype.itemsize], f"{name}: {stride} bytes from KV head to KV head"
    assert stride % 64 == 0 and tensor.data_ptr() % dtype.itemsize == 0, f"{name}: tiles are whole cache lines"
    return tensor.data_ptr()


def _require_rows(context: ForwardContext, num_rows: int) -> None:
    for name in ("positions", "sequences"):
        tensor = getattr(context, name)
        assert tensor.dtype == torch.int32 and tensor.shape == (num_rows,), f"{name}: int32 [{num_rows}]"
    assert context.page_table.dtype == torch.int32 and context.page_table.dim() == 2, "page_table: int32 [S, P]"


def kv_write(k: torch.Tensor, v: torch.Tensor, kv: LayerKV, context: ForwardContext) -> None:
    """Store k, v [T, Hk * D] of every row in the pages of its sequence, at its absolute position."""
    num_kv_heads, head_dim = kv.codec.num_kv_heads, kv.codec.head_dim
    assert k.shape == v.shape == (k.shape[0], num_kv_heads * head_dim), "k, v: [T, Hk * D]"
    assert k.dtype == v.dtype, "k, v: one dtype"
    form = Format.of(kv.codec)
    _require_rows(context, k.shape[0])
    arguments = KVWriteArguments(
        rows=k.shape[0],
        k=pointer(k),
        v=pointer(v),
        positions=pointer(context.positions),
        sequences=pointer(context.sequences),
        page_table=pointer(context.page_table),
        table_width=context.page_table.shape[1],
        **form.pages(kv, k.dtype, context.page_size),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=context.page_size,
        storage=_STORAGE[k.dtype],
        format=form.format,
        pow2=form.pow2,
    )
    submit(KV_WRITE, arguments, k, keep=(context.page_table, kv.keys, kv.values, kv.key_scales, kv.value_scales))


def kv_amax(k: torch.Tensor, amax: torch.Tensor) -> None:
    """amax FP32 [Hk] = max(amax, |k|), in place, over k [T, Hk * D]."""
    num_kv_heads = amax.shape[0]
    assert amax.dtype == torch.float32 and amax.dim() == 1, "amax: FP32 [Hk]"
    assert k.dim() == 2 and k.shape[1] % (16 * num_kv_heads) == 0, "k: [T, Hk * D], D a multiple of 16"
    arguments = KVAmaxArguments(
        rows=k.shape[0],
        k=pointer(k),
        amax=pointer(amax),
        num_kv_heads=num_kv_heads,
        head_dim=k.shape[1] // num_kv_heads,
        storage=_STORAGE[k.dtype],
    )
    submit(KV_AMAX, arguments, k, keep=(amax,))


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
    form = Format.of(kv.codec)
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
        **form.pages(kv, q.dtype, context.page_size),
        out=pointer(out),
        lse=pointer(lse),
        num_heads=num_heads,
        num_kv_heads=kv.codec.num_kv_heads,
        head_dim=head_dim,
        page_size=context.page_size,
        kv_split=kv_split,
        storage=_STORAGE[q.dtype],
        **dataclasses.asdict(form),
        scale=scale,
    )
    submit(ATTENTION, arguments, q, keep=(context.page_table, kv.keys, kv.values, kv.key_scales, kv.value_scales))
    return out, lse


def attention_grad(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor,
    sample_starts: torch.Tensor,
    codec: KVCodec,
    scales: tuple[torch.Tensor, ...] | None,
    *,
    num_heads: int,
    scale: float,
    leaves: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, in their shapes and dtype. `scales`: FP32 [Hk] of keys and values where calibrated."""
    num_kv_heads, head_dim, form = codec.num_kv_heads, codec.head_dim, Format.of(codec)
    assert (scales is not None) == (form.format == 2), "calibrated scales, and no others"
    key_scales, value_scales = scales or (None, None)
    assert d_out.shape == out.shape == q.shape and d_out.dtype == q.dtype, "d_out: like q"
    assert sample_starts.dtype == torch.int32, "sample_starts: int32 [S + 1]"
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    lengths = sample_starts[1:] - sample_starts[:-1]
    num_tiles = int(((lengths + (TILE_ROWS - 1)) // TILE_ROWS).sum())
    # Mirrors attention_grad_bytes: four packed tiles, FP32 sums of dq, log-sum-exp, delta and scales, progress.
    item_bytes = TILE_ROWS * head_dim * (4 * q.element_size() + 4) + 3 * TILE_ROWS * 4 + 64
    workspace = torch.empty(num_tiles * num_heads * item_bytes, dtype=torch.uint8)
    arguments = AttentionGradArguments(
        rows=q.shape[0],
        q=pointer(q),
        k=pointer(k),
        v=pointer(v),
        out=pointer(out),
        d_out=pointer(d_out),
        key_scales=pointer(key_scales),
        value_scales=pointer(value_scales),
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
        **dataclasses.asdict(form),
        scale=scale,
    )
    submit(ATTENTION_GRAD, arguments, q)
    return dq, dk, dv
