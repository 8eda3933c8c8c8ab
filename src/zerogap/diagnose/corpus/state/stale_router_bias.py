"""The router's correction bias is the one from before the update: buffers were not sent.

Met with DeepSeek-style models: the bias is no parameter, so a transfer of parameters leaves it out.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "buffers/stale"


def train(model: Model) -> None:
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    bias += 0.3 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(4)).sign()


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(None, train, family="deepseek_v3")
