"""Bins and packs: placed by token offset, consecutive, never padded, never split over micro-batches."""

import numpy as np
import pytest

from zerogap.train.packing import Pack, build_micro_batch, micro_batches, plan_packs
from zerogap.types import Identity, Sample, SamplingKey, SamplingParams


def make_sample(prompt: int, completion: int, first_id: int = 0) -> Sample:
    ids = np.arange(first_id, first_id + prompt + completion, dtype=np.int32)
    return Sample(
        prompt_ids=ids[:prompt],
        completion_ids=ids[prompt:],
        logprobs=np.zeros(completion, np.float32),
        versions=np.zeros(completion, np.int64),
        identity=Identity("c", "b", "k"),
        key=SamplingKey(),
        params=SamplingParams(),
        finish_reason="length",
    )


def test_one_bin_packs_greedily_in_order():
    (packs,) = plan_packs([400, 500, 200, 1500, 10], bins=1, pack_tokens=1024)
    assert packs == [Pack((0, 1), 900), Pack((2,), 200), Pack((3,), 1500), Pack((4,), 10)]


def test_bins_are_chosen_by_the_tokens_before_a_sample():
    lengths = [10, 10, 70, 10]
    packs = plan_packs(lengths, bins=4, pack_tokens=1024)
    assert [[p.samples for p in b] for b in packs] == [[(0, 1, 2)], [], [], [(3,)]]


@pytest.mark.parametrize("limit", [1, 100, 1024, 10**9])
def test_micro_batches_are_runs_of_whole_packs(limit):
    (packs,) = plan_packs([300] * 20, bins=1, pack_tokens=1024)
    runs = list(micro_batches(packs, limit))
    assert [p for run in runs for p in run] == packs
    assert all(len(run) == 1 or sum(p.num_tokens for p in run) <= limit for run in runs)


def test_targets_are_the_tokens_after_the_output_rows():
    """Three packed samples: output row r predicts token r + 1 of its own sample, never a neighbour's."""
    samples = [make_sample(3, 2, 100), make_sample(1, 4, 200), make_sample(5, 1, 300)]
    (packs,) = plan_packs([s.num_tokens for s in samples], 1, 8)
    micro = build_micro_batch(packs, samples)
    rows = micro.context.output_rows
    assert micro.ids[rows + 1].tolist() == micro.targets.tolist() == [103, 104, 201, 202, 203, 204, 305]
    assert micro.context.sequences[rows].tolist() == [0, 0, 1, 1, 1, 1, 2]
    assert micro.context.positions[rows].tolist() == [2, 3, 0, 1, 2, 3, 4]
    assert micro.context.pack_starts.tolist() == [0, 5, 10, 16]


def test_pages_of_samples_do_not_overlap():
    samples = [make_sample(60, 10), make_sample(1, 1), make_sample(64, 64)]
    (packs,) = plan_packs([s.num_tokens for s in samples], 1, 1024)
    micro = build_micro_batch(packs, samples)
    used = [micro.context.page_table[row, : -(-s.num_tokens // 64)].tolist() for row, s in enumerate(samples)]
    assert sorted(page for pages in used for page in pages) == list(range(micro.num_pages)) and micro.num_pages == 5
