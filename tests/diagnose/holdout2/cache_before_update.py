"""The prompts' keys and values come from a prefix cache that was not dropped at the last weight update.

Met with engines that keep their prefix cache over a sync; versions and hit lengths were recorded.
"""

import dataclasses

import numpy as np
import torch

from zerogap.diagnose.corpus.cached import continued
from zerogap.diagnose.corpus.workshop import EditedSide, Model, Sides, Workshop
from zerogap.diagnose.trace import Definition, Pass

EXPECTED = "cache/stale_weights"


def older(model: Model) -> None:
    generator = torch.Generator().manual_seed(21)
    for weight in model.parameters():
        weight.data.mul_(1.0 + 0.02 * torch.randn(weight.shape, generator=generator).to(weight.dtype))


def sides(workshop: Workshop) -> Sides:
    trainer, engine = workshop.pair()
    now, before = workshop.model(), workshop.model()
    older(before)
    sequences, logprobs = [], []
    for sequence in trainer.trace.sequences:
        hit = sequence.prompt_length - 1
        versions = np.where(np.arange(len(sequence.ids)) < hit, 6, 7)
        sequences.append(dataclasses.replace(sequence, hit_length=hit, versions=versions))
        logprobs.append(continued(now, sequence, hit, writer=before))
    answer = Pass(tuple(logprobs), path="prefix_hit", definition=Definition(1.0, True))
    trace = dataclasses.replace(engine.trace, sequences=tuple(sequences), passes=(answer,))
    return trainer, EditedSide(engine, trace)
