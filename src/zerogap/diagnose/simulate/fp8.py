"""Products of operands that were stored in eight bits first: formats, blocks and scales, each of the weight and of the
rows.

operands    e4m3, e5m2, int8 (symmetric, 127 steps); `e4m3, e5m2 rows` (the weight is E4M3)
block       `W, X` (`choices`). W of the weight: HxW, channel, tensor, stored (as it is). X of the rows: 1xW, token,
            tensor, each sequence (as each was computed in a pass of its own), stored
scale       fp32, pow2 (rounded up to a power of two), `fp32, amax 240` (E4M3 of another kind), `fp32, reciprocal`
            (codes are of x times 1/scale), bf16, fp16 (scales are rounded), `bf16 of the weight`, `fp16 of the weight`
            (only the weight's are), `fixed 1` (of the rows; saturating)
"""

import dataclasses
import functools
from collections.abc import Hashable, Iterator
from typing import Any

import torch

from zerogap.diagnose.simulate import dots
from zerogap.diagnose.simulate.arithmetic import FP32, round_to
from zerogap.diagnose.simulate.variant import Problem

STORED, SEQUENCE = "stored", "each sequence"
OPERANDS = ("e4m3", "int8", "e5m2")
TOPS = {"e4m3": 448.0, "int8": 127.0, "e5m2": 57344.0}
OF_WEIGHT, MIXED = " of the weight", "e4m3, e5m2 rows"
SCALES = (
    *("fp32", "pow2", "fp32, amax 240", "fp32, reciprocal", "bf16", "fp16", "fixed 1"),
    *(f"bf16{OF_WEIGHT}", f"fp16{OF_WEIGHT}"),
)
SIZES = (128, 64, 32, 256, 16)
TALL = (*(f"{n}x{n}" for n in SIZES), *(f"1x{n}" for n in SIZES), "channel", "tensor", STORED)
WIDE = (*(f"1x{n}" for n in SIZES), "token", "tensor", SEQUENCE, STORED)
USUAL = frozenset(
    {
        *(f"{n}x{n}, 1x{n}" for n in (128, 64, 32, 256)),
        *("128x128, token", "channel, token", "tensor, token", "tensor, tensor", f"tensor, {SEQUENCE}"),
        *(f"{weight}, {STORED}" for weight in (*(f"{n}x{n}" for n in (128, 64, 32, 256)), "channel", "tensor")),
        *(f"{STORED}, {rows}" for rows in WIDE if rows not in ("1x16", STORED)),
        "1x32, 1x32",
    }
)


@dataclasses.dataclass(frozen=True)
class Form:
    """One choice of the fields above."""

    operands: str
    block: str
    scale: str


def coded(operands: str) -> bool:
    """True for operands of eight bits."""
    return operands.replace(",", "").split()[0] in OPERANDS


def has_stored(block: str) -> bool:
    """True if the weight or the rows stay as they are."""
    return STORED in block


def usual(block: str, scale: str, operands: str) -> bool:
    """True for what stacks have; the rest is tried where nothing else fits."""
    return block in USUAL and scale in SCALES[:3] and operands.split()[0] == "e4m3"  # not the mixed ones


@functools.cache
def choices() -> tuple[tuple[str, str, str], ...]:
    """(operands, block, scale), usual ones first."""

    def all_of_them() -> Iterator[tuple[str, str, str]]:
        for operands in OPERANDS:
            for block in (f"{w}, {x}" for w in TALL for x in WIDE if not w == x == STORED):
                scales = SCALES if operands == "e4m3" else SCALES[:2]
                for scale in scales if block in USUAL else SCALES[:1] if operands == "e4m3" else ():
                    if operands == "e4m3" and block in USUAL and not has_stored(block) and scale in SCALES[:2]:
                        yield MIXED, block, scale
                    if not (scale == "fixed 1" and block.endswith(STORED)):
                        yield f"{operands} weights" if block.endswith(STORED) else operands, block, scale

    return tuple(sorted(all_of_them(), key=lambda c: not usual(c[1], c[2], c[0])))


