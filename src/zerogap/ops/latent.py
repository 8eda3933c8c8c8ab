"""Sizes of latent attention, and its KV codec: how the one row of a token stands in pages (formulas: ops/mla.py).

A token's row is its latent, which is key and value of every head, and the rotated part of its key, which all heads
share. It is stored once: no head has pages of its own, and nothing is stored a second time as a value. Pages hold rows
as they come, latents first, then rotated parts, then scales (kernels/mla.h); the page size only says where rows stand,
so it cannot change a bit.

FP8 pages hold the latent as E4M3 codes in tiles of 128 elements with a scale each; the rotated part stays BF16. Codes
are written once and every step, the writing one included, reads them: x becomes code * scale with code =
rn_e4m3(fl32(x / scale)), nearest even, saturating at +-448 (docs/numerics.md, "FP8").
"""

import dataclasses
from typing import ClassVar

import torch

from zerogap.errors import ConfigError
from zerogap.numerics import KV_SCALES, SCALE_FORMATS, DType
from zerogap.ops.backend import TORCH_DTYPES
from zerogap.ops.kv import require_page_size, zeros
from zerogap.types import LayerKV

TILE = 128  # elements of a latent that share a scale


@dataclasses.dataclass(frozen=True)
class LatentSizes:
    """Sizes of one latent attention block, all multiples of 16.

    Attributes:
        num_heads: query heads.
        nope, rope: elements of a query head without and with rotation.
        latent: elements of the compressed row that keys and values share (`kv_lora_rank`).
        value: elements of a head's value.
    """

    num_heads: int
    nope: int
    rope: int
    latent: int
    value: int

    def __post_init__(self) -> None:
        if self.num_heads < 1:
            raise ConfigError("num_heads", self.num_heads, "choose at least 1")
        for name in ("nope", "rope", "latent", "value"):
            _require_multiple(name, getattr(self, name))

    @property
    def q_width(self) -> int:
        """Elements of all query heads of a token."""
        return self.num_heads * (self.nope + self.rope)

    @property
    def row(self) -> int:
        """Elements of a token's row: latent, then the rotated part."""
        return self.latent + self.rope

    @property
    def out_width(self) -> int:
        """Elements of all heads' outputs of a token."""
        return self.num_heads * self.value


@dataclasses.dataclass(frozen=True)
class LatentCodec:
    """Latent rows, stored once per token.

    Attributes:
        latent, rope: elements of a row, without and with rotation.
        kv: BF16 or FP32, the dtype of the rows, which stand as they are; or FP8, over BF16 rows.
        kv_scale: FP8: `per_token_head`, a scale per token and tile of 128 elements, from its own amax and written with
            the codes; `calibrated`, one per tile, given from outside; what exceeds 448 * scale saturates.
        scale_format: `fp32`, or `pow2` (scales rounded up to powers of two). Calibrated scales come in that format.
    """

    latent: int
    rope: int
    kv: DType
    kv_scale: str = "none"
    scale_format: str = "fp32"
    num_kv_heads: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _require_multiple("latent", self.latent)
        _require_multiple("rope", self.rope)
        choices = KV_SCALES if self.coded else ("none",)
        if self.kv_scale not in choices:
            raise ConfigError("kv_scale", self.kv_scale, f"a cache of {self.kv.value} takes {' or '.join(choices)}")
        if self.scale_format not in SCALE_FORMATS:
            raise ConfigError("scale_format", self.scale_format, f"choose {' or '.join(SCALE_FORMATS)}")

    @property
    def name(self) -> str:
        """`latent`, or `latent-fp8`."""
        return "latent-fp8" if self.coded else "latent"

    @property
    def coded(self) -> bool:
        """True if latents stand as FP8 codes."""
        return self.kv is DType.FP8

    @property
    def head_dim(self) -> int:
        """Elements of a row."""
        return self.latent + self.rope

    @property
    def tiles(self) -> int:
        """Tiles of a latent, the last one ragged."""
        return -(-self.latent // TILE)

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Calibrated scales of a layer: of one kind, by tile."""
        return 1, self.tiles

    @property
    def rows(self) -> DType:
        """Dtype of the rows that are written, and operands of the score and value products."""
        return DType.BF16 if self.coded else self.kv

    @property
    def attention_math(self) -> DType:
        """Operands of the score and value products."""
        return self.rows

    def _part_bytes(self) -> tuple[int, int, int]:
        """Bytes of latent, rotated part and written scales of a token."""
        scales = 4 * self.tiles if self.kv_scale == "per_token_head" else 0
        return self.latent * self.kv.nbytes, self.rope * self.rows.nbytes, scales

    def bytes_per_token(self) -> int:
        """Bytes of a row, and of scales that belong to the token, per token and layer."""
        return sum(self._part_bytes())

    def allocate(self, num_pages: int, page_size: int, scales: tuple[torch.Tensor, ...] | None = None) -> LayerKV:
        """Zeroed pages for one layer.

        Args:
            num_pages, page_size: page_size tokens each.
            scales: calibrated only: (FP32 [tiles],), kept as it is (a view of live scales stays live). May come later
                by `dataclasses.replace`; `mla` refuses pages without.

        Returns:
            keys: latents [num_pages, 1, page_size * latent], uint8 codes or rows' dtype; values: rotated parts
            [num_pages, 1, page_size * rope]; with `per_token_head` key_scales FP32 [num_pages, 1, page_size * tiles].

        Raises:
            ConfigError: a page size that is not a positive multiple of 16.
        """
        require_page_size(page_size)
        assert scales is None or self.kv_scale == "calibrated", "only calibrated scales are given"
        parts = [page_size * size for size in self._part_bytes()]
        latents, rotated, written = zeros((num_pages, 1, sum(parts)), torch.uint8).split(parts, -1)
        dtype = TORCH_DTYPES[self.rows]
        keys, values = latents if self.coded else latents.view(dtype), rotated.view(dtype)
        if self.kv_scale == "per_token_head":
            return LayerKV(keys, values, self, key_scales=written.view(torch.float32))
        return LayerKV(keys, values, self, key_scales=None if scales is None else scales[0])


def _require_multiple(name: str, size: int) -> None:
    """Raise `ConfigError` for a size that the kernels do not implement."""
    if size < 16 or size % 16:
        raise ConfigError(name, size, "the kernels of latent attention take multiples of 16")
