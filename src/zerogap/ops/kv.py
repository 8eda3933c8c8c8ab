"""KV codecs: how keys and values stand in pages. The engine's cache and the trainer's scratch pages use the same one.

Dense pages are the layout that the attention kernel reads without unpacking: a page holds, per KV head, tiles of 16
tokens; a tile of keys has its tokens side by side for every pair of head dimensions, a tile of values has pairs of
tokens side by side for every head dimension (kernels/attention.h). A page size only says where tiles stand, so it
cannot change a bit. Nothing is rounded: the step that writes and every later one read the same numbers.

Keys, values and scales are views of one block of memory, in which what a KV head has in a page stands together:
decoding jumps from page to page, and a jump costs more than the bytes that it leads to.

FP8 pages hold E4M3 codes in the same tiles, a byte per element, written once: every step, the writing one included,
reads the codes, so both sides see the same rounded numbers. An element x of a row is the value code * scale with
code = rn_e4m3(fl32(x / scale)), nearest even, saturating at +-448 (docs/numerics.md, "FP8"). A NaN or infinity becomes
a NaN code, never a number.
"""

import dataclasses
from typing import ClassVar

import numpy as np
import torch

from zerogap.errors import ConfigError, ContractError
from zerogap.numerics import KV_SCALES, SCALE_FORMATS, DType
from zerogap.ops.backend import TORCH_DTYPES
from zerogap.ops.cpu import attention as native
from zerogap.types import LayerKV

TILE_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class DenseCodec:
    """Keys and values in the storage dtype, unscaled."""

    num_kv_heads: int
    head_dim: int
    storage: DType
    name: str = "dense"
    kv_scale: ClassVar[str] = "none"
    scale_format: ClassVar[str] = "fp32"

    def __post_init__(self) -> None:
        require_heads(self.num_kv_heads, self.head_dim)

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Calibrated scales of a layer: of keys and of values, by KV head."""
        return 2, self.num_kv_heads

    @property
    def attention_math(self) -> DType:
        """Operands of the score and value products."""
        return self.storage

    def bytes_per_token(self) -> int:
        """Bytes of keys and values per token and layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.storage.nbytes

    def allocate(self, num_pages: int, page_size: int, scales: tuple[torch.Tensor, ...] | None = None) -> LayerKV:
        """Zeroed pages for one layer: keys and values [num_pages, num_kv_heads, page_size * head_dim].

        Memory is taken from the system when a page is first written.

        Raises:
            ConfigError: a page size that is not a positive multiple of 16.
        """
        require_page_size(page_size)
        assert scales is None, "dense pages have no scales"
        part = page_size * self.head_dim
        keys, values = zeros((num_pages, self.num_kv_heads, 2 * part), TORCH_DTYPES[self.storage]).split(part, -1)
        return LayerKV(keys, values, self)


