"""What the routers of a mixture-of-experts model chose in the trainer's own forward, and what follows from it.

The trainer records every routed layer's choices while it computes a batch. Where samples carry the rollout's choices,
both are compared: with one contract on both sides they are equal, so that nothing has to be replayed. Loads are counted
as integers over the global batch, once per token however often the backward recomputes activations, and move the
correction biases at the next update.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction

import numpy as np
import torch

from zerogap.errors import ConfigError, NonFiniteError
from zerogap.models.decoder import Decoder
from zerogap.moments import Moments
from zerogap.ops import tap
from zerogap.ops.balance import balance_losses, expert_counts, update_bias
from zerogap.ops.handle import WeightHandle
from zerogap.routing import RoutingRecord, RoutingTrace
from zerogap.train.packing import MicroBatch
from zerogap.types import Sample

DIFFERENT_EXPERTS = "moe/different_experts"  # logged only where recorded experts were compared
BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"


@dataclasses.dataclass(frozen=True)
class RoutingResult:
    """What one `forward_backward` saw of its routers, over the global batch.

    Attributes:
        compared_tokens: tokens whose experts the rollout recorded at the trainer's weight version.
        mismatched_tokens: those for which any layer chose other experts.
        margin: by how little the last chosen expert won anywhere, in the trainer's forward; infinity of nothing.
        metrics: `moe/...` by logged name (rl/dictionary.py).
    """

    compared_tokens: int = 0
    mismatched_tokens: int = 0
    margin: float = math.inf
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Routers:
    """The routers of a decoder under training. Mutated by `keep` (loads) and `update_biases`."""

    def __init__(self, decoder: Decoder, balance_loss: float, bias_rate: float) -> None:
        """
        Raises:
            ConfigError: the model cannot have a balance loss or a bias update.
        """
        spec = decoder.spec
        for key, value in (("balance_loss", balance_loss), ("router_bias_rate", bias_rate)):
            if not 0.0 <= value < math.inf:
                raise ConfigError(f"moe.{key}", value, "choose 0 (off) or a positive number")
            if value and spec.moe is None:
                raise ConfigError(f"moe.{key}", value, "this model has no routed experts: choose 0")
        self.balance_loss, self.bias_rate = balance_loss, bias_rate
        self.layers: tuple[int, ...] = ()
        self.num_experts = self.top_k = 0
        if spec.moe is not None:
            self.layers = spec.moe.routed_layers(spec.num_layers)
            self.num_experts, self.top_k = spec.moe.num_experts, spec.moe.top_k
        names = [BIAS.format(layer) for layer in self.layers]
        self.biases: list[WeightHandle | None] = [decoder.weights.get(name) for name in names]
        if bias_rate and not any(self.biases):
            raise ConfigError(
                "moe.router_bias_rate", bias_rate, "this model's routers have no correction bias: choose 0"
            )
        self._counts = np.zeros((len(self.layers), self.num_experts), np.int64)  # since the last update

    def recording(self, micro: MicroBatch) -> tuple[MicroBatch, RoutingRecord]:
        """The micro-batch with a context that makes routers leave their choices in the record."""
        record = RoutingRecord.allocate(self.layers, len(micro.ids), self.top_k)
        return dataclasses.replace(micro, context=dataclasses.replace(micro.context, routing=record)), record

    def state(self) -> dict[str, torch.Tensor]:
        """The correction biases by name, FP32, live tensors."""
        return {f"buffer/{b.spec.name}": _values(b) for b in self.biases if b is not None}

    def load_state(self, named: Mapping[str, torch.Tensor]) -> None:
        """Inverse of `state`: copies in place."""
        for name, tensor in self.state().items():
            tensor.copy_(named[name])
        self._counts[:] = 0

    def keep(self, ledger: "RoutingLedger") -> None:
        """Count the loads of a whole batch, whose gradients are kept too."""
        self._counts += ledger.counts

    def update_biases(self) -> None:
        """Move the biases by the loads since the last update."""
        if self.bias_rate:
            for bias, counts in zip(self.biases, self._counts, strict=True):
                if bias is not None:
                    update_bias(_values(bias), counts, self.bias_rate)
        self.drop()

    def drop(self) -> None:
        """Forget the loads since the last update."""
        self._counts[:] = 0


def _values(bias: WeightHandle) -> torch.Tensor:
    assert bias.rows is not None, f"{bias.spec.name} is no buffer"
    return bias.rows


class RoutingLedger:
    """The choices of all routers over one global batch. Grows by `record` and `take`, micro-batch by micro-batch.

    Attributes:
        counts: int64 [layers, E] tokens per expert.
        compared, mismatched: as in `RoutingResult`.
    """

    def __init__(self, routers: Routers, num_sequences: int) -> None:
        """`num_sequences`: samples of the global batch, over which the balance loss is averaged."""
        self._routers, self._num_sequences = routers, num_sequences
        self._record = RoutingRecord.allocate(routers.layers, 0, routers.top_k)
        self._tokens = 0
        self.counts = np.zeros((len(routers.layers), routers.num_experts), np.int64)
        self.compared = self.mismatched = 0
        self._margins: list[np.ndarray] = []
        self._balance = Moments()

    @property
    def coefficient(self) -> float:
        """Of each sequence's balance loss in each layer."""
        return self._routers.balance_loss / max(1, self._num_sequences)

    @property
    def balance_term(self) -> Fraction:
        """The balance loss's exact part of the global loss so far."""
        return Fraction(self.coefficient) * self._balance.total

    @contextmanager
    def record(self, micro: MicroBatch) -> Iterator[MicroBatch]:
        """The micro-batch with a context that makes routers leave their choices here, for the forward in the block."""
        num_tokens = len(micro.ids)
        if self._record.experts.shape[1] < num_tokens:
            self._record = RoutingRecord.allocate(self._routers.layers, num_tokens, self._routers.top_k)
        context = dataclasses.replace(micro.context, routing=self._record, balance=self.coefficient)
        starts = micro.context.sample_starts
        assert starts is not None, "a trainer's context knows where samples begin"

        def observe(name: str, outputs: Mapping[str, torch.Tensor], info: Mapping[str, object]) -> None:
            if name == "router":
                self._add_balance(outputs["logits"].detach(), outputs["experts"], info, starts)

        self._tokens = num_tokens
        with tap.listen(observe):
            yield dataclasses.replace(micro, context=context)

    def take(self, micro: MicroBatch, samples: Sequence[Sample], version: int) -> str:
        """Count and compare what the last forward recorded; call it before the backward, which may record again.

        Args:
            micro: the micro-batch of that forward.
            samples: the global batch.
            version: the trainer's weight version.

        Returns:
            The first difference in words, or nothing.
        """
        rows = slice(0, self._tokens)
        self.counts += expert_counts(self._record.experts[:, rows], self._routers.num_experts)
        margins = self._record.margins[:, rows].numpy().ravel()
        self._margins.append(margins[np.isfinite(margins)])
        difference, first = "", 0
        for index in micro.samples:
            sample = samples[index]
            theirs = sample.routing
            if theirs is not None and len(sample.versions) and int(sample.versions[-1]) == version:
                ours = self._record.trace(first, sample.num_tokens - 1)
                found = self._compare(index, ours, theirs)
                difference = difference or found
            first += sample.num_tokens
        return difference

    def result(self) -> RoutingResult:
        """Everything so far."""
        margins = np.concatenate([np.zeros(0, np.float32), *self._margins])
        metrics: dict[str, float] = {}
        if self.counts.size and self.counts.sum():
            # max / mean = max * E / sum; every layer has the same sum, so the worst layer has the largest maximum
            metrics["moe/load_max"] = int(self.counts.max()) * self._routers.num_experts / int(self.counts[0].sum())
            metrics["moe/idle_experts"] = float((self.counts == 0).sum())
            metrics["moe/balance_loss"] = self._balance.mean
        if margins.size:
            metrics["moe/margin_min"] = float(margins.min())
            metrics["moe/margin_p01"] = float(np.partition(margins, margins.size // 100)[margins.size // 100])
        if self.compared:
            metrics[DIFFERENT_EXPERTS] = self.mismatched / self.compared
        lowest = metrics.get("moe/margin_min", math.inf)
        return RoutingResult(self.compared, self.mismatched, lowest, metrics)

    # ---- parts

    def _compare(self, index: int, ours: RoutingTrace, theirs: RoutingTrace) -> str:
        """Count one sample's tokens; the first difference in words."""
        if theirs.experts.shape != ours.experts.shape:
            raise ConfigError(
                f"samples[{index}].routing", theirs.experts.shape, f"this model's trace of it is {ours.experts.shape}"
            )
        differs = ours.different(theirs)
        self.compared += int(theirs.recorded.sum())
        self.mismatched += int(differs.sum())
        if not differs.any():
            return ""
        token = int(np.flatnonzero(differs)[0])
        place = int(np.flatnonzero((ours.experts[token] != theirs.experts[token]).any(1))[0])
        return (
            f"sample {index}, token {token}, layer {self._routers.layers[place]}: trainer "
            f"{ours.experts[token, place].tolist()} with margin {ours.margins[token, place]:.3g}, rollout "
            f"{theirs.experts[token, place].tolist()} with margin {theirs.margins[token, place]:.3g}"
        )

    def _add_balance(
        self, logits: torch.Tensor, experts: torch.Tensor, info: Mapping[str, object], starts: torch.Tensor
    ) -> None:
        losses = balance_losses(logits, experts, info["routing"], starts)  # type: ignore[arg-type]
        if not np.isfinite(losses).all():
            raise NonFiniteError(f"layer {info['layer']}: the router's logits hold a NaN or infinity")
        self._balance += Moments.of(losses)
