"""Granite-like: updates are multiplied by residual_multiplier (0.35) before the addition; the other side ignores the
config's key."""

from zerogap.diagnose.corpus.open_modules import OpenLayer
from zerogap.diagnose.corpus.workshop import Workshop, turn

EXPECTED = "residual/formula"


class Scaled(OpenLayer):
    def add(self, residual, update):
        return residual + update * 0.35


def sides(workshop: Workshop):
    return workshop.pair(None, lambda m: turn(m, r"layers\.\d+", Scaled))
