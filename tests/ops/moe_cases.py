"""Routed layers small enough for tests: weights, contexts, and routers of both families."""

import dataclasses

import torch

from tests.bits import hard_values, unit_values
from zerogap.ops.handle import WeightHandle
from zerogap.ops.moe import MoEWeights, Routing
from zerogap.ops.stack import PanelStack
from zerogap.routing import RoutingRecord
from zerogap.types import ForwardContext, FP8Blocks, WeightSpec

BF16, FP32 = torch.bfloat16, torch.float32
NONE = torch.zeros(0, dtype=torch.int32)

# Routers by name: Qwen3-MoE's, one that does not normalise, Moonlight's, DeepSeek-V3's, every expert, one expert.
ROUTINGS = {
    "qwen3": Routing(20, 4),
    "plain": Routing(10, 3, normalise=False, scaling=2.5),
    "moonlight": Routing(16, 3, "sigmoid", scaling=2.446),
    "deepseek": Routing(32, 5, "sigmoid", scaling=2.5, groups=4, top_groups=2),
    "raw sigmoid": Routing(6, 2, "sigmoid", normalise=False),
    "all": Routing(5, 5),
    "one": Routing(33, 1),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and numerics of a layer: H hidden, I expert, F shared (0: none)."""

    storage: torch.dtype = BF16
    fp8: FP8Blocks | None = None
    routing: Routing = ROUTINGS["qwen3"]
    hidden: int = 72
    inner: int = 40
    shared: int = 56
    seed: int = 0

    def weights(self, trainable: bool = False, random=unit_values) -> MoEWeights:
        """Loaded weights, the same for the same case; trainable ones have open bins. All have input gradients."""
        h, i, f, e = self.hidden, self.inner, self.shared, self.routing.num_experts

        def value(shape: tuple[int, ...], number: int) -> torch.Tensor:
            return random(shape, FP32, 1000 * self.seed + number) * shape[-1] ** -0.5

        def handle(shape: tuple[int, int], number: int, fp8: FP8Blocks | None, leaves=(1, 1)) -> WeightHandle:
            weight = WeightHandle(WeightSpec(f"w{number}", shape, "matrix", *leaves, fp8=fp8), self.storage)
            return prepare(weight, value(shape, number))

        def prepare(weight: WeightHandle, tensor: torch.Tensor) -> WeightHandle:
            weight.load(tensor.to(self.storage))
            weight.set_trainable(trainable)
            weight.enable_input_grad()
            if trainable:
                weight.open_grad()
            return weight

        def stack(name: str, shape: tuple[int, int], number: int) -> PanelStack:
            made = PanelStack(name, e, shape, self.storage, self.fp8)
            for index in range(e):
                spec = WeightSpec(f"{name}.{index}", shape, "matrix", fp8=self.fp8, stack=(name, index, e))
                prepare(WeightHandle(spec, self.storage, made), value(shape, number + index))
            return made

        router = handle((e, h), 0, None)
        bias = None
        if self.routing.scoring == "sigmoid":
            bias = WeightHandle(WeightSpec("bias", (e,), "buffer"), self.storage)
            bias.load(unit_values((e,), FP32, self.seed + 7) / 4)
        experts = [stack("gate", (i, h), 100), stack("up", (i, h), 300), stack("down", (h, i), 500)]
        shared = None
        if f:
            leaves = 2 if f % 256 == 0 else 1
            shared = (
                handle((f, h), 1, self.fp8, (1, leaves)),
                handle((f, h), 2, self.fp8, (1, leaves)),
                handle((h, f), 3, self.fp8, (leaves, 1)),
            )
        return MoEWeights(router, bias, *experts, shared)

    def rows(self, count: int, seed: int = 50, spread: int = 2) -> torch.Tensor:
        """Rows [count, H] with wide exponents."""
        return hard_values((count, self.hidden), self.storage, seed, spread=spread)


def context(
    packs: list[int] | None = None,
    samples: list[int] | None = None,
    record: RoutingRecord | None = None,
    balance: float = 0.0,
) -> ForwardContext:
    """A context of which the op reads pack and sample borders, the record and the balance coefficient only."""
    packs_tensor = None if packs is None else torch.tensor(packs, dtype=torch.int32)
    samples_tensor = None if samples is None else torch.tensor(samples, dtype=torch.int32)
    return ForwardContext(
        NONE, NONE, NONE, 16, sample_starts=samples_tensor, pack_starts=packs_tensor, routing=record, balance=balance
    )
