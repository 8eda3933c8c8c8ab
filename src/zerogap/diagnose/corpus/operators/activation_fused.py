"""SiLU times up in one kernel, FP32 inside and rounded once; transformers rounds SiLU first.

Met between every inference engine (silu_and_mul) and the eager model.
"""

import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "activation/rounding"


class FusedMLP(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj((torch.nn.functional.silu(gate.float()) * up.float()).to(x.dtype))


def plant(model: Model) -> None:
    turn(model, "mlp", FusedMLP)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
