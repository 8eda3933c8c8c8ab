"""The tensors behind the pages: how many pages a budget of bytes buys, and whether a request can ever fit.

Layout and size of a page belong to the model's KV codec; the engine only counts.
"""

import dataclasses
from collections.abc import Sequence

from zerogap.errors import CapacityError, ConfigError
from zerogap.models.decoder import Decoder
from zerogap.types import LayerKV


@dataclasses.dataclass(frozen=True)
class KVCache:
    """Pages for every layer. The tensors inside are written by attention alone.

    Attributes:
        layers: one `LayerKV` per decoder layer, all with the same page numbers.
        num_pages, page_size: pages and tokens per page.
        page_bytes: bytes of one page over all layers.
    """

    layers: Sequence[LayerKV]
    num_pages: int
    page_size: int
    page_bytes: int

    @classmethod
    def of(cls, decoder: Decoder, page_size: int, budget_bytes: int, max_pages: int) -> "KVCache":
        """As many pages as `budget_bytes` buy, at most `max_pages`.

        Raises:
            ConfigError: a page size that the kernels do not have.
            CapacityError: the budget does not buy one page.
        """
        if page_size < 16 or page_size % 16:
            raise ConfigError("page_size", page_size, "choose a multiple of 16")
        page_bytes = decoder.codec().bytes_per_token() * page_size * decoder.spec.num_layers
        num_pages = min(int(budget_bytes) // page_bytes, max_pages)
        if num_pages < 1:
            raise CapacityError(
                f"kv_cache_bytes = {budget_bytes} does not hold one page of {page_size} tokens ({page_bytes} bytes): "
                f"give at least {page_bytes}"
            )
        return cls(decoder.new_kv(num_pages, page_size), num_pages, page_size, page_bytes)

    def serving(self, decoder: Decoder) -> "KVCache":
        """The same pages for another decoder of the same model and contract, whose scales they read from now on."""
        return dataclasses.replace(self, layers=decoder.bind_kv(self.layers))

    def require_room(self, num_tokens: int, what: str) -> None:
        """Raise `CapacityError` unless a sequence of `num_tokens` cached tokens fits when it is alone."""
        needed = -(-num_tokens // self.page_size)
        if needed > self.num_pages:
            raise CapacityError(
                f"{what} needs the keys and values of {num_tokens} tokens ({needed} pages of {self.page_size}, "
                f"{needed * self.page_bytes} bytes), the cache has {self.num_pages} pages "
                f"({self.num_pages * self.page_bytes} bytes): raise kv_cache_bytes or lower max_tokens"
            )
