"""FP8 linear layers that faults start from: weights 128x128, activations 1x128, FP32 scales amax / 448."""

import torch

from zerogap.diagnose.corpus.arithmetic import quantised, quantised_rows

WIDE = {"hidden_size": 256, "intermediate_size": 256}  # facts of a model with more than one block


class BlockLinear(torch.nn.Linear):
    """Operands through E4M3 codes; products accumulated FP32 by the library, rounded once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.nn.functional.linear(self.rows(x), self.columns())
        return out.to(x.dtype).view(*x.shape[:-1], -1)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Activations [R, K] as the product reads them, FP32."""
        return quantised_rows(x, 128)

    def columns(self) -> torch.Tensor:
        """Weights [N, K] as the product reads them, FP32."""
        return quantised(self.weight, 128, 128)
