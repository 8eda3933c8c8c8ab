"""A whole pass whose operators run row by row has the bits of decoding, and says which operator made the difference."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.bits import assert_same_bits
from tests.diagnose.adapters.models import SIZES, some_sequences, tiny_model
from zerogap.diagnose.adapters.row_ops import row_replacements
from zerogap.diagnose.adapters.torch_side import TorchSide
from zerogap.diagnose.run import diagnose
from zerogap.diagnose.side import Ask

CASES = [
    (family, attention, dtype)
    for family in ("llama", "qwen3", "qwen3_moe")
    for attention in ("eager", "sdpa")
    for dtype in (torch.bfloat16, torch.float32)
]


@pytest.mark.parametrize(("family", "attention", "dtype"), CASES)
def test_all_operators_row_by_row_give_the_bits_of_decoding(family, attention, dtype):
    side = TorchSide(tiny_model(family, attention, dtype), some_sequences(((5, 24), (7, 40), (3, 9))))
    decoded = side.again(Ask("decode"))
    found = side.again(Ask(replace=row_replacements(side)))
    for a, b in zip(found.logprobs, decoded.logprobs):
        assert_same_bits(a[1:], b[1:], f"{family} {attention} {dtype}")


def test_the_operators_between_a_decoded_and_a_whole_pass_are_told_apart():
    """SDPA computes one query otherwise than many; no other operator of this model depends on the number of rows."""
    model, sequences = tiny_model("llama", "sdpa"), some_sequences(((6, 40), (9, 56)))
    a = TorchSide(model, sequences, path="decode")
    report = diagnose(a, TorchSide(model, sequences))
    assert report.verdict.check == "path"
    by_kind = {share.kind: share for share in report.operators}
    assert by_kind["attention"].share == 1.0, "without it nothing is left"
    assert {kind for kind, share in by_kind.items() if share.alone} == {"attention"}
    (found,) = report.attributions
    assert "attention" in found.node and found.share_a == found.share_b == 1.0


def test_rows_are_those_of_the_running_sequence():
    """Two sequences of one length, with prompts of other lengths."""
    same = [dataclasses.replace(s, prompt_length=p) for s, p in zip(some_sequences(((2, 30), (20, 30))), (2, 20))]
    side = TorchSide(tiny_model("qwen3", "sdpa"), same)
    found, decoded = side.again(Ask(replace=row_replacements(side))), side.again(Ask("decode"))
    for a, b in zip(found.logprobs, decoded.logprobs):
        assert np.array_equal(a[1:], b[1:])
    assert SIZES["num_hidden_layers"] == len({n.split(".")[0] for n in side.nodes if n[0].isdigit()})
