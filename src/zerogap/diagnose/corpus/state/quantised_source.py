"""The rollout's MLP weights come from an FP8 checkpoint, de-quantised; the trainer's from the BF16 one.

Met when two repositories of one model are taken for the same weights.
"""

from zerogap.diagnose.corpus.arithmetic import quantised
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/quantised"


def plant(model: Model) -> None:
    for name, parameter in model.named_parameters():
        if ".mlp." in name:
            parameter.data = quantised(parameter.data, 128, 128).to(parameter.dtype)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, facts={"hidden_size": 128, "intermediate_size": 256})
