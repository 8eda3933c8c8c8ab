"""Products of many weights of one shape, each with rows of its own: thin functions over kernels/product_grouped.cpp.

Two uses. Experts: the rows of x are sorted by group, and `starts` says where each group begins; it may be written by a
command that runs just before, so a recorded program serves any routing. Heads: every group has all rows, and reads and
writes its own columns. A row's bits are those of a product with its group's weight alone (one leaf), bit for bit.

Legend: T rows as the program counts them, k lines per row (experts per token), G groups, P packs.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zerogap.ops.cpu import gemm, quant
from zerogap.ops.cpu.library import STORAGE, Arguments, Operation, empty, pointer, recording, submit

MAX_SEGMENTS = 4
MODES = {"concatenate": 0, "chain": 1}

_address, _int32, _int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class _Segment(ctypes.Structure):
    _fields_ = (
        *[(name, _address) for name in ("x", "panels", "out")],
        *[(name, _int64) for name in ("width", "reduce")],
        *[(name, _int64) for name in ("x_row_stride", "x_group_stride", "out_row_stride", "out_group_stride")],
        *[(name, _address) for name in ("x_scales", "panel_scales")],
        *[(name, _int64) for name in ("scale_row_stride", "scale_col_stride")],
    )


class _GroupedArguments(Arguments):
    _fields_ = (
        ("rows", _int64),
        ("starts", _address),
        ("groups", _int64),
        *[(name, _int32) for name in ("num_segments", "mode", "storage", "out_fp32")],
        ("segment", _Segment * MAX_SEGMENTS),
    )


class _CopyColumnsArguments(Arguments):
    _fields_ = (
        ("rows", _int64),
        *[(name, _address) for name in ("src", "dst")],
        *[(name, _int64) for name in ("heads", "width")],
        *[(name, _int64) for name in ("src_row_stride", "src_head_stride", "dst_row_stride", "dst_head_stride")],
        ("element_bytes", _int64),
    )


_grouped_product = Operation("grouped_product", _GroupedArguments)
_copy_columns = Operation("copy_columns", _CopyColumnsArguments)


class GroupSegment(NamedTuple):
    """G weights [width, reduce] of a grouped product, and where their rows stand. Strides and offsets count elements.

    Attributes:
        x: storage dtype, T rows first. Experts: [T, k, reduce] (or, with one line, [T, reduce]), sorted rows. Heads:
            group g of row t reads `reduce` elements from t * x_row_stride + g * x_group_stride + x_offset on.
        panels: [G, ...], `PanelStack.panels` or `.transposed`.
        width, reduce: of one weight.
        x_offset, x_row_stride, x_group_stride: heads only; default: a row holds the groups side by side.
        out_offset, out_row_stride, out_group_stride: likewise, of the output.
        x_scales: FP8: FP32 scales of every sorted row, ceil(reduce / 128) each; x then holds grid values.
        panel_scales: FP8: FP32 [G, ceil(width / 128), ceil(reduce / 128)], or with `transposed` the scales of the
            forward weights, [G, ceil(reduce / 128), ceil(width / 128)].
    """

    x: torch.Tensor
    panels: torch.Tensor | None
    width: int
    reduce: int
    x_offset: int = 0
    x_row_stride: int | None = None
    x_group_stride: int | None = None
    out_offset: int = 0
    out_row_stride: int | None = None
    out_group_stride: int | None = None
    x_scales: torch.Tensor | None = None
    panel_scales: torch.Tensor | None = None
    transposed: bool = False


def _check_operands(s: GroupSegment, groups: int, lines: int, sorted_rows: bool) -> None:
    """Panels and scales have the shapes and dtypes that the kernel reads."""
    dtype, fp8 = s.x.dtype, s.panel_scales is not None
    assert s.panels is not None, "grouped_product: these weights have no panels (their input gradient was not enabled)"
    shape = quant.panels_shape(s.width, s.reduce) if fp8 else gemm.panels_shape(s.width, s.reduce, dtype)
    assert tuple(s.panels.shape) == (groups, *shape), f"grouped_product: panels {tuple(s.panels.shape)}"
    if s.panel_scales is None:
        assert s.panels.dtype == dtype and s.x_scales is None, f"grouped_product: {dtype} rows, {s.panels.dtype} panels"
        return
    assert sorted_rows and dtype == torch.bfloat16 and s.panels.dtype == torch.uint8, f"grouped_product: FP8, {dtype}"
    shape = quant.scales_shape(s.reduce, s.width) if s.transposed else quant.scales_shape(s.width, s.reduce)
    assert tuple(s.panel_scales.shape) == (groups, *shape), f"grouped_product: scales {tuple(s.panel_scales.shape)}"
    assert s.x_scales is not None, "grouped_product: FP8 rows without their scales"
    count = s.x.shape[0] * lines * -(-s.reduce // quant.BLOCK)
    assert s.x_scales.numel() == count, f"grouped_product: scales {tuple(s.x_scales.shape)} of {tuple(s.x.shape)}"
    assert s.x_scales.dtype == s.panel_scales.dtype == torch.float32, "grouped_product: scales are FP32"


def _strides(
    tensor: torch.Tensor, size: int, groups: int, offset: int, row: int | None, group: int | None
) -> tuple[int, int]:
    """(row stride, group stride) of columns of `tensor`, `size` for each group; they must lie inside a row."""
    row = math.prod(tensor.shape[1:]) if row is None else row
    group = size if group is None else group
    assert offset >= 0 and group >= 0 and offset + (groups - 1) * group + size <= row, (
        f"grouped_product: {groups} groups of {size} columns, {group} apart from column {offset} on, in rows of {row}"
    )
    assert tensor.shape[0] * row <= tensor.numel(), f"grouped_product: {tuple(tensor.shape)} holds no rows of {row}"
    return row, group


def _scale_strides(s: GroupSegment) -> tuple[int, int]:
    """Distance between the scales of two blocks of columns, and of two blocks of the reduced axis."""
    if s.panel_scales is None:
        return 0, 0
    across = s.panel_scales.shape[2]
    return (1, across) if s.transposed else (across, 1)


def grouped_product(
    segments: Sequence[GroupSegment],
    mode: str,
    *,
    starts: torch.Tensor | None = None,
    lines: int = 1,
    fp32: bool = False,
    outs: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Products of G weights per segment, each with its own rows, in one native command; recordable.

    Args:
        segments: 1 to 4, all with the same rows, groups and dtype of x; FP8 and BF16 ones mix.
        mode: `concatenate`: one output per segment. `chain`: one output; one accumulator runs segment 0's slice, then
            segment 1's, ...
        starts: int32 [G + 1] (experts): group g has rows starts[g] up to starts[g + 1] of x seen as [T * lines, ...];
            starts[G] <= T * lines. None (heads): every group has all T rows.
        lines: k.
        fp32: outputs are FP32 and unrounded.
        outs: where to write, one per output; None: new ones, [T, k, width] with `starts`, else [T, G * width].

    Returns:
        the outputs. With `starts`, rows from starts[G] on are not written.
    """
    first = segments[0]
    dtype, rows = first.x.dtype, first.x.shape[0]
    assert 1 <= len(segments) <= MAX_SEGMENTS and first.panels is not None, f"grouped_product: {len(segments)} segments"
    groups, sorted_rows = first.panels.shape[0], starts is not None
    assert starts is None or (starts.dtype == torch.int32 and tuple(starts.shape) == (groups + 1,)), "starts: [G + 1]"
    assert lines == 1 or sorted_rows, "grouped_product: lines are those of sorted rows"
    made: list[torch.Tensor] = []
    structs = (_Segment * MAX_SEGMENTS)()
    keep: list[torch.Tensor | None] = [starts]
    for i, s in enumerate(segments):
        assert s.x.dtype == dtype and s.x.shape[0] == rows, "grouped_product: segments have other rows"
        _check_operands(s, groups, lines, sorted_rows)
        if mode == "concatenate" or i == 0:
            out_dtype = torch.float32 if fp32 else dtype
            shape = (lines, s.width) if sorted_rows else (groups * s.width,)
            made.append(empty(first.x, shape, out_dtype) if outs is None else outs[len(made)])
            assert made[-1].dtype == out_dtype and made[-1].shape[0] == rows, "grouped_product: outs"
        else:
            assert s.width == first.width, "grouped_product: summed segments have one width"
        x, out = s.x, made[-1]
        if sorted_rows:
            assert x.numel() == rows * lines * s.reduce, f"grouped_product: x {tuple(x.shape)}, {lines} lines"
            assert out.numel() == rows * lines * s.width, f"grouped_product: out {tuple(out.shape)}, {lines} lines"
            strides = (s.reduce, 0, s.width, 0)
        else:
            strides = (
                *_strides(x, s.reduce, groups, s.x_offset, s.x_row_stride, s.x_group_stride),
                *_strides(out, s.width, groups, s.out_offset, s.out_row_stride, s.out_group_stride),
            )
        structs[i] = _Segment(
            _at(x, s.x_offset), pointer(s.panels), _at(out, s.out_offset), s.width, s.reduce, *strides,
            pointer(s.x_scales), pointer(s.panel_scales), *_scale_strides(s),
        )  # fmt: skip
        keep += [s.panels, s.panel_scales]
    assert outs is None or len(outs) == len(made), f"grouped_product: {len(outs)} outputs for {len(made)}"
    arguments = _GroupedArguments(
        rows, pointer(starts), groups, len(segments), MODES[mode], STORAGE[dtype], fp32, structs
    )
    submit(_grouped_product, arguments, first.x, tuple(keep))
    return tuple(made)


