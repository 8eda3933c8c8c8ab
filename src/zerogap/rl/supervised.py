"""Supervised training on given answers: the mean negative log-prob of completion tokens, for the same trainer.

It makes models that reinforcement learning can start from; a run of RL does not use it. Samples were drawn by nobody,
so there are no log-probs to compare: they carry the weight version -1, which no trainer ever has.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from zerogap.errors import NonFiniteError
from zerogap.moments import Moments, exact_sum
from zerogap.types import (
    Denominators,
    Identity,
    LossResult,
    Sample,
    SamplingKey,
    SamplingParams,
    TokenRows,
    TrainBatch,
)

UNDRAWN = -1  # weight version of tokens that no model drew


@dataclasses.dataclass(frozen=True)
class SupervisedLoss:
    """-log-prob, mean over the live tokens of the global batch; implements `types.Loss`."""

    def denominators(self, batch: TrainBatch) -> Denominators:
        """Live tokens and sequences of the whole global batch."""
        counts = np.array([int(mask.sum()) for mask in batch.masks], np.int64)
        return Denominators(tokens=int(counts.sum()), sequences=int((counts > 0).sum()), sample_tokens=counts)

    def __call__(self, rows: TokenRows, denominators: Denominators) -> LossResult:
        """Loss and derivatives of one micro-batch; the metric `nll` is over its live tokens.

        Raises:
            NonFiniteError: a NaN or infinity at a live position; names sample and position.
        """
        live = rows.mask
        bad = np.flatnonzero(live & ~np.isfinite(rows.logp))
        if len(bad):
            at = int(bad[0])
            where = f"sample {rows.sample[at]}, completion position {rows.position[at]}"
            raise NonFiniteError(f"trainer log-prob is {rows.logp[at]} at {where}")
        values = -rows.logp[live].astype(np.float64)
        weight = 1.0 / denominators.tokens if denominators.tokens else 0.0
        dlogp = np.where(live, -weight, 0.0).astype(np.float32)
        return LossResult(exact_sum(weight * values), dlogp, None, {"nll": Moments.of(values)})


def supervised_batch(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], identity: Identity) -> TrainBatch:
    """A batch of (prompt ids, completion ids), all of whose completion tokens take part in the loss.

    Args:
        pairs: a completion holds its end-of-sequence id, if it should be learnt.
        identity: of the trainer (`trainer.rollout_identity`).
    """
    samples = tuple(_sample(prompt, completion, identity) for prompt, completion in pairs)
    masks = tuple(np.ones(len(s.completion_ids), np.bool_) for s in samples)
    return TrainBatch(samples=samples, advantages=np.zeros(len(samples)), masks=masks)


def _sample(prompt: Sequence[int], completion: Sequence[int], identity: Identity) -> Sample:
    count = len(completion)
    return Sample(
        prompt_ids=np.asarray(prompt, np.int32),
        completion_ids=np.asarray(completion, np.int32),
        logprobs=np.zeros(count, np.float32),
        versions=np.full(count, UNDRAWN, np.int64),
        identity=identity,
        key=SamplingKey(),
        params=SamplingParams(max_tokens=max(1, count)),
        finish_reason="stop",
    )
