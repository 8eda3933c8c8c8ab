"""Handles, contexts and one run of every elementwise op, as the tests of these ops need them.

Run as a module, it prints the digests of all outputs as JSON: so instruction sets, each in its own process, are
compared.
"""

import json

import torch

from tests.bits import hard_values, unit_values
from zerogap.models.rope_spec import RopeSpec
from zerogap.ops.activation import silu_mul
from zerogap.ops.cpu import library
from zerogap.ops.digest import digest
from zerogap.ops.embedding import embedding
from zerogap.ops.handle import WeightHandle
from zerogap.ops.norm import head_norm, rms_norm
from zerogap.ops.optim import adamw, global_norm
from zerogap.ops.rope import rope, rope_table
from zerogap.types import ForwardContext, WeightSpec

BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = [FP32, BF16]
UNIT = {FP32: 2.0**-24, BF16: 2.0**-8}  # unit roundoff
EPS = 1e-5


def handle(value: torch.Tensor, trainable: bool = True, head_leaves: int = 0) -> WeightHandle:
    """A loaded weight (vector or embedding) in the dtype of `value`, with an open gradient bin where it is trained."""
    kind = "vector" if value.dim() == 1 else "embedding"
    weight = WeightHandle(WeightSpec("weight", tuple(value.shape), kind, head_leaves=head_leaves), value.dtype)
    weight.load(value)
    weight.set_trainable(trainable)
    if trainable:
        weight.open_grad()
    return weight


def context(positions: torch.Tensor | None = None, packs: list[int] | None = None) -> ForwardContext:
    """A context of which these ops read positions and pack borders only."""
    none = torch.zeros(0, dtype=torch.int32)
    positions = none if positions is None else positions.to(torch.int32)
    starts = None if packs is None else torch.tensor(packs, dtype=torch.int32)
    return ForwardContext(positions, none, none, 16, pack_starts=starts)


def scaling(theta: float, kind: str = "default") -> RopeSpec:
    """RoPE settings as a model's config gives them, for contexts of 512 tokens stretched by 8."""
    return RopeSpec(theta, kind, 8.0, 1.0, 4.0, 512)


def all_outputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Outputs and gradients of every op on fixed, hard data."""
    rows, heads, dim, packs = 200, 4, 24, [0, 150, 200]
    width = heads * dim
    here = context(torch.arange(rows) * 7, packs)
    out: dict[str, torch.Tensor] = {}

    def values(seed: int, *shape: int) -> torch.Tensor:
        return hard_values(shape or (rows, width), dtype, seed).requires_grad_()

    def grads(names: list[str], outputs: tuple[torch.Tensor, ...], inputs: list[torch.Tensor]) -> None:
        torch.autograd.backward(outputs, [hard_values(o.shape, dtype, 90 + i) for i, o in enumerate(outputs)])
        out.update(zip(names, [*outputs, *(t.grad for t in inputs)], strict=True))

    x, delta, weight = values(1), values(2), handle(values(3, width).detach())
    grads(["residual", "normed", "dx", "ddelta"], rms_norm(x, delta, weight, EPS, here), [x, delta])
    x, per_head = values(4), handle(values(5, dim).detach(), head_leaves=2)
    grads(["heads", "dheads"], (head_norm(x, per_head, heads, EPS, 2, here),), [x])
    out |= {"norm weight": weight.grad, "head weight": per_head.grad}
    out["table"] = rope_table(scaling(10000.0, "llama3"), dim, 2000)
    q, k = values(6), values(7, rows, 2 * dim)
    grads(["q", "k", "dq", "dk"], rope(q, k, out["table"], dim, here), [q, k])
    out["yarn table"] = rope_table(scaling(10000.0, "yarn"), dim, 2000)
    q, k = values(13), values(14, rows, dim)
    pairs = rope(q, k, out["yarn table"], dim, here, interleaved=True)
    grads(["pair q", "pair k", "pair dq", "pair dk"], pairs, [q, k])
    g, u = values(8), values(9)
    grads(["silu", "dgate", "dup"], (silu_mul(g, u),), [g, u])
    table = handle(values(10, 50, width).detach())
    looked = embedding(torch.arange(rows) ** 2 % 50, table, here)
    looked.backward(values(11).detach())
    out |= {"embedding": looked, "table grad": table.grad}
    master, first, second = unit_values(1003, seed=12), torch.zeros(1003), torch.zeros(1003)
    for step in (1, 2, 3):
        settings = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": step}
        adamw(master, hard_values(1003, seed=20 + step), first, second, learning_rate=1e-3, **settings)
    out |= {"master": master, "first": first, "second": second}
    out["norm"] = torch.tensor(global_norm([t.float() for t in out.values()]), dtype=torch.float64)
    return out


def all_digests() -> dict[str, str]:
    """Digests of `all_outputs` in both dtypes, by dtype and name."""
    return {f"{str(d)[6:]}/{n}": digest(t) for d in DTYPES for n, t in all_outputs(d).items()}


if __name__ == "__main__":
    print(json.dumps({"backend": library.backend(), "digests": all_digests()}))
