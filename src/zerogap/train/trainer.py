"""The trainer: four verbs over one decoder. `forward_backward`, `optim_step`, `logprobs`, `state`.

`forward_backward` runs the same forward as the rollout engine over packed samples, compares its log-probs with the
rollout's as FP32 bits before any backward, asks a pure loss function for the derivative of every token's log-prob, and
sends it back through the ops. Gradients are summed per bin and pack of the global batch, so micro-batch size and
activation recompute do not change a bit (train/packing.py, train/bins.py).
"""

import dataclasses
import time
import weakref
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerogap.errors import CheckpointError, ConfigError, ContractError, NonFiniteError, ParityError
from zerogap.models.decoder import Decoder, call_block
from zerogap.moments import Moments, pool
from zerogap.numerics import Numerics, preset
from zerogap.ops.kv_scales import Calibration, KVScales
from zerogap.ops.logprob import KeptSets, token_logprobs
from zerogap.ops.optim import tree_add
from zerogap.ops.sampling import SamplingRows
from zerogap.routing import RoutingTrace
from zerogap.text import Tokenizer
from zerogap.train.bins import GradientBins
from zerogap.train.optimizer import AdamW, OptimizerSettings, OptimizerStep
from zerogap.train.packing import PAGE_SIZE, MicroBatch, build_micro_batch, micro_batches, plan_packs
from zerogap.train.recompute import recompute_block
from zerogap.train.routing import Routers, RoutingLedger, RoutingResult
from zerogap.types import Identity, LayerKV, Loss, Sample, TokenRows, TrainBatch
from zerogap.weights import open_model

_NO_UPDATE = "No update was made. Set parity.on_mismatch: warn to go on regardless"


@dataclasses.dataclass(frozen=True)
class BackwardResult:
    """What one `forward_backward` saw.

    Attributes:
        loss: the global loss.
        compared_tokens: completion tokens whose weight version is the trainer's, so that bits must be equal.
        mismatched_tokens: how many of them differ from the rollout's log-prob in at least one bit.
        routing: what the routers chose, for a mixture-of-experts model; else nothing compared and no metrics.
        metrics: pooled over micro-batches, by name.
        num_tokens: prompt and completion tokens that went through the model.
    """

    loss: float
    compared_tokens: int
    mismatched_tokens: int
    metrics: Mapping[str, Moments]
    num_tokens: int
    routing: RoutingResult = dataclasses.field(default_factory=RoutingResult)

    @property
    def routing_compared(self) -> int:
        """Tokens whose experts the rollout recorded at the trainer's weight version."""
        return self.routing.compared_tokens

    @property
    def routing_mismatched(self) -> int:
        """How many of them went to other experts in any layer."""
        return self.routing.mismatched_tokens


