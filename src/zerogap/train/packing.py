"""From a global batch to packed micro-batches, and why gradients cannot depend on the way.

Samples are assigned to gradient bins by their token offset in the global batch, runs of consecutive samples of one bin
form packs, and a micro-batch is a run of whole packs. Weight gradients are summed per pack in blocks of 128 rows, so
the micro-batch size decides only how many packs share a forward pass (docs/numerics.md, "Gradients and optimizer").
There is no padding: a pack's rows are its samples' tokens, one after the other.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from zerogap.types import ForwardContext, Sample, SamplingParams

PAGE_SIZE = 64  # of the trainer's scratch pages; no bit depends on it


@dataclasses.dataclass(frozen=True)
class Pack:
    """Consecutive samples of one bin: their indices in the global batch, and their tokens together."""

    samples: tuple[int, ...]
    num_tokens: int


def plan_packs(lengths: Sequence[int], bins: int, pack_tokens: int) -> list[list[Pack]]:
    """Packs of each bin, in global-batch order.

    Sample i goes to bin floor(bins * tokens before it / all tokens). A pack is a greedy run of at most `pack_tokens`
    tokens; a longer sample stands alone.

    Args:
        lengths: prompt + completion tokens per sample.
        bins: gradient bins (`Numerics.grad_bins`).
        pack_tokens: `Numerics.pack_tokens`.
    """
    total, before = sum(lengths), 0
    members: list[list[int]] = [[] for _ in range(bins)]
    for index, length in enumerate(lengths):
        members[bins * before // total].append(index)
        before += length
    planned: list[list[Pack]] = []
    for run in members:
        packs: list[Pack] = []
        for index in run:
            if packs and packs[-1].num_tokens + lengths[index] <= pack_tokens:
                packs[-1] = Pack((*packs[-1].samples, index), packs[-1].num_tokens + lengths[index])
            else:
                packs.append(Pack((index,), lengths[index]))
        planned.append(packs)
    return planned


def micro_batches(packs: Sequence[Pack], max_tokens: int) -> Iterator[list[Pack]]:
    """Runs of whole packs of at most `max_tokens` tokens (a larger pack stands alone)."""
    run: list[Pack] = []
    for pack in packs:
        if run and sum(p.num_tokens for p in run) + pack.num_tokens > max_tokens:
            yield run
            run = []
        run.append(pack)
    if run:
        yield run


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """One forward pass of the trainer.

    Attributes:
        samples: indices in the global batch, in row order.
        ids: int64 [T] tokens.
        context: positions, identity page table, borders; its output rows are those that predict a completion token.
        targets: int64 [R] the completion tokens.
        row_params: the sampling parameters of each of the R rows.
        num_pages: scratch pages that the page table uses.
    """

    samples: tuple[int, ...]
    ids: torch.Tensor
    context: ForwardContext
    targets: torch.Tensor
    row_params: tuple[SamplingParams, ...]
    num_pages: int


def build_micro_batch(packs: Sequence[Pack], samples: Sequence[Sample]) -> MicroBatch:
    """Concatenate the samples of `packs`."""
    order = [index for pack in packs for index in pack.samples]
    chosen = [samples[index] for index in order]
    lengths = np.array([s.num_tokens for s in chosen], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    pack_starts = np.concatenate([[0], np.cumsum([pack.num_tokens for pack in packs])])
    ids = np.concatenate([part for s in chosen for part in (s.prompt_ids, s.completion_ids)])
    outputs = [
        np.arange(start + len(s.prompt_ids) - 1, start + s.num_tokens - 1)
        for start, s in zip(starts[:-1], chosen, strict=True)
    ]
    pages = -(-lengths // PAGE_SIZE)
    first_pages = np.concatenate([[0], np.cumsum(pages)])
    table = np.zeros((len(chosen), int(pages.max())), np.int32)
    for row, (first, count) in enumerate(zip(first_pages[:-1], pages, strict=True)):
        table[row, :count] = np.arange(first, first + count)

    def int32(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int32))

    context = ForwardContext(
        positions=int32(np.concatenate([np.arange(n) for n in lengths])),
        sequences=int32(np.repeat(np.arange(len(chosen)), lengths)),
        page_table=torch.from_numpy(table),
        page_size=PAGE_SIZE,
        output_rows=torch.from_numpy(np.concatenate(outputs).astype(np.int64)),
        sample_starts=int32(starts),
        pack_starts=int32(pack_starts),
    )
    return MicroBatch(
        samples=tuple(order),
        ids=torch.from_numpy(ids.astype(np.int64)),
        context=context,
        targets=torch.from_numpy(np.concatenate([s.completion_ids for s in chosen]).astype(np.int64)),
        row_params=tuple(s.params for s in chosen for _ in range(len(s.completion_ids))),
        num_pages=int(first_pages[-1]),
    )