def _at(tensor: torch.Tensor, offset: int) -> int:
    """Address of element `offset`."""
    address = pointer(tensor)
    assert address is not None
    return address + offset * tensor.element_size()


def copy_columns(
    src: torch.Tensor,
    dst: torch.Tensor,
    *,
    heads: int,
    width: int,
    src_head_stride: int,
    dst_head_stride: int,
    src_offset: int = 0,
    dst_offset: int = 0,
    src_row_stride: int | None = None,
    dst_row_stride: int | None = None,
) -> None:
    """For each row and head h, copy `width` elements from src's column src_offset + h * src_head_stride on to dst's
    column dst_offset + h * dst_head_stride on; recordable.

    Args:
        src, dst: T rows first, one dtype, contiguous; they do not overlap. A `src_head_stride` of 0 copies the same
            columns for every head.
        src_row_stride, dst_row_stride: elements from row to row; default: those of the tensor.
    """
    assert src.dtype == dst.dtype and src.shape[0] == dst.shape[0], f"copy_columns: {src.shape} to {dst.shape}"
    assert dst_head_stride >= width or heads <= 1, "copy_columns: heads overlap"
    source = _strides(src, width, heads, src_offset, src_row_stride, src_head_stride)
    target = _strides(dst, width, heads, dst_offset, dst_row_stride, dst_head_stride)
    arguments = _CopyColumnsArguments(
        src.shape[0], _at(src, src_offset), _at(dst, dst_offset), heads, width, *source, *target, src.element_size()
    )
    submit(_copy_columns, arguments, src)


