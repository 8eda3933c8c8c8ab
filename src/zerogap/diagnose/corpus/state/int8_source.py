"""The rollout's projections come from an INT8 checkpoint with one scale per row, de-quantised.

Met with bitsandbytes-style rollouts.
"""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/quantised"


def plant(model: Model) -> None:
    for name, parameter in model.named_parameters():
        if "_proj" in name:
            wide = parameter.data.float()
            scale = wide.abs().amax(1, keepdim=True) / 127.0
            parameter.data = ((wide / scale).round() * scale).to(parameter.dtype)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
