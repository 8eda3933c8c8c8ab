"""The engine states filters that are off (top-k 0, top-p 1.0, min-p 0.0), the trainer states none. Nothing differs."""

from zerogap.diagnose.corpus.workshop import Sides, Workshop
from zerogap.diagnose.trace import Definition

EXPECTED = "clean"


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(family="qwen3", definition=Definition(1.0, True, 0, 1.0, 0.0))
