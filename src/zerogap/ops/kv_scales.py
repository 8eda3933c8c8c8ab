"""Calibrated scales of an FP8 KV cache: one number per layer, keys or values, and KV head, for one weight version.

    scale = the scale of a block (ops/quant.py) whose largest magnitude is fl(kv_margin * amax)

`amax` is the largest magnitude that keys (after RoPE) or values had over a set of tokens. The trainer takes it along in
its forward pass under weight version v, for the scales of version v + 1; version 0 is calibrated in one pass over the
first prompts with a BF16 cache. A maximum does not depend on any order, so neither do the scales.

A set has a name, which is a digest of its numbers: samples, prefix-cache keys and checkpoints carry it, and whoever
cannot find the set of that name refuses to compute. There is no default scale.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence

import torch

from zerogap.errors import CheckpointError, NonFiniteError
from zerogap.numerics import Numerics
from zerogap.ops.cpu.quant import block_scales
from zerogap.ops.digest import digest
from zerogap.ops.kv import kv_amax


@dataclasses.dataclass(frozen=True, eq=False)
class KVScales:
    """A scale set.

    Attributes:
        values: FP32 [layers, 2, num_kv_heads], of keys and of values; never written after construction.
    """

    values: torch.Tensor

    @functools.cached_property
    def name(self) -> str:
        """16 hex digits over the scales."""
        return digest(self.values)[:16]

    @classmethod
    def of(cls, amax: torch.Tensor, numerics: Numerics) -> "KVScales":
        """The scales for magnitudes FP32 [layers, 2, num_kv_heads].

        Raises:
            NonFiniteError: a magnitude is not finite; names layer, kind and head.
        """
        finite = torch.isfinite(amax)
        if not finite.all():
            layer, kind, head = (int(i) for i in (~finite).nonzero()[0])
            what = ("keys", "values")[kind]
            raise NonFiniteError(f"{what} of layer {layer}, KV head {head} are not finite: no scale can be calibrated")
        return cls(block_scales(amax * numerics.kv_margin, numerics.scale_format))

    @classmethod
    def from_list(cls, numbers: Sequence) -> "KVScales":
        """Inverse of `to_list`.

        Raises:
            CheckpointError: something else than positive numbers per layer, kind and head.
        """
        try:
            values = torch.tensor(numbers, dtype=torch.float32)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"KV scales are no table of numbers: {error}") from None
        if values.dim() != 3 or values.shape[1] != 2 or not (torch.isfinite(values) & (values > 0)).all():
            raise CheckpointError("KV scales must be positive numbers, [layers][keys, values][KV heads]")
        return cls(values)

    def to_list(self) -> list:
        """JSON-ready numbers that `from_list` reads back to the same bits."""
        return self.values.tolist()


class Calibration:
    """The running maxima of one forward pass or several. Raised by attention, layer by layer.

    Attributes:
        amax: FP32 [layers, 2, num_kv_heads].
        seconds: spent on them.
    """

    def __init__(self, num_layers: int, num_kv_heads: int) -> None:
        self.amax = torch.zeros((num_layers, 2, num_kv_heads))
        self.seconds = 0.0

    def layer(self, index: int) -> "LayerCalibration":
        """What attention of one layer raises."""
        return LayerCalibration(self, index)


@dataclasses.dataclass(frozen=True)
class LayerCalibration:
    """One layer's part of a `Calibration`."""

    whole: Calibration
    index: int

    def observe(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Raise the maxima by keys and values [T, num_kv_heads * head_dim], as attention gets them."""
        began = time.perf_counter()
        kv_amax(k, self.whole.amax[self.index, 0])
        kv_amax(v, self.whole.amax[self.index, 1])
        self.whole.seconds += time.perf_counter() - began
