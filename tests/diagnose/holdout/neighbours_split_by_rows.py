"""Every linear layer's GEMM picks split-K 4 for passes of 40 rows and more, one part below; all else gives the same
bits in any batch. The engine batches all four sequences. FP32 models."""

import torch

from zerogap.diagnose.corpus.arithmetic import chain, products
from zerogap.diagnose.corpus.open_modules import exact
from zerogap.diagnose.corpus.workshop import Workshop

EXPECTED = "linear/split"


class ByRows(torch.nn.Linear):
    def forward(self, x):
        rows, size = x.shape[:-1].numel(), x.shape[-1]
        parts = 4 if rows >= 40 else 1
        step = size // parts
        each = (chain(products(x, self.weight, range(at, at + step))) for at in range(0, size, step))
        return chain(each).to(x.dtype).view(*x.shape[:-1], -1)


def change(model):
    exact(model)
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.__class__ = ByRows


def sides(workshop: Workshop):
    return workshop.pair(change, change, dtype="float32", batches=((0, 1, 2, 3),))
