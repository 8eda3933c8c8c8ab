"""The rollout's prompts begin with two beginning-of-sequence tokens.

Met when a chat template writes one and the tokenizer adds another.
"""

import dataclasses

import numpy as np

from zerogap.diagnose.corpus.workshop import BOS, Sides, Workshop
from zerogap.diagnose.trace import SequenceTrace

EXPECTED = "ids/special_tokens"


def doubled(sequence: SequenceTrace) -> SequenceTrace:
    ids = np.concatenate([[BOS], sequence.ids]).astype(np.int32)
    return dataclasses.replace(sequence, ids=ids, prompt_length=sequence.prompt_length + 1)


def sides(workshop: Workshop) -> Sides:
    trainer = workshop.torch_side(workshop.model(), name="trainer")
    sequences = [doubled(s) for s in workshop.sequences()]
    return trainer, workshop.torch_side(workshop.model(), sequences, name="rollout")
