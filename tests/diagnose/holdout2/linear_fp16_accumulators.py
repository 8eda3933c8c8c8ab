"""Products accumulate in FP16 instead of FP32.

Met when `allow_fp16_accumulation` or a consumer card's fast mode is on.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import chain, chain_linear, products
from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

EXPECTED = "linear/accumulate"


class Wide(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return chain_linear(x, self.weight)


class Narrow(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = chain(products(x, self.weight, range(x.shape[-1])), torch.float16)
        return total.to(x.dtype).view(*x.shape[:-1], -1)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(lambda model: turn(model, "o_proj", Narrow), lambda model: turn(model, "o_proj", Wide))
