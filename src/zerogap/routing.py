"""What a mixture-of-experts router decided, as both sides record it: the evidence that no routing replay is needed.

A router's choice is discrete: two sides whose hidden states differ in one bit may run other experts. Where a run asks
for it, every routed layer writes the experts of each token, and by how much the last of them won, into a record; a
sample carries the rollout's, the trainer compares its own.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch


class RoutingSink(Protocol):
    """Where a forward pass leaves its routers' choices (`ForwardContext.routing`)."""

    def rows(self, layer: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers that the router of decoder layer `layer` writes: int32 [T, k] experts, ascending, and float32 [T]
        margins, for T = `num_tokens` rows."""
        ...


@dataclasses.dataclass(frozen=True)
class RoutingRecord:
    """Buffers for every routed layer of a forward pass of up to C rows. Written by the router op alone.

    Attributes:
        layers: decoder layers that route, ascending.
        experts: int32 [layers, C, k].
        margins: float32 [layers, C]: lowest chosen score minus the highest one that was not chosen.
    """

    layers: tuple[int, ...]
    experts: torch.Tensor
    margins: torch.Tensor

    @classmethod
    def allocate(cls, layers: Sequence[int], capacity: int, top_k: int) -> "RoutingRecord":
        """Empty buffers for `capacity` rows."""
        shape = (len(layers), capacity)
        return cls(tuple(layers), torch.full((*shape, top_k), -1, dtype=torch.int32), torch.zeros(shape))

    def rows(self, layer: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        index = self.layers.index(layer)
        return self.experts[index, :num_tokens], self.margins[index, :num_tokens]

    def trace(self, first: int, count: int) -> "RoutingTrace":
        """A copy of `count` rows from row `first` on."""
        rows = slice(first, first + count)
        experts = self.experts[:, rows].transpose(0, 1).numpy().astype(np.int16)
        return RoutingTrace(experts, np.ascontiguousarray(self.margins[:, rows].numpy().T))


@dataclasses.dataclass(frozen=True, eq=False)
class RoutingTrace:
    """The choices for the tokens of one sample, prompt first; the last token has none, because nothing read it.

    All of it was computed at the weights that drew the sample's last token.

    Attributes:
        experts: int16 [N, layers, k], ascending; -1 where no forward pass of the sample computed the token (its keys
            and values came from the prefix cache).
        margins: float32 [N, layers].
    """

    experts: np.ndarray
    margins: np.ndarray

    def __post_init__(self) -> None:
        assert self.experts.dtype == np.int16 and self.margins.dtype == np.float32, "int16 experts, float32 margins"
        assert self.experts.shape[:2] == self.margins.shape, f"{self.experts.shape}, {self.margins.shape}"

    @classmethod
    def unrecorded(cls, num_tokens: int, num_layers: int, top_k: int) -> "RoutingTrace":
        """A trace of N tokens that nothing has computed yet. A running sequence's is filled by `write`."""
        shape = (num_tokens, num_layers)
        return cls(np.full((*shape, top_k), -1, np.int16), np.zeros(shape, np.float32))

    @property
    def recorded(self) -> np.ndarray:
        """bool [N]: tokens that a forward pass of the sample computed."""
        return self.experts[:, 0, 0] >= 0

    def write(self, first: int, other: "RoutingTrace") -> None:
        """Put another trace's tokens in place from token `first` on. For whoever is still recording this one."""
        self.experts[first : first + len(other.experts)] = other.experts
        self.margins[first : first + len(other.margins)] = other.margins

    def forget(self) -> None:
        """Nothing is recorded any more: the weights have changed. For whoever is still recording this one."""
        self.experts.fill(-1)
        self.margins.fill(0)

    def first(self, num_tokens: int) -> "RoutingTrace":
        """A copy of the first tokens."""
        return RoutingTrace(self.experts[:num_tokens].copy(), self.margins[:num_tokens].copy())

    def different(self, other: "RoutingTrace", *, margins: bool = False) -> np.ndarray:
        """bool [N]: tokens that both have recorded and for which any layer chose other experts, or, with `margins`, by
        another margin in any bit."""
        differs = (self.experts != other.experts).any((1, 2))
        if margins:
            differs |= (self.margins.view(np.int32) != other.margins.view(np.int32)).any(1)
        return differs & self.recorded & other.recorded
