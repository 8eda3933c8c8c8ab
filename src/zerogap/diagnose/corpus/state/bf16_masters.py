"""The rollout has BF16-rounded weights in FP32 tensors, the trainer its FP32 masters; both compute in FP32.

Met with trainers that score with masters and engines that load what was published.
"""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/dtype"


def plant(model: Model) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, dtype="float32")
