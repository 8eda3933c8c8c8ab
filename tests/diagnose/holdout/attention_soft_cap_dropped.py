"""Gemma-2-like: a soft cap of 5 on the scores, which the SDPA path of the other side leaves out."""

import functools

from zerogap.diagnose.corpus.arithmetic import eager
from zerogap.diagnose.corpus.workshop import Workshop, attend

EXPECTED = "attention/formula"


def sides(workshop: Workshop):
    return workshop.pair(None, lambda m: attend(m, "ext_cap", functools.partial(eager, cap=5.0)))
