"""Thin functions over the native log-prob kernels: mirrors of their argument structs, tensors in, tensors out."""

import ctypes
from ctypes import c_int32, c_int64, c_void_p

import torch

from zerogap.ops.cpu.library import Arguments, Operation, empty, pointer, submit

MAX_LEAVES = 64  # of the kernels; the contract allows eight
RULE_WORDS = 4  # int32 words of a KeptRule
LEAF_WORDS = 8  # int64 words of a LeafState


class VocabularyRows(ctypes.Structure):
    """Mirror of `zg::VocabularyRows` (kernels/logprob.h)."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "temperature", "top_k", "top_p", "min_p", "bits", "bits_out")),
        *((name, c_void_p) for name in ("leaves", "rules", "logp", "entropy", "count", "digest")),
        *((name, c_int64) for name in ("vocab", "leaf_size")),
    )


class LogprobArguments(Arguments):
    _fields_ = (
        ("rows", c_int64),
        ("v", VocabularyRows),
        *((name, c_void_p) for name in ("targets", "row_max", "row_sum")),
    )


class LogprobGradArguments(Arguments):
    _fields_ = (
        ("rows", c_int64),
        *((name, c_void_p) for name in ("logits", "temperature", "bits", "rules", "targets")),
        *((name, c_void_p) for name in ("row_max", "row_sum", "entropy", "d_logp", "d_entropy", "out")),
        *((name, c_int64) for name in ("vocab", "leaf_size")),
        ("storage", c_int32),
    )


LOGPROB = Operation("logprob", LogprobArguments)
LOGPROB_GRAD = Operation("logprob_grad", LogprobGradArguments)


class RowOutputs:
    """What every pass over rows of logits leaves per row; `rules` and `leaves` are the kernels' own.

    Attributes:
        logp, entropy: float32 [R].
        count, digest: int32 and uint64 [R], the kept set.
        rules: int32 [R, 4], the kept set as a rule on these logits.
    """

    def __init__(self, rows_of: torch.Tensor, vocab: int, leaf_size: int) -> None:
        self.logp = empty(rows_of, (), torch.float32)
        self.entropy = empty(rows_of, (), torch.float32)
        self.count = empty(rows_of, (), torch.int32)
        self.digest = empty(rows_of, (), torch.uint64)
        self.rules = empty(rows_of, (RULE_WORDS,), torch.int32)
        self.leaves = empty(rows_of, (-(-vocab // leaf_size), LEAF_WORDS), torch.int64)


def vocabulary_rows(
    logits: torch.Tensor,
    parameters: tuple[torch.Tensor, ...],
    leaf_size: int,
    outputs: RowOutputs,
    bits: torch.Tensor | None = None,
    bits_out: torch.Tensor | None = None,
) -> VocabularyRows:
    """The struct that sampling and log-probs share. `parameters`: temperature, top_k, top_p, min_p, each [R]."""
    rows, vocab = logits.shape
    temperature, top_k, top_p, min_p = parameters
    assert logits.dtype == torch.float32, f"logits are FP32, not {logits.dtype}"
    assert leaf_size % 64 == 0 and -(-vocab // leaf_size) <= MAX_LEAVES, f"leaves of {leaf_size} entries of {vocab}"
    for tensor, dtype in ((temperature, torch.float32), (top_k, torch.int32), (top_p, torch.float32)):
        assert tensor.dtype == dtype and tensor.shape == (rows,), f"{dtype} [{rows}], not {tensor.dtype} {tensor.shape}"
    assert min_p.dtype == torch.float32 and min_p.shape == (rows,)
    for words in (bits, bits_out):
        assert words is None or (words.dtype == torch.int64 and words.shape == (rows, -(-vocab // 64))), "kept words"
    return VocabularyRows(
        pointer(logits),
        *(pointer(p) for p in parameters),
        pointer(bits),
        pointer(bits_out),
        pointer(outputs.leaves),
        pointer(outputs.rules),
        pointer(outputs.logp),
        pointer(outputs.entropy),
        pointer(outputs.count),
        pointer(outputs.digest),
        vocab,
        leaf_size,
    )


def logprob(
    logits: torch.Tensor,
    targets: torch.Tensor,
    parameters: tuple[torch.Tensor, ...],
    leaf_size: int,
    bits: torch.Tensor | None = None,
    bits_out: torch.Tensor | None = None,
) -> tuple[RowOutputs, torch.Tensor, torch.Tensor]:
    """Log-probs of int64 targets [R] from FP32 logits [R, V]: (outputs, row maximum [R], row sum [R])."""
    assert targets.dtype == torch.int64 and targets.shape == logits.shape[:1], "one int64 target per row"
    outputs = RowOutputs(logits, logits.shape[1], leaf_size)
    row_max, row_sum = empty(logits, (), torch.float32), empty(logits, (), torch.float32)
    rows = vocabulary_rows(logits, parameters, leaf_size, outputs, bits, bits_out)
    arguments = LogprobArguments(logits.shape[0], rows, pointer(targets), pointer(row_max), pointer(row_sum))
    submit(LOGPROB, arguments, logits, keep=parameters)
    return outputs, row_max, row_sum


def logprob_grad(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    rules: torch.Tensor,
    bits: torch.Tensor | None,
    row: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    d_logp: torch.Tensor,
    d_entropy: torch.Tensor,
    leaf_size: int,
    storage: torch.dtype,
) -> torch.Tensor:
    """Gradient of the logits [R, V] in the storage dtype. `row`: maximum, sum and entropy [R] of the forward."""
    assert d_logp.dtype == d_entropy.dtype == torch.float32, "derivatives by log-probs and entropies are FP32"
    out = empty(logits, (logits.shape[1],), storage)
    arguments = LogprobGradArguments(
        logits.shape[0],
        *(pointer(t) for t in (logits, temperature, bits, rules, targets, *row, d_logp, d_entropy, out)),
        logits.shape[1],
        leaf_size,
        int(storage == torch.bfloat16),
    )
    submit(LOGPROB_GRAD, arguments, logits)
    return out
