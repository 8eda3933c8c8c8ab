"""Rotary position embedding, in the pairing of Hugging Face models: element i of a head turns with element i + D/2.

Table (Su et al. 2021; `llama3` scaling as in the Llama 3.1 model code): frequency f_i = theta^(-2i/D), angle
position * f_i, cosine and sine, all FP64; the table is their FP32 rounding. Rotation, FP32, rounded once:

    out[i] = rn(fma(x, cos, -(y * sin)))    out[i + D/2] = rn(fma(y, cos, x * sin))    x, y = in[i], in[i + D/2]

The gradient is the same with the other sign of sin. A row depends on itself, its position and the table only.
"""

import math
from typing import Protocol

import torch
from torch.autograd.function import once_differentiable

from zerogap.errors import ConfigError
from zerogap.ops import tap
from zerogap.ops.cpu import library
from zerogap.ops.cpu import rope as kernels
from zerogap.types import ForwardContext

MAX_POSITIONS = 1 << 20  # the range of the reduction by pi/2


class RopeScaling(Protocol):
    """What the table needs of a model's config: base, kind and, for `llama3`, the four numbers of its scaling."""

    @property
    def theta(self) -> float: ...
    @property
    def kind(self) -> str: ...
    @property
    def factor(self) -> float: ...
    @property
    def low_freq_factor(self) -> float: ...
    @property
    def high_freq_factor(self) -> float: ...
    @property
    def original_max_position(self) -> int: ...


def frequencies(scaling: RopeScaling, head_dim: int) -> list[float]:
    """Radians per position of each of the head_dim / 2 pairs, FP64.

    Raises:
        ConfigError: a kind of scaling that is not computed here.
    """
    plain = [scaling.theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2)]
    if scaling.kind == "default":
        return plain
    if scaling.kind != "llama3":
        raise ConfigError("rope.kind", scaling.kind, "only default and llama3 are computed")
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    scaled = []
    for f in plain:
        turns = scaling.original_max_position * f / (2.0 * math.pi)  # full turns inside the original context
        if turns > high:
            scaled.append(f)
        elif turns < low:
            scaled.append(f / scaling.factor)
        else:
            blend = (turns - low) / (high - low)
            scaled.append((1.0 - blend) * (f / scaling.factor) + blend * f)
    return scaled


def rope_table(scaling: RopeScaling, head_dim: int, num_positions: int) -> torch.Tensor:
    """FP32 [num_positions, head_dim]: the cosines of the head_dim / 2 angles, then the sines.

    Args:
        scaling: base and scaling of the frequencies.
        head_dim: even.
        num_positions: positions 0 .. num_positions - 1 are computed; a prefix never depends on this number.

    Raises:
        ConfigError: unknown kind of scaling, odd head_dim, or more than 2^20 positions.
    """
    if head_dim < 2 or head_dim % 2:
        raise ConfigError("head_dim", head_dim, "choose an even number")
    if not 1 <= num_positions <= MAX_POSITIONS:
        raise ConfigError("num_positions", num_positions, f"choose a number from 1 to {MAX_POSITIONS}")
    return kernels.rope_table(frequencies(scaling, head_dim), num_positions)


def rope(
    q: torch.Tensor, k: torch.Tensor, table: torch.Tensor, head_dim: int, context: ForwardContext
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their rows' positions.

    Args:
        q, k: [T, Hq * D], [T, Hk * D] storage dtype.
        table: FP32 [P, D] of `rope_table`, with P above every position.
        head_dim: D.
        context: `positions`, int32 [T].

    Returns:
        (q, k) rotated, in new tensors.
    """
    positions = context.positions
    if not library.recording() and positions.numel():
        low, high = int(positions.min()), int(positions.max())
        assert low >= 0 and high < table.shape[0], f"positions {low}..{high} outside a table of {table.shape[0]}"
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        q_out, k_out = _Rope.apply(q, k, table, head_dim, positions)
    else:
        q_out, k_out = kernels.rotate(q, k, table, positions, head_dim, inverse=False)
    tap.observe("rope", {"q": q_out, "k": k_out}, {"q": q, "k": k, "positions": positions, "head_dim": head_dim})
    return q_out, k_out


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, table, head_dim, positions):
        ctx.table, ctx.head_dim, ctx.positions = table, head_dim, positions
        return kernels.rotate(q, k, table, positions, head_dim, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk):
        turned = kernels.rotate(dq.contiguous(), dk.contiguous(), ctx.table, ctx.positions, ctx.head_dim, inverse=True)
        return *turned, None, None, None
