"""How much memory a run takes, by part, known before anything is read: arithmetic on shapes, nothing else.

Weights, masters, moments, gradients, the KV cache and what autograd keeps of a forward pass are counted tensor by
tensor, in the packed forms that the kernels read, so they are exact on one CPU process; tests hold them against a real
trainer. What lives only while one op runs (`workspace`), and the engine's buffers, are upper estimates.

All parts are counted as if they existed at once, which is nearly so in the backward pass of a step: the engine keeps
its cache and buffers, and of the activations of a pass none is gone when the backward begins.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

from zerogap.config import RunConfig
from zerogap.models.cache import codec_of
from zerogap.models.inventory import BLOCK, SCALE_BYTES, kv_bytes, layer_of
from zerogap.models.layout import Layout
from zerogap.models.spec import ModelSpec
from zerogap.models.trainable import input_gradients, select_trainable
from zerogap.numerics import DType, Numerics
from zerogap.types import WeightSpec

PANEL = 64  # output columns of a packed panel (ops.cpu.gemm)
FP32 = 4
KV_PAGE = 64  # tokens of a page of the trainer's scratch (train.packing)
HEAD_ROWS = 128  # rows of logits that exist at a time (ops.logprob)
DRAFT_ROWS = 128  # most guessed rows of one of the engine's passes (rollout.speculate)


@dataclasses.dataclass(frozen=True)
class Part:
    """Bytes of one part on one device, and in words what they are."""

    name: str
    bytes: int
    what: str


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What a run takes on each device.

    Attributes:
        parts: in the order in which they come into being; those of 0 bytes are left out.
        other_activations: bytes of `activations` with the other setting of optimizer.activation_recompute.
        trained: names of the trained tensors.
    """

    parts: tuple[Part, ...]
    other_activations: int
    trained: tuple[str, ...]

    @property
    def total(self) -> int:
        return sum(part.bytes for part in self.parts)

    def bytes_of(self, name: str) -> int:
        """Bytes of a part; 0 where there is none."""
        return next((part.bytes for part in self.parts if part.name == name), 0)


@dataclasses.dataclass(frozen=True)
class TensorBytes:
    """Bytes of one tensor in every form that it has; see `ops.handle.WeightHandle`.

    Attributes:
        forward: what forward passes read: panels, rows.
        scales: block scales of FP8 panels.
        transposed: panels that input gradients read.
        published: the BF16 value of a quantised matrix that is not trained.
        master, moments, gradient: FP32, of a trained tensor.
    """

    forward: int
    scales: int = 0
    transposed: int = 0
    published: int = 0
    master: int = 0
    moments: int = 0
    gradient: int = 0


