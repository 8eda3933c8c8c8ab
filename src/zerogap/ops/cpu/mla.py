"""Thin calls of the native ops of latent attention (kernels/mla.h); shapes are asserted, nothing is computed.

Shapes: T token rows, h query heads, L latent, R rotated part, S page-table rows, P pages per table row.
"""

import ctypes
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from zerogap.ops.cpu.library import STORAGE, Arguments, Operation, empty, pointer, submit
from zerogap.types import ForwardContext, LayerKV

if TYPE_CHECKING:
    from zerogap.ops.latent import LatentCodec

_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_PLACE: list[tuple[str, Any]] = [
    *[(name, _POINTER) for name in ("positions", "sequences", "page_table")],
    ("table_width", _INT64),
    *[(name, _POINTER) for name in ("latent_pages", "rope_pages", "scales")],
    ("page_stride", _INT64),
]
TILE_ROWS = 64  # rows of a gradient tile
FORMATS = {"none": 0, "per_token_head": 1, "calibrated": 2}  # mirror of `zg::KVFormat`


class LatentWriteArguments(Arguments):
    _fields_: ClassVar = [
        ("rows", _INT64),
        *[(name, _POINTER) for name in ("latent", "rope")],
        *_PLACE,
        *[(name, _INT32) for name in ("latent_size", "rope_size", "page_size", "storage", "format", "pow2")],
    ]


class LatentAmaxArguments(Arguments):
    _fields_: ClassVar = [
        ("rows", _INT64),
        *[(name, _POINTER) for name in ("latent", "amax")],
        *[(name, _INT32) for name in ("latent_size", "storage")],
    ]


class LatentAttentionArguments(Arguments):
    _fields_: ClassVar = [
        ("rows", _INT64),
        *[(name, _POINTER) for name in ("q_latent", "q_rope")],
        *_PLACE,
        *[(name, _POINTER) for name in ("out", "lse")],
        *[(name, _INT32) for name in ("num_heads", "latent_size", "rope_size", "page_size", "kv_split", "storage")],
        ("format", _INT32),
        ("scale", _FLOAT),
    ]


class LatentGradArguments(Arguments):
    _fields_: ClassVar = [
        ("rows", _INT64),
        *[(name, _POINTER) for name in ("q_latent", "q_rope", "latent", "rope", "out", "d_out")],
        *[(name, _POINTER) for name in ("scales", "lse", "sample_starts")],
        *[(name, _INT64) for name in ("num_samples", "num_tiles")],
        *[(name, _POINTER) for name in ("dq_latent", "dq_rope", "d_latent", "d_rope", "workspace")],
        *[(name, _INT32) for name in ("num_heads", "latent_size", "rope_size", "leaves", "storage")],
        *[(name, _INT32) for name in ("format", "pow2")],
        ("scale", _FLOAT),
    ]


LATENT_WRITE = Operation("latent_write", LatentWriteArguments)
LATENT_AMAX = Operation("latent_amax", LatentAmaxArguments)
LATENT_ATTENTION = Operation("latent_attention", LatentAttentionArguments)
LATENT_GRAD = Operation("latent_grad", LatentGradArguments)


def _place(kv: LayerKV, context: ForwardContext, num_rows: int, rows_dtype: torch.dtype) -> dict[str, int | None]:
    """Pointers to pages and scales, and to what says where rows stand; asserts dtypes, shapes and strides."""
    codec = cast("LatentCodec", kv.codec)
    size, count = context.page_size, kv.keys.shape[0]
    for name in ("positions", "sequences"):
        tensor = getattr(context, name)
        assert tensor.dtype == torch.int32 and tensor.shape == (num_rows,), f"{name}: int32 [{num_rows}]"
    assert context.page_table.dtype == torch.int32 and context.page_table.dim() == 2, "page_table: int32 [S, P]"
    stride = kv.keys.stride(0) * kv.keys.element_size()
    dtype = torch.uint8 if codec.coded else rows_dtype
    assert not codec.coded or rows_dtype == torch.bfloat16, "FP8 pages take BF16 rows"
    parts = [
        ("latent_pages", kv.keys, codec.latent, dtype),
        ("rope_pages", kv.values, codec.rope, rows_dtype),
    ]
    scales = kv.key_scales
    if codec.kv_scale == "per_token_head":
        assert scales is not None, "scales of every token"
        parts.append(("scales", scales, codec.tiles, torch.float32))
    found: dict[str, int | None] = {"page_stride": stride, "scales": None}
    for name, tensor, width, kind in parts:
        assert tensor.dtype == kind and tensor.shape == (count, 1, size * width), f"{name}: {kind}, pages of {size}"
        assert tensor.stride(2) == 1 and tensor.stride(0) * tensor.element_size() == stride, f"{name}: stride {stride}"
        found[name] = tensor.data_ptr()
    if codec.kv_scale == "calibrated":
        assert scales is not None and scales.shape == (codec.tiles,) and scales.dtype == torch.float32, "FP32 [tiles]"
        found["scales"] = pointer(scales)
    return found | {
        "positions": pointer(context.positions),
        "sequences": pointer(context.sequences),
        "page_table": pointer(context.page_table),
        "table_width": context.page_table.shape[1],
        "latent_size": codec.latent,
        "rope_size": codec.rope,
        "page_size": size,
        "storage": STORAGE[rows_dtype],
        "format": FORMATS[codec.kv_scale],
    }


