"""E4M3 codes and the block quantiser on tensors. Mirrors kernels/quant.h; see `zerogap.ops.quant`."""

import ctypes
import math

import torch

from zerogap.ops.cpu import memory
from zerogap.ops.cpu.library import Arguments, Operation, empty, pointer, submit

BLOCK = 128  # edge of a block of a weight; length of a block of a row
PANEL = 64
SCALE_FORMATS = {"fp32": 0, "pow2": 1}  # the `pow2` flag of argument structs

_address, _int32, _int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class _EncodeArguments(Arguments):
    _fields_ = (("rows", _int64), *[(name, _address) for name in ("x", "codes", "grid")])


class _BlockScalesArguments(Arguments):
    _fields_ = (("rows", _int64), *[(name, _address) for name in ("amax", "scales")], ("pow2", _int32))


class _DecodeArguments(Arguments):
    _fields_ = (("rows", _int64), *[(name, _address) for name in ("codes", "grid")])


class _QuantiseRowsArguments(Arguments):
    _fields_ = (
        ("rows", _int64),
        *[(name, _address) for name in ("x", "grid", "scales")],
        *[(name, _int64) for name in ("k", "lines")],
        ("pow2", _int32),
    )


class _QuantiseWeightArguments(Arguments):
    _fields_ = (
        *[(name, _int64) for name in ("rows", "k")],
        ("source", _address),
        *[(name, _int32) for name in ("source_fp32", "pow2")],
        *[(name, _address) for name in ("panels", "transposed", "scales")],
    )


class _PackCodesArguments(Arguments):
    _fields_ = (
        *[(name, _int64) for name in ("rows", "k")],
        *[(name, _address) for name in ("codes", "panels", "transposed")],
    )


class _UnpackCodesArguments(Arguments):
    _fields_ = (*[(name, _int64) for name in ("rows", "k")], *[(name, _address) for name in ("panels", "codes")])


class _DequantiseArguments(Arguments):
    _fields_ = (
        *[(name, _int64) for name in ("rows", "k")],
        *[(name, _address) for name in ("codes", "scales", "out")],
        ("block_rows", _int64),
    )


_encode = Operation("encode", _EncodeArguments)
_block_scales = Operation("block_scales", _BlockScalesArguments)
_decode = Operation("decode", _DecodeArguments)
_quantise_rows = Operation("quantise_rows", _QuantiseRowsArguments)
_quantise_weight = Operation("quantise_weight", _QuantiseWeightArguments)
_pack_codes = Operation("pack_codes", _PackCodesArguments)
_unpack_codes = Operation("unpack_codes", _UnpackCodesArguments)
_dequantise = Operation("dequantise", _DequantiseArguments)


# ------------------------------------------------------------------------------------------------ single numbers


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes (uint8) and grid values (BF16) of FP32 numbers of any shape, without a scale.

    To nearest even, saturating at +-448, signed zeros kept; NaN has code 0x7f or 0xff.
    """
    assert x.dtype == torch.float32, f"encode takes float32, not {x.dtype}"
    codes, grid = torch.empty(x.shape, dtype=torch.uint8), torch.empty(x.shape, dtype=torch.bfloat16)
    submit(_encode, _EncodeArguments(x.numel(), pointer(x), pointer(codes), pointer(grid)), x)
    return codes, grid


def decode(codes: torch.Tensor) -> torch.Tensor:
    """Grid values (BF16) of E4M3 codes (uint8), any shape."""
    assert codes.dtype == torch.uint8, f"decode takes uint8, not {codes.dtype}"
    grid = torch.empty(codes.shape, dtype=torch.bfloat16)
    submit(_decode, _DecodeArguments(codes.numel(), pointer(codes), pointer(grid)), codes)
    return grid


# ------------------------------------------------------------------------------------------------ blocks


def block_scales(amax: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Scales FP32 of blocks whose largest magnitudes are `amax`, FP32 of any shape; NaN where one is not finite."""
    assert amax.dtype == torch.float32 and amax.is_contiguous(), "block_scales takes contiguous float32"
    scales = torch.empty_like(amax)
    arguments = _BlockScalesArguments(amax.numel(), pointer(amax), pointer(scales), SCALE_FORMATS[scale_format])
    submit(_block_scales, arguments, amax)
    return scales


