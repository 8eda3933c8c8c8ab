"""Stacks that compute log-probs from their logits in a way of their own: the last step of the recording is replaced."""

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from zerogap.diagnose.corpus.workshop import EditedSide
from zerogap.diagnose.side import Ask, Side
from zerogap.diagnose.trace import Pass

Scoring = Callable[[torch.Tensor, torch.Tensor], np.ndarray]  # (FP32 logits [N-1, V], int64 ids [N-1]) -> [N-1]


@dataclasses.dataclass(frozen=True)
class RescoringSide(EditedSide):
    """A live side whose log-probs at temperature 1 are `scoring` of its own logits."""

    scoring: Scoring = lambda logits, ids: np.zeros(0)

    def again(self, ask: Ask) -> Pass | None:
        return rescored(self.side, ask, self.scoring)


def rescored(side: Side, ask: Ask, scoring: Scoring) -> Pass | None:
    """What the side computes as asked, with log-probs by `scoring`; other temperatures keep the side's own."""
    found = side.again(dataclasses.replace(ask, capture=True))
    definition = ask.definition or side.trace.recorded.definition
    if found is None or definition.temperature not in (None, 1.0):
        return found
    rows, logprobs = 0, []
    for sequence in side.trace.sequences:
        size = len(sequence.ids)
        logits = found.boundaries["lm_head"][rows : rows + size - 1].float()
        values = scoring(logits, torch.from_numpy(sequence.ids[1:].astype(np.int64)))
        logprobs.append(np.concatenate([[np.nan], values]).astype(np.float32))
        rows += size
    following = np.concatenate([np.append(p[1:], np.float32(np.nan)) for p in logprobs])
    boundaries = {**found.boundaries, "logprob": torch.from_numpy(following)[:, None]} if ask.capture else {}
    return dataclasses.replace(found, logprobs=tuple(logprobs), boundaries=boundaries)


def relogged(side: Side, scoring: Scoring) -> RescoringSide:
    """The side with log-probs by `scoring` wherever it records them."""
    found = rescored(side, Ask(capture=bool(side.trace.recorded.boundaries)), scoring)
    assert found is not None, "a live side computes again"
    recorded = dataclasses.replace(side.trace.recorded, logprobs=found.logprobs, boundaries=found.boundaries)
    return RescoringSide(side, dataclasses.replace(side.trace, passes=(recorded,)), None, scoring)
