"""The trainer renders prompts without the generation prompt: the last tokens of every prompt are missing.

Met with `add_generation_prompt=False`, the default of `apply_chat_template`.
"""

import dataclasses

import numpy as np

from zerogap.diagnose.corpus.workshop import Sides, Workshop
from zerogap.diagnose.trace import SequenceTrace

EXPECTED = "ids/template"
HEADER = (311, 312, 313)  # what the template writes before an answer


def headed(sequence: SequenceTrace) -> SequenceTrace:
    at = sequence.prompt_length
    ids = np.concatenate([sequence.ids[:at], HEADER, sequence.ids[at:]]).astype(np.int32)
    return dataclasses.replace(sequence, ids=ids, prompt_length=at + len(HEADER))


def sides(workshop: Workshop) -> Sides:
    trainer = workshop.torch_side(workshop.model(), name="trainer")
    sequences = [headed(s) for s in workshop.sequences()]
    return trainer, workshop.torch_side(workshop.model(), sequences, name="rollout")
