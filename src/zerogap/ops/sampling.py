"""Sampling: one token per row of logits, with its log-prob, entropy and kept set, in one pass over the batch.

Formula, for a row of FP32 logits z with temperature T:

    y_i = z_i / T (FP32 division; T = 0: y = z),  max = max_i y_i,  e_i = exp(y_i - max)
    mass_i = round(2^40 e_i), an integer;  the kept set is filtered by top-k, then top-p, then min-p:
      top-k  the k first ids by (y descending, id ascending)
      top-p  the smallest prefix of these, in that order, with mass >= ceil(top_p * their total mass)
      min-p  of these, the ids with mass >= ceil(min_p * 2^40)  (2^40 is the largest mass)
    u = the row's 64-bit draw,  r = floor(u * total / 2^64) over the kept masses
    the token is the first id, ascending, whose running kept mass exceeds r;  T = 0: the first id with y = max
    logp = (y_token - max) - log(sum of kept e),  entropy = log(sum) - (sum of kept e (y - max)) / sum

FP32 in, FP32 arithmetic with integer masses, FP32 out. Sums: sixteen lanes inside a vocabulary leaf, then the tree over
leaves; masses are integers, so their order is free. The result depends on the row's own logits, parameters and key and
on the leaf size; never on the batch, the row's place in it, threads, or what runs beside it.

The draw is the first two words of Philox4x32-10 (Salmon et al., SC 2011) with key = seed (64 bits) and counter =
(position, step, prompt, attempt * 2^20 + sample). Keys that differ within the ranges below never share a counter.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zerogap.errors import ConfigError
from zerogap.ops import tap
from zerogap.ops.cpu import sampling as native
from zerogap.types import SamplingKey, SamplingParams

KEY_WORDS = 4
_RANGES = {"seed": 64, "step": 32, "prompt": 32, "attempt": 12, "sample": 20}  # bits


@dataclasses.dataclass(frozen=True, eq=False)
class SamplingRows:
    """Sampling parameters per row; the engine owns one at capacity and writes rows in place.

    Attributes:
        temperature, top_p, min_p: float32 [R].
        top_k: int32 [R].
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def allocate(cls, rows: int) -> "SamplingRows":
        """Temperature 1, no filters, for `rows` rows."""
        return cls(torch.ones(rows), torch.zeros(rows, dtype=torch.int32), torch.ones(rows), torch.zeros(rows))

    @classmethod
    def of(cls, params: Sequence[SamplingParams], counts: Sequence[int] | None = None) -> "SamplingRows":
        """The rows of several requests: `params[i]` for `counts[i]` consecutive rows (one each by default)."""
        repeats = torch.tensor([1] * len(params) if counts is None else list(counts), dtype=torch.int64)

        def column(name: str, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor([getattr(p, name) for p in params], dtype=dtype).repeat_interleave(repeats)

        return cls(
            column("temperature", torch.float32),
            torch.tensor([min(p.top_k, 2**31 - 1) for p in params], dtype=torch.int32).repeat_interleave(repeats),
            column("top_p", torch.float32),
            column("min_p", torch.float32),
        )

    def set(self, row: int, params: SamplingParams) -> None:
        """Write one row in place."""
        self.temperature[row], self.top_p[row], self.min_p[row] = params.temperature, params.top_p, params.min_p
        self.top_k[row] = min(params.top_k, 2**31 - 1)

    def slice(self, start: int, stop: int) -> "SamplingRows":
        """Views of rows start .. stop - 1."""
        return SamplingRows(*(t[start:stop] for t in self.tensors))

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.temperature, self.top_k, self.top_p, self.min_p

    def __len__(self) -> int:
        return len(self.temperature)


def pack_key(key: SamplingKey, position: int = 0) -> tuple[int, int, int, int]:
    """The four int64 words of a row of `keys`: seed, prompt * 2^32 + step, attempt * 2^20 + sample, position.

    The first three stay the same during a completion; word 3 is the index of the token in its completion.

    Raises:
        ConfigError: a part of the key is negative or too large, so that two keys could share a draw.
    """
    for name, bits in _RANGES.items():
        value = getattr(key, name)
        if not 0 <= value < 1 << bits:
            raise ConfigError(f"sampling key {name}", value, f"choose a whole number from 0 to 2^{bits} - 1")
    if not 0 <= position < 1 << 32:
        raise ConfigError("sampling key position", position, "choose a whole number from 0 to 2^32 - 1")

    def signed(value: int) -> int:
        return value - (1 << 64) if value >> 63 else value

    return signed(key.seed), signed(key.prompt << 32 | key.step), key.attempt << 20 | key.sample, position


class Drawn(NamedTuple):
    """One row per sequence.

    Attributes:
        ids: int64 [R]; 0 where the row is refused.
        logp: float32 [R], under temperature and kept set; NaN where a logit is NaN or infinite (the caller refuses).
        kept_count: int32 [R]; the vocabulary's size where nothing is filtered.
        kept_digest: uint64 [R] digest of the kept ids; 0 where nothing is filtered.
        entropy: float32 [R] of the distribution that was drawn from.
    """

    ids: torch.Tensor
    logp: torch.Tensor
    kept_count: torch.Tensor
    kept_digest: torch.Tensor
    entropy: torch.Tensor


def sample(
    logits: torch.Tensor,
    rows: SamplingRows,
    keys: torch.Tensor,
    leaf_size: int,
    kept_words: torch.Tensor | None = None,
) -> Drawn:
    """Draw one id per row (formula above). Recordable; `rows` and `keys` are then the engine's fixed buffers.

    Args:
        logits: FP32 [R, V].
        rows: parameters of R rows.
        keys: int64 [R, 4], rows of `pack_key`.
        leaf_size: entries per vocabulary leaf (`Numerics.vocab_leaf_size`).
        kept_words: int64 [R, ceil(V / 64)] to be filled with the kept sets of filtered rows, or None.
    """
    ids, out = native.sample(logits, rows.tensors, keys, leaf_size, kept_words)
    drawn = Drawn(ids, out.logp, out.count, out.digest, out.entropy)
    tap.observe("sample", drawn._asdict(), {"leaf_size": leaf_size})
    return drawn
