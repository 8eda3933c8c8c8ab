"""One layer's MLP output replaces the residual stream instead of being added to it.

Met in hand-fused blocks, where the norm's two outputs were taken in the wrong order.
"""

from typing import Any

import torch

from zerogap.diagnose.corpus.open_modules import OpenLayer
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "residual/formula"


class ForgetfulLayer(OpenLayer):
    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        update, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        return self.mlp(self.post_attention_layernorm(hidden_states + update))


def plant(model: Model) -> None:
    turn(model, r"layers\.0", ForgetfulLayer)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
