"""Router logits get random noise, as they do in training with jitter.

Met with `router_jitter_noise` left on in scoring: experts change from run to run.
"""

from typing import Any

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "rerun/nondeterministic"


class NoisyRouter(Qwen3MoeTopKRouter):
    generator = torch.Generator().manual_seed(14)

    def forward(self, hidden_states: torch.Tensor) -> Any:
        noise = 1.0 + 0.05 * (torch.rand(hidden_states.shape, generator=self.generator) - 0.5)
        return super().forward((hidden_states * noise).to(hidden_states.dtype))


def plant(model: Model) -> None:
    turn(model, "mlp.gate", NoisyRouter)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3_moe")
