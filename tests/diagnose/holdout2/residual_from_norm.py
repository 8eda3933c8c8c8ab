"""The stream continues from the normed row instead of from the row before the norm.

Met with configs that have `apply_residual_connection_post_layernorm`.
"""

from typing import Any

import torch

from zerogap.diagnose.corpus.open_modules import OpenLayer
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "residual/formula"


class PostLayer(OpenLayer):
    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        update, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + update
        normed = self.post_attention_layernorm(hidden_states)
        return normed + self.mlp(normed)


def plant(model: Model) -> None:
    turn(model, r"layers\.1", PostLayer)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
