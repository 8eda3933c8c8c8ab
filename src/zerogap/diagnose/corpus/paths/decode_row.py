"""Rows decoded alone come out of a block disturbed, outside of any operator.

Met as a buffer that is reused one step too early; only the path can be named.
"""

from zerogap.diagnose.corpus.faulty_blocks import disturbed
from zerogap.diagnose.corpus.workshop import Sides, Workshop
from zerogap.models.passes import of_engine, runs
from zerogap.types import ForwardContext

EXPECTED = "path/decode"


def decoded(context: ForwardContext) -> list[int]:
    return [row for row, count, at in runs(context) if of_engine(context) and count == 1 and at > 0]


def sides(workshop: Workshop) -> Sides:
    engine = disturbed(workshop.decoder(), decoded)
    return (
        workshop.zerogap_side(workshop.decoder(), name="trainer"),
        workshop.zerogap_side(engine, name="rollout", path="decode"),
    )