# ------------------------------------------------------------------------------------------------ gradients


def routed_packs(starts: torch.Tensor, tokens: torch.Tensor, pack_starts: torch.Tensor) -> torch.Tensor:
    """Where each pack's rows begin among each group's sorted rows, int32 [G, P + 1], then the group's end.

    Args:
        starts: int32 [G + 1], as in `grouped_product`.
        tokens: int32 [T, k] or flat: token of each sorted row, ascending inside a group.
        pack_starts: int32 [P + 1], first token of each pack, then T.
    """
    groups, count = starts.shape[0] - 1, int(pack_starts[-1])
    group = torch.repeat_interleave(torch.arange(groups), starts.diff().long(), output_size=tokens.numel())
    keys = group * count + tokens.flatten().long()  # ascending over all rows
    wanted = torch.arange(groups)[:, None] * count + pack_starts.long()
    return torch.searchsorted(keys, wanted).to(torch.int32)


def grouped_weight_grad(
    dy: torch.Tensor,
    x: torch.Tensor,
    packs: torch.Tensor,
    accumulators: Sequence[torch.Tensor | None],
    scale_format: str | None = None,
) -> None:
    """Weight gradients of G groups from sorted rows: `gemm.weight_grad` of each group's rows alone.

    Blocks are 128 consecutive rows of the group inside each pack. A group without rows changes nothing.

    Args:
        dy, x: sorted rows, [T, k, n] and [T, k, reduce], one storage dtype (or [rows, n] and [rows, reduce]).
        packs: int32 [G, P + 1] from `routed_packs`.
        accumulators: FP32 [n, reduce] per group; None where a group is not trained.
        scale_format: FP8 operands, as in `gemm.weight_grad`.
    """
    assert not recording(), "gradients are not recorded"
    assert packs.shape[0] == len(accumulators), (
        f"grouped_weight_grad: {packs.shape[0]} groups, {len(accumulators)} sums"
    )
    dy, x = dy.view(-1, dy.shape[-1]), x.view(-1, x.shape[-1])
    for (begin, end), pack_starts, sums in zip(packs[:, [0, -1]].tolist(), packs, accumulators, strict=True):
        if sums is not None and end > begin:
            gemm.weight_grad(dy[begin:end], x[begin:end], pack_starts - begin, sums, scale_format)
