"""What a diagnosis works on: a recorded side (a trace), or a live one that can be asked to compute again.

Checks ask and take what they get: a side that cannot answer returns None, and the check is then `not checked`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from zerogap.diagnose.config_facts import config_parameters
from zerogap.diagnose.source_weights import SourceWeights
from zerogap.diagnose.trace import Definition, Pass, Trace

# (node name, the tensors that the operator reads, by name) -> its output rows
Replacement = Callable[[str, Mapping[str, torch.Tensor]], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Ask:
    """One computation that a live side is asked for, over its trace's sequences.

    Attributes:
        path: how tokens are computed (`trace.PATHS`).
        batches: which sequences share a forward pass, in this order; None: each alone.
        neighbours: token ids of further sequences that join every batch, before its own; they are not recorded.
        chunk: tokens per chunk where `path` is `chunked`.
        definition: what the log-probs shall mean; None: as the trace's first pass says.
        capture: record all boundaries.
        replace: node kind (`norm`, `linear`, ...) -> what computes these operators instead.
    """

    path: str = "whole"
    batches: tuple[tuple[int, ...], ...] | None = None
    neighbours: tuple[Sequence[int], ...] = ()
    chunk: int = 0
    definition: Definition | None = None
    capture: bool = False
    replace: Mapping[str, Replacement] = dataclasses.field(default_factory=dict)


class Side(Protocol):
    """One side of a diagnosis."""

    @property
    def trace(self) -> Trace:
        """What it recorded."""
        ...

    def again(self, ask: Ask) -> Pass | None:
        """Compute as asked; None if this side cannot. The same weights and sequences as the trace."""
        ...

    def weight(self, name: str) -> torch.Tensor | None:
        """A weight or buffer by its checkpoint name, as the side computes with it; None if not at hand."""
        ...

    def parameters(self, node: str) -> Mapping[str, object]:
        """What else a node's operator depends on, as the side has it (`eps`, `num_heads`, `scale`, `theta`,
        `activation`, ...; `implementation` names the library call); empty if not known."""
        ...


@dataclasses.dataclass(frozen=True)
class RecordedSide:
    """A trace alone: answers from its own passes and the folder of its weights, computes nothing."""

    trace: Trace

    @functools.cached_property
    def _weights(self) -> SourceWeights:
        return SourceWeights(self.trace.source, self.trace.weights)

    def again(self, ask: Ask) -> Pass | None:
        """The first further pass that was recorded under the asked path and batches."""
        for found in self.trace.passes[1:]:
            fits = found.path == ask.path and not ask.neighbours and not ask.replace
            if fits and (ask.batches is None or found.batches == ask.batches):
                return found
        return None

    def weight(self, name: str) -> torch.Tensor | None:
        return self._weights.get(name)

    def parameters(self, node: str) -> Mapping[str, object]:
        return config_parameters(node, self.trace.model)
