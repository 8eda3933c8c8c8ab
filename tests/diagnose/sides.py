"""Small recorded and live sides for tests of the checks: arrays, boundaries, and a stack that answers as it is told."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from zerogap.diagnose.facts import Facts
from zerogap.diagnose.side import Ask, RecordedSide, Side
from zerogap.diagnose.trace import Definition, Pass, SequenceTrace, Trace

LENGTHS, PROMPTS = (12, 9, 15), (4, 3, 5)
OPEN = Definition()
STATED = Definition(temperature=1.0, processed=True, top_k=0, top_p=1.0, min_p=0.0)


def sequences(seed: int = 0, **facts: object) -> tuple[SequenceTrace, ...]:
    generator = np.random.default_rng(seed)
    return tuple(
        SequenceTrace(generator.integers(3, 50, n).astype(np.int32), p, **facts)  # type: ignore[arg-type]
        for n, p in zip(LENGTHS, PROMPTS, strict=True)
    )


def numbers(seed: int = 1) -> tuple[np.ndarray, ...]:
    """Log-probs of completions; NaN for prompts."""
    generator = np.random.default_rng(seed)
    out = []
    for n, p in zip(LENGTHS, PROMPTS, strict=True):
        values = -generator.exponential(1.5, n).astype(np.float32)
        values[:p] = np.nan
        out.append(values)
    return tuple(out)


def noisy(values: Sequence[np.ndarray], size: float, seed: int = 2) -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(seed)
    return tuple((v + size * generator.standard_normal(len(v))).astype(np.float32) for v in values)


def trace(
    logprobs: Sequence[np.ndarray] | None = None,
    boundaries: Mapping[str, torch.Tensor] | None = None,
    definition: Definition = STATED,
    of: tuple[SequenceTrace, ...] | None = None,
    path: str = "whole",
    more: Sequence[Pass] = (),
    **facts: object,
) -> Trace:
    first = Pass(tuple(logprobs or numbers()), path, ((0,), (1,), (2,)), definition, boundaries or {})
    return Trace("side", of or sequences(), (first, *more), **facts)  # type: ignore[arg-type]


def recorded(*arguments: object, **facts: object) -> RecordedSide:
    return RecordedSide(trace(*arguments, **facts))  # type: ignore[arg-type]


@dataclasses.dataclass
class Told:
    """A live side that answers an ask by a function of it."""

    trace: Trace
    answer: Callable[[Ask], Pass | None]
    weights: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def again(self, ask: Ask) -> Pass | None:
        return self.answer(ask)

    def weight(self, name: str) -> torch.Tensor | None:
        return self.weights.get(name)

    def parameters(self, node: str) -> Mapping[str, object]:
        return {}


def facts(a: Side, b: Side) -> Facts:
    return Facts(a, b)
