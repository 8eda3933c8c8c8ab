"""What each cause means and how it is mended, in words: shown by the terminal summary, the report page and
docs/diagnose.md, which lists exactly these.

A framework cause has words of its own. An operator cause is put together from what the operator is and from what the
field is, for a split reduction is the same thing wherever it happens.
"""

import dataclasses
from collections.abc import Mapping

from zerogap.diagnose.verdict import FRAMEWORK, OPERATORS, UNATTRIBUTED, Cause


@dataclasses.dataclass(frozen=True)
class Meaning:
    """One line each: what is wrong, and what to do about it."""

    text: str
    mend: str


FRAMEWORK_MEANINGS: Mapping[str, Meaning] = {
    "ids/template": Meaning(
        "the two sides rendered the prompt differently (chat template, system message, generation prompt)",
        "render once and hand token ids, not text, to the other side",
    ),
    "ids/tokens": Meaning(
        "the same text became other token ids, as when a completion is decoded and encoded again",
        "keep the sampled ids from the engine to the loss; never encode decoded text",
    ),
    "ids/special_tokens": Meaning(
        "a special token (BOS, EOS, padding) was added or dropped on one side",
        "switch automatic special tokens off where ids are made, and add them in one place",
    ),
    "definition/temperature": Meaning(
        "the log-probs are of distributions of two temperatures",
        "divide both sides' logits by the sampling temperature, or neither's",
    ),
    "definition/kept_set": Meaning(
        "one side renormalises over the tokens that top-k, top-p or min-p kept, the other over all or over another set",
        "sample with filters off, or score with the same filters",
    ),
    "definition/processed": Meaning(
        "one side records raw log-probs (the model's own), the other processed ones (after temperature and filters)",
        "ask the engine for processed log-probs (vLLM: logprobs_mode=processed_logprobs), or score raw on both sides",
    ),
    "definition/shift": Meaning(
        "entry i of one side belongs to token i-1 or i+1 of the other",
        "logits of position i score token i+1: drop the last logit and the first id",
    ),
    "definition/eos": Meaning(
        "the end-of-sequence token is counted, scored or masked on one side only",
        "agree on whether the token that ends a completion has a log-prob and is in the loss mask",
    ),
    "definition/wrong_token": Meaning(
        "the log-prob is of another token than the one drawn (the likeliest one, say)",
        "look the drawn id up in the engine's answer instead of taking the first entry",
    ),
    "definition/unit": Meaning(
        "the numbers are something else than natural log-probs (base 2 or 10, negated, plain probabilities)",
        "convert to natural logarithms of probabilities where they are recorded",
    ),
    "weights/missing": Meaning(
        "one side lacks a tensor that the other computes with, or left it as it was initialised",
        "load strictly: fail on missing and on unexpected names",
    ),
    "weights/stale": Meaning(
        "a tensor has other values on the two sides, as after an update that did not reach it",
        "send every parameter after every step and compare digests after the load",
    ),
    "weights/transposed": Meaning(
        "a matrix arrived transposed",
        "compare shapes and digests in the weight conversion; square matrices hide this",
    ),
    "weights/permuted": Meaning(
        "a tensor has the same rows or columns in another order (heads, fused QKV, RoPE halves)",
        "apply the inverse order in the weight conversion",
    ),
    "weights/swapped": Meaning(
        "two tensors were exchanged (gate and up, two layers, two experts)",
        "check the name mapping of the weight conversion",
    ),
    "weights/tied": Meaning(
        "output head and embedding are one tensor on one side and two on the other",
        "tie on both sides, or send the head as a tensor of its own",
    ),
    "weights/quantised": Meaning(
        "one side's values lie on an 8-bit grid: it loaded, or went through, quantised weights",
        "load both sides from the same source, or quantise both by the same function",
    ),
    "weights/dtype": Meaning(
        "the same values rounded to another dtype (FP32 masters against published BF16)",
        "let both sides compute with the published rounding",
    ),
    "weights/scaled": Meaning(
        "a tensor was multiplied by a constant (a LoRA factor, a merged scale)",
        "apply the factor on both sides, in the same place",
    ),
    "buffers/missing": Meaning(
        "a buffer (router bias, rotary frequencies, KV scales) exists on one side only",
        "send buffers with the weights; state_dict leaves non-persistent ones out",
    ),
    "buffers/stale": Meaning(
        "a buffer has other values on the two sides",
        "send buffers with the weights after every update",
    ),
    "buffers/dtype": Meaning(
        "a buffer holds the same values rounded to another dtype (rotary frequencies cast with the model, say)",
        "keep buffers in FP32 when the model is cast, on both sides",
    ),
    "cache/stale_weights": Meaning(
        "keys and values of older weights were used after an update",
        "drop the prefix cache and abort or recompute running requests when weights change",
    ),
    "cache/wrong_prefix": Meaning(
        "a prefix hit served keys and values of other tokens",
        "make the cache key hold all ids before the block, the weight version and the adapter",
    ),
    "cache/positions": Meaning(
        "cached keys were rotated for other positions",
        "key cached blocks by absolute position, or rotate when they are read",
    ),
    "cache/scales": Meaning(
        "the KV cache was quantised with other scales than it is read with",
        "store the name of the scale set with the cache and drop the cache when scales change",
    ),
    "rerun/nondeterministic": Meaning(
        "a side disagrees with itself on the same input (atomics, autotuning, dropout, a race)",
        "switch to deterministic kernels and evaluation mode; until then no other cause can be told from noise",
    ),
    "neighbours/batch_size": Meaning(
        "a sequence's numbers change with the number of rows in the batch: kernels are chosen by size",
        "use batch-invariant kernels, or pad the number of rows to one fixed size",
    ),
    "neighbours/row": Meaning(
        "a sequence's numbers change with its place in the batch",
        "use kernels whose tail rows are computed like the others",
    ),
    "neighbours/content": Meaning(
        "a sequence's numbers change with what its neighbours hold: rows leak into each other (shared scale, wrong "
        "mask, expert capacity)",
        "scale, mask and route per row; this is a bug of the side, not rounding",
    ),
    "neighbours/padding": Meaning(
        "a sequence's numbers change when padding joins the pass",
        "mask padding in attention, positions and routing, or pack without padding",
    ),
    "path/decode": Meaning(
        "a side's token-by-token pass disagrees with its own full pass",
        "use one attention and one set of kernels for prefill and decode, or score with the path that sampled",
    ),
    "path/chunked": Meaning(
        "a side's chunked prefill disagrees with its own full pass",
        "fix the chunk size, or use an attention whose blocks do not depend on the chunk",
    ),
    "path/prefix_hit": Meaning(
        "a sequence whose beginning came from the prefix cache disagrees with the same sequence computed whole",
        "switch prefix caching off to confirm, then check what the cached blocks were computed with",
    ),
    "path/speculative": Meaning(
        "tokens accepted from a draft have other log-probs than without speculation",
        "record the target model's log-prob of accepted tokens, computed as without a draft",
    ),
    "layout/ranks": Meaning(
        "tensor, expert or context parallel sizes change a reduction's order",
        "run both sides with the same layout, or exchange split reductions in one fixed order",
    ),
    "routing/near_tie": Meaning(
        "a tiny difference before the router sends tokens to other experts",
        "mend the difference that the further causes name, or replay the recorded routing",
    ),
}

