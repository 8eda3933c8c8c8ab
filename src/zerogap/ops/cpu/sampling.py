"""Thin functions over the native sampler and its generator."""

from ctypes import c_int64, c_void_p

import torch

from zerogap.ops.cpu.library import Arguments, Operation, empty, pointer, submit
from zerogap.ops.cpu.logprob import RowOutputs, VocabularyRows, vocabulary_rows


class SampleArguments(Arguments):
    _fields_ = (("rows", c_int64), ("v", VocabularyRows), ("keys", c_void_p), ("ids", c_void_p))


class PhiloxArguments(Arguments):
    _fields_ = (("rows", c_int64), ("counters", c_void_p), ("keys", c_void_p), ("out", c_void_p))


SAMPLE = Operation("sample", SampleArguments)
PHILOX = Operation("philox", PhiloxArguments)


def sample(
    logits: torch.Tensor,
    parameters: tuple[torch.Tensor, ...],
    keys: torch.Tensor,
    leaf_size: int,
    bits_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, RowOutputs]:
    """Draws one id per row of FP32 logits [R, V] under int64 keys [R, 4]: (ids int64 [R], outputs)."""
    assert keys.dtype == torch.int64 and keys.shape == (logits.shape[0], 4), "keys are int64 [rows, 4]"
    outputs = RowOutputs(logits, logits.shape[1], leaf_size)
    ids = empty(logits, (), torch.int64)
    rows = vocabulary_rows(logits, parameters, leaf_size, outputs, None, bits_out)
    arguments = SampleArguments(logits.shape[0], rows, pointer(keys), pointer(ids))
    submit(SAMPLE, arguments, logits, keep=(*parameters, keys))
    return ids, outputs


def philox(counters: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Philox4x32-10 of 32-bit counters [R, 4] under keys [R, 2] (both int32, bits read as unsigned): int32 [R, 4]."""
    assert counters.dtype == keys.dtype == torch.int32 and counters.shape[0] == keys.shape[0]
    out = empty(counters, (4,), torch.int32)
    submit(PHILOX, PhiloxArguments(counters.shape[0], pointer(counters), pointer(keys), pointer(out)), counters)
    return out
