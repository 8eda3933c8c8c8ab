"""In-flight weight update without a reset of the KV cache: the first 5, 8, 2 and 11 tokens' keys and values are of
weight version 3, everything after of version 4. A recorded rollout; boundaries were not recorded."""

import dataclasses

import numpy as np
import torch

from zerogap.diagnose.corpus.cached import continued
from zerogap.diagnose.corpus.workshop import Workshop
from zerogap.diagnose.side import RecordedSide
from zerogap.diagnose.trace import Definition, Pass

EXPECTED = "cache/stale_weights"


@torch.no_grad()
def older(model):
    generator = torch.Generator().manual_seed(9)
    for layer in model.model.layers:
        for part in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            part.weight.add_((0.01 * torch.randn(part.weight.shape, generator=generator)).to(part.weight.dtype))
    return model


def sides(workshop: Workshop):
    trainer = workshop.torch_side(workshop.model(), name="trainer")
    model, writer = workshop.model(), older(workshop.model())
    sequences, logprobs = [], []
    for sequence in workshop.sequences():
        hit = sequence.prompt_length - 1
        versions = np.where(np.arange(len(sequence.ids)) < hit, 3, 4).astype(np.int64)
        sequences.append(dataclasses.replace(sequence, hit_length=hit, versions=versions))
        logprobs.append(continued(model, sequence, hit, writer=writer))
    held = workshop.torch_side(model, sequences, name="rollout").trace
    recorded = Pass(tuple(logprobs), "prefix_hit", definition=Definition(1.0, True))
    return trainer, RecordedSide(dataclasses.replace(held, sequences=tuple(sequences), passes=(recorded,)))
