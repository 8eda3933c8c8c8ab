"""One projection keeps its accumulator in BF16 after every product.

Met in a kernel written for an accelerator without a wide accumulator.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import chain, chain_linear, products
from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

EXPECTED = "linear/accumulate"


class WideLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return chain_linear(x, self.weight)


class NarrowLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = chain(products(x, self.weight, range(x.shape[-1])), torch.bfloat16)
        return total.view(*x.shape[:-1], -1)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: turn(model, "layers.0.mlp.up_proj", NarrowLinear),
        lambda model: turn(model, "layers.0.mlp.up_proj", WideLinear),
    )
