"""Which tokens of which sequences the next step computes.

Sequences run in order of arrival, and the order decides everything: an earlier one is served first, and when pages run
out the latest running one gives up all of its pages and waits to be computed again (from whatever the prefix cache
still has). As every request fits the cache alone, the earliest always proceeds, so all of them finish.

No choice made here can change a token or a log-prob: the numerics contract makes every row independent of its batch,
its chunk and its page, and sampling is a function of the request's key. The scheduler is free to think of speed only.
"""

from collections import deque
from typing import NamedTuple

import numpy as np

from zerogap.rollout.pages import PagePool, chain_key
from zerogap.rollout.sequence import Sequence


class Chunk(NamedTuple):
    """Tokens `start` to `start + size` of a sequence, to be computed in this step; the last `drafts` are guesses that
    stand behind the known ones, and each of these draws a token, too."""

    sequence: Sequence
    start: int
    size: int
    drafts: int = 0

    @property
    def draws(self) -> bool:
        """True if this computes the last known token, so that the next one can be drawn."""
        return self.start + self.size - self.drafts == self.sequence.length


class Scheduler:
    """Continuous batching with chunked prefill, a shared prefix cache and preemption by recompute.

    Attributes:
        waiting, running: in order of arrival; every running one came before every waiting one.
        preemptions, cache_hit_tokens: counts since construction.
    """

    def __init__(self, pool: PagePool, page_table: np.ndarray, max_batch_tokens: int, max_sequences: int) -> None:
        """
        Args:
            page_table: int32 [max_sequences, P], written here: row `slot` lists a running sequence's pages.
            max_batch_tokens: most tokens of one step, at least `max_sequences`.
            max_sequences: most sequences that run at once.
        """
        assert max_batch_tokens >= max_sequences, "every running sequence needs one token per step"
        self.pool, self.page_table = pool, page_table
        self.max_batch_tokens = max_batch_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.root_key = b""
        self.preemptions = 0
        self.cache_hit_tokens = 0
        self._free_slots = list(range(max_sequences - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        """Queue a new request."""
        self.waiting.append(sequence)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, at most one per running sequence; pages for all of them are reserved.

        Empty only when nothing waits or runs. Full pages are published here, before they are computed: whoever finds
        one computes later in the same step or in a later one, and attention writes all keys of a step before it reads.
        """
        chunks: list[Chunk] = []
        budget, preemptions = self.max_batch_tokens, self.preemptions
        place = 0
        while place < len(self.running):  # grows shorter when later sequences are preempted
            sequence = self.running[place]
            # New ones start only with what running ones leave, so all but the last lack a single token here.
            count = min(sequence.length - sequence.computed, budget)
            assert count > 0, "more running sequences than tokens in a step"
            if not self._reserve(sequence, sequence.computed + count):
                break  # it was the latest one, and has been preempted itself
            drafts = self._room_for_drafts(sequence, budget - count - (len(self.running) - place - 1))
            chunks.append(self._chunk(sequence, count, drafts))
            budget -= count + drafts
            place += 1
        if preemptions == self.preemptions:
            self._admit(chunks, budget)
        return chunks

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        """Start waiting sequences while there are tokens, slots and pages for them."""
        page_size = self.pool.page_size
        while self.waiting and budget > 0 and self._free_slots:
            sequence = self.waiting[0]
            pages = self.find_prefix(sequence)
            needed = -(-sequence.length // page_size) - len(pages)
            # One page stays free for each running sequence: it would preempt the new one within page_size steps.
            if needed + len(self.running) > self.pool.available:
                self.give_back(pages)
                sequence.page_keys.clear()
                return
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.slot = self._free_slots.pop()
            sequence.pages = pages
            self.page_table[sequence.slot, : len(pages)] = pages
            sequence.computed = len(pages) * page_size
            self.cache_hit_tokens += sequence.computed
            count = min(sequence.length - sequence.computed, budget)
            reserved = self._reserve(sequence, sequence.computed + count)
            assert reserved, "pages were counted before the sequence was started"
            chunks.append(self._chunk(sequence, count))
            budget -= count

    def _chunk(self, sequence: Sequence, count: int, drafts: int = 0) -> Chunk:
        """The chunk of the next `count` known tokens and the guesses behind them; the pages that known tokens fill are
        published. A page with a guess in it is not, before the guess has become a known token."""
        page_size = self.pool.page_size
        if self.pool.prefix_cache:
            for i in range(len(sequence.page_keys), (sequence.computed + count) // page_size):
                parent = sequence.page_keys[-1] if i else self.root_key
                sequence.page_keys.append(chain_key(parent, sequence.ids[i * page_size : (i + 1) * page_size]))
                self.pool.publish(sequence.pages[i], sequence.page_keys[i])
        return Chunk(sequence, sequence.computed, count + drafts, drafts)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Shared pages of the longest published prefix, without the last known token: its logits are needed."""
        pages: list[int] = []
        if not self.pool.prefix_cache:
            return pages
        page_size, key = self.pool.page_size, self.root_key
        for i in range((sequence.length - 1) // page_size):
            key = chain_key(key, sequence.ids[i * page_size : (i + 1) * page_size])
            page = self.pool.share(key)
            if page is None:
                break
            pages.append(page)
            sequence.page_keys.append(key)
        return pages

    def _reserve(self, sequence: Sequence, length: int) -> bool:
        """Get pages for the first `length` tokens, preempting later sequences; False if it had to yield itself."""
        pages, page_size = sequence.pages, self.pool.page_size
        while len(pages) * page_size < length:
            page = self.pool.take()
            if page is not None:
                self.page_table[sequence.slot, len(pages)] = page
                pages.append(page)
                continue
            victim = self.running[-1]
            self.preemptions += 1
            self._stop_running(victim)
            self.waiting.appendleft(victim)
            if victim is sequence:
                return False
        return True

    def _room_for_drafts(self, sequence: Sequence, budget: int) -> int:
        """How many guesses of a sequence fit into `budget` tokens, and into pages that nobody else needs for now."""
        drafts = min(sequence.drafts, budget)
        if drafts <= 0:
            return 0
        pages, page_size = sequence.pages, self.pool.page_size
        while len(pages) * page_size < sequence.length + drafts:
            page = self.pool.take() if self.pool.available > len(self.running) else None
            if page is None:
                return len(pages) * page_size - sequence.length
            self.page_table[sequence.slot, len(pages)] = page
            pages.append(page)
        return drafts

    def release(self, sequence: Sequence) -> None:
        """Take a finished or aborted sequence out, wherever it is; its pages are given back."""
        if sequence.slot >= 0:
            self._stop_running(sequence)
        else:
            self.waiting.remove(sequence)

    def drop_all(self) -> None:
        """Forget every key and value: running sequences wait to be computed again, nothing published is found."""
        while self.running:
            sequence = self.running[-1]
            self._stop_running(sequence)
            self.waiting.appendleft(sequence)
        self.pool.forget()

    def _stop_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self.give_back(sequence.pages)
        sequence.slot, sequence.pages, sequence.computed, sequence.drafts = -1, [], 0, 0
        sequence.page_keys.clear()

    def give_back(self, pages: list[int]) -> None:
        """Last page first, so that a prefix outlives what follows it."""
        for page in reversed(pages):
            self.pool.give_back(page)
