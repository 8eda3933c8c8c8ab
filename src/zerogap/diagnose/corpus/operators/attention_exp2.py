"""exp2 of scores times log2(e) instead of exp, in an FP32 model.

Met in every GPU flash kernel, against an eager softmax.
"""

import functools
import math

import torch

from zerogap.diagnose.corpus.arithmetic import online
from zerogap.diagnose.corpus.workshop import Sides, Workshop, attend

EXPECTED = "attention/primitive"


def power(x: torch.Tensor) -> torch.Tensor:
    return torch.exp2(x * math.log2(math.e))


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: attend(model, "exp2", functools.partial(online, block=64, power=power)),
        lambda model: attend(model, "block_64", functools.partial(online, block=64)),
        dtype="float32",
    )
