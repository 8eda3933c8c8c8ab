"""The end-of-sequence token is not part of what the trainer scores.

Met where completions are cut at the first stop token before they are handed over.
"""

import dataclasses

from zerogap.diagnose.corpus.workshop import EOS, Sides, Workshop
from zerogap.diagnose.trace import SequenceTrace

EXPECTED = "ids/special_tokens"


def cut(sequence: SequenceTrace) -> SequenceTrace:
    return dataclasses.replace(sequence, ids=sequence.ids[:-1]) if sequence.ids[-1] == EOS else sequence


def sides(workshop: Workshop) -> Sides:
    sequences = [cut(s) for s in workshop.sequences()]
    trainer = workshop.torch_side(workshop.model(), sequences, name="trainer")
    return trainer, workshop.torch_side(workshop.model(), name="rollout")
