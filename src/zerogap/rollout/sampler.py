"""Sampling parameters and keys of the rows that draw, laid out for the sampling op, and what the op drew.

Every sequence brings its own parameters and key, so one batch may mix greedy, tempered and filtered requests. The key
of a draw is (seed, step, prompt, attempt, sample, position in the completion): nothing of the engine's state is in it.
"""

import dataclasses
from collections.abc import Sequence as List

import numpy as np
import torch

from zerogap.ops import sampling
from zerogap.rollout.sequence import Sequence


@dataclasses.dataclass(frozen=True)
class DrawnRows:
    """What the first R rows drew, as plain Python numbers (see `ops.sampling.Drawn`)."""

    ids: list[int]
    logprobs: list[float]
    kept_counts: list[int]
    kept_digests: list[int]

    @classmethod
    def of(cls, drawn: sampling.Drawn, count: int) -> "DrawnRows":
        columns = (drawn.ids, drawn.logp, drawn.kept_count, drawn.kept_digest)
        return cls(*(column.numpy()[:count].tolist() for column in columns))


class Sampler:
    """Input rows of the sampling op, at the capacity of the largest step.

    Attributes:
        inputs: the tensors whose rows `fill` writes.
    """

    def __init__(self, max_sequences: int, leaf_size: int, max_rows: int | None = None) -> None:
        """`leaf_size`: entries per vocabulary leaf. `max_rows`: one per sequence by default."""
        self._leaf_size = leaf_size
        self._params = sampling.SamplingRows.allocate(max_rows or max_sequences)
        self._keys = torch.zeros((max_rows or max_sequences, sampling.KEY_WORDS), dtype=torch.int64)
        self.inputs = (*self._params.tensors, self._keys)
        # The same columns by slot, written once per sequence; each step copies the rows that draw.
        self._slot_params = sampling.SamplingRows.allocate(max_sequences)
        self._slot_keys = torch.zeros((max_sequences, sampling.KEY_WORDS), dtype=torch.int64)
        self._columns = [
            (by_slot.numpy(), rows.numpy())
            for by_slot, rows in zip((*self._slot_params.tensors, self._slot_keys), self.inputs, strict=True)
        ]
        self._owners: list[Sequence | None] = [None] * max_sequences

    def fill(self, drawing: List[tuple[Sequence, int]]) -> None:
        """Write one row per draw of this step: of which sequence, and its position in the completion."""
        slots = [sequence.slot for sequence, _ in drawing]
        for slot, (sequence, _) in zip(slots, drawing, strict=True):
            if self._owners[slot] is not sequence:
                self._owners[slot] = sequence
                self._slot_params.set(slot, sequence.params)
                self._slot_keys[slot] = torch.tensor(sampling.pack_key(sequence.key))
        for by_slot, rows in self._columns:
            np.take(by_slot, slots, axis=0, out=rows[: len(slots)])
        self._columns[-1][1][: len(slots), -1] = [position for _, position in drawing]

    def draw(self, logits: torch.Tensor) -> sampling.Drawn:
        """Run or record the op over `logits`, FP32 [R, V]."""
        count = len(logits)
        return sampling.sample(logits, self._params.slice(0, count), self._keys[:count], self._leaf_size)
