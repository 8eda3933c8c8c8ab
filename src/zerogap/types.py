"""The few objects and protocols that cross package borders.

Everything a rollout hands to a trainer is a `Sample`; everything one forward pass needs besides ids and weights is a
`ForwardContext`; whoever splits a reduction over ranks implements `Exchange`. Objects are frozen; arrays inside them
are never written after construction, except where a comment says who writes them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Protocol

import numpy as np
import torch

from zerogap.errors import ConfigError
from zerogap.moments import Moments
from zerogap.numerics import DType
from zerogap.routing import RoutingSink, RoutingTrace


@dataclasses.dataclass(frozen=True)
class Identity:
    """What decides bits: contract fingerprint, backend class (`cpu/avx512bf16`), hash of the kernel build."""

    contract: str
    backend: str
    build: str

    def __str__(self) -> str:
        return f"{self.contract}@{self.backend}#{self.build}"


# ---------------------------------------------------------------------------------------------------- sampling


@dataclasses.dataclass(frozen=True)
class SamplingKey:
    """Names a random stream; with the position in the completion it keys one 64-bit Philox draw.

    Two samples never share a key: `prompt` is the slot of the prompt in its step's global batch, `attempt` counts
    deliberate re-draws of that prompt, `sample` the group member. A re-issue after a failure keeps its key.
    """

    seed: int = 0
    step: int = 0
    prompt: int = 0
    attempt: int = 0
    sample: int = 0


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. Nothing is ever inherited from a model folder's generation_config.json.

    Attributes:
        temperature: logits are divided by it (FP32) before everything else; 0 is greedy and records the untempered
            log-prob.
        top_k, top_p, min_p: kept-set filters in that order; 0, 1.0 and 0.0 switch them off.
        max_tokens: most completion tokens.
        stop_token_ids: ids that end a completion (the id stays in the sample, with its own log-prob). None means the
            model's own end-of-sequence ids.
        stop: strings that end a completion once the decoded text contains one.
        min_tokens: a stop before this many tokens is ignored.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    min_tokens: int = 0

    def __post_init__(self) -> None:
        def refuse(name: str, mend: str) -> None:
            raise ConfigError(f"sampling.{name}", getattr(self, name), mend)

        if not 0.0 <= self.temperature < float("inf"):
            refuse("temperature", "choose 0 (greedy) or a positive number")
        if 0.0 < self.temperature < 1e-3:
            refuse("temperature", "choose 0 for greedy decoding, or at least 0.001")
        if self.top_k < 0:
            refuse("top_k", "choose 0 (off) or a positive number of ids")
        if not 0.0 < self.top_p <= 1.0:
            refuse("top_p", "choose a number in (0, 1]")
        if not 0.0 <= self.min_p <= 1.0:
            refuse("min_p", "choose a number in [0, 1]")
        if self.max_tokens < 1:
            refuse("max_tokens", "choose at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            refuse("min_tokens", "choose a number from 0 to max_tokens")

    @property
    def filters(self) -> bool:
        """True if some ids may be excluded, so that the kept set has to be recorded."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """One prompt with one completion, as the rollout produced it.

    Attributes:
        prompt_ids, completion_ids: int32; exactly what the model read and drew (never decoded and re-encoded).
        logprobs: float32 [C], natural log of the probability of each completion token at the time it was drawn, under
            `params` (temperature and kept set applied).
        versions: int64 [C], weight version per token: the oldest version of any cache entry the token's forward read.
        identity: what computed the log-probs.
        key, params: the sampling key and parameters.
        finish_reason: `stop` (stop id or string), `length` or `abort`.
        kept_counts: int32 [C] ids kept by the filters, or None when all are kept.
        kept_digests: uint64 [C] digest of each kept set, or None.
        scale_set: name of the KV scale set; None for unscaled caches.
        text: the decoded completion, for people and reward functions only.
        routing: what the routers of a mixture-of-experts model chose, where that was asked for.
    """

    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    identity: Identity
    key: SamplingKey
    params: SamplingParams
    finish_reason: str
    kept_counts: np.ndarray | None = None
    kept_digests: np.ndarray | None = None
    scale_set: str | None = None
    text: str = ""
    routing: RoutingTrace | None = None

    def __post_init__(self) -> None:
        c = len(self.completion_ids)
        assert len(self.logprobs) == c == len(self.versions), "one log-prob and one weight version per completion token"
        assert self.finish_reason in ("stop", "length", "abort"), f"unknown finish reason {self.finish_reason!r}"

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


# ---------------------------------------------------------------------------------------------------- training


@dataclasses.dataclass(frozen=True, eq=False)
class TokenRows:
    """The completion tokens of one micro-batch, T rows; all a loss may look at.

    Attributes:
        sample: int64 [T] index of the token's sample in the global `TrainBatch`.
        position: int64 [T] index of the token in its completion.
        logp: float32 [T] log-probs by the trainer, at the weights being trained, under the sampling parameters.
        entropy: float32 [T] entropy of the distribution each token was drawn from, by the trainer.
        rollout_logp: float32 [T] log-probs recorded when the tokens were drawn.
        old_logp: float32 [T] log-probs that the ratio of the loss divides by (the rollout's, unless stated otherwise).
        ref_logp: float32 [T] log-probs by the reference model, or None.
        advantage: float64 [T].
        mask: bool [T] True where the token takes part in the loss (*live*).
        current: bool [T] True where the rollout drew the token at the weight version the trainer has now, so that
            `logp` and `rollout_logp` must be the same bits.
        weights: float64 [T] factor of each token's surrogate (a correction's importance weight), or None for 1.
        rejected: bool [T] True where a correction took the token out of `mask`, or None for nowhere.
    """

    sample: np.ndarray
    position: np.ndarray
    logp: np.ndarray
    entropy: np.ndarray
    rollout_logp: np.ndarray
    old_logp: np.ndarray
    ref_logp: np.ndarray | None
    advantage: np.ndarray
    mask: np.ndarray
    current: np.ndarray
    weights: np.ndarray | None = None
    rejected: np.ndarray | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            assert value is None or value.shape == self.sample.shape, f"{field.name}: one number per completion token"
        for name in ("logp", "entropy", "rollout_logp", "old_logp"):
            assert getattr(self, name).dtype == np.float32, f"{name} must be float32, not {getattr(self, name).dtype}"


@dataclasses.dataclass(frozen=True, eq=False)
class TrainBatch:
    """The global batch of one update: S samples in global-batch order, with what the loss needs to know of each.

    Attributes:
        samples: the samples; a sample without completion tokens contributes nothing.
        advantages, token_advantages: float64 [S]; where tokens of a sample differ, also float64 [C] per sample.
        masks: bool [C] per sample; True where a completion token takes part in the loss.
        old_logprobs: float32 [C] per sample, or None for the rollout's own.
        ref_logprobs: float32 [C] per sample by the reference model, or None when the loss has no KL term.
        weights, rejected: float64 [C] and bool [C] per sample, as in `TokenRows` (`rl.correction.correct`), or None.
    """

    samples: tuple[Sample, ...]
    advantages: np.ndarray
    masks: tuple[np.ndarray, ...]
    old_logprobs: tuple[np.ndarray, ...] | None = None
    ref_logprobs: tuple[np.ndarray, ...] | None = None
    weights: tuple[np.ndarray, ...] | None = None
    rejected: tuple[np.ndarray, ...] | None = None
    token_advantages: tuple[np.ndarray, ...] | None = None

    def __post_init__(self) -> None:
        lengths = [len(s.completion_ids) for s in self.samples]
        assert len(self.advantages) == len(lengths), "one advantage per sample"
        for name in ("masks", "old_logprobs", "ref_logprobs", "weights", "rejected", "token_advantages"):
            value = getattr(self, name)
            assert value is None or [len(v) for v in value] == lengths, f"{name}: one number per completion token"

    def rows(self, indices: Sequence[int], logp: np.ndarray, entropy: np.ndarray, version: int) -> TokenRows:
        """The completion tokens of the named samples, concatenated in the order given.

        Args:
            indices: sample indices of one micro-batch.
            logp, entropy: float32 [T] by the trainer, in the same order.
            version: the trainer's weight version.
        """

        def column(per_sample: Sequence[np.ndarray], dtype: type) -> np.ndarray:
            return np.concatenate([np.zeros(0, dtype), *(np.asarray(per_sample[i], dtype) for i in indices)])

        lengths = np.array([len(self.samples[i].completion_ids) for i in indices], np.int64)
        rollout = column([s.logprobs for s in self.samples], np.float32)
        sample, own = np.repeat(np.asarray(indices, np.int64), lengths), self.token_advantages
        return TokenRows(
            sample=sample,
            position=np.concatenate([np.zeros(0, np.int64), *(np.arange(n) for n in lengths)]),
            logp=logp,
            entropy=entropy,
            rollout_logp=rollout,
            old_logp=rollout if self.old_logprobs is None else column(self.old_logprobs, np.float32),
            ref_logp=None if self.ref_logprobs is None else column(self.ref_logprobs, np.float32),
            advantage=np.asarray(self.advantages, np.float64)[sample] if own is None else column(own, np.float64),
            mask=column(self.masks, np.bool_),
            current=column([s.versions for s in self.samples], np.int64) == version,
            weights=None if self.weights is None else column(self.weights, np.float64),
            rejected=None if self.rejected is None else column(self.rejected, np.bool_),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Denominators:
    """Counts over the live tokens of the whole global batch, taken before any micro-batch runs.

    Attributes:
        tokens: live tokens in the batch.
        sequences: samples with at least one live token.
        sample_tokens: int64 [S] live tokens per sample.
    """

    tokens: int
    sequences: int
    sample_tokens: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class LossResult:
    """What a loss says about one micro-batch.

    Attributes:
        loss: this micro-batch's exact share of the global loss; add over micro-batches, then take `float()`.
        dlogp: float32 [T] derivative of the global loss by each token's log-prob; +0 where the token is not live.
        dentropy: float32 [T] derivative by each token's entropy, or None when the loss does not depend on it.
        metrics: moments by name, over live tokens; combine micro-batches with `pool`.
    """

    loss: Fraction
    dlogp: np.ndarray
    dentropy: np.ndarray | None
    metrics: Mapping[str, Moments]


class Loss(Protocol):
    """A training loss as a pure function of per-token numbers; gradients never depend on how rows are grouped."""

    def denominators(self, batch: TrainBatch) -> Denominators:
        """Counts over the whole global batch."""
        ...

    def __call__(self, rows: TokenRows, denominators: Denominators) -> LossResult:
        """Loss and derivatives for the rows of one micro-batch.

        Raises:
            NonFiniteError: a NaN or infinity at a live position; names sample and position.
        """
        ...


# ---------------------------------------------------------------------------------------------------- forward pass


@dataclasses.dataclass(frozen=True)
class ForwardContext:
    """Everything that one forward pass over T token rows needs besides ids and weights. Both sides build one.

    T rows are the concatenation of S sequences' consecutive tokens: rows of one sequence are adjacent and ascend by
    one position. `page_table[sequences[t], p // page_size]` is the page of absolute position p of row t's sequence.
    The engine's context lives in fixed buffers of its captured program, which the engine rewrites before each replay.

    Attributes:
        positions: int32 [T] absolute position in the sequence.
        sequences: int32 [T] row of `page_table`.
        page_table: int32 [S, P].
        page_size: tokens per page, a multiple of 16.
        output_rows: int64 [R] rows whose hidden state goes to the head; None means all T.
        sample_starts: int32 [S + 1] first row of each sequence, then T (trainer only: attention backward).
        pack_starts: int32 [B + 1] first row of each pack, then T (trainer only: weight-gradient blocks).
        routing: where routers write what they chose, or None.
        balance: coefficient of the routers' balance loss per sequence, divided by the number of sequences of the global
            batch (trainer only).
    """

    positions: torch.Tensor
    sequences: torch.Tensor
    page_table: torch.Tensor
    page_size: int
    output_rows: torch.Tensor | None = None
    sample_starts: torch.Tensor | None = None
    pack_starts: torch.Tensor | None = None
    routing: RoutingSink | None = None
    balance: float = 0.0


@dataclasses.dataclass(frozen=True)
class LayerKV:
    """Pages of one layer: raw storage whose layout belongs to the codec that made it (see `KVCodec`).

    Attributes:
        keys, values: pages, the page number first.
        key_scales, value_scales: FP32 scales of an FP8 codec (which says of what), None for any other.
        calibration: who is shown the keys and values before they are written, None: nobody.
    """

    keys: torch.Tensor
    values: torch.Tensor
    codec: "KVCodec"
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    calibration: "KVObserver | None" = None


class KVObserver(Protocol):
    """Learns how large keys and values get (`ops.kv_scales`)."""

    def observe(self, *kinds: torch.Tensor) -> None:
        """T rows of each kind that a codec stores: keys after RoPE and values; latents."""
        ...


class KVCodec(Protocol):
    """How keys and values stand in pages. Used by the engine's cache and by the trainer's scratch pages alike.

    Keys and values have separate layouts. Attention kernels read what `write` stored, the step that writes included,
    so a codec that rounds (FP8) rounds on both sides.
    """

    @property
    def name(self) -> str: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def kv_scale(self) -> str:
        """As in `Numerics`: `none`, `per_token_head` or `calibrated`."""
        ...

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Calibrated scales of a layer: kinds (keys and values; latents) and groups (KV heads; tiles)."""
        ...

    @property
    def scale_format(self) -> str: ...

    @property
    def attention_math(self) -> DType: ...

    def bytes_per_token(self) -> int:
        """Bytes of keys, values and scales per token and layer."""
        ...

    def allocate(self, num_pages: int, page_size: int, scales: tuple[torch.Tensor, ...] | None = None) -> LayerKV:
        """Zeroed pages for one layer; `scales` of each kind only where the codec takes calibrated ones."""
        ...