def codes(value: torch.Tensor, largest: torch.Tensor, operands: str, scale: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes' values and scales of `value` under the largest magnitudes (broadcast to it)."""
    name = operands.split()[0]
    top = 240.0 if scale.endswith("240") else TOPS[name]
    scales = torch.where(largest < 2.0**-100, torch.ones_like(largest), largest / top)
    if scale == "pow2":
        fraction, exponent = torch.frexp(scales)
        scales = torch.ldexp(torch.ones_like(scales), exponent - (fraction == 0.5).to(exponent.dtype))
    elif scale in ("bf16", "fp16"):
        scales = round_to(scales, scale)
    elif scale == "fixed 1":
        scales = torch.ones_like(scales)
    small = value * (1 / scales) if scale.endswith("reciprocal") else value / scales
    small = small.clamp(-top, top)
    if name == "int8":
        return small.round(), scales
    return small.to(torch.float8_e4m3fn if name == "e4m3" else torch.float8_e5m2).to(FP32), scales


Coded = tuple[torch.Tensor, torch.Tensor]


def _operands(form: Form, problem: Problem) -> tuple[Coded, Coded]:
    """Codes' values and scales of the rows and of the weight, all of them; made once for every sample."""
    weight = problem.weight()
    assert weight is not None
    tall, _, across = form.block.partition(", ")
    shared: dict[Hashable, Any] = problem.once("whole", dict)

    def quantised(value: torch.Tensor, how: str, lengths: list[int], scale: str) -> Coded:
        name = form.operands.split()[0].rstrip(",")
        name = "e5m2" if form.operands == MIXED and value is not weight else name
        key = ("codes", value is weight, name, how, scale)
        if key not in shared:
            plain = value.to(FP32)
            as_it_is = plain, torch.ones_like(plain)
            shared[key] = as_it_is if how == STORED else codes(plain, largest(plain, how, lengths), name, scale)
        return shared[key]

    of_rows = "fp32" if form.scale.endswith(OF_WEIGHT) else form.scale
    of_weight = "fp32" if form.scale == "fixed 1" else form.scale.removesuffix(OF_WEIGHT)
    rows = quantised(problem.inputs[0], across, problem.lengths, of_rows)
    return rows, quantised(weight, tall, [len(weight)], of_weight)


def library_product(form: Form, problem: Problem, *, wide: bool) -> torch.Tensor:
    """FP32 [rows, columns] of the sample: torch's product of de-quantised operands, in the storage dtype or (`wide`) in
    FP32."""

    def run() -> torch.Tensor:
        left, right = (grid * scales for grid, scales in _operands(form, problem))
        dtype = FP32 if wide else problem.inputs[0].dtype
        return torch.nn.functional.linear(left.to(dtype), right.to(dtype)).to(FP32)

    return problem.whole(("coded", form, wide), run)


def product(form: Form, problem: Problem, primitive: str) -> torch.Tensor:
    """FP32 [rows, columns] of the sample: exact products of codes, block after block, with scales on their sums
    (`dots.fp8_dot`)."""
    x, w = _operands(form, problem)
    width = x[0].shape[1]
    step = min([*(int(part.split("x")[1]) for part in form.block.split(", ") if "x" in part), width])
    rows, columns = problem.rows, problem.columns
    return dots.fp8_dot(
        (x[0][rows], x[1][rows][:, ::step]),
        (w[0][columns], w[1][columns][:, ::step]),
        0 if step == width else step,
        primitive,
    )


def largest(value: torch.Tensor, block: str, lengths: list[int]) -> torch.Tensor:
    """Largest magnitude of every element's block, [M, K]: `HxW`, `channel` and `token` (a row), `tensor`, `each
    sequence` (rows of `lengths`)."""
    magnitude = value.abs()
    if block == "tensor":
        return magnitude.amax().expand(value.shape)
    if block == SEQUENCE:
        return torch.cat([part.amax().expand(part.shape) for part in magnitude.split(lengths)])
    if "x" not in block:
        return magnitude.amax(1, keepdim=True).expand(value.shape)
    tall, wide = (int(n) for n in block.split("x"))
    across = torch.cat([p.amax(1, keepdim=True).expand(p.shape) for p in magnitude.split(wide, dim=1)], 1)
    return across if tall == 1 else torch.cat([p.amax(0, keepdim=True).expand(p.shape) for p in across.split(tall)])
