"""The trainer's half of the head: log-probs and entropies of given tokens, without ever holding all logits.

Formula and orders are those of ops/sampling.py, by the same kernel over the same logits, so the log-prob of a sampled
token has the sampler's bits. T = 0 scores the untempered distribution. Logits of 128 rows at most exist at a time: the
forward keeps maximum, sum and kept rule per row, the backward computes each block's logits again (same bits) and

    dlogits_i = (d_logp (1{i = target} - p_i) - d_entropy p_i (logp_i + H)) / T,   FP32, rounded once to storage

(+0 for excluded ids; a row whose two derivatives are zero is +0). Then dX = dlogits W over the vocabulary leaves, and
dW is added to the weight's open accumulator by blocks of 128 rows.

Those blocks are 128 consecutive *output rows of one pack*, ascending, the pack's last block ragged; a pack's output
rows are the entries of `context.output_rows` that lie in it. They depend on the pack alone, so dW depends on the packs
of the bin in their order, never on how packs are grouped into micro-batches. Other results depend on their row alone.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from zerogap.errors import ConfigError
from zerogap.ops import gemm, tap
from zerogap.ops.cpu import gemm as native_gemm
from zerogap.ops.cpu import library
from zerogap.ops.cpu import logprob as native
from zerogap.ops.handle import WeightHandle
from zerogap.ops.sampling import SamplingRows
from zerogap.types import ForwardContext, Sample

GRAD_BLOCK = 128  # rows of a weight-gradient block (Numerics.grad_block)
MAX_ROWS = 128  # rows of logits that exist at a time; twice as many cost more in fresh pages than they save in streams


@dataclasses.dataclass(eq=False)
class KeptSets:
    """What the rollout recorded of the kept sets of R rows, and, once materialised, the sets themselves.

    `token_logprobs` writes `mismatched`, and `words` where `materialise` asks for it; all else is written once.

    Attributes:
        counts, digests: int32 and uint64 [R]; the vocabulary's size and 0 where nothing was filtered.
        words: int64 [R, ceil(V / 64)], id i is bit i % 64 of word i / 64; None until materialised. With words the
            filters are not evaluated: a filtered row keeps exactly these ids.
        materialise: True to have the sets of the next forward written to `words`, for updates at other weights.
        mismatched: bool [R] where the set that was computed (or given as words) has another count or digest than the
            recorded one: a parity difference, to be reported like a differing log-prob.
    """

    counts: torch.Tensor
    digests: torch.Tensor
    words: torch.Tensor | None = None
    materialise: bool = False
    mismatched: torch.Tensor | None = None

    @classmethod
    def of(cls, samples: Sequence[Sample], vocab: int, materialise: bool = False) -> "KeptSets":
        """The recorded sets of all completion tokens of `samples`, in order."""
        counts = [np.zeros(0, np.int32)]
        digests = [np.zeros(0, np.uint64)]
        for sample in samples:
            tokens = len(sample.completion_ids)
            if sample.kept_counts is not None and sample.kept_digests is not None:
                counts.append(sample.kept_counts)
                digests.append(sample.kept_digests)
            else:
                counts.append(np.full(tokens, vocab, np.int32))
                digests.append(np.zeros(tokens, np.uint64))
        return cls(
            torch.from_numpy(np.concatenate(counts)), torch.from_numpy(np.concatenate(digests)), materialise=materialise
        )

    def __len__(self) -> int:
        return len(self.counts)


def row_blocks(context: ForwardContext, rows: int) -> Iterator[tuple[int, int, list[int]]]:
    """Consecutive runs (start, stop, block borders from 0) of whole weight-gradient blocks, `MAX_ROWS` rows at most."""
    if context.pack_starts is None:
        starts = [0, rows]
    elif context.output_rows is None:
        starts = context.pack_starts.tolist()
    else:
        starts = torch.searchsorted(context.output_rows, context.pack_starts.to(torch.int64)).tolist()
    assert starts[0] == 0 and starts[-1] == rows, f"packs cover output rows {starts[0]}..{starts[-1]} of {rows}"
    borders = [0]
    for begin, end in itertools.pairwise(starts):
        borders += [*range(begin + GRAD_BLOCK, end, GRAD_BLOCK), end] if end > begin else []
    first = 0
    while first + 1 < len(borders):
        last = first + 1
        while last + 1 < len(borders) and borders[last + 1] - borders[first] <= MAX_ROWS:
            last += 1
        yield borders[first], borders[last], [b - borders[first] for b in borders[first : last + 1]]
        first = last


class _Rows:
    """Per-row results of a forward (float32 [R], rules int32 [R, 4]); the backward needs all but the log-probs."""

    def __init__(self, rows: int) -> None:
        self.logp, self.entropy, self.maximum, self.sum = (torch.empty(rows) for _ in range(4))
        self.rules = torch.empty((rows, native.RULE_WORDS), dtype=torch.int32)


def _forward(
    hidden: torch.Tensor,
    weight: WeightHandle,
    targets: torch.Tensor,
    sampling: SamplingRows,
    kept: KeptSets | None,
    context: ForwardContext,
) -> _Rows:
    rows, vocab, leaf_size = len(hidden), weight.spec.shape[0], weight.spec.out_leaf_size
    result = _Rows(rows)
    given = kept.words if kept is not None else None
    written = None
    if kept is not None:
        kept.mismatched = torch.zeros(rows, dtype=torch.bool)
        if kept.materialise and given is None:
            written = torch.zeros((rows, -(-vocab // 64)), dtype=torch.int64)
    for start, stop, _ in row_blocks(context, rows):
        part = slice(start, stop)
        logits = gemm.head_logits(hidden[part], weight)
        out, maximum, total = native.logprob(
            logits,
            targets[part],
            sampling.slice(start, stop).tensors,
            leaf_size,
            None if given is None else given[part],
            None if written is None else written[part],
        )
        result.logp[part], result.entropy[part], result.rules[part] = out.logp, out.entropy, out.rules
        result.maximum[part], result.sum[part] = maximum, total
        if kept is not None:
            assert kept.mismatched is not None
            digests = kept.digests[part].view(torch.int64)
            kept.mismatched[part] = (out.count != kept.counts[part]) | (out.digest.view(torch.int64) != digests)
    if kept is not None and written is not None:
        kept.words = written
    return result


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, anchor, weight, targets, sampling, kept, context):  # type: ignore[no-untyped-def]
        ctx.words = kept.words if kept is not None else None
        rows = _forward(hidden, weight, targets, sampling, kept, context)
        # The entropy is an output, which as a plain attribute would keep the whole graph alive for ever.
        ctx.save_for_backward(hidden, rows.entropy)
        ctx.rules, ctx.maximum, ctx.sum = rows.rules, rows.maximum, rows.sum
        ctx.weight, ctx.targets, ctx.sampling, ctx.context = weight, targets, sampling, context
        return rows.logp, rows.entropy

    @staticmethod
    def backward(ctx, d_logp, d_entropy):  # type: ignore[no-untyped-def]
        hidden, entropy = ctx.saved_tensors
        weight = ctx.weight
        d_logp, d_entropy = d_logp.contiguous(), d_entropy.contiguous()
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start, stop, borders in row_blocks(ctx.context, len(hidden)):
            part = slice(start, stop)
            d_logits = native.logprob_grad(
                gemm.head_logits(hidden[part], weight),
                ctx.targets[part],
                ctx.sampling.temperature[part],
                ctx.rules[part],
                None if ctx.words is None else ctx.words[part],
                (ctx.maximum[part], ctx.sum[part], entropy[part]),
                d_logp[part],
                d_entropy[part],
                weight.spec.out_leaf_size,
                hidden.dtype,
            )
            if d_hidden is not None:
                d_hidden[part] = gemm.head_input_grad(d_logits, weight)
            if weight.trainable:
                accumulator = weight.head_grad if weight.is_tied_head else weight.grad
                assert accumulator is not None, f"{weight.spec.name}: no gradient bin is open"
                packs = torch.tensor(borders, dtype=torch.int32)
                native_gemm.weight_grad(d_logits, hidden[part], packs, accumulator)
        return d_hidden, None, None, None, None, None, None


def token_logprobs(
    hidden: torch.Tensor,
    weight: WeightHandle,
    targets: torch.Tensor,
    sampling: SamplingRows,
    kept: KeptSets | None,
    context: ForwardContext,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of `targets` and entropies under the sampling parameters (formula above), with autograd.

    Args:
        hidden: [R, H] storage dtype, final-normed, one row per completion token in context order.
        weight: the head (or tied embedding), `spec.shape` [V, H].
        targets: int64 [R].
        sampling: parameters of R rows.
        kept: recorded kept sets of R rows, or None where there are none to verify (the filters are then evaluated on
            this pass's own logits).
        context: for `pack_starts` and `output_rows`, which cut the weight-gradient blocks.

    Returns:
        (logp, entropy), float32 [R]. NaN where a logit is NaN or infinite; -inf where the target is not kept.

    Raises:
        ConfigError: a target that is no id of the vocabulary.
    """
    rows, vocab = len(hidden), weight.spec.shape[0]
    assert not library.recording(), "token_logprobs is the trainer's: it is never recorded"
    assert hidden.dim() == 2 and len(targets) == len(sampling) == rows, "one target and one set of parameters per row"
    assert kept is None or len(kept) == rows, "one kept set per row"
    outside = (targets < 0) | (targets >= vocab)
    if outside.any():
        wrong = int(outside.nonzero()[0, 0])
        raise ConfigError(f"targets[{wrong}]", int(targets[wrong]), f"give an id from 0 to {vocab - 1}")
    hidden, targets = hidden.contiguous(), targets.contiguous()
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.anchor.requires_grad):
        logp, entropy = _TokenLogprobs.apply(hidden, weight.anchor, weight, targets, sampling, kept, context)
    else:
        result = _forward(hidden, weight, targets, sampling, kept, context)
        logp, entropy = result.logp, result.entropy
    tap.observe("token_logprobs", {"logp": logp, "entropy": entropy}, {"weight": weight.spec.name})
    return logp, entropy
