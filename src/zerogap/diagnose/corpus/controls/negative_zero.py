"""-0 stands where the other side has +0, in a boundary whose sign of zero cannot matter: log-probs are equal."""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "clean"


class SignedZeros(torch.nn.Linear):
    """Zeros of the output are negative."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return torch.where(out == 0, -0.0, out).to(out.dtype)


def zero(model: Model) -> None:
    model.model.layers[0].mlp.up_proj.weight.data[::4] = 0.0


def plant(model: Model) -> None:
    zero(model)
    turn(model, "layers.0.mlp.up_proj", SignedZeros)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, zero)
