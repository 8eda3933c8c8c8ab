"""The one forward. Rollout engine and trainer call the same `Decoder` with an explicit `ForwardContext`; the trainer's
context has an identity page table, and autograd records its ops. Nothing else differs, so nothing else can.

Families differ by data only (`ModelSpec`): biases, query/key norm, tied head, RoPE scaling, routed layers, latent
attention.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch

from zerogap.errors import CheckpointError, ConfigError, ContractError
from zerogap.layers.block import Block
from zerogap.models.blocks import BlockBuilder, make_weights
from zerogap.models.cache import codec_of
from zerogap.models.calibrate import calibration_pass
from zerogap.models.spec import ModelSpec
from zerogap.models.trainable import input_gradients, select_trainable
from zerogap.numerics import Numerics
from zerogap.ops import backend
from zerogap.ops.digest import digest
from zerogap.ops.embedding import embedding, gather_rows
from zerogap.ops.gemm import head_logits
from zerogap.ops.kv_scales import Calibration, KVScales
from zerogap.ops.norm import rms_norm
from zerogap.ops.rope import rope_table
from zerogap.types import LOCAL, BlockCodes, Exchange, ForwardContext, KVCodec, LayerKV

BlockRunner = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def call_block(block: Block, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain way to run a block; a trainer may pass one that recomputes activations in its backward."""
    return block(*args)  # type: ignore[arg-type]


