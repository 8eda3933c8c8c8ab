"""Both sides quantise the inputs of the MLP's products to E4M3; one with a scale per 64 values of a token, the other
per 32.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import quantised_rows
from zerogap.diagnose.corpus.workshop import Workshop, turn

EXPECTED = "linear/block"


class Fp8(torch.nn.Linear):
    columns = 64

    def forward(self, x):
        rows = quantised_rows(x, self.columns)
        return torch.nn.functional.linear(rows, self.weight.float()).to(x.dtype).view(*x.shape[:-1], -1)


def sides(workshop: Workshop):
    names = r"mlp\.\w+_proj"
    return workshop.pair(lambda m: turn(m, names, Fp8, columns=32), lambda m: turn(m, names, Fp8, columns=64))
