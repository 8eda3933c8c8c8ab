"""Dynamic per-tensor FP8 activations: the scale is the largest value of the whole pass, so each sequence depends on
what shares the pass with it. Both sides do so; the rollout batches, the trainer scores one by one.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import e4m3, exact_linear
from zerogap.diagnose.corpus.open_modules import exact
from zerogap.diagnose.corpus.workshop import Workshop

EXPECTED = "neighbours/content"


class PerTensor(torch.nn.Linear):
    def forward(self, x):
        scale = x.float().abs().max().clamp_min(1e-12) / 448.0
        return exact_linear(e4m3(x.float() / scale) * scale, self.weight.float()).to(x.dtype)


def change(model):
    exact(model)
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = PerTensor


def sides(workshop: Workshop):
    return workshop.pair(change, change, batches=((0, 1, 2, 3),))