OPERATOR_MEANINGS: Mapping[str, str] = {
    "embedding": "the lookup of token ids",
    "norm": "RMSNorm or LayerNorm, of the stream or of heads",
    "linear": "a matrix product with a weight",
    "rope": "the rotation of queries and keys by position",
    "attention": "scores, softmax and the weighted sum of values",
    "activation": "the gated activation of the MLP",
    "residual": "the addition into the residual stream",
    "router": "the scores and the choice of experts",
    "experts": "the experts' products and their combination",
    "head": "the product with the output head (final logits)",
    "logprob": "log-softmax over the vocabulary and the pick of the token",
}

FIELD_MEANINGS: Mapping[str, Meaning] = {
    "order": Meaning(
        "the same terms are added in another order (one chain, lanes, pairs, a tree, a ring)",
        "use kernels with one fixed order of addition on both sides",
    ),
    "split": Meaning(
        "the sum is cut into another number of parts, each added up alone (split-K, split KV)",
        "pin the number of splits; it must not depend on batch or sequence length",
    ),
    "primitive": Meaning(
        "another basic operation (fused multiply-add or not, exp2 for exp, rsqrt for a division, a dot instruction)",
        "use the same primitive, compiler flags and instruction set",
    ),
    "operands": Meaning(
        "inputs are rounded to another dtype before the operation (TF32, FP16, FP8)",
        "switch the low-precision mode off, or on for both sides",
    ),
    "accumulate": Meaning(
        "partial sums are kept in another dtype",
        "ask for FP32 accumulation, without reduced-precision reduction",
    ),
    "rounding": Meaning(
        "a rounding happens at another place (before or after the weight, the bias, the addition)",
        "round at the same points; a fused kernel usually leaves one out",
    ),
    "output": Meaning(
        "the result is stored in another dtype",
        "store in the same dtype on both sides",
    ),
    "formula": Meaning(
        "another function is computed (epsilon, factor, bias, kind of activation, missing term)",
        "compare the configs that the two sides were built from",
    ),
    "scale": Meaning(
        "another factor: of scores, of a quantiser, or of expert weights",
        "take the factor from one place, in one format (FP32 or power of two)",
    ),
    "block": Meaning(
        "values are quantised, or the softmax is cut, in blocks of another size",
        "use the same block size",
    ),
    "mask": Meaning(
        "another set of keys is visible (causal border, window, padding)",
        "compare masks at the first differing position",
    ),
    "positions": Meaning(
        "rows are rotated for other positions",
        "pass positions explicitly; padding must not shift them",
    ),
    "tie_rule": Meaning(
        "equal router scores are decided otherwise",
        "decide ties by the lower index on both sides",
    ),
}
ANY_FIELD = Meaning(
    "the operator computes other bits from equal inputs, but no known form reproduces them",
    "record the operator's inputs and weights on both sides, and compare the library calls by hand",
)
NOT_KNOWN = Meaning(
    "what was recorded does not show the cause",
    "record what the checks that could not be made ask for",
)


def meaning(cause: Cause) -> Meaning:
    """What a cause says in words."""
    if cause.subject in FRAMEWORK and cause.field != UNATTRIBUTED:
        return FRAMEWORK_MEANINGS[cause.name]
    if cause.subject in OPERATORS:
        field = ANY_FIELD if cause.field == UNATTRIBUTED else FIELD_MEANINGS[cause.field]
        return Meaning(f"{OPERATOR_MEANINGS[cause.subject]}: {field.text}", field.mend)
    return NOT_KNOWN