class Exchange(Protocol):
    """Combines reductions that a layout splits. Local identity by default; `parallel/` implements it over ranks.

    A rank owns a contiguous, tree-aligned run of leaves and hands in the FP32 sum of its subtree; what comes back is
    the FP32 sum of the whole fixed tree (adjacent pairs, an odd last one passes up), before any rounding.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def combine(self, subtree: torch.Tensor) -> torch.Tensor:
        """FP32 [M, N] subtree sum of this rank -> FP32 [M, N] sum over all ranks in tree order."""
        ...


@dataclasses.dataclass(frozen=True)
class LocalExchange:
    """The exchange of an unsplit layout: one rank owns every leaf."""

    rank: int = 0
    size: int = 1

    def combine(self, subtree: torch.Tensor) -> torch.Tensor:
        return subtree


LOCAL = LocalExchange()


# ---------------------------------------------------------------------------------------------------- weights


@dataclasses.dataclass(frozen=True)
class FP8Blocks:
    """How a matrix is quantised to E4M3 in blocks of 128 x 128.

    Attributes:
        scale_format: `fp32`, or `pow2` for scales rounded up to a power of two.
        gradients: operands of its input and weight gradients are quantised, too.
    """

    scale_format: str
    gradients: bool


@dataclasses.dataclass(frozen=True, eq=False)
class BlockCodes:
    """A matrix as a checkpoint stores it in FP8: value = grid value of the code * scale of its block.

    Attributes:
        codes: uint8 [N, K], E4M3.
        scales: FP32 [ceil(N / 128), ceil(K / 128)], one per block of 128 x 128 (a file's `*_scale_inv`).
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """What the numerics need to know of one named tensor of a checkpoint.

    Attributes:
        name: the checkpoint's own name (`model.layers.0.self_attn.q_proj.weight`).
        shape: logical, unsharded shape; matrices are [out, in].
        kind: `matrix` (packed for products), `embedding` (row lookup; packed too when tied to the head), `vector`,
            `heads` (a matrix that is used head by head, in two parts: `head_parts`), `buffer` (a vector that stays FP32
            and that no gradient trains).
        in_leaves: leaves of the forward reduction over the input axis (o_proj, down_proj; 1 elsewhere).
        out_leaves: leaves of the input gradient's reduction over the output axis (q, k, v, gate, up; 1 elsewhere).
        out_leaf_size: for the head: entries per vocabulary leaf (0 elsewhere).
        head_leaves: for query/key norm weights: leaves of the gradient's sum over heads, so that its accumulator is
            [head_leaves, head_dim] (0 elsewhere).
        fp8: how the tensor is quantised; None: it keeps the storage dtype.
        head_parts: of kind `heads`: (heads, rows of each head's first part, rows of its second part).
        stack: of an expert's matrix: (name of the stack that holds its packed form, index in it, size of the stack).
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    in_leaves: int = 1
    out_leaves: int = 1
    out_leaf_size: int = 0
    head_leaves: int = 0
    fp8: FP8Blocks | None = None
    head_parts: tuple[int, int, int] | None = None
    stack: tuple[str, int, int] | None = None

    def __post_init__(self) -> None:
        assert self.fp8 is None or self.kind == "matrix", f"{self.name}: only matrices are quantised"
        dimensions = {"matrix": 2, "embedding": 2, "heads": 2, "vector": 1, "buffer": 1}
        assert len(self.shape) == dimensions.get(self.kind), f"{self.name}: {self.kind} of shape {self.shape}"
        assert (self.kind == "heads") == (self.head_parts is not None), f"{self.name}: {self.kind}, {self.head_parts}"
        assert self.stack is None or self.kind == "matrix", f"{self.name}: only matrices are stacked"
