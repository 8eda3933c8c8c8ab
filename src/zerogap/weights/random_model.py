"""Models with random weights, for tests and for `verify` where no checkpoint is at hand.

Every matrix matters: rows have unit expected gain, norm weights and biases are not trivial, and the head is scaled so
that logits spread with standard deviation `peak`. With flat logits a wrong forward pass looks right. So do
routers: their logits spread, so that the chosen experts have unequal weights and a wrong choice shows.
"""

import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

from zerogap.models.spec import ModelSpec
from zerogap.models.tensors import ROUTER
from zerogap.numerics import PRESETS, DType
from zerogap.ops.backend import TORCH_DTYPES
from zerogap.types import WeightSpec
from zerogap.weights.save import MAX_SHARD_BYTES, save_folder

ROUTER_PEAK = 2.0  # standard deviation of router logits


def random_tensors(
    spec: ModelSpec, seed: int = 0, peak: float = 4.0, storage: DType = DType.BF16
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) in checkpoint-name order. A tensor depends on seed, its name and shape only.

    Args:
        peak: standard deviation of the logits (the head's input has unit mean square).
        storage: dtype of the tensors, buffers excepted; values are drawn in FP32 and rounded once.
    """
    for name, weight in spec.weight_specs(PRESETS["fp32"]).items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), seed))  # it looks at 32 bits only
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
        dtype = torch.float32 if weight.kind == "buffer" else TORCH_DTYPES[storage]
        yield name, _scaled(spec, weight, noise, peak).to(dtype)


def _scaled(spec: ModelSpec, weight: WeightSpec, noise: torch.Tensor, peak: float) -> torch.Tensor:
    if weight.name.endswith("norm.weight"):
        return 1.0 + 0.1 * noise
    if weight.kind in ("vector", "buffer"):  # biases
        return 0.2 * noise
    gain = peak if weight.name == "lm_head.weight" or (weight.kind == "embedding" and spec.tied) else 1.0
    if weight.name.endswith(ROUTER):
        gain = ROUTER_PEAK
    if weight.kind == "embedding" and not spec.tied:
        return noise
    return noise * (gain / math.sqrt(weight.shape[1]))


def write_random_model(
    path: str | os.PathLike[str],
    spec: ModelSpec,
    seed: int = 0,
    peak: float = 4.0,
    storage: DType = DType.BF16,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write `random_tensors` as a Hugging Face folder without a tokenizer; the folder's path."""
    return save_folder(path, spec, random_tensors(spec, seed, peak, storage), max_shard_bytes=max_shard_bytes)
