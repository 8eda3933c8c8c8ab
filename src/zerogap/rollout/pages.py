"""Who holds which page of the KV cache, and which pages can be found again by what they contain.

A page holds the keys and values of `page_size` consecutive tokens in every layer. Pages are counted references: several
sequences read one page of a shared prompt, nobody copies it, and nobody writes a full page again. A full page may be
published under a key that names everything its content depends on: weight version, KV scale set, contract, and all
token ids from the start of the sequence to the end of the page. A published page that nobody holds stays findable until
its space is needed; the one least recently used goes first.

Only numbers of pages live here, no tensors.
"""

import hashlib
from collections import OrderedDict

import numpy as np


def root_key(version: int, scale_set: str | None, contract: str) -> bytes:
    """The key that every chain starts from: what a page's content depends on besides token ids."""
    return hashlib.blake2b(f"{version}|{scale_set}|{contract}".encode(), digest_size=16).digest()


def chain_key(parent: bytes, ids: np.ndarray) -> bytes:
    """Key of the page with these token ids (int32 [page_size]) after the page, or root, with key `parent`."""
    return hashlib.blake2b(parent + np.ascontiguousarray(ids, np.int32).tobytes(), digest_size=16).digest()


class PagePool:
    """All pages of one cache, by number.

    Attributes:
        num_pages, page_size: fixed at construction.
        prefix_cache: False makes `publish` do nothing.
    """

    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool = True) -> None:
        self.num_pages, self.page_size, self.prefix_cache = num_pages, page_size, prefix_cache
        self._holders = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # published and unheld, least recently used first

    @property
    def available(self) -> int:
        """Pages that `take` can still give: never used, given back, or published and unheld."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        """Pages that somebody holds."""
        return self.num_pages - self.available

    def take(self) -> int | None:
        """A page of undefined content, held once by the caller; None when all are held."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
        else:
            return None
        self._holders[page] = 1
        return page

    def share(self, key: bytes) -> int | None:
        """The page published under `key`, held once more by the caller; None when there is none."""
        page = self._page_of.get(key)
        if page is not None:
            self._idle.pop(page, None)
            self._holders[page] += 1
        return page

    def publish(self, page: int, key: bytes) -> None:
        """Make a held, full page findable. The first page published under a key keeps it."""
        assert self._holders[page] > 0, f"page {page} is published but nobody holds it"
        if self.prefix_cache and key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def give_back(self, page: int) -> None:
        """Let go of one page that the caller held."""
        assert self._holders[page] > 0, f"page {page} is given back but nobody holds it"
        self._holders[page] -= 1
        if self._holders[page] == 0:
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def forget(self) -> None:
        """Make every page unfindable; held pages stay with their holders."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._page_of.clear()
        self._key_of.clear()

    def check(self) -> None:
        """Assert that every page is exactly one of free, idle and held, and that keys and pages match."""
        held = {page for page, holders in enumerate(self._holders) if holders}
        assert all(holders >= 0 for holders in self._holders), "a page has a negative number of holders"
        assert len(self._free) == len(set(self._free)), "a page is free twice"
        places = [held, set(self._free), set(self._idle)]
        assert sum(map(len, places)) == self.num_pages == len(set().union(*places)), "a page is lost or in two places"
        assert {page: key for key, page in self._page_of.items()} == self._key_of, "keys and pages do not match"
        assert set(self._idle) <= set(self._key_of), "an idle page has no key"
        assert not set(self._free) & set(self._key_of), "a free page has a key"