class Decoder:
    """A decoder-only language model over weight handles.

    Attributes:
        spec, numerics, identity: what it is, by which contract, and who computes it.
        weights: checkpoint name -> handle, in checkpoint-name order.
        version: weight version; the trainer adds one per optimizer step.
        loads: how often all weights were put in place from outside (`load`, a trainer's `load_state`), which says
            nothing of the version: an engine must notice it, too.
        kv_scales: the scale set of this version's KV cache, where the contract calibrates one and it is known yet.
    """

    def __init__(self, spec: ModelSpec, numerics: Numerics, *, max_positions: int | None = None) -> None:
        """Unloaded weights; `load` fills them.

        Args:
            max_positions: longest sequence to serve (sizes the RoPE table); default and upper bound: the model's own.
        """
        self.spec, self.numerics = spec, numerics
        self.identity = backend.identity(numerics)
        self.version = self.loads = 0
        self.kv_scales: KVScales | None = None
        self._live_scales = torch.full((spec.num_layers, *self.codec().scale_shape), float("nan"))
        self.exchange: Exchange = LOCAL
        self.max_positions = min(max_positions or spec.max_position, spec.max_position)
        self.weights, stacks = make_weights(spec.weight_specs(numerics), numerics)
        self.rope_table = rope_table(spec.rope, spec.rope_dim, self.max_positions)
        builder = BlockBuilder(spec, numerics, self.weights, stacks, self.exchange)
        self.blocks = [builder.block(layer) for layer in range(spec.num_layers)]
        self.embed = self.weights["model.embed_tokens.weight"]
        self.head = self.embed if spec.tied else self.weights["lm_head.weight"]
        self.final_norm = self.weights["model.norm.weight"]

    # ---- weights

    def load(self, tensors: Iterable[tuple[str, torch.Tensor | BlockCodes]]) -> "Decoder":
        """Fill every weight from (checkpoint name, tensor) pairs; returns self.

        Raises:
            CheckpointError: names missing or unexpected, or a shape that does not fit the config.
        """
        seen: set[str] = set()
        for name, tensor in tensors:
            if name not in self.weights:
                raise CheckpointError(f"unexpected tensor {name} {tuple(tensor.shape)}: the config does not imply it")
            self.weights[name].load(tensor)
            seen.add(name)
        missing = sorted(set(self.weights) - seen)
        if missing:
            raise CheckpointError(f"{len(missing)} tensors are missing, the first is {missing[0]}")
        self.kv_scales = None  # a set belongs to the weights that it was calibrated for
        self.loads += 1
        return self

    def set_trainable(self, patterns: Sequence[str]) -> list[str]:
        """Train the tensors that match (`trainable.select_trainable`), buffers never; returns their names in
        checkpoint-name order."""
        names = [name for name, handle in self.weights.items() if handle.spec.kind != "buffer"]
        chosen = select_trainable(names, patterns, self.spec.num_layers)
        for name, handle in self.weights.items():
            handle.set_trainable(name in chosen)
        for name in input_gradients(self.weights, chosen, self.spec.num_layers):
            self.weights[name].enable_input_grad()
        return sorted(chosen)

    def digests(self) -> dict[str, str]:
        """Digest of every published weight, of the RoPE buffer, and the name of the KV scale set, by name."""
        digests = {name: h.digest() for name, h in self.weights.items()} | {"rope_table": digest(self.rope_table)}
        return digests if self.kv_scales is None else digests | {"kv_scales": self.kv_scales.name}

    def quantised(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that stand in FP8, in checkpoint-name order."""
        return {name: h.spec.shape for name, h in self.weights.items() if h.spec.fp8 is not None}

    def copy_from(self, other: "Decoder") -> None:
        """Take over the published weights and the version of a decoder under another contract; KV scales are
        not known then.

        Raises:
            ContractError: it is another model.
        """
        if other.spec != self.spec:
            raise ContractError("weights can only be copied between decoders of one model")
        for name, handle in self.weights.items():
            handle.load(other.weights[name].stored())
        self.version, self.kv_scales = other.version, None
        self.loads += 1

    # ---- KV

    @property
    def calibrated(self) -> bool:
        """True if the contract's KV cache has calibrated scales."""
        return self.numerics.kv_scale == "calibrated"

    @property
    def needs_calibration(self) -> bool:
        """True if nothing can be computed before `calibrate` or `set_kv_scales`."""
        return self.calibrated and self.kv_scales is None

    def require_calibrated(self) -> None:
        """Raise `ContractError` if the KV cache's scales are not known."""
        if self.needs_calibration:
            mend = "call decoder.calibrate(prompts), or set_kv_scales with the set of these weights"
            raise ContractError(f"the KV cache has calibrated scales, and none are known for these weights: {mend}")

    def calibrate(self, prompts: Sequence[Sequence[int]]) -> KVScales:
        """Scales from one pass over prompts (token ids) with a BF16 cache; put in place and returned.

        Only the first 1,024 tokens of all prompts together are read.
        """
        scales = KVScales.of(calibration_pass(self, prompts), self.numerics)
        self.set_kv_scales(scales)
        return scales

    def set_kv_scales(self, scales: KVScales) -> None:
        """Put a scale set in place: every `LayerKV` of `new_kv` reads it from now on.

        Raises:
            ConfigError: the contract has no calibrated scales, or the set is of another model.
        """
        if not self.calibrated:
            raise ConfigError("numerics.kv_scale", self.numerics.kv_scale, "only a calibrated cache takes a scale set")
        if scales.values.shape != self._live_scales.shape:
            mend = f"this model has {tuple(self._live_scales.shape)} layers, kinds and KV heads (or tiles)"
            raise ConfigError("kv_scales", tuple(scales.values.shape), mend)
        self._live_scales.copy_(scales.values)
        self.kv_scales = scales

    def codec(self) -> KVCodec:
        """How keys and values of this model stand in pages, by the contract."""
        return codec_of(self.spec, self.numerics)

    def new_kv(self, num_pages: int, page_size: int) -> list[LayerKV]:
        """Zeroed pages for every layer; with calibrated scales they read the decoder's set of the moment.

        Until there is one, its scales are NaN, so nothing finite can come of them.
        """
        return self.bind_kv([self.codec().allocate(num_pages, page_size) for _ in self.blocks])

    def bind_kv(self, layers: Sequence[LayerKV]) -> list[LayerKV]:
        """The same pages, one `LayerKV` per layer; with calibrated scales they read this decoder's set of the moment,
        whichever decoder's they read before."""
        return self._layers_of(list(layers), self._live_scales)

    def scratch_kv(
        self, pages: LayerKV, scales: KVScales | None = None, calibration: Calibration | None = None
    ) -> list[LayerKV]:
        """The same pages for every layer, one after the other: enough where no layer is visited twice (a trainer).

        Args:
            pages: of `codec().allocate`, or of another codec's.
            scales: a scale set to read; None: the decoder's current one.
            calibration: maxima that attention raises on the way.

        Raises:
            ContractError: the scales are not known yet.
        """
        values = None
        if pages.codec.kv_scale == "calibrated":
            if scales is None:
                self.require_calibrated()
            values = self._live_scales if scales is None else scales.values
        layers = self._layers_of([pages] * len(self.blocks), values)
        if calibration is None:
            return layers
        return [dataclasses.replace(kv, calibration=calibration.layer(i)) for i, kv in enumerate(layers)]

    def _layers_of(self, pages: list[LayerKV], scales: torch.Tensor | None) -> list[LayerKV]:
        if not self.calibrated or scales is None:
            return pages
        names = ("key_scales", "value_scales")[: scales.shape[1]]
        return [dataclasses.replace(kv, **dict(zip(names, scales[i], strict=True))) for i, kv in enumerate(pages)]

    # ---- forward

    def hidden(
        self,
        ids_T: torch.Tensor,
        context: ForwardContext,
        kv: Sequence[LayerKV],
        run_block: BlockRunner = call_block,
    ) -> torch.Tensor:
        """Final-normed hidden states.

        Args:
            ids_T: int64 [T] token ids.
            context: positions, pages and, for a trainer, sample and pack borders.
            kv: one `LayerKV` per layer (a trainer may pass the same scratch pages for each).

        Returns:
            [R, H] storage dtype: the rows of `context.output_rows`, or all T.
        """
        residual_TH = embedding(ids_T, self.embed, context)
        update_TH: torch.Tensor | None = None
        for block, layer_kv in zip(self.blocks, kv, strict=True):
            residual_TH, update_TH = run_block(block, residual_TH, update_TH, self.rope_table, layer_kv, context)
        _, hidden_TH = rms_norm(residual_TH, update_TH, self.final_norm, self.spec.norm_eps, context)
        if context.output_rows is None:
            return hidden_TH
        return gather_rows(hidden_TH, context.output_rows)

    def logits(self, ids_T: torch.Tensor, context: ForwardContext, kv: Sequence[LayerKV]) -> torch.Tensor:
        """FP32 logits [R, V] of `hidden`, never rounded."""
        return head_logits(self.hidden(ids_T, context, kv), self.head)
