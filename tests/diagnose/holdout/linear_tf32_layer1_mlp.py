"""FP32 trainer; the other side lets gate and up of layer 1 run in TF32 (allow_tf32)."""

import torch

from zerogap.diagnose.corpus.arithmetic import tf32
from zerogap.diagnose.corpus.workshop import Workshop, turn

EXPECTED = "linear/operands"


class Tf32(torch.nn.Linear):
    def forward(self, x):
        return torch.nn.functional.linear(tf32(x), tf32(self.weight))


def sides(workshop: Workshop):
    return workshop.pair(lambda m: turn(m, r"1\.mlp\.(gate|up)_proj", Tf32), dtype="float32")
