"""Sizes of latent attention, and how its one row per token stands in pages (ops/mla.py says what is computed).

A token's row is its normed latent followed by the rotated part of its key, which all heads share. Keys are the whole
row, values its latent part.
"""

import dataclasses
from typing import ClassVar

import torch

from zerogap.errors import ConfigError
from zerogap.numerics import DType
from zerogap.ops.backend import TORCH_DTYPES
from zerogap.ops.kv import require_page_size, zeros
from zerogap.types import LayerKV


@dataclasses.dataclass(frozen=True)
class LatentSizes:
    """Sizes of one latent attention block.

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
            require_multiple(name, getattr(self, name))

    @property
    def q_width(self) -> int:
        """Elements of all query heads of a row."""
        return self.num_heads * (self.nope + self.rope)

    @property
    def row(self) -> int:
        """Elements of a token's row: latent, then the rotated part."""
        return self.latent + self.rope

    @property
    def out_width(self) -> int:
        """Elements of all heads' outputs of a row."""
        return self.num_heads * self.value


@dataclasses.dataclass(frozen=True)
class LatentCodec:
    """Rows of latent and rotated key as they are, in the storage dtype."""

    latent: int
    rope: int
    storage: DType
    name: str = "latent"
    num_kv_heads: ClassVar[int] = 1
    kv_scale: ClassVar[str] = "none"
    scale_format: ClassVar[str] = "fp32"

    def __post_init__(self) -> None:
        require_multiple("latent", self.latent)
        require_multiple("rope", self.rope)
        if self.storage is DType.FP8:
            raise ConfigError("kv", self.storage.value, "latent rows are stored in the storage dtype")

    @property
    def head_dim(self) -> int:
        """Elements of a row."""
        return self.latent + self.rope

    @property
    def attention_math(self) -> DType:
        """Operands of the score and value products."""
        return self.storage

    def bytes_per_token(self) -> int:
        """Bytes of rows per token and layer."""
        return 2 * self.head_dim * self.storage.nbytes

    def allocate(
        self, num_pages: int, page_size: int, scales: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> LayerKV:
        """Zeroed pages for one layer.

        Raises:
            ConfigError: a page size that is not a positive multiple of 16.
        """
        require_page_size(page_size)
        assert scales is None, "dense pages have no scales"
        part = page_size * self.head_dim
        keys, values = zeros((num_pages, 1, 2 * part), TORCH_DTYPES[self.storage]).split(part, -1)
        return LayerKV(keys, values, self)


def require_multiple(name: str, size: int) -> None:
    """Raise `ConfigError` for a size that the kernels do not implement."""
    if size < 16 or size % 16:
        raise ConfigError(name, size, "the kernels of latent attention take multiples of 16")
