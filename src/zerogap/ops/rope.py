"""Rotary position embedding, in both pairings of Hugging Face models: element i of a head turns with element i + D/2,
or, `interleaved` (DeepSeek-V3's `rope_interleave`), element 2i with element 2i + 1.

Table (Su et al. 2021; `llama3` scaling as in the Llama 3.1 model code; `yarn`: Peng et al. 2023 as transformers'
modeling_rope_utils has it): frequency f_i = theta^(-2i/D), scaled; angle position * f_i; cosine and sine, times the
attention factor of yarn (1 elsewhere), all FP64; the table is their FP32 rounding. Rotation, FP32, rounded once:

    out[a] = rn(fma(x, cos, -(y * sin)))    out[b] = rn(fma(y, cos, x * sin))    x, y = in[a], in[b]; a, b the i-th pair

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

KINDS = ("default", "llama3", "yarn")
MAX_POSITIONS = 1 << 20  # the range of the reduction by pi/2


class RopeScaling(Protocol):
    """What the table needs of a model's config (`models.rope_spec.RopeSpec`): base, kind and the kind's own numbers."""

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
    @property
    def beta_fast(self) -> float: ...
    @property
    def beta_slow(self) -> float: ...
    @property
    def mscale(self) -> float: ...
    @property
    def mscale_all_dim(self) -> float: ...
    @property
    def attention_factor(self) -> float | None: ...
    @property
    def truncate(self) -> bool: ...


def frequencies(scaling: RopeScaling, head_dim: int) -> list[float]:
    """Radians per position of each of the head_dim / 2 pairs, FP64.

    Raises:
        ConfigError: a kind of scaling that is not computed here.
    """
    plain = [scaling.theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2)]
    if scaling.kind == "default":
        return plain
    if scaling.kind not in KINDS:
        raise ConfigError("rope.kind", scaling.kind, f"only {', '.join(KINDS)} are computed")
    if scaling.kind == "yarn":
        low_pair, high_pair = _blended_pairs(scaling, head_dim)
        ramp = [min(max((i - low_pair) / (high_pair - low_pair), 0.0), 1.0) for i in range(head_dim // 2)]
        return [r * (f / scaling.factor) + (1.0 - r) * f for r, f in zip(ramp, plain, strict=True)]
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


def _blended_pairs(scaling: RopeScaling, head_dim: int) -> tuple[float, float]:
    """yarn: pairs up to the first number keep their frequency, those from the second on are divided by the factor."""

    def pair(turns: float) -> float:  # the pair that makes so many full turns inside the original context
        context = scaling.original_max_position / (turns * 2.0 * math.pi)
        return head_dim * math.log(context) / (2.0 * math.log(scaling.theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high + 0.001 if low == high else high


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """YaRN's 0.1 * weight * log(factor) + 1, and 1 for factors up to 1."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def attention_factor(scaling: RopeScaling) -> float:
    """By what cosines and sines are multiplied; 1 for every kind but yarn."""
    if scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_scale(scaling.factor, scaling.mscale) / yarn_scale(scaling.factor, scaling.mscale_all_dim)
    return yarn_scale(scaling.factor)


def rope_table(scaling: RopeScaling, head_dim: int, num_positions: int) -> torch.Tensor:
    """FP32 [num_positions, head_dim]: the cosines of the head_dim / 2 angles, then the sines, times `attention_factor`.

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
    return kernels.rope_table(frequencies(scaling, head_dim), num_positions, attention_factor(scaling))


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    table: torch.Tensor,
    head_dim: int,
    context: ForwardContext,
    *,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their rows' positions.

    Args:
        q, k: [T, Hq * D], [T, Hk * D] storage dtype.
        table: FP32 [P, D] of `rope_table`, with P above every position.
        head_dim: D.
        context: `positions`, int32 [T].
        interleaved: pairs are (2i, 2i + 1) instead of (i, i + D/2).

    Returns:
        (q, k) rotated, in new tensors.
    """
    positions = context.positions
    check_positions(positions, table)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        q_out, k_out = _Rope.apply(q, k, table, head_dim, positions, interleaved)
    else:
        q_out, k_out = kernels.rotate(q, k, table, positions, head_dim, inverse=False, interleaved=interleaved)
    inputs = {"q": q, "k": k, "positions": positions, "head_dim": head_dim, "interleaved": interleaved}
    tap.observe("rope", {"q": q_out, "k": k_out}, inputs)
    return q_out, k_out


def check_positions(positions: torch.Tensor, table: torch.Tensor) -> None:
    """Positions must lie inside the table; a recorded program's caller answers for them."""
    if not library.recording() and positions.numel():
        low, high = int(positions.min()), int(positions.max())
        assert low >= 0 and high < table.shape[0], f"positions {low}..{high} outside a table of {table.shape[0]}"


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, table, head_dim, positions, interleaved):
        ctx.rest, ctx.interleaved = (table, positions, head_dim), interleaved
        return kernels.rotate(q, k, *ctx.rest, inverse=False, interleaved=interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk):
        inverse = {"inverse": True, "interleaved": ctx.interleaved}
        return *kernels.rotate(dq.contiguous(), dk.contiguous(), *ctx.rest, **inverse), None, None, None, None