def latent_write(latent: torch.Tensor, rope: torch.Tensor, kv: LayerKV, context: ForwardContext) -> None:
    """Store latent [T, L] and rotated part [T, R] of every token in the pages of its sequence."""
    codec = cast("LatentCodec", kv.codec)
    rows = latent.shape[0]
    assert latent.shape == (rows, codec.latent) and rope.shape == (rows, codec.rope), f"{latent.shape}, {rope.shape}"
    assert latent.dtype == rope.dtype, "latent, rope: one dtype"
    arguments = LatentWriteArguments(
        rows=rows,
        latent=pointer(latent),
        rope=pointer(rope),
        pow2=codec.scale_format == "pow2",
        **_place(kv, context, rows, latent.dtype),
    )
    submit(LATENT_WRITE, arguments, latent, keep=(context.page_table, kv.keys, kv.values, kv.key_scales))


def latent_amax(latent: torch.Tensor, amax: torch.Tensor) -> None:
    """amax FP32 [tiles] = max(amax, |latent|), in place, over latent [T, L]; tiles of 128, the last one ragged."""
    assert amax.dtype == torch.float32 and amax.shape == (-(-latent.shape[1] // 128),), "amax: FP32 [tiles]"
    assert latent.dim() == 2 and latent.shape[1] % 16 == 0, "latent: [T, L], L a multiple of 16"
    arguments = LatentAmaxArguments(
        rows=latent.shape[0],
        latent=pointer(latent),
        amax=pointer(amax),
        latent_size=latent.shape[1],
        storage=STORAGE[latent.dtype],
    )
    submit(LATENT_AMAX, arguments, latent, keep=(amax,))


def latent_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    kv: LayerKV,
    context: ForwardContext,
    *,
    num_heads: int,
    scale: float,
    kv_split: int,
    want_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q_latent [T, h * L], q_rope [T, h * R] against the pages -> out [T, h * L] and, if wanted, lse FP32 [T, h]."""
    codec = cast("LatentCodec", kv.codec)
    rows = q_latent.shape[0]
    assert q_latent.shape == (rows, num_heads * codec.latent), f"q_latent {tuple(q_latent.shape)}"
    assert q_rope.shape == (rows, num_heads * codec.rope) and q_rope.dtype == q_latent.dtype, f"q_rope {q_rope.shape}"
    out = empty(q_latent, (num_heads * codec.latent,), q_latent.dtype)
    lse = empty(q_latent, (num_heads,), torch.float32) if want_lse else None
    arguments = LatentAttentionArguments(
        rows=rows,
        q_latent=pointer(q_latent),
        q_rope=pointer(q_rope),
        out=pointer(out),
        lse=pointer(lse),
        num_heads=num_heads,
        kv_split=kv_split,
        scale=scale,
        **_place(kv, context, rows, q_latent.dtype),
    )
    submit(LATENT_ATTENTION, arguments, q_latent, keep=(context.page_table, kv.keys, kv.values, kv.key_scales))
    return out, lse


def latent_grad(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor,
    sample_starts: torch.Tensor,
    codec: "LatentCodec",
    scales: torch.Tensor | None,
    *,
    num_heads: int,
    scale: float,
    leaves: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q_latent, q_rope, latent and rope, like them; `scales`: FP32 [tiles] where calibrated."""
    assert (scales is not None) == (codec.kv_scale == "calibrated"), "calibrated scales, and no others"
    assert d_out.shape == out.shape == q_latent.shape and d_out.dtype == q_latent.dtype, "d_out: like q_latent"
    assert sample_starts.dtype == torch.int32, "sample_starts: int32 [S + 1]"
    dq_latent, dq_rope, d_latent, d_rope = (torch.empty_like(x) for x in (q_latent, q_rope, latent, rope))
    lengths = sample_starts[1:] - sample_starts[:-1]
    num_tiles = int(((lengths + (TILE_ROWS - 1)) // TILE_ROWS).sum())
    # Mirrors latent_grad_bytes: four packed tiles, FP32 sums of dq, log-sum-exp and delta, progress.
    packed = (4 * codec.latent + 2 * codec.rope) * q_latent.element_size()
    item_bytes = TILE_ROWS * (packed + codec.head_dim * 4 + 2 * 4) + 64
    workspace = torch.empty(num_tiles * num_heads * item_bytes, dtype=torch.uint8)
    arguments = LatentGradArguments(
        rows=q_latent.shape[0],
        q_latent=pointer(q_latent),
        q_rope=pointer(q_rope),
        latent=pointer(latent),
        rope=pointer(rope),
        out=pointer(out),
        d_out=pointer(d_out),
        scales=pointer(scales),
        lse=pointer(lse),
        sample_starts=pointer(sample_starts),
        num_samples=lengths.shape[0],
        num_tiles=num_tiles,
        dq_latent=pointer(dq_latent),
        dq_rope=pointer(dq_rope),
        d_latent=pointer(d_latent),
        d_rope=pointer(d_rope),
        workspace=pointer(workspace),
        num_heads=num_heads,
        latent_size=codec.latent,
        rope_size=codec.rope,
        leaves=leaves,
        storage=STORAGE[q_latent.dtype],
        format=FORMATS[codec.kv_scale],
        pow2=codec.scale_format == "pow2",
        scale=scale,
    )
    submit(LATENT_GRAD, arguments, q_latent)
    return dq_latent, dq_rope, d_latent, d_rope