def panels_shape(n: int, k: int) -> tuple[int, int, int]:
    """Shape of the FP8 panels (uint8) of a weight [n, k]: [panels, pairs, 128]."""
    return -(-n // PANEL), -(-k // 2), 2 * PANEL


def scales_shape(n: int, k: int) -> tuple[int, int]:
    """Shape of the FP32 scales of a weight [n, k]."""
    return -(-n // BLOCK), -(-k // BLOCK)


def allocate_panels(n: int, k: int) -> torch.Tensor:
    """Zeroed FP8 panels for a weight [n, k], on huge pages where there are any."""
    return memory.zeros(panels_shape(n, k), torch.uint8)


def quantise_rows(x: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(grid values BF16 like x, scales FP32 [M, ceil(K / 128)]) of x, BF16 [M, K]; one recordable command.

    x may hold several lines per row, [M, lines, K]: then scales are [M, lines, ceil(K / 128)].
    """
    assert x.dtype == torch.bfloat16 and x.dim() in (2, 3), f"quantise_rows takes BF16 rows: {x.dtype} {tuple(x.shape)}"
    (rows, *lines, k), pow2 = x.shape, SCALE_FORMATS[scale_format]
    grid, scales = empty(x, (*lines, k), torch.bfloat16), empty(x, (*lines, -(-k // BLOCK)), torch.float32)
    arguments = _QuantiseRowsArguments(rows, pointer(x), pointer(grid), pointer(scales), k, math.prod(lines), pow2)
    submit(_quantise_rows, arguments, x)
    return grid, scales


def _check_panels(n: int, k: int, panels: torch.Tensor | None, transposed: torch.Tensor | None) -> None:
    for t, shape in ((panels, panels_shape(n, k)), (transposed, panels_shape(k, n))):
        assert t is None or (t.dtype == torch.uint8 and t.shape == shape), f"FP8 panels {tuple(t.shape)}, not {shape}"


def quantise_weight(
    source: torch.Tensor,
    scale_format: str,
    panels: torch.Tensor | None,
    transposed: torch.Tensor | None,
    scales: torch.Tensor,
) -> None:
    """Codes and scales of a weight, in place. A block with a NaN or infinity gets the scale NaN: the caller looks.

    Args:
        source: [N, K] BF16, or FP32 which is rounded to BF16 first (subnormals become zeros), contiguous.
        panels, transposed: uint8 `panels_shape(N, K)` and `panels_shape(K, N)`; either may be None.
        scales: FP32 `scales_shape(N, K)`.
    """
    n, k = source.shape
    assert source.dtype in (torch.float32, torch.bfloat16), f"quantise_weight: {source.dtype}"
    _check_panels(n, k, panels, transposed)
    assert scales.dtype == torch.float32 and scales.shape == scales_shape(n, k), f"scales {tuple(scales.shape)}"
    arguments = _QuantiseWeightArguments(
        n, k, pointer(source), source.dtype == torch.float32, SCALE_FORMATS[scale_format], pointer(panels),
        pointer(transposed), pointer(scales),
    )  # fmt: skip
    submit(_quantise_weight, arguments, source)


def load_codes(codes: torch.Tensor, panels: torch.Tensor | None, transposed: torch.Tensor | None = None) -> None:
    """Row-major codes, uint8 [N, K], into panels and the panels of the transpose, in place; either may be None."""
    n, k = codes.shape
    assert codes.dtype == torch.uint8, f"codes are uint8, not {codes.dtype}"
    _check_panels(n, k, panels, transposed)
    submit(_pack_codes, _PackCodesArguments(n, k, pointer(codes), pointer(panels), pointer(transposed)), codes)


def unpack_codes(panels: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Row-major codes, uint8 [n, k], of forward panels."""
    _check_panels(n, k, panels, None)
    codes = torch.empty((n, k), dtype=torch.uint8)
    submit(_unpack_codes, _UnpackCodesArguments(n, k, pointer(panels), pointer(codes)), codes)
    return codes


def dequantise(codes: torch.Tensor, scales: torch.Tensor, block_rows: int) -> torch.Tensor:
    """rn(fl32(grid value * scale)), BF16 [M, K], of codes [M, K] with one scale per block of block_rows x 128."""
    rows, k = codes.shape
    expected = (-(-rows // block_rows), -(-k // BLOCK))
    assert codes.dtype == torch.uint8 and scales.dtype == torch.float32 and scales.shape == expected, "dequantise"
    out = torch.empty((rows, k), dtype=torch.bfloat16)
    arguments = _DequantiseArguments(rows, k, pointer(codes), pointer(scales), pointer(out), block_rows)
    submit(_dequantise, arguments, codes)
    return out
