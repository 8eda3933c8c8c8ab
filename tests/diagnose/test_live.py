"""Live sides by name: both stacks over the same sequences, sampled by either, with what log-probs mean."""

import json

import numpy as np
import pytest

from tests.models_on_disk import small_tokenizer, tiny_spec, write_gguf
from tests.tiny_runs import write_model
from zerogap.diagnose.live import TEXTS, LiveModel, Loaded, definition_for, read_prompts, sequences_of
from zerogap.diagnose.trace import Definition, Pass, SequenceTrace, Trace
from zerogap.diagnose.zerogap_side import RAW
from zerogap.errors import ConfigError
from zerogap.numerics import preset


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("live"))


@pytest.fixture(scope="module", params=["transformers", "zerogap"])
def loaded(request, folder):
    numerics = preset("bf16") if request.param == "zerogap" else None
    return Loaded(LiveModel(request.param, str(folder), dtype="bfloat16", numerics=numerics))


def test_completions_are_keyed_by_the_seed_and_scored_along_the_path(loaded):
    prompts = [
        s.ids for s in sequences_of([{"prompt": "say one"}, {"prompt": "two"}], loaded.tokenizer, 264, complete=True)
    ]
    once, again, other = (loaded.complete(prompts, 6, 1.0, seed) for seed in (3, 3, 4))
    assert [s.ids.tolist() for s in once] == [s.ids.tolist() for s in again]
    assert [s.ids.tolist() for s in once] != [s.ids.tolist() for s in other]
    for prompt, sequence in zip(prompts, once):
        assert sequence.prompt_length == len(prompt)
        assert sequence.ids[: len(prompt)].tolist() == prompt.tolist()
        assert sequence.finish_reason == ("length" if len(sequence.ids) == len(prompt) + 6 else "stop")
    side = loaded.side(once, Definition(1.0, True, 0, 1.0, 0.0), "decode")
    assert side.trace.recorded.path == "decode"
    assert np.isfinite(np.concatenate([p[1:] for p in side.trace.recorded.logprobs])).all()


def test_a_gguf_file_is_a_model_for_transformers_too(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_spec("llama"), tokenizer=small_tokenizer())
    found = Loaded(LiveModel("transformers", str(path)), tmp_path / "scratch")
    side = found.side(sequences_of([], found.tokenizer, found.vocabulary)[:1], RAW)
    assert side.trace.num_rows > 8
    assert found.tokenizer is not None


def test_sequences(folder):
    tokenizer = Loaded(LiveModel("transformers", str(folder))).tokenizer
    assert len(sequences_of([], tokenizer, 264)) == len(TEXTS)
    text = sequences_of([{"prompt": "abcdefgh"}], tokenizer, 264)[0]
    assert (len(text.ids), text.prompt_length) == (8, 2)
    pair = sequences_of([{"prompt": "abc", "completion": "de"}], tokenizer, 264)[0]
    assert pair.counted.tolist() == [False, False, False, True, True]
    ids = sequences_of([{"ids": [5, 6, 7], "prompt_length": 2}], None, 264)[0]
    assert (ids.ids.tolist(), ids.prompt_length) == ([5, 6, 7], 2)
    assert [len(s.ids) for s in sequences_of([], None, 264)] == [24, 40, 31, 48]
    for rows, words in (
        ([{"prompt": "x"}], "no tokenizer"),
        ([{"ids": [1, 264]}], "0 to 263"),
        ([{"ids": [1]}], "two"),
    ):
        with pytest.raises(ConfigError, match=words):
            sequences_of(rows, None, 264)


def test_files_of_prompts(tmp_path):
    lines, rows = tmp_path / "p.txt", tmp_path / "p.jsonl"
    lines.write_text("one\n\ntwo\n")
    assert read_prompts(lines) == [{"prompt": "one"}, {"prompt": "two"}]
    rows.write_text(json.dumps({"ids": [1, 2], "prompt_length": 1}) + "\n")
    assert read_prompts(rows) == [{"ids": [1, 2], "prompt_length": 1}]
    for bad in ("{", "[1]", '{"text": 1}', ""):
        rows.write_text(bad)
        with pytest.raises(ConfigError, match="--prompts"):
            read_prompts(rows)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "none.txt")


def test_log_probs_are_those_of_the_distribution_that_tokens_are_drawn_from():
    def trace(definition):
        return Trace(
            "t",
            (SequenceTrace(np.array([1, 2], np.int32), 1),),
            (Pass((np.zeros(2, np.float32),), definition=definition),),
        )

    assert definition_for(None) == definition_for(1.0) == definition_for(None, trace(Definition())) == RAW
    assert definition_for(0.7) == Definition(0.7, True, 0, 1.0, 0.0)
    assert definition_for(None, trace(Definition(0.7, False))) == Definition(0.7, True, 0, 1.0, 0.0)
    assert definition_for(None, trace(Definition(0.7, True, 5))) == Definition(0.7, True, 5, 1.0, 0.0)
    assert definition_for(0.9, trace(Definition(0.7, False))) == Definition(0.9, True, 0, 1.0, 0.0)


@pytest.mark.parametrize("stack", ["transformers", "zerogap"])
def test_a_model_that_is_not_there(stack):
    with pytest.raises(ConfigError, match="no such"):
        Loaded(LiveModel(stack, "nowhere", numerics=preset("bf16")))
