"""Packed weights and matrix products on CPU: thin functions over kernels/product.h.

A packed weight of logical shape [n, k] is a tensor of *panels* of 64 output columns (`panels_shape`); the kernel reads
each panel once per block of rows. Argument structs mirror the C++ ones field by field.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zerogap.ops.cpu import memory, quant
from zerogap.ops.cpu.library import Arguments, Operation, empty, pointer, recording, submit

PANEL = 64
MAX_SEGMENTS = 4
MODES = {"concatenate": 0, "chain": 1, "trees": 2}
STORAGE = {torch.float32: 0, torch.bfloat16: 1}

_address, _int32, _int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class _Segment(ctypes.Structure):
    _fields_ = (
        *[(name, _address) for name in ("x", "panels", "bias", "out")],
        *[(name, _int64) for name in ("width", "reduce", "leaf_size")],
        *[(name, _address) for name in ("x_scales", "panel_scales")],
        *[(name, _int64) for name in ("scale_row_stride", "scale_col_stride")],
    )


class _ProductArguments(Arguments):
    _fields_ = (
        ("rows", _int64),
        *[(name, _int32) for name in ("num_segments", "mode", "storage", "out_fp32")],
        ("segment", _Segment * MAX_SEGMENTS),
    )


class _FinishArguments(Arguments):
    _fields_ = (
        *[(name, _int64) for name in ("rows", "n", "num_sums")],
        ("sums", _address * MAX_SEGMENTS),
        ("bias", _address),
        ("out", _address),
        ("storage", _int32),
    )


class _WeightGradArguments(Arguments):
    _fields_ = (
        ("rows", _int64),
        *[(name, _address) for name in ("dy", "x", "pack_starts")],
        *[(name, _int64) for name in ("num_packs", "n", "k")],
        *[(name, _address) for name in ("acc", "workspace", "scales")],
        *[(name, _int32) for name in ("storage", "pow2")],
    )


class _ColumnGradArguments(Arguments):
    _fields_ = (
        ("rows", _int64),
        *[(name, _address) for name in ("dy", "pack_starts")],
        *[(name, _int64) for name in ("num_packs", "n")],
        ("acc", _address),
        ("storage", _int32),
    )


class _PackArguments(Arguments):
    _fields_ = (
        *[(name, _int64) for name in ("rows", "k")],
        ("source", _address),
        *[(name, _int32) for name in ("source_fp32", "storage")],
        *[(name, _address) for name in ("panels", "transposed")],
    )


class _UnpackArguments(Arguments):
    _fields_ = (
        *[(name, _int64) for name in ("rows", "k")],
        *[(name, _address) for name in ("panels", "out")],
        ("storage", _int32),
    )


_product = Operation("product", _ProductArguments)
_finish = Operation("finish", _FinishArguments)
_weight_grad = Operation("weight_grad", _WeightGradArguments)
_column_grad = Operation("column_grad", _ColumnGradArguments)
_pack = Operation("pack", _PackArguments)
_unpack = Operation("unpack", _UnpackArguments)


# ------------------------------------------------------------------------------------------------ packed weights


def panels_shape(n: int, k: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Shape of the packed form of a weight [n, k]: [panels, pairs, 64, 2] in BF16, [panels, k, 64] in FP32."""
    count = -(-n // PANEL)
    return (count, -(-k // 2), PANEL, 2) if dtype == torch.bfloat16 else (count, k, PANEL)


def allocate_panels(n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeroed panels for a weight [n, k], on huge pages where there are any."""
    return memory.zeros(panels_shape(n, k, dtype), dtype)


def pack(source: torch.Tensor, panels: torch.Tensor | None, transposed: torch.Tensor | None = None) -> None:
    """Pack `source` [n, k] into `panels` and into `transposed`, in place; either may be None.

    Args:
        source: FP32 (rounded to the panels' dtype, to nearest even), or the panels' own dtype; contiguous.
        panels: `panels_shape(n, k, dtype)`, read by the forward product.
        transposed: `panels_shape(k, n, dtype)`, read by the input gradient.
    """
    n, k = source.shape
    dtypes = {t.dtype for t in (panels, transposed) if t is not None}
    assert len(dtypes) == 1, "pack: give panels of one dtype"
    dtype = dtypes.pop()
    assert source.dtype in (torch.float32, dtype), f"pack: {source.dtype} into {dtype} panels"
    assert panels is None or tuple(panels.shape) == panels_shape(n, k, dtype), "pack: panels have another shape"
    assert transposed is None or tuple(transposed.shape) == panels_shape(k, n, dtype), "pack: transposed, likewise"
    arguments = _PackArguments(
        n, k, pointer(source), source.dtype == torch.float32, STORAGE[dtype], pointer(panels), pointer(transposed)
    )
    submit(_pack, arguments, source)


def unpack(panels: torch.Tensor, n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Row-major [n, k] value of forward panels of storage `dtype`."""
    assert panels.dtype == dtype and tuple(panels.shape) == panels_shape(n, k, dtype), "unpack: another shape"
    out = torch.empty((n, k), dtype=dtype)
    submit(_unpack, _UnpackArguments(n, k, pointer(panels), pointer(out), STORAGE[dtype]), out)
    return out


# ------------------------------------------------------------------------------------------------ products


class Segment(NamedTuple):
    """One weight of a product: x [M, reduce] storage dtype, its panels [width, reduce], and how the sum is cut.

    `leaf_size` counts elements of the reduced axis (even in BF16, a multiple of 128 in FP8, the last leaf may be
    ragged); 0 means one leaf. FP8 segments have E4M3 values in x (BF16), their `x_scales` FP32 [M, ceil(reduce / 128)],
    codes in the panels, and `panel_scales` FP32 [ceil(width / 128), ceil(reduce / 128)], or the transpose of that with
    `transposed` (the panels of an input gradient, which share the forward weight's scales).
    """

    x: torch.Tensor
    panels: torch.Tensor | None
    width: int
    leaf_size: int = 0
    bias: torch.Tensor | None = None
    x_scales: torch.Tensor | None = None
    panel_scales: torch.Tensor | None = None
    transposed: bool = False


def _check_operands(s: Segment) -> None:
    reduce, dtype = s.x.shape[1], s.x.dtype
    assert s.panels is not None, "product: this weight has no panels (its input gradient was not enabled)"
    assert s.bias is None or (s.bias.dtype == dtype and tuple(s.bias.shape) == (s.width,)), "product: bias"
    fp8 = s.panel_scales is not None
    shape = quant.panels_shape(s.width, reduce) if fp8 else panels_shape(s.width, reduce, dtype)
    assert tuple(s.panels.shape) == shape, f"product: panels {tuple(s.panels.shape)} of a weight [{s.width}, {reduce}]"
    if s.panel_scales is None:
        assert s.panels.dtype == dtype and s.x_scales is None, f"product: {dtype} rows, {s.panels.dtype} panels"
        assert dtype == torch.float32 or s.leaf_size % 2 == 0, "product: BF16 leaves are cut between pairs"
        return
    assert dtype == torch.bfloat16 and s.panels.dtype == torch.uint8, f"product: {dtype} and {s.panels.dtype} for FP8"
    shape = quant.scales_shape(reduce, s.width) if s.transposed else quant.scales_shape(s.width, reduce)
    assert s.panel_scales.shape == shape, f"product: panel scales {tuple(s.panel_scales.shape)}, not {shape}"
    shape = (s.x.shape[0], -(-reduce // quant.BLOCK))
    assert s.x_scales is not None and s.x_scales.shape == shape, "product: FP8 rows without their scales"
    assert s.x_scales.dtype == s.panel_scales.dtype == torch.float32, "product: scales are FP32"
    assert s.leaf_size % quant.BLOCK == 0, "product: FP8 leaves are cut between scale blocks"


def _scale_strides(s: Segment) -> tuple[int, int]:
    """Distance between the scales of two blocks of columns, and of two blocks of the reduced axis."""
    if s.panel_scales is None:
        return 0, 0
    across = s.panel_scales.shape[1]
    return (1, across) if s.transposed else (across, 1)


def product(segments: Sequence[Segment], mode: str, fp32: bool = False) -> tuple[torch.Tensor, ...]:
    """Products of 1 to 4 weights in one native command.

    Args:
        segments: all with the same rows and dtype of x; FP8 and BF16 ones mix.
        mode: `concatenate`: one output [M, width] each. `chain`, `trees`: one output, summed over the segments as
            kernels/product.h says.
        fp32: outputs are FP32 and unrounded (subtree sums, logits).
    """
    first = segments[0]
    dtype = first.x.dtype
    assert 1 <= len(segments) <= MAX_SEGMENTS, f"product: {len(segments)} segments"
    structs = (_Segment * MAX_SEGMENTS)()
    leaves, outs, keep = set(), [], []
    for i, s in enumerate(segments):
        reduce = s.x.shape[1]
        assert s.x.dtype == dtype and s.x.shape[0] == first.x.shape[0], "product: segments have other rows"
        _check_operands(s)
        if mode == "concatenate" or i == 0:
            outs.append(empty(first.x, (s.width,), torch.float32 if fp32 else dtype))
        else:
            assert s.width == first.width and s.bias is None, "product: summed segments have one width and no bias"
        leaves.add(-(-reduce // s.leaf_size) if s.leaf_size else 1)
        out = outs[-1]
        structs[i] = _Segment(
            pointer(s.x), pointer(s.panels), pointer(s.bias), pointer(out), s.width, reduce, s.leaf_size,
            pointer(s.x_scales), pointer(s.panel_scales), *_scale_strides(s),
        )  # fmt: skip
        keep += [s.panels, s.bias, s.panel_scales]
    assert mode != "chain" or len(leaves) == 1, "product: chained segments have equally many leaves"
    arguments = _ProductArguments(first.x.shape[0], len(segments), MODES[mode], STORAGE[dtype], fp32, structs)
    submit(_product, arguments, first.x, tuple(keep))
    return tuple(outs)


def finish(sums: Sequence[torch.Tensor], bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """rn(((sums[0] + sums[1]) + ...) + bias): FP32 [M, N] sums, finished over ranks, to storage [M, N]."""
    rows, n = sums[0].shape
    assert 1 <= len(sums) <= MAX_SEGMENTS and all(s.dtype == torch.float32 and s.shape == (rows, n) for s in sums)
    out = empty(sums[0], (n,), dtype)
    addresses = (_address * MAX_SEGMENTS)(*[pointer(s) for s in sums])
    arguments = _FinishArguments(rows, n, len(sums), addresses, pointer(bias), pointer(out), STORAGE[dtype])
    submit(_finish, arguments, sums[0], (bias,))
    return out


# ------------------------------------------------------------------------------------------------ gradients


def weight_grad(
    dy: torch.Tensor,
    x: torch.Tensor,
    pack_starts: torch.Tensor,
    acc: torch.Tensor,
    scale_format: str | None = None,
) -> None:
    """acc [n, k] FP32 += dy^T x over blocks of 128 rows of each pack, each from +0, added ascending.

    Args:
        dy: [M, n], x: [M, k], one storage dtype.
        pack_starts: int32 [packs + 1], first row of each pack, then M.
        scale_format: FP8 operands (`fp32`, `pow2`): each column of dy and x is quantised to E4M3 per block of rows, and
            a finished block enters as fma(block, fl32(scale_dy * scale_x), acc). None: the operands as they are.
    """
    assert not recording(), "gradients are not recorded"
    assert scale_format is None or dy.dtype == torch.bfloat16, f"weight_grad: {dy.dtype} is not quantised"
    (rows, n), k, packs = dy.shape, x.shape[1], pack_starts.shape[0] - 1
    assert x.shape[0] == rows and x.dtype == dy.dtype, f"weight_grad: {dy.shape} {dy.dtype}, {x.shape} {x.dtype}"
    assert acc.shape == (n, k) and acc.dtype == torch.float32 and pack_starts.dtype == torch.int32
    columns = PANEL * -(-k // PANEL) + 16 * -(-n // 16)
    workspace = torch.empty(columns * (rows + packs), dtype=dy.dtype)
    scales = None if scale_format is None else torch.empty(columns * (rows // quant.BLOCK + packs), dtype=torch.float32)
    pow2 = 0 if scale_format is None else quant.SCALE_FORMATS[scale_format]
    arguments = _WeightGradArguments(
        rows, pointer(dy), pointer(x), pointer(pack_starts), packs, n, k, pointer(acc), pointer(workspace),
        pointer(scales), STORAGE[dy.dtype], pow2,
    )  # fmt: skip
    submit(_weight_grad, arguments, dy)


def column_grad(dy: torch.Tensor, pack_starts: torch.Tensor, acc: torch.Tensor) -> None:
    """acc [n] FP32 += sum of dy's rows [M, n], in the blocks and order of `weight_grad`: the gradient of a bias."""
    assert not recording(), "gradients are not recorded"
    (rows, n), packs = dy.shape, pack_starts.shape[0] - 1
    assert acc.shape == (n,) and acc.dtype == torch.float32 and pack_starts.dtype == torch.int32
    arguments = _ColumnGradArguments(rows, pointer(dy), pointer(pack_starts), packs, n, pointer(acc), STORAGE[dy.dtype])
    submit(_column_grad, arguments, dy)
