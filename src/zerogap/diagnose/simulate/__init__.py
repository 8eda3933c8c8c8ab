"""Reduction orders, arithmetic primitives and rounding points of real stacks, put together and tried.

A kind of operator has `bases` (whole forms that exist), `changes` (one field changed), `applies` and `simulate`.
`zerogap.diagnose.attribute` searches them for the variant that reproduces recorded bits. Nothing computed here is used
by any run: it imitates other stacks' arithmetic, which is why raw maths is allowed.
"""

import dataclasses
from collections.abc import Callable, Iterable

import torch

from zerogap.diagnose.simulate import activation, attention, elementwise, experts, linear, logprob, norm, rope
from zerogap.diagnose.simulate.variant import Problem, Variant


@dataclasses.dataclass(frozen=True)
class Simulator:
    """One kind's search space: whole forms, changes of one field of a form, and how a variant is computed.

    `sample` picks rows and columns where they cannot be picked one by one (problem, differing elements, most rows, most
    columns). `cost` of a variant: 0 is always tried, 1 where one field is changed, 2 for a side that nothing else
    reproduces.
    """

    bases: Callable[[Problem], list[Variant]]
    changes: Callable[[Variant, Problem], Iterable[Variant]]
    applies: Callable[[Variant, Problem], bool]
    simulate: Callable[[Variant, Problem], torch.Tensor]
    cost: Callable[[Variant], int] = lambda variant: 0
    sample: Callable[[Problem, torch.Tensor, int, int], tuple[torch.Tensor, torch.Tensor]] | None = None


_LINEAR = Simulator(linear.bases, linear.changes, linear.applies, linear.simulate, linear.cost)
SIMULATORS: dict[str, Simulator] = {
    "linear": _LINEAR,
    "head": _LINEAR,
    "router": _LINEAR,
    "norm": Simulator(norm.bases, norm.changes, norm.applies, norm.simulate),
    "attention": Simulator(
        attention.bases, attention.changes, attention.applies, attention.simulate, attention.cost, attention.sample
    ),
    "rope": Simulator(rope.bases, rope.changes, rope.applies, rope.simulate, sample=rope.sample),
    "logprob": Simulator(
        logprob.bases, logprob.changes, logprob.applies, logprob.simulate, logprob.cost, logprob.sample
    ),
    "experts": Simulator(experts.bases, experts.changes, experts.applies, experts.simulate, experts.cost),
    "activation": Simulator(activation.bases, activation.changes, activation.applies, activation.simulate),
    "residual": Simulator(
        elementwise.residual_bases,
        elementwise.residual_changes,
        elementwise.residual_applies,
        elementwise.simulate_residual,
    ),
    "embedding": Simulator(
        elementwise.embedding_bases,
        elementwise.embedding_changes,
        elementwise.embedding_applies,
        elementwise.simulate_embedding,
    ),
}
