"""After an update the engine still serves prompts from its prefix cache, which the old weights wrote.

InternLM/lmdeploy#4917, NVIDIA-NeMo/RL#4018: the cache is keyed by tokens, not by weights. Rows of this
model have the same bits in any chunk, so that nothing but the old keys and values shows.
"""

import dataclasses

import numpy as np
import torch

from zerogap.diagnose.corpus.cached import continued
from zerogap.diagnose.corpus.open_modules import exact
from zerogap.diagnose.corpus.workshop import EditedSide, Model, Sides, Workshop
from zerogap.diagnose.trace import Definition, Pass

EXPECTED = "cache/stale_weights"


@torch.no_grad()
def update(model: Model) -> None:
    generator = torch.Generator().manual_seed(17)
    for parameter in model.parameters():
        step = 0.03 * torch.randn(parameter.shape, generator=generator)
        parameter.copy_((parameter.float() * (1.0 + step)).to(parameter.dtype))
    exact(model)


def sides(workshop: Workshop) -> Sides:
    trainer, rollout = workshop.pair(update, update)
    old, new = workshop.model(), workshop.model()
    exact(old)
    update(new)
    sequences, logprobs = [], []
    for sequence in workshop.sequences():
        hit = sequence.prompt_length - 1
        versions = np.where(np.arange(len(sequence.ids)) < hit, 3, 4).astype(np.int64)
        sequences.append(dataclasses.replace(sequence, hit_length=hit, versions=versions))
        logprobs.append(continued(new, sequence, hit, writer=old))
    served = Pass(tuple(logprobs), "prefix_hit", definition=Definition(1.0, True))
    trace = dataclasses.replace(rollout.trace, sequences=tuple(sequences), passes=(served,))
    return trainer, EditedSide(rollout, trace, lambda found: found)