def panel_bytes(width: int, reduce: int, dtype: DType) -> int:
    """Bytes of the packed form of a weight [width, reduce]: panels of 64 columns; pairs of elements but in FP32."""
    rows = reduce if dtype is DType.FP32 else 2 * -(-reduce // 2)
    return -(-width // PANEL) * rows * PANEL * dtype.nbytes


def tensor_bytes(weight: WeightSpec, storage: DType, trained: bool, input_gradient: bool) -> TensorBytes:
    """Bytes of one unsplit tensor.

    Args:
        input_gradient: gradients flow through it to what lies below.
    """
    size = math.prod(weight.shape)
    state = {}
    if trained:
        tied_head = weight.kind == "embedding" and weight.out_leaf_size > 0
        sums = max(1, weight.head_leaves) + tied_head
        state = {"master": FP32 * size, "moments": 2 * FP32 * size, "gradient": sums * FP32 * size}
    if weight.kind == "buffer":
        return TensorBytes(FP32 * size)
    if weight.kind == "heads":
        assert weight.head_parts is not None
        heads, *parts = weight.head_parts
        reduce = weight.shape[1]
        both = [panel_bytes(part, reduce, storage) + panel_bytes(reduce, part, storage) for part in parts]
        return TensorBytes(storage.nbytes * size + heads * sum(both), **state)
    rows = 0 if weight.kind == "matrix" else storage.nbytes * size
    if weight.kind == "vector" or (weight.kind == "embedding" and not weight.out_leaf_size):
        return TensorBytes(rows, **state)
    (width, reduce), fp8 = weight.shape, weight.fp8
    transposed = DType.FP8 if fp8 is not None and fp8.gradients else storage
    turned = panel_bytes(reduce, width, transposed) if input_gradient else 0
    forward = rows + panel_bytes(width, reduce, storage if fp8 is None else DType.FP8)
    if fp8 is None:
        return TensorBytes(forward, transposed=turned, **state)
    scales = SCALE_BYTES * math.prod(-(-side // BLOCK) for side in weight.shape)
    return TensorBytes(forward, scales, turned, 0 if trained else storage.nbytes * size, **state)


@functools.lru_cache(maxsize=4)
def _specs(spec: ModelSpec, numerics: Numerics) -> dict[str, WeightSpec]:
    """The model's tensors; tens of thousands, which plans of one model ask for again and again."""
    return spec.weight_specs(numerics)


def trained_names(spec: ModelSpec, numerics: Numerics, patterns: Sequence[str]) -> set[str]:
    """Names of the tensors that `Decoder.set_trainable` trains: buffers never."""
    names = [name for name, weight in _specs(spec, numerics).items() if weight.kind != "buffer"]
    return select_trainable(names, patterns, spec.num_layers)


def weight_bytes(spec: ModelSpec, numerics: Numerics, patterns: Sequence[str], layout: Layout) -> dict[str, int]:
    """Bytes of a decoder's weights and of what trains them, on one device, by the names of `TensorBytes`' fields.

    Args:
        patterns: tensors to train (`select_trainable`); none for a decoder that a trainer only scores with.
    """
    specs = _specs(spec, numerics)
    trained = trained_names(spec, numerics, patterns)
    through = set(input_gradients(specs, trained, spec.num_layers))
    sums = dict.fromkeys((field.name for field in dataclasses.fields(TensorBytes)), 0)
    # Equal tensors are counted together: experts are tens of thousands of a few kinds.
    kinds: dict[tuple, list[WeightSpec]] = {}
    for name, weight in specs.items():
        stack = None if weight.stack is None else weight.stack[2]
        cuts = (weight.in_leaves, weight.out_leaves, weight.out_leaf_size, weight.head_leaves, weight.head_parts, stack)
        key = (weight.shape, weight.kind, weight.fp8, cuts, name in trained, name in through)
        kinds.setdefault(key, []).append(weight)
    for (*_, is_trained, is_through), alike in kinds.items():
        found = tensor_bytes(alike[0], numerics.storage, is_trained, is_through)
        ranks = layout.ranks_of(alike[0], numerics)
        for name in sums:
            sums[name] += len(alike) * -(-getattr(found, name) // ranks)
    # Sums of several bins exist at a time (train.bins): as many as a binary counter over this rank's bins has digits.
    bins = -(-numerics.grad_bins // layout.dp)
    sums["gradient"] *= bins.bit_length()
    return sums


# ---------------------------------------------------------------------------------------------------- activations


@dataclasses.dataclass(frozen=True)
class Saved:
    """What one op keeps of each token for its backward.

    Attributes:
        weights: ends of the names of the tensors that it applies; gradients are recorded from the first trained one on.
        elements: numbers in the storage dtype.
        extra: bytes of anything else.
    """

    weights: tuple[str, ...]
    elements: int
    extra: int = 0


def saved_by_layer(spec: ModelSpec, numerics: Numerics, layer: int, layout: Layout) -> list[Saved]:
    """Per token, in the order in which a decoder layer computes.

    The residual stream and its norm are whole on every rank; what lies between a split projection and the next is not.
    """
    attention = _saved_attention if spec.mla is None else _saved_latent
    return [
        Saved(("input_layernorm.weight",), spec.hidden_size),
        *attention(spec, numerics, layout),
        Saved(("o_proj.weight", "o_proj.bias"), 0),  # its input is attention's result
        Saved(("post_attention_layernorm.weight",), spec.hidden_size),
        *(_saved_experts if _is_routed(spec, layer) else _saved_mlp)(spec, numerics, layout),
    ]


def _is_routed(spec: ModelSpec, layer: int) -> bool:
    return spec.moe is not None and layer not in spec.moe.dense_layers


def _saved_attention(spec: ModelSpec, numerics: Numerics, layout: Layout) -> list[Saved]:
    ranks = math.gcd(layout.tp, numerics.head_leaves(spec.num_heads, spec.q_width))
    kv_ranks = math.gcd(layout.tp, numerics.head_leaves(spec.num_kv_heads, spec.kv_width))
    q, kv = spec.q_width // ranks, spec.kv_width // kv_ranks
    projections = tuple(f"{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias"))
    return [
        Saved(projections, spec.hidden_size),
        Saved(("q_norm.weight", "k_norm.weight"), q + kv if spec.qk_norm else 0),
        Saved((), 2 * q + 2 * kv, FP32 * spec.num_heads // ranks),  # q, k, v, the result, and the log-sum-exp
    ]


def _saved_latent(spec: ModelSpec, numerics: Numerics, layout: Layout) -> list[Saved]:
    assert spec.mla is not None
    sizes, compressed = spec.mla.sizes, spec.mla.q_rank
    heads = sizes.num_heads // math.gcd(layout.tp, spec.mla.leaves(numerics))
    # Of each head: q, q in the latent's terms, its rotated part, the mixed latent, the result; of the row: the latent
    # before and after its norm, and the rotated key.
    head = 2 * (sizes.nope + sizes.rope) - sizes.nope + 2 * sizes.latent + sizes.value
    down = ("q_proj.weight", "q_a_proj.weight", "q_a_proj.bias", "kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias")
    return [
        Saved(down, spec.hidden_size),
        Saved(("q_a_layernorm.weight",), compressed or 0),
        Saved(("q_b_proj.weight",), compressed or 0),
        Saved(
            ("kv_a_layernorm.weight", "kv_b_proj.weight"), heads * head + 2 * sizes.latent + sizes.rope, FP32 * heads
        ),
    ]


def _saved_mlp(spec: ModelSpec, numerics: Numerics, layout: Layout) -> list[Saved]:
    inner = _split_width(spec.intermediate_size, numerics, layout)
    return [
        Saved(("gate_proj.weight", "up_proj.weight"), spec.hidden_size),
        Saved(("down_proj.weight",), 3 * inner),  # gate, up and their product
    ]


def _saved_experts(spec: ModelSpec, numerics: Numerics, layout: Layout) -> list[Saved]:
    """One op: its input, the router's logits, choices, weights and order, gate, up and output of each expert's row, and
    gate and up of the shared experts. Ranks that share experts hold as many rows as their tokens have, on average."""
    assert spec.moe is not None
    k, shared = spec.moe.top_k, _split_width(spec.moe.shared_size, numerics, layout)
    rows = k * (2 * spec.moe.expert_size + spec.hidden_size)
    ends = ("gate.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight")
    return [Saved(ends, spec.hidden_size + rows + 2 * shared, FP32 * (spec.moe.num_experts + 4 * k))]


def _split_width(inner: int, numerics: Numerics, layout: Layout) -> int:
    """Inner size of an MLP on one rank."""
    return inner // math.gcd(layout.tp, numerics.axis_leaves(inner)) if inner else 0


def activation_bytes(
    spec: ModelSpec, numerics: Numerics, trained: Sequence[str], layout: Layout, tokens: int, recompute: bool
) -> int:
    """Bytes that autograd keeps of a forward pass over `tokens` tokens, each of them a completion token at worst.

    Nothing is kept below the first trained tensor. With `recompute`, blocks keep their two inputs, and one block at a
    time is computed again.
    """
    storage, hidden = numerics.storage.nbytes, spec.hidden_size
    recorded = "model.embed_tokens.weight" in trained
    by_layer: dict[int, list[str]] = {}
    for name in trained:
        if (layer := layer_of(name)) is not None:
            by_layer.setdefault(layer, []).append("." + name)
    kept, largest = 0, 0
    for layer in range(spec.num_layers):
        ours, inside = by_layer.get(layer, []), 0
        for saved in saved_by_layer(spec, numerics, layer, layout):
            ends = tuple("." + end for end in saved.weights)
            recorded = recorded or any(name.endswith(ends) for name in ours)
            inside += (storage * saved.elements + saved.extra) * recorded
        if recompute and recorded:
            kept += storage * hidden * (2 if layer else 1)
            largest = max(largest, inside)
        else:
            kept += inside
    recorded = recorded or "model.norm.weight" in trained
    kept += storage * hidden * recorded  # the residual stream below the last norm
    recorded = recorded or "lm_head.weight" in trained
    return tokens * (kept + largest + storage * hidden * recorded)  # and the rows of the head


def _workspace(spec: ModelSpec, numerics: Numerics, layout: Layout, tokens: int) -> tuple[int, int]:
    """(bytes of the head's pass over its rows, most bytes of any other op's backward): upper estimates."""
    storage, hidden = numerics.storage.nbytes, spec.hidden_size
    vocab_leaves = -(-spec.vocab_size // numerics.vocab_leaf_size(spec.vocab_size))
    vocab = spec.vocab_size // math.gcd(layout.tp, vocab_leaves)
    head = HEAD_ROWS * (vocab * (FP32 + 2 * storage) + hidden * storage) + tokens * hidden * storage
    # Gradients of its wide side beside what was saved of it, a residual's gradient and an operand of a weight gradient.
    most = storage * (max(_widths(spec, numerics, layout)) + 2 * hidden)
    if (
        spec.moe is not None
    ):  # sorted rows and their gradients: of the output, of gate, up and inner, of the input in FP32
        quantised = 2 * (numerics.linear_grad is DType.FP8)
        row = storage * (2 * hidden + (3 + quantised) * spec.moe.expert_size) + FP32 * hidden
        most = max(most, spec.moe.top_k * row + (storage + FP32) * hidden)
    return head, tokens * most


def _widths(spec: ModelSpec, numerics: Numerics, layout: Layout) -> list[int]:
    """Elements per token on the wide side of each kind of projection."""
    widths = [2 * _split_width(spec.intermediate_size, numerics, layout)]
    if spec.mla is None:
        return [*widths, spec.q_width + 2 * spec.kv_width]
    sizes = spec.mla.sizes
    return [*widths, sizes.num_heads * (sizes.nope + 2 * sizes.rope + 2 * sizes.latent)]


# ---------------------------------------------------------------------------------------------------- the run


def kv_cache_bytes(spec: ModelSpec, config: RunConfig) -> int:
    """Bytes of the engine's cache: whole pages, no more than twice what all sequences at full length need."""
    rollout = config.rollout
    page = sum(kv_bytes(spec, config.rollout_contract())) * rollout.page_size
    most = 2 * rollout.max_sequences * -(-sequence_tokens(config) // rollout.page_size)
    return min(int(rollout.kv_cache_memory * 2**30) // page, most) * page


def sequence_tokens(config: RunConfig) -> int:
    """Longest sequence of a run, in tokens."""
    return config.data.max_prompt_length + config.rollout.max_completion_length


def memory_plan(spec: ModelSpec, config: RunConfig, layout: Layout = Layout()) -> MemoryPlan:
    """What the recipe takes on each device of a layout; of one process, if none is given.

    Raises:
        ConfigError: a pattern of `trainable` or of the contract that matches nothing, or a layout that the model does
            not have.
    """
    layout.require(spec)
    numerics, rollout = config.contract(), config.rollout
    trained = sorted(trained_names(spec, numerics, config.trainable))
    weights = weight_bytes(spec, numerics, config.trainable, layout)
    tokens, recompute = config.optimizer.micro_batch_tokens, config.optimizer.activation_recompute
    kept, other = (
        activation_bytes(spec, numerics, trained, layout, tokens, chosen) for chosen in (recompute, not recompute)
    )
    head, workspace = _workspace(spec, numerics, layout, tokens)
    pages = tokens // KV_PAGE + -(-tokens // sequence_tokens(config))
    parts = [
        Part("weights", weights["forward"], "as forward passes read them"),
        Part("FP8 scales", weights["scales"], "of blocks of 128 x 128"),
        Part("published copies", weights["published"], "BF16 values of FP8 matrices that are not trained"),
        Part("transposed weights", weights["transposed"], "packed again for input gradients"),
        Part("masters", weights["master"], "FP32, of trained tensors"),
        Part("moments", weights["moments"], "two of AdamW, FP32"),
        Part("gradients", weights["gradient"], f"FP32, {numerics.grad_bins} bin{'s' * (numerics.grad_bins > 1)}"),
        Part("reference model", _reference_copy(spec, config, layout), "weights for the KL (algorithm.beta)"),
        Part("rollout's weights", _rollout_copy(spec, config, layout), "one-sided: a copy under rollout.numerics"),
        Part("KV cache", kv_cache_bytes(spec, config), "whole pages of rollout.kv_cache_memory; taken as used"),
        Part("engine buffers", _engine_bytes(spec, config, layout), f"{rollout.max_batch_tokens:,} tokens; estimate"),
        Part("RoPE table", FP32 * sequence_tokens(config) * spec.rope_dim, "cosines and sines"),
        Part("scratch pages", pages * KV_PAGE * codec_of(spec, numerics).bytes_per_token(), "KV of one layer"),
        Part("activations", kept, f"{tokens:,} tokens of a micro-batch" + ", recomputed" * recompute),
        Part("logits", head, f"{HEAD_ROWS} rows at a time, forward and backward; estimate"),
        Part("workspace", workspace, "of the largest op's backward; estimate"),
    ]
    return MemoryPlan(tuple(part for part in parts if part.bytes), other, tuple(trained))


def _reference_copy(spec: ModelSpec, config: RunConfig, layout: Layout) -> int:
    """A decoder that a trainer only scores with."""
    return sum(weight_bytes(spec, config.contract(), (), layout).values()) if config.algorithm.beta else 0


def _rollout_copy(spec: ModelSpec, config: RunConfig, layout: Layout) -> int:
    """The decoder that a one-sided rollout samples from; it has no input gradients at all."""
    if not config.one_sided:
        return 0
    found = weight_bytes(spec, config.rollout_contract(), (), layout)
    return sum(found.values()) - found["transposed"]


def _engine_bytes(spec: ModelSpec, config: RunConfig, layout: Layout) -> int:
    """Buffers of the recorded forward at its largest step, and the logits of its rows: an upper estimate."""
    numerics, rollout = config.rollout_contract(), config.rollout
    per_token = 5 * spec.hidden_size + 2 * sum(_widths(spec, numerics, layout))
    if spec.moe is not None:
        per_token += spec.moe.top_k * (2 * spec.hidden_size + 3 * spec.moe.expert_size)
    drafts = min(DRAFT_ROWS, rollout.max_sequences * rollout.speculation.draft_tokens)
    logits = min(rollout.max_batch_tokens, rollout.max_sequences + drafts) * spec.vocab_size * FP32
    return rollout.max_batch_tokens * per_token * numerics.storage.nbytes + logits
