"""The first row after a chunk border comes out of a block disturbed.

Met with chunked prefill, where the first row of a chunk takes another branch.
"""

from zerogap.diagnose.corpus.faulty_blocks import disturbed
from zerogap.diagnose.corpus.workshop import Sides, Workshop
from zerogap.models.passes import of_engine, runs
from zerogap.types import ForwardContext

EXPECTED = "path/chunked"


def borders(context: ForwardContext) -> list[int]:
    return [row for row, count, at in runs(context) if of_engine(context) and count > 1 and at > 0]


def sides(workshop: Workshop) -> Sides:
    engine = disturbed(workshop.decoder(), borders)
    return (
        workshop.zerogap_side(workshop.decoder(), name="trainer"),
        workshop.zerogap_side(engine, name="rollout", path="chunked"),
    )