@dataclasses.dataclass(frozen=True)
class FP8Codec:
    """Keys and values as E4M3 codes with FP32 scales, over BF16 rows.

    Attributes:
        kv_scale: `per_token_head`: a scale per token and KV head, amax over the head dimension / 448, written with the
            codes. `calibrated`: one per KV head, given from outside; what exceeds 448 * scale saturates.
        scale_format: `fp32`, or `pow2` (scales rounded up to powers of two). Calibrated scales come in that format.
        attention_math: BF16: codes are read as the BF16 numbers they are. FP8: queries (per token and head) and
            probabilities (per row and key block, times the scales of the values) are quantised as well.
    """

    num_kv_heads: int
    head_dim: int
    kv_scale: str
    scale_format: str = "fp32"
    attention_math: DType = DType.BF16
    name: str = "fp8"

    def __post_init__(self) -> None:
        require_heads(self.num_kv_heads, self.head_dim)
        for key, choices in (("kv_scale", KV_SCALES), ("scale_format", SCALE_FORMATS)):
            if getattr(self, key) not in choices:
                raise ConfigError(key, getattr(self, key), f"choose {' or '.join(choices)}")
        if self.attention_math not in (DType.BF16, DType.FP8):
            raise ConfigError("attention_math", self.attention_math.value, "choose bf16 or fp8")

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Calibrated scales of a layer: of keys and of values, by KV head."""
        return 2, self.num_kv_heads

    @property
    def calibrated(self) -> bool:
        """True if scales are given, not written."""
        return self.kv_scale == "calibrated"

    def bytes_per_token(self) -> int:
        """Bytes of codes, and of scales that belong to the token, per token and layer."""
        return 2 * self.num_kv_heads * (self.head_dim + (0 if self.calibrated else 4))

    def allocate(self, num_pages: int, page_size: int, scales: tuple[torch.Tensor, ...] | None = None) -> LayerKV:
        """Zeroed pages for one layer: keys and values uint8 [num_pages, num_kv_heads, page_size * head_dim].

        Args:
            num_pages, page_size: page_size tokens each.
            scales: calibrated only: FP32 [num_kv_heads] of keys and of values, kept as they are (views of live scales
                stay live). May come later by `dataclasses.replace`; `attention` refuses pages without.

        Returns:
            Pages; with `per_token_head` also scales FP32 [num_pages, num_kv_heads, page_size].

        Raises:
            ConfigError: a page size that is not a positive multiple of 16.
        """
        require_page_size(page_size)
        codes, written = page_size * self.head_dim, 0 if self.calibrated else page_size * 4
        block = zeros((num_pages, self.num_kv_heads, 2 * (codes + written)), torch.uint8)
        keys, key_scales, values, value_scales = block.split((codes, written, codes, written), -1)
        if self.calibrated:
            return LayerKV(keys, values, self, *(scales or (None, None)))
        assert scales is None, "scales per token and head are written, not given"
        return LayerKV(keys, values, self, key_scales.view(torch.float32), value_scales.view(torch.float32))


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeroed memory that the system hands out page by page, when a page is first written."""
    # numpy asks for zeroed pages of the system and touches none; torch.zeros would write them all
    integer = {1: np.uint8, 2: np.int16, 4: np.int32}[dtype.itemsize]
    return torch.from_numpy(np.zeros(shape, integer)).view(dtype)


def require_heads(num_kv_heads: int, head_dim: int) -> None:
    """Raise `ConfigError` for sizes that the kernels do not implement."""
    if num_kv_heads < 1:
        raise ConfigError("num_kv_heads", num_kv_heads, "choose at least 1")
    if head_dim < 16 or head_dim % 16:
        raise ConfigError("head_dim", head_dim, "the kernels take multiples of 16")


def require_page_size(page_size: int) -> None:
    """Raise `ConfigError` unless pages are whole tiles."""
    if page_size < TILE_TOKENS or page_size % TILE_TOKENS:
        raise ConfigError("page_size", page_size, f"choose a positive multiple of {TILE_TOKENS}")


def require_scales(kv: LayerKV) -> None:
    """Raise `ContractError` if FP8 pages came without their scales: there is no default for one."""
    kinds = (kv.key_scales, kv.value_scales)[: kv.codec.scale_shape[0]]
    if kv.codec.kv_scale != "none" and any(scales is None for scales in kinds):
        raise ContractError(
            "the FP8 KV cache of a layer has no scales: calibrated scales belong to a weight version and must be "
            "given with it; calibrate first, or choose numerics.kv_scale: per_token_head"
        )


def calibrated_scales(kv: LayerKV) -> tuple[torch.Tensor, ...] | None:
    """A copy of the calibrated scales of each kind (keys, values; latents), None for any other codec."""
    if kv.codec.kv_scale != "calibrated":
        return None
    require_scales(kv)
    return tuple(scales.clone() for scales in (kv.key_scales, kv.value_scales) if scales is not None)


def kv_amax(k: torch.Tensor, amax: torch.Tensor) -> None:
    """amax = max(amax, |k|) per KV head, in place: what calibrated scales are made of.

    A maximum has no order, so the result does not depend on chunks, threads or rows. A NaN in k or amax leaves a NaN,
    an infinity an infinity.

    Args:
        k: keys or values of T rows, [T, num_kv_heads * head_dim] BF16 or FP32, as attention gets them.
        amax: FP32 [num_kv_heads], no negative numbers.
    """
    native.kv_amax(k, amax)