class Trainer:
    """Trains a decoder in place. Mutated by `forward_backward` (gradients), `optim_step` and `load_state`."""

    def __init__(
        self,
        model: Decoder | str | Path,
        numerics: str | Numerics = "bf16",
        *,
        optimizer: OptimizerSettings | None = None,
        trainable: str | Sequence[str] = ("all",),
        micro_batch_tokens: int = 4096,
        activation_recompute: bool = False,
        on_mismatch: str = "abort",
        rollout_identity: Identity | None = None,
        balance_loss: float = 0.0,
        router_bias_rate: float = 0.0,
    ) -> None:
        """
        Args:
            model: a loaded decoder (its own contract counts), or a model folder, hub id or .gguf file.
            numerics: contract for a model given by name.
            optimizer: AdamW and schedule; None: the defaults of `OptimizerSettings`.
            trainable: tensors to train (`models.trainable.select_trainable`).
            micro_batch_tokens: most tokens per forward and backward pass; bounds memory, changes no bit.
            activation_recompute: recompute block activations in the backward; saves memory, changes no bit.
            on_mismatch: `abort` raises `ParityError` before the backward; `warn` counts and goes on.
            rollout_identity: what computes the rollout's log-probs where that is declared to differ from this trainer
                (*one-sided*: not exact). Differences are then counted and never abort; None: this trainer's own.
            balance_loss: coefficient of the routers' balance loss, mean over samples, sum over layers.
            router_bias_rate: by how much correction biases move at each update (`ops.balance.update_bias`).
        """
        if on_mismatch not in ("abort", "warn"):
            raise ConfigError("parity.on_mismatch", on_mismatch, "choose abort or warn")
        if micro_batch_tokens < 1:
            raise ConfigError("optimizer.micro_batch_tokens", micro_batch_tokens, "choose at least 1 token")
        self.tokenizer: Tokenizer | None = None
        if not isinstance(model, Decoder):
            files = open_model(model)
            if files.tokenizer_files():
                self.tokenizer = Tokenizer.from_files(files.tokenizer_files(), files.chat_template)
            model = Decoder(files.spec, preset(numerics)).load(files.tensors())
        self.decoder = model
        self.routers = Routers(model, balance_loss, router_bias_rate)
        self.on_mismatch = on_mismatch
        self.rollout_identity = rollout_identity or model.identity
        self.micro_batch_tokens = micro_batch_tokens
        self.activation_recompute = activation_recompute
        self.trainable = model.set_trainable((trainable,) if isinstance(trainable, str) else trainable)
        self.handles = [model.weights[name] for name in self.trainable]
        self.optimizer = AdamW(self.handles, optimizer or OptimizerSettings())
        self._gradients: list[torch.Tensor] | None = None
        self._scratch: LayerKV | None = None
        self._scale_sets: dict[str, KVScales] = {}  # the one that the batch at hand was drawn with, by name
        self._calibration: Calibration | None = None
        self.calibration_seconds = 0.0  # since construction, spent on calibrating the KV cache's scales
        self._kept: weakref.WeakKeyDictionary[TrainBatch, dict[tuple[int, ...], KeptSets]] = weakref.WeakKeyDictionary()

    @property
    def one_sided(self) -> bool:
        """True if the rollout is declared to compute other bits than this trainer."""
        return self.rollout_identity != self.decoder.identity

    # ---- the four verbs

    def forward_backward(self, batch: TrainBatch, loss: Loss) -> BackwardResult:
        """Forward, bit comparison, loss, backward over the whole global batch of one update.

        Gradients add to those of earlier calls since the last `optim_step`.

        Raises:
            ParityError: (on_mismatch = abort) a log-prob, or a router's choice, that must equal the rollout's does not;
                no gradient is kept.
            NonFiniteError: a NaN or infinity at a live token.
            ContractError: a sample of another identity than the declared one, which cannot be compared, or of a KV
                scale set that this trainer does not hold.
        """
        self._check_identity(batch.samples)
        scales = self._scales_of(batch.samples)
        if scales is not None:
            self._scale_sets = {scales.name: scales}
        if self.decoder.calibrated and self._calibration is None:
            self._calibration = Calibration(self.decoder.spec.num_layers, self.decoder.codec().scale_shape)
        denominators = loss.denominators(batch)
        numerics = self.decoder.numerics
        bins = GradientBins(self.handles, numerics.grad_bins)
        results, total, compared, mismatched = [], Fraction(0), 0, 0
        kept_sets = self._kept.setdefault(batch, {})
        ledger = RoutingLedger(self.routers, len(batch.samples)) if self.routers.layers else None
        for packs in plan_packs([s.num_tokens for s in batch.samples], numerics.grad_bins, numerics.pack_tokens):
            bins.open()
            for run in micro_batches(packs, self.micro_batch_tokens):
                micro = build_micro_batch(run, batch.samples)
                if not len(micro.targets) and ledger is None:  # prompts alone have loads and a balance loss
                    continue
                kept = self._kept_sets(micro, batch, kept_sets)
                logp, entropy = self._forward(micro, kept, scales, self._calibration, ledger)
                if ledger is not None:
                    wrong = ledger.take(micro, batch.samples, self.decoder.version)
                    if wrong and self.on_mismatch == "abort" and not self.one_sided:
                        raise ParityError(f"a router chose other experts than the rollout's: {wrong}. {_NO_UPDATE}")
                rows = batch.rows(micro.samples, logp.detach().numpy(), entropy.detach().numpy(), self.decoder.version)
                differs = rows.logp.view(np.int32) != rows.rollout_logp.view(np.int32)
                if kept is not None:
                    assert kept.mismatched is not None, "the forward verifies every kept set"
                    differs |= kept.mismatched.numpy()
                differs &= rows.current
                compared += int(rows.current.sum())
                mismatched += int(differs.sum())
                if differs.any() and self.on_mismatch == "abort" and not self.one_sided:
                    raise ParityError(_describe(rows, differs))
                result = loss(rows, denominators)
                total += result.loss
                results.append(result.metrics)
                gradients = [torch.from_numpy(result.dlogp)]
                outputs = [logp]
                if result.dentropy is not None:
                    outputs.append(entropy)
                    gradients.append(torch.from_numpy(result.dentropy))
                torch.autograd.backward(outputs, gradients)
            bins.close()
        self._add_gradients(bins.finish())
        tokens = sum(s.num_tokens for s in batch.samples)
        routing = RoutingResult()
        if ledger is not None:
            self.routers.keep(ledger)
            total, routing = total + ledger.balance_term, ledger.result()
        return BackwardResult(float(total), compared, mismatched, pool(results), tokens, routing)

    def optim_step(self, learning_rate: float | None = None) -> OptimizerStep:
        """Clip, update the masters, publish the weights in place, and count the weight version up.

        Raises:
            ConfigError: there is no gradient.
            NonFiniteError: the gradient is not finite; weights are unchanged and the gradient is dropped.
        """
        if self._gradients is None:
            raise ConfigError("optim_step", None, "call forward_backward first: there is no gradient")
        gradients, self._gradients = self._gradients, None
        scales = self._next_scales()
        try:
            step = self.optimizer.step(gradients, learning_rate)
        except NonFiniteError:
            self.routers.drop()
            raise
        self.routers.update_biases()
        self.decoder.version += 1
        if scales is not None:
            self.decoder.set_kv_scales(scales)
        return step

    def logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Log-probs of every sample's completion tokens at the current weights and KV scales, under the sample's own
        parameters.

        Returns:
            float32 [C] per sample, in the order given.
        """
        return self.logprobs_and_routing(samples)[0]

    def logprobs_and_routing(self, samples: Sequence[Sample]) -> tuple[list[np.ndarray], list[RoutingTrace | None]]:
        """`logprobs`, and what the routers of the same forward chose: one trace per sample of a mixture-of-experts
        model that has completion tokens, else None."""
        numerics = self.decoder.numerics
        out: list[np.ndarray] = [np.zeros(0, np.float32)] * len(samples)
        traces: list[RoutingTrace | None] = [None] * len(samples)
        (packs,) = plan_packs([s.num_tokens for s in samples], 1, numerics.pack_tokens) if samples else ([],)
        with torch.no_grad():
            for run in micro_batches(packs, self.micro_batch_tokens):
                micro = build_micro_batch(run, samples)
                if not len(micro.targets):
                    continue
                micro, record = self.routers.recording(micro)
                logp, _ = self._forward(micro, None, None)
                row = token = 0
                for index in micro.samples:
                    completion, tokens = len(samples[index].completion_ids), samples[index].num_tokens
                    out[index] = logp[row : row + completion].numpy().copy()
                    if record.layers:
                        traces[index] = record.trace(token, tokens - 1)
                    row, token = row + completion, token + tokens
        return out, traces

    def state(self) -> dict[str, Any]:
        """Everything that a checkpoint needs besides the model's source: tensors by name and plain facts."""
        return {
            "tensors": self.optimizer.state() | self.routers.state(),
            "updates": self.optimizer.updates,
            "version": self.decoder.version,
            "trainable": list(self.trainable),
            "numerics": self.decoder.numerics.fields(),
            "kv_scales": None if self.decoder.kv_scales is None else self.decoder.kv_scales.to_list(),
        }

    def load_state(
        self, tensors: Mapping[str, torch.Tensor], updates: int, version: int, kv_scales: KVScales | None = None
    ) -> None:
        """Continue from a `state`: masters and moments are copied in place and the weights published.

        Raises:
            CheckpointError: the contract calibrates the KV cache's scales and there are none.
        """
        if self.decoder.calibrated and kv_scales is None:
            raise CheckpointError("the contract calibrates the KV cache's scales, and the checkpoint holds none")
        self.optimizer.load_state(tensors, updates)
        self.routers.load_state(tensors)
        if kv_scales is not None:
            self.decoder.set_kv_scales(kv_scales)
        self.decoder.version = version
        self.decoder.loads += 1
        self._gradients = self._calibration = None

    # ---- parts

    def _forward(
        self,
        micro: MicroBatch,
        kept: KeptSets | None,
        scales: KVScales | None,
        calibration: Calibration | None = None,
        ledger: RoutingLedger | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """FP32 log-probs and entropies [R] of the micro-batch's completion tokens.

        Args:
            scales: KV scale set to compute under; None: the decoder's current one, or none at all.
            calibration: maxima to raise on the way.
            ledger: records what the routers choose.
        """
        if ledger is not None:
            with ledger.record(micro) as recording:
                return self._forward(recording, kept, scales, calibration)
        layers = self.decoder.scratch_kv(self._scratch_pages(micro.num_pages), scales, calibration)
        run_block = recompute_block if self.activation_recompute and torch.is_grad_enabled() else call_block
        hidden = self.decoder.hidden(micro.ids, micro.context, layers, run_block)
        rows = SamplingRows.of(micro.row_params)
        return token_logprobs(hidden, self.decoder.head, micro.targets, rows, kept, micro.context)

    def _kept_sets(
        self, micro: MicroBatch, batch: TrainBatch, known: dict[tuple[int, ...], KeptSets]
    ) -> KeptSets | None:
        """The micro-batch's kept sets: as recorded at the first update of a batch, materialised for later ones."""
        if not any(params.filters for params in micro.row_params):
            return None
        if micro.samples not in known:
            chosen = [batch.samples[i] for i in micro.samples]
            known[micro.samples] = KeptSets.of(chosen, self.decoder.spec.vocab_size, materialise=True)
        return known[micro.samples]

    def _scratch_pages(self, num_pages: int) -> LayerKV:
        """Pages for one layer's keys and values; every layer overwrites the last one's."""
        if self._scratch is None or self._scratch.keys.shape[0] < num_pages:
            self._scratch = self.decoder.codec().allocate(num_pages, PAGE_SIZE)
        return self._scratch

    def _add_gradients(self, gradients: list[torch.Tensor]) -> None:
        if self._gradients is None:
            self._gradients = gradients
        else:
            for total, gradient in zip(self._gradients, gradients, strict=True):
                tree_add(total, gradient)

    def _check_identity(self, samples: Sequence[Sample]) -> None:
        for index, sample in enumerate(samples):
            if sample.identity != self.rollout_identity:
                raise ContractError(
                    f"sample {index} was drawn by {sample.identity}, this trainer expects {self.rollout_identity}: "
                    "log-probs of different identities cannot be equal"
                )
            if self.one_sided and sample.params.filters:
                raise ContractError(
                    f"sample {index} was drawn with top_k, top_p or min_p by {sample.identity}: the sets of ids that "
                    "two identities keep differ, so the trainer has no log-prob for it"
                )

    def _next_scales(self) -> KVScales | None:
        """The KV scales of the next weight version, from the forward passes since the last update."""
        calibration, self._calibration = self._calibration, None
        if calibration is None:
            return None
        began = time.perf_counter()
        scales = KVScales.of(calibration.amax, self.decoder.numerics)
        self.calibration_seconds += calibration.seconds + time.perf_counter() - began
        return scales

    def _scales_of(self, samples: Sequence[Sample]) -> KVScales | None:
        """The one KV scale set that a batch was drawn with; every update on it uses that set. One-sided, the rollout's
        set means nothing here, and the trainer's own of the moment is used."""
        if not self.decoder.calibrated:
            return None
        if self.one_sided:
            self.decoder.require_calibrated()
            return self.decoder.kv_scales
        names = sorted({str(s.scale_set) for s in samples})
        if len(names) != 1:
            raise ContractError(f"the batch was drawn with {len(names)} KV scale sets ({', '.join(names)}): give one")
        current = self.decoder.kv_scales
        held = self._scale_sets | ({} if current is None else {current.name: current})
        if names[0] not in held:
            raise ContractError(
                f"the batch was drawn with KV scale set {names[0]}, this trainer holds {', '.join(held) or 'none'}: "
                "a cache can only be read with the scales it was written with"
            )
        return held[names[0]]


def _describe(rows: TokenRows, differs: np.ndarray) -> str:
    first = int(np.flatnonzero(differs)[0])
    return (
        f"{int(differs.sum())} of {int(rows.current.sum())} log-probs differ from the rollout's; the first is sample "
        f"{int(rows.sample[first])}, completion position {int(rows.position[first])}: trainer {rows.logp[first]!r} "
        f"({rows.logp[first : first + 1].view(np.uint32)[0]:#010x}), rollout {rows.rollout_logp[first]!r} "
        f"({rows.rollout_logp[first : first + 1].view(np.uint32)[0]:#010x}). {_NO_UPDATE}"
    )
