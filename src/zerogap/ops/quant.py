"""The block quantiser: FP8 operands as codes and scales, one definition for trainer, engine, update and export.

Formula (docs/numerics.md, "FP8"), for each block of a BF16 tensor: amax = largest magnitude; scale = fl32(amax / 448),
or that rounded up to a power of two (`pow2`); 1 where amax < 2^-100; code = rn_e4m3(fl32(x / scale)), to nearest even,
saturating, subnormals and signed zeros kept. Format: E4M3 of "OCP 8-bit Floating Point Specification" (torch's
`float8_e4m3fn`). A code's value, the *grid value*, is exact in BF16, and so is the product of two in FP32.

Blocks: weights 128 x 128 from row 0, column 0 of the logical tensor; rows (activations, output gradients) 1 x 128;
tails are ragged. Only the published BF16 value of a weight is ever quantised, never its FP32 master.
Depends on: the block alone. Never on: other blocks, threads, instruction set.
"""

import torch

from zerogap.errors import CheckpointError, NonFiniteError
from zerogap.ops.cpu import quant as kernels
from zerogap.types import BlockCodes

BLOCK = kernels.BLOCK


def quantise_rows(x: torch.Tensor, scale_format: str = "fp32") -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in blocks of 1 x 128.

    A block with a NaN or an infinity gets the scale NaN, so that whatever is computed from it is NaN: recorded programs
    cannot raise, and nothing is hidden.

    Args:
        x: BF16 [M, K], contiguous.
        scale_format: `fp32` or `pow2`.

    Returns:
        grid values BF16 [M, K], scales FP32 [M, ceil(K / 128)].
    """
    return kernels.quantise_rows(x, scale_format)


def quantise_weight(
    value: torch.Tensor, scale_format: str = "fp32", name: str = "weight"
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in blocks of 128 x 128.

    Args:
        value: published value, BF16 [N, K]; an FP32 master is rounded to BF16 first.
        scale_format: `fp32` or `pow2`.
        name: of the tensor, for the message.

    Returns:
        codes uint8 [N, K], scales FP32 [ceil(N / 128), ceil(K / 128)].

    Raises:
        NonFiniteError: the value holds a NaN or an infinity.
    """
    n, k = value.shape
    panels, scales = kernels.allocate_panels(n, k), torch.empty(kernels.scales_shape(n, k))
    kernels.quantise_weight(value.contiguous(), scale_format, panels, None, scales)
    require_finite(scales, name)
    return kernels.unpack_codes(panels, n, k), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """rn(fl32(grid value * scale)), BF16 [N, K], of a weight's codes uint8 [N, K] and block scales."""
    return kernels.dequantise(codes.contiguous(), scales.contiguous(), BLOCK)


def require_finite(scales: torch.Tensor, name: str) -> None:
    """Raise where a quantised weight held a NaN or an infinity, naming it and the block.

    Raises:
        NonFiniteError: a scale is NaN.
    """
    bad = (~scales.isfinite()).nonzero()
    if len(bad):
        row, column = (int(i) * BLOCK for i in bad[0])
        raise NonFiniteError(
            f"{name}: a NaN or an infinity in the block of 128 x 128 at row {row}, column {column} cannot be quantised"
        )


def check_block_codes(stored: BlockCodes, name: str) -> None:
    """Refuse codes and scales of a file that stand for no weight.

    Raises:
        CheckpointError: scales are not FP32 of the right shape, or one is not a positive normal number; a code is NaN.
    """
    codes, scales = stored.codes, stored.scales
    expected = kernels.scales_shape(*codes.shape)
    if codes.dtype != torch.uint8 or scales.dtype != torch.float32 or tuple(scales.shape) != expected:
        raise CheckpointError(
            f"{name}: codes {codes.dtype} {tuple(codes.shape)} with scales {scales.dtype} {tuple(scales.shape)}; "
            f"blocks of {BLOCK} x {BLOCK} need float32 scales {expected}"
        )
    if not bool(((scales >= torch.finfo(torch.float32).tiny) & scales.isfinite()).all()):
        raise CheckpointError(f"{name}: a scale is not a positive number")
    if bool(((codes & 0x7F) == 0x7F).any()):
        raise CheckpointError(f"{name}: a code is NaN")


def has_format(scales: torch.Tensor, scale_format: str) -> bool:
    """True if positive normal scales are of `scale_format`: any are `fp32`, powers of two are `pow2`, too."""
    return scale_format == "fp32" or not bool((scales.view(torch.int32) & 0x7FFFFF).any())
