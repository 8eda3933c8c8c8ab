"""A side that computes with zerogap answers with the same bits on every path, and what is wrong in its layers, or
written through the op tap, is seen in its boundaries."""

import numpy as np
import pytest
import torch

from tests.tiny import tiny_decoder
from zerogap.diagnose.side import Ask
from zerogap.diagnose.trace import Definition, load_trace, save_trace
from zerogap.diagnose.zerogap_side import RAW, ZerogapSide
from zerogap.errors import ConfigError
from zerogap.rollout.engine import Engine
from zerogap.types import SamplingKey, SamplingParams
from zerogap.verify.faulty_layers import FaultyBlock, decodes

GENERATOR = np.random.default_rng(0)
SEQUENCES = [GENERATOR.integers(0, 500, n).tolist() for n in (25, 6, 37)]
PROMPTS = [20, 2, 19]
STRANGER = [7, 8, 9, 10, 11]
ASKS = {
    "together": Ask("whole", ((2, 0, 1),), capture=True),
    "neighbour": Ask("whole", ((1, 0), (2,)), neighbours=(STRANGER,), capture=True),
    "decode": Ask("decode", capture=True),
    "decode together": Ask("decode", ((1, 2, 0),), neighbours=(STRANGER,), capture=True),
    "chunked": Ask("chunked", chunk=9, capture=True),
    "prefix_hit": Ask("prefix_hit", capture=True),
}


def side(family: str = "llama", **settings: object) -> ZerogapSide:
    return ZerogapSide(tiny_decoder(family), SEQUENCES, prompt_lengths=PROMPTS, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_every_path_has_the_bits_of_the_whole(family):
    made = side(family)
    whole = made.trace.recorded
    for name, ask in ASKS.items():
        found = made.again(ask)
        assert found is not None
        compared = 0
        for a, b in zip(whole.logprobs, found.logprobs, strict=True):
            known = ~np.isnan(b)
            compared += int(known.sum())
            assert np.array_equal(a[known].view(np.int32), b[known].view(np.int32)), name
        assert compared >= 5 + 18, name  # completions, at least
        assert list(found.boundaries) == list(whole.boundaries)
        for node, rows in found.boundaries.items():
            known = ~rows.isnan().any(1)
            assert known.sum() >= 23 and torch.equal(rows[known], whole.boundaries[node][known]), (name, node)


def test_a_block_that_is_wrong_while_decoding_is_seen_where_it_is():
    decoder = tiny_decoder()
    decoder.blocks[1] = FaultyBlock(  # type: ignore[call-overload]
        decoder.blocks[1], lambda context: list(range(len(context.positions))) if decodes(context) else []
    )
    made = ZerogapSide(decoder, SEQUENCES, prompt_lengths=PROMPTS)
    whole, decode = made.trace.recorded, made.again(Ask("decode", capture=True))
    assert decode is not None
    differing = {n for n, rows in decode.boundaries.items() if not torch.equal(rows, whole.boundaries[n])}
    assert differing - {"logprob"} == {"1.down_proj", "1.residual_mlp", "final_norm", "lm_head"}
    assert decode.boundaries["1.down_proj"][0].equal(whole.boundaries["1.down_proj"][0])  # a row of the prompt


def test_what_is_written_through_the_tap_is_seen():
    def disturb(name, outputs, info):
        if name == "attention":
            outputs["out"][:, 0] += 1.0

    clean, faulty = side().trace.recorded, side(disturb=disturb).trace.recorded
    assert torch.equal(clean.boundaries["0.v_proj"], faulty.boundaries["0.v_proj"])
    assert not torch.equal(clean.boundaries["0.attention"], faulty.boundaries["0.attention"])
    assert not np.array_equal(clean.logprobs[0], faulty.logprobs[0])


def test_definitions():
    made = side()
    raw = made.again(Ask(definition=RAW))
    cold = made.again(Ask(definition=Definition(temperature=0.5, processed=True)))
    kept = made.again(Ask(definition=Definition(temperature=1.0, processed=True, top_k=3)))
    assert raw is not None and cold is not None and kept is not None
    assert np.array_equal(raw.logprobs[0], made.trace.recorded.logprobs[0], equal_nan=True)
    assert not np.array_equal(cold.logprobs[0], raw.logprobs[0], equal_nan=True)
    assert np.isneginf(kept.logprobs[0]).any()


def test_log_probs_are_those_of_a_rollout():
    decoder = tiny_decoder()
    params = SamplingParams(temperature=0.7, max_tokens=8, stop_token_ids=())
    (sample,) = Engine(decoder).generate([SEQUENCES[0]], params, [SamplingKey(seed=3)])
    ids = [*sample.prompt_ids.tolist(), *sample.completion_ids.tolist()]
    definition = Definition(temperature=0.7, processed=True)
    made = ZerogapSide(decoder, [ids], prompt_lengths=[len(SEQUENCES[0])], definition=definition)
    assert np.array_equal(made.trace.recorded.logprobs[0][len(SEQUENCES[0]) :], sample.logprobs)


def test_a_saved_trace_can_hold_sketches_of_all_weights(tmp_path):
    made = side(sketches=True)
    assert list(load_trace(save_trace(made.trace, tmp_path / "a")).weights) == list(made.decoder.weights)


def test_routing_is_recorded():
    (sequence, *_) = side("qwen3_moe").trace.sequences
    assert sequence.experts is not None and sequence.experts.shape == (25, 2, 3) and (sequence.experts >= 0).all()
    assert sequence.margins is not None and (sequence.margins > 0).any()


def test_facts_and_refusals():
    made = side("qwen3")
    assert made.parameters("1.q_norm")["num_heads"] == 6 and made.parameters("0.attention")["head_dim"] == 32
    assert made.weight("model.norm.weight") is not None and made.weight("nothing") is None
    assert made.again(Ask("speculative")) is None
    with pytest.raises(ConfigError, match="2 to"):
        ZerogapSide(tiny_decoder(), [[1]])
