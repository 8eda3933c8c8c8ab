"""Calibrated scales of an FP8 KV cache: one number per layer, keys or values, and KV head, for one weight version; of
latent attention one per layer and tile of 128 elements of the latent.

    scale = the scale of a block (ops/quant.py) whose largest magnitude is fl(kv_margin * amax)

`amax` is the largest magnitude that keys (after RoPE), values or latents had over a set of tokens. The trainer takes it
along in its forward pass under weight version v, for the scales of version v + 1; version 0 is calibrated in one pass
over the first prompts with a BF16 cache. A maximum does not depend on any order, so neither do the scales.

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
from zerogap.ops.cpu.mla import latent_amax
from zerogap.ops.cpu.quant import block_scales
from zerogap.ops.digest import digest
from zerogap.ops.kv import kv_amax


@dataclasses.dataclass(frozen=True, eq=False)
class KVScales:
    """A scale set.

    Attributes:
        values: FP32 [layers, kinds, groups], by the codec's `scale_shape`: of keys and of values by KV head, or of
            latents by tile; never written after construction.
    """

    values: torch.Tensor

    @functools.cached_property
    def name(self) -> str:
        """16 hex digits over the scales."""
        return digest(self.values)[:16]

    @classmethod
    def of(cls, amax: torch.Tensor, numerics: Numerics) -> "KVScales":
        """The scales for magnitudes FP32 [layers, kinds, groups].

        Raises:
            NonFiniteError: a magnitude is not finite; names layer, kind and group.
        """
        finite = torch.isfinite(amax)
        if not finite.all():
            layer, kind, group = (int(i) for i in (~finite).nonzero()[0])
            what, where = ("latents", "tile") if amax.shape[1] == 1 else (("keys", "values")[kind], "KV head")
            raise NonFiniteError(f"{what} of layer {layer}, {where} {group} are not finite: no scale can be calibrated")
        return cls(block_scales(amax * numerics.kv_margin, numerics.scale_format))

    @classmethod
    def from_list(cls, numbers: Sequence) -> "KVScales":
        """Inverse of `to_list`.

        Raises:
            CheckpointError: something else than positive numbers per layer, kind and group.
        """
        try:
            values = torch.tensor(numbers, dtype=torch.float32)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"KV scales are no table of numbers: {error}") from None
        if values.dim() != 3 or values.shape[1] not in (1, 2) or not (torch.isfinite(values) & (values > 0)).all():
            mend = "[layers][keys, values][KV heads], or [layers][latents][tiles]"
            raise CheckpointError(f"KV scales must be positive numbers, {mend}")
        return cls(values)

    def to_list(self) -> list:
        """JSON-ready numbers that `from_list` reads back to the same bits."""
        return self.values.tolist()


class Calibration:
    """The running maxima of one forward pass or several. Raised by attention, layer by layer.

    Attributes:
        amax: FP32 [layers, kinds, groups].
        seconds: spent on them.
    """

    def __init__(self, num_layers: int, scale_shape: tuple[int, int]) -> None:
        """`scale_shape`: kinds and groups of a layer, by the model's codec."""
        self.amax = torch.zeros((num_layers, *scale_shape))
        self.seconds = 0.0

    def layer(self, index: int) -> "LayerCalibration":
        """What attention of one layer raises."""
        return LayerCalibration(self, index)


@dataclasses.dataclass(frozen=True)
class LayerCalibration:
    """One layer's part of a `Calibration`."""

    whole: Calibration
    index: int

    def observe(self, *kinds: torch.Tensor) -> None:
        """Raise the maxima by T rows, as attention gets them: keys and values [T, num_kv_heads * head_dim] each, or
        latents [T, latent]."""
        began = time.perf_counter()
        raise_by = latent_amax if len(kinds) == 1 else kv_amax
        for rows, amax in zip(kinds, self.whole.amax[self.index], strict=True):
            raise_by(rows, amax)
        self.whole.seconds += time.perf_counter() - began
