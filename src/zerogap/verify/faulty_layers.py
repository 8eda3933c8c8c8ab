"""Layers that are wrong on purpose: what planted faults (verify/faults.py) put in place of a decoder's own.

Each is the real layer over the real kernels, and differs in the passes, or the rows, that a fault chooses: in one
element of a block's output, in what a router decided, in whose weights are read, in where a row is rotated to.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping

import torch

from zerogap.layers.block import Block
from zerogap.layers.latent_attention import LatentAttention
from zerogap.layers.moe import RoutedMLP
from zerogap.models.passes import of_engine, runs
from zerogap.ops import tap
from zerogap.ops.cpu.moe import route
from zerogap.ops.handle import WeightHandle
from zerogap.ops.moe import MoEWeights
from zerogap.ops.stack import PanelStack
from zerogap.types import ForwardContext, LayerKV

RowChooser = Callable[[ForwardContext], list[int]]
PassChooser = Callable[[ForwardContext], bool]


# ---------------------------------------------------------------------------------------------------- which passes


def every_pass(context: ForwardContext) -> bool:
    return True


def continues_prompts(context: ForwardContext) -> bool:
    """Engine passes of nothing but chunks that are not a prompt's first, and no single rows."""
    return of_engine(context) and all(count > 1 and at > 0 for _, count, at in runs(context))


def decodes(context: ForwardContext) -> bool:
    """Engine passes of nothing but single rows."""
    return of_engine(context) and all(count == 1 and at > 0 for _, count, at in runs(context))


# ---------------------------------------------------------------------------------------------------- layers


@dataclasses.dataclass(frozen=True)
class FaultyBlock:
    """A decoder block that disturbs the first element of chosen output rows."""

    block: Block
    rows: RowChooser

    def __call__(self, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
        residual, update = self.block(*args)  # type: ignore[arg-type]
        context = args[-1]
        assert isinstance(context, ForwardContext), "the context is a block's last argument"
        for row in self.rows(context):
            update.detach()[row, 0] += 1.0 + update.detach()[row, 0].abs()
        return residual, update


@dataclasses.dataclass(frozen=True)
class FaultyExperts:
    """A routed layer that is another one in chosen passes.

    Attributes:
        whole, faulty: the layer, and the one that takes its place.
        passes: which passes `faulty` computes.
        disturb: sees what the router of `faulty` decided before anything follows from it, and may write into it.
    """

    whole: RoutedMLP
    faulty: RoutedMLP
    passes: PassChooser
    disturb: tap.Callback | None = None

    def __call__(self, x_TH: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        if not self.passes(context):
            return self.whole(x_TH, context)
        with tap.listen(self.disturb or _leave):
            return self.faulty(x_TH, context)


@dataclasses.dataclass(frozen=True)
class FaultyLatent:
    """Latent attention that is another one in chosen passes, or rotates rows `shift` positions further there."""

    whole: LatentAttention
    faulty: LatentAttention
    passes: PassChooser
    shift: int = 0

    def __call__(
        self, x_TH: torch.Tensor, rope_table: torch.Tensor, kv: LayerKV, context: ForwardContext
    ) -> torch.Tensor:
        if not self.passes(context):
            return self.whole(x_TH, rope_table, kv, context)
        return self.faulty(x_TH, rope_table.roll(-self.shift, 0), kv, context)


def _leave(name: str, outputs: Mapping[str, torch.Tensor], info: Mapping[str, object]) -> None:
    """Disturbs nothing."""


# ---------------------------------------------------------------------------------------------------- what is wrong


def with_weights(layer: RoutedMLP, **weights: object) -> RoutedMLP:
    """The layer with some of its weights replaced."""
    return dataclasses.replace(layer, weights=dataclasses.replace(layer.weights, **weights))  # type: ignore[arg-type]


def loaded(like: WeightHandle, value: torch.Tensor) -> WeightHandle:
    """A weight of its own, with the sizes of another and the given value; not trained, but input gradients pass."""
    made = WeightHandle(dataclasses.replace(like.spec, stack=None), like.storage)
    made.load(value)
    made.enable_input_grad()
    return made


def kept(stack: PanelStack) -> PanelStack:
    """A copy of packed experts as they are now, for forward passes alone."""
    stale = copy.copy(stack)
    stale.panels = stack.panels.clone()
    stale.scales = None if stack.scales is None else stack.scales.clone()
    return stale


def higher_ties(name: str, outputs: Mapping[str, torch.Tensor], info: Mapping[str, object]) -> None:
    """Chooses again with ties to the higher index: the same router over experts in reverse order."""
    if name != "router":
        return
    weights, routing = info["weights"], info["routing"]
    assert isinstance(weights, MoEWeights)
    bias = None if weights.bias is None or weights.bias.rows is None else weights.bias.rows.flip(0)
    mirrored, factors, _ = route(outputs["logits"].flip(1), bias, routing)  # type: ignore[arg-type]
    experts = (outputs["logits"].shape[1] - 1 - mirrored).flip(1)
    changed = (experts != outputs["experts"]).any(1)  # other rows keep their weights, whose sums ran in other orders
    outputs["experts"][changed] = experts[changed]
    outputs["weights"][changed] = factors.flip(1)[changed]


def limited_experts(name: str, outputs: Mapping[str, torch.Tensor], info: Mapping[str, object]) -> None:
    """Lets an expert take no more than its even share of a pass's rows; those beyond count as zeros."""
    if name != "router":
        return
    experts, num_experts = outputs["experts"], outputs["logits"].shape[1]
    capacity = -(-experts.numel() // num_experts)
    for expert in range(num_experts):
        rows, places = (experts == expert).nonzero(as_tuple=True)
        outputs["weights"][rows[capacity:], places[capacity:]] = 0.0
