"""Log-probs differ on tokens that the mask leaves out (a tool's output inside a completion), and nowhere else."""

import dataclasses

import numpy as np

from zerogap.diagnose.corpus.workshop import Sides, Workshop, edited
from zerogap.diagnose.trace import SequenceTrace

EXPECTED = "clean"


def marked(sequence: SequenceTrace) -> SequenceTrace:
    mask = sequence.counted.copy()
    mask[sequence.prompt_length + 1 : sequence.prompt_length + 4] = False
    return dataclasses.replace(sequence, mask=mask)


def elsewhere(logprobs: np.ndarray, sequence: SequenceTrace) -> np.ndarray:
    return np.where(sequence.counted, logprobs, np.float32(0.0))


def sides(workshop: Workshop) -> Sides:
    sequences = [marked(s) for s in workshop.sequences()]
    trainer = workshop.torch_side(workshop.model(), sequences, name="trainer")
    return trainer, edited(workshop.torch_side(workshop.model(), sequences, name="rollout"), elsewhere)
