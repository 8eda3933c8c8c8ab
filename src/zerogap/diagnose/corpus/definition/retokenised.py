"""The trainer encodes the completions' text again and gets other tokens: two of them merge into one.

Met in every multi-turn loop that keeps text instead of ids.
"""

import dataclasses

import numpy as np

from zerogap.diagnose.corpus.workshop import VOCABULARY, Sides, Workshop
from zerogap.diagnose.trace import SequenceTrace

EXPECTED = "ids/tokens"


def merged(sequence: SequenceTrace) -> SequenceTrace:
    at = sequence.prompt_length + 3
    ids = np.concatenate([sequence.ids[:at], [VOCABULARY - 7], sequence.ids[at + 2 :]]).astype(np.int32)
    return dataclasses.replace(sequence, ids=ids)


def sides(workshop: Workshop) -> Sides:
    rollout = workshop.torch_side(workshop.model(), name="rollout")
    sequences = workshop.sequences()
    sequences = (sequences[0], merged(sequences[1]), merged(sequences[2]), sequences[3])
    return workshop.torch_side(workshop.model(), sequences, name="trainer"), rollout
