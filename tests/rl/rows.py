"""Samples and token rows of random numbers for the tests of this folder."""

import dataclasses

import numpy as np

from zerogap.types import Identity, Sample, SamplingKey, SamplingParams, TokenRows, TrainBatch

IDENTITY = Identity("contract", "cpu/test", "build")


def make_sample(length: int, finish: str = "stop", version: int = 0, seed: int = 0) -> Sample:
    """A sample of `length` completion tokens with random log-probs."""
    rng = np.random.default_rng([seed, length])
    return Sample(
        prompt_ids=np.arange(3, dtype=np.int32),
        completion_ids=rng.integers(0, 100, length).astype(np.int32),
        logprobs=-rng.exponential(1.0, length).astype(np.float32),
        versions=np.full(length, version, np.int64),
        identity=IDENTITY,
        key=SamplingKey(),
        params=SamplingParams(),
        finish_reason=finish,
    )


def make_batch(lengths, seed: int = 0, ref: bool = True, spread: float = 0.3) -> tuple[TrainBatch, TokenRows]:
    """A batch with about a fifth of tokens masked, and all its rows under log-probs that differ from the rollout's."""
    rng = np.random.default_rng(seed)
    samples = tuple(make_sample(n, seed=seed + i) for i, n in enumerate(lengths))
    total = sum(lengths)
    batch = TrainBatch(
        samples=samples,
        advantages=rng.standard_normal(len(lengths)),
        masks=tuple(rng.random(n) > 0.2 for n in lengths),
        ref_logprobs=tuple(
            (s.logprobs + spread * rng.standard_normal(len(s.logprobs))).astype(np.float32) for s in samples
        )
        if ref
        else None,
    )
    rollout = np.concatenate([s.logprobs for s in samples])
    logp = (rollout + spread * rng.standard_normal(total)).astype(np.float32)
    return batch, batch.rows(range(len(lengths)), logp, rng.exponential(1.0, total).astype(np.float32), version=0)


def pick(rows: TokenRows, chosen: np.ndarray) -> TokenRows:
    """The chosen rows."""
    return TokenRows(
        **{f.name: None if (v := getattr(rows, f.name)) is None else v[chosen] for f in dataclasses.fields(rows)}
    )
