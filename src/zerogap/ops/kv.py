"""KV codecs: how keys and values stand in pages. The engine's cache and the trainer's scratch pages use the same one.

Dense pages are the layout that the attention kernel reads without unpacking: a page holds, per KV head, tiles of 16
tokens; a tile of keys has its tokens side by side for every pair of head dimensions, a tile of values has pairs of
tokens side by side for every head dimension (kernels/attention.h). A page size only says where tiles stand, so it
cannot change a bit. Nothing is rounded: the step that writes and every later one read the same numbers.
"""

import dataclasses

import numpy as np
import torch

from zerogap.errors import ConfigError
from zerogap.numerics import DType
from zerogap.ops.backend import TORCH_DTYPES
from zerogap.types import LayerKV

TILE_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class DenseCodec:
    """Keys and values in the storage dtype, unscaled."""

    num_kv_heads: int
    head_dim: int
    storage: DType
    name: str = "dense"

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1:
            raise ConfigError("num_kv_heads", self.num_kv_heads, "choose at least 1")
        if self.head_dim < 16 or self.head_dim % 16:
            raise ConfigError("head_dim", self.head_dim, "the kernels take multiples of 16")

    def bytes_per_token(self) -> int:
        """Bytes of keys and values per token and layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.storage.nbytes

    def allocate(self, num_pages: int, page_size: int) -> LayerKV:
        """Zeroed pages for one layer: keys and values [num_pages, num_kv_heads, page_size * head_dim].

        Memory is taken from the system when a page is first written.

        Raises:
            ConfigError: a page size that is not a positive multiple of 16.
        """
        require_page_size(page_size)
        shape = (num_pages, self.num_kv_heads, page_size * self.head_dim)
        return LayerKV(self._zeros(shape), self._zeros(shape), self)

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        # numpy asks for zeroed pages of the system and touches none; torch.zeros would write them all
        integer = {2: np.int16, 4: np.int32}[self.storage.nbytes]
        return torch.from_numpy(np.zeros(shape, integer)).view(TORCH_DTYPES[self.storage])


def require_page_size(page_size: int) -> None:
    """Raise `ConfigError` unless pages are whole tiles."""
    if page_size < TILE_TOKENS or page_size % TILE_TOKENS:
        raise ConfigError("page_size", page_size, f"choose a positive multiple of {TILE_TOKENS}")
