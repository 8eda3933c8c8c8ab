"""torch's allow_bf16_reduced_precision_reduction: both sides cut the output projection's sum in 4 parts; one keeps the
partial sums in BF16, the other in FP32."""

import torch

from zerogap.diagnose.corpus.arithmetic import split_linear
from zerogap.diagnose.corpus.workshop import Workshop, turn

EXPECTED = "linear/accumulate"


class Split(torch.nn.Linear):
    partial = torch.float32

    def forward(self, x):
        return split_linear(x, self.weight, 4, self.partial)


def sides(workshop: Workshop):
    return workshop.pair(lambda m: turn(m, "o_proj", Split, partial=torch.bfloat16), lambda m: turn(m, "o_proj", Split))
