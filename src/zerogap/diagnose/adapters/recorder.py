"""A trace of an engine written by hand: rows are handed over where they are computed, over prefill and decoding.

    recorder = zg.Recorder()
    with recorder.sequence(0):
        ...                                        # the engine's own loop; inside it, wherever an operator ends:
        recorder.record("0.q_proj", rows)          # [T, ...]: rows of the T tokens that this call computes
    trace = recorder.trace("engine", ids, prompt_lengths, logprobs, definition)

Rows of one name are joined in the order of their calls, which is that of the tokens: a prefill's rows, then one row per
decoded token. The last sampled token is never fed back, so that its row does not exist; and an engine may compute
logits for the last token of a prompt only. Both become rows of NaN (-1 in integers), which no comparison counts.
Outside `sequence` nothing is recorded, so that calls of `record` may stay in the engine.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from zerogap.diagnose.trace import Definition, Pass, SequenceTrace, Trace
from zerogap.errors import ConfigError


class Recorder:
    """Gathers the rows of sequences that are computed one after another, each in one or several calls."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, list[tuple[int | None, torch.Tensor]]]] = {}
        self._open: int | None = None

    @contextlib.contextmanager
    def sequence(self, index: int) -> Iterator[None]:
        """What is recorded inside belongs to this sequence, computed anew; blocks do not nest."""
        if self._open is not None:
            raise ConfigError("sequence", index, f"sequence {self._open} is still open: close its block first")
        self._open, self._rows[index] = index, {}
        try:
            yield
        finally:
            self._open = None

    def record(self, name: str, rows: torch.Tensor, first: int | None = None) -> None:
        """Copy the rows of one operator's output.

        Args:
            name: of the boundary, as docs/trace-format.md has it (`0.q_proj`, `lm_head`).
            rows: [T, ...] for T tokens in a row, in the dtype it was computed in.
            first: position of the first of them in the sequence; None: they follow the rows recorded before. Logits
                that a prefill gives for the last of N prompt tokens only are `first=N - 1`.
        """
        if self._open is None:
            return
        if rows.dim() < 2:
            raise ConfigError(f"record({name})", tuple(rows.shape), "give one row per token: [T, width]")
        copied = rows.detach().reshape(len(rows), -1).to("cpu", copy=True)
        self._rows[self._open].setdefault(name, []).append((first, copied))

    def boundaries(self, lengths: Sequence[int]) -> dict[str, torch.Tensor]:
        """Name -> [R, width], sequence by sequence; rows that were never computed are NaN (integers: -1).

        Raises:
            ConfigError: more rows than tokens, or rows of several widths or dtypes, under one name.
        """
        out: dict[str, torch.Tensor] = {}
        starts = np.cumsum([0, *lengths]).tolist()
        for index, held in self._rows.items():
            if not 0 <= index < len(lengths):
                raise ConfigError("sequence", index, f"the trace has {len(lengths)} sequences, counted from 0")
            for name, parts in held.items():
                at = 0
                for first, rows in parts:
                    at = at if first is None else first
                    missing = torch.nan if rows.dtype.is_floating_point else -1
                    whole = out.setdefault(name, torch.full((starts[-1], rows.shape[1]), missing, dtype=rows.dtype))
                    if at < 0 or at + len(rows) > lengths[index]:
                        mend = f"sequence {index} has {lengths[index]} tokens: record each token's row once"
                        raise ConfigError(f"record({name})", at + len(rows), mend)
                    if (whole.dtype, whole.shape[1]) != (rows.dtype, rows.shape[1]):
                        raise ConfigError(f"record({name})", (rows.dtype, rows.shape[1]), "keep one dtype and width")
                    whole[starts[index] + at : starts[index] + at + len(rows)] = rows
                    at += len(rows)
        return out

    def trace(
        self,
        name: str,
        ids: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        logprobs: Sequence[Sequence[float]],
        definition: Definition,
        *,
        path: str = "decode",
        **facts: Any,
    ) -> Trace:
        """The trace of what was recorded, each sequence computed alone.

        Args:
            name: for people.
            ids: prompt and completion of each sequence.
            prompt_lengths: tokens of each prompt.
            logprobs: as the engine reports them: one per token of the completion, or one per token of the sequence.
            definition: what they mean.
            path: `decode`, or `whole` for one call over the whole sequence.
            facts: further fields of `Trace` (`weights`, `layout`, `model`, ...).

        Raises:
            ConfigError: numbers of sequences or of log-probs that do not fit; and as `boundaries`.
        """
        if not len(ids) == len(prompt_lengths) == len(logprobs):
            raise ConfigError("sequences", (len(ids), len(prompt_lengths), len(logprobs)), "give one of each for each")
        values = []
        for one, prompt, given in zip(ids, prompt_lengths, logprobs):
            if len(given) not in (len(one), len(one) - prompt):
                mend = f"give one per token of the completion ({len(one) - prompt}) or of the sequence ({len(one)})"
                raise ConfigError("logprobs", len(given), mend)
            row = np.full(len(one), np.nan, np.float32)
            row[len(one) - len(given) :] = given
            values.append(row)
        sequences = tuple(SequenceTrace(np.asarray(one, np.int32), n) for one, n in zip(ids, prompt_lengths))
        rows = self.boundaries([len(one) for one in ids])
        alone = tuple((i,) for i in range(len(ids)))
        return Trace(name, sequences, (Pass(tuple(values), path, alone, definition, rows),), **facts)
