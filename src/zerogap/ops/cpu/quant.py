"""E4M3 codes and the block quantiser on tensors. Mirrors kernels/quant.h; see `zerogap.ops.quant`."""

import ctypes

import torch

from zerogap.ops.cpu.library import Arguments, Operation, pointer, submit

_address, _int32, _int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class _EncodeArguments(Arguments):
    _fields_ = (("rows", _int64), *[(name, _address) for name in ("x", "codes", "grid")])


class _DecodeArguments(Arguments):
    _fields_ = (("rows", _int64), *[(name, _address) for name in ("codes", "grid")])


_encode = Operation("encode", _EncodeArguments)
_decode = Operation("decode", _DecodeArguments)


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
