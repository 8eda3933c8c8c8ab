"""model.half().float(): the rotary frequencies of one side went through FP16."""

import torch

from zerogap.diagnose.corpus.workshop import Workshop

EXPECTED = "buffers/dtype"


@torch.no_grad()
def change(model):
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.half().float()


def sides(workshop: Workshop):
    return workshop.pair(change)
