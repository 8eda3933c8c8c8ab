"""The contract's operators inside a transformers model: with all of them, both stacks have the same bits."""

import numpy as np
import pytest
import torch
import transformers

from tests.bits import assert_same_bits
from tests.tiny import tiny_spec
from zerogap.diagnose.adapters.contract_ops import contract_replacements
from zerogap.diagnose.adapters.torch_side import TorchSide
from zerogap.diagnose.side import Ask
from zerogap.diagnose.trace import SequenceTrace
from zerogap.diagnose.zerogap_side import ZerogapSide
from zerogap.models.decoder import Decoder
from zerogap.numerics import DType, preset
from zerogap.weights import open_model
from zerogap.weights.random_model import write_random_model


def two_stacks(folder, family, numerics):
    """The same weights in transformers and in zerogap, and the same sequences."""
    storage = DType.BF16 if numerics == "bf16" else DType.FP32
    write_random_model(folder, tiny_spec(family, num_heads=4), peak=3.0, storage=storage)
    dtype = torch.bfloat16 if numerics == "bf16" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
    generator = np.random.default_rng(0)
    sequences = [SequenceTrace(generator.integers(0, 500, n).astype(np.int32), p) for p, n in ((5, 17), (3, 30))]
    files = open_model(folder)
    decoder = Decoder(files.spec, preset(numerics)).load(files.tensors())
    ours = ZerogapSide(decoder, [s.ids for s in sequences], prompt_lengths=[s.prompt_length for s in sequences])
    return TorchSide(model, sequences), ours


CASES = [("llama", "bf16", "whole"), ("llama", "fp32", "whole"), ("qwen2", "bf16", "whole"), ("qwen3", "bf16", "whole")]


@pytest.mark.parametrize(("family", "numerics", "path"), [*CASES, ("qwen3", "bf16", "decode")])
def test_all_operators_replaced_give_the_contracts_bits(family, numerics, path, tmp_path):
    theirs, ours = two_stacks(tmp_path / "model", family, numerics)
    replace = contract_replacements(theirs)
    if path == "decode":
        del replace["rope"]  # a cache holds keys that were rotated before
        expected = theirs.again(Ask("decode", replace=replace)).logprobs
        found = theirs.again(Ask("chunked", chunk=7, replace=replace)).logprobs
    else:
        expected = ours.again(Ask()).logprobs
        found = theirs.again(Ask(replace=replace)).logprobs
        plain = theirs.again(Ask()).logprobs
        assert any(not np.array_equal(a[1:], b[1:]) for a, b in zip(plain, expected)), "nothing to show"
    for a, b in zip(found, expected):
        assert_same_bits(a[1:], b[1:], f"{family} {numerics}")


def test_one_kind_less_shows(tmp_path):
    """The control: with any one kind left as it was, the stacks differ (in BF16, where every kind rounds)."""
    theirs, ours = two_stacks(tmp_path / "model", "qwen3", "bf16")
    expected = ours.again(Ask()).logprobs
    replace = contract_replacements(theirs)
    for kind in ("norm", "rope", "attention", "activation", "head"):
        found = theirs.again(Ask(replace={k: f for k, f in replace.items() if k != kind})).logprobs
        assert any(not np.array_equal(a[1:], b[1:]) for a, b in zip(found, expected)), kind
