"""`zerogap diagnose`: words for sides, refusals before any work, exit codes, files, the self-test's bar."""

import itertools
import json
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.tiny_runs import write_model
from zerogap.cli import app, main
from zerogap.cli.side_option import parse_side
from zerogap.diagnose import self_test
from zerogap.diagnose.live import LiveModel
from zerogap.diagnose.trace import Pass, SequenceTrace, Trace, save_trace
from zerogap.errors import ConfigError
from zerogap.numerics import preset


def run(*words):
    return CliRunner().invoke(app, ["diagnose", *map(str, words)])


def code_of(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["zerogap", "diagnose", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


def trace(folder, change=0.0):
    logprobs = np.array([np.nan, -1.0, -2.0 + change, -0.5], np.float32)
    sequence = SequenceTrace(np.array([5, 6, 7, 8], np.int32), 1)
    return save_trace(Trace(folder.name, (sequence,), (Pass((logprobs,)),)), folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def test_words_of_a_live_side():
    assert parse_side("A", "transformers:owner/name,dtype=bfloat16,attn=eager,batch=together") == LiveModel(
        "transformers", "owner/name", "bfloat16", "eager", together=True
    )
    found = parse_side("B", "zerogap:m,numerics={preset: fp8, scale_format: pow2},path=decode,logprobs=raw")
    assert (found.path, found.logprobs, found.numerics.scale_format) == ("decode", "raw", "pow2")
    assert parse_side("B", "zerogap:m").numerics == preset("bf16")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nowhere", "no such folder"),
        ("sglang:m", "give the folder of a trace"),
        ("vllm:m", "in its own environment"),
        ("transformers:", "name a model"),
        ("transformers:m,numerics=bf16", "takes dtype"),
        ("transformers:m,dtype=int8", "choose one of auto, bfloat16"),
        ("zerogap:m,eager", "takes numerics"),
        ("zerogap:m,numerics=int3", "int3"),
    ],
)
def test_words_that_are_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_side("A", text)


def test_a_folder_that_is_a_model_is_named_as_one(model, tmp_path):
    with pytest.raises(ConfigError, match="write transformers:"):
        parse_side("A", str(model))
    (tmp_path / "trace.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a readable trace"):
        parse_side("A", str(tmp_path))


def test_exit_codes_of_traces(tmp_path, monkeypatch):
    a, b, c = trace(tmp_path / "a"), trace(tmp_path / "b"), trace(tmp_path / "c", 0.25)
    assert run(a, b).exit_code == 0
    done = run(a, c, "--json", tmp_path / "x.json", "--report", tmp_path / "why")
    assert done.exit_code == 1, done.output
    assert "DIFFERENT" in done.output
    assert json.loads((tmp_path / "x.json").read_text())["statistics"]["max"] == 0.25
    assert (tmp_path / "why" / "report.html").is_file()
    assert code_of(monkeypatch, a, tmp_path / "none") == 2


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("A",),
        ("A", "B", "--self-test"),
        ("--arrays", "none.npz"),
        ("--nemo-rl", "none.jsonl"),
        ("--self-test", "--faults", "none"),
        ("A", "B", "--path", "fast"),
        ("A", "B", "--faults", "x"),
        ("A", "B", "--json", "none/x.json"),
    ],
)
def test_bad_input_ends_with_code_2(words, monkeypatch, capsys):
    assert code_of(monkeypatch, *words) == 2
    assert "ConfigError" in capsys.readouterr().err


def test_a_trace_has_its_own_sequences(tmp_path):
    a = trace(tmp_path / "a")
    done = run(a, a, "--path", "generate")
    assert isinstance(done.exception, ConfigError)
    assert "its own sequences" in str(done.exception)


def test_progress_goes_to_standard_error_where_there_is_no_terminal(tmp_path):
    a, b = trace(tmp_path / "a"), trace(tmp_path / "b", 0.25)
    done = run(a, b)
    told = [line.split(" s  ")[1] for line in done.stderr.splitlines()]
    assert told[0] == "ids" and "operators" in told and "operators" not in done.stdout.splitlines()
    assert all(x != y for x, y in itertools.pairwise(told))


def test_workers_are_the_self_tests(tmp_path):
    a = trace(tmp_path / "a")
    done = run(a, a, "--workers", 2)
    assert isinstance(done.exception, ConfigError) and "--self-test" in str(done.exception)


def test_two_arrays(tmp_path):
    ids, a = np.arange(24).reshape(2, 12), -np.linspace(0.1, 2, 24, dtype=np.float32).reshape(2, 12)
    b = a.copy()
    b[1, 7] -= 0.5
    np.savez(tmp_path / "s.npz", ids=ids, logprobs_a=a, logprobs_b=b, prompt_length=[2, 2], length=[12, 12])
    done = run("--arrays", tmp_path / "s.npz", "--temperature", "0.7")
    assert done.exit_code == 1, done.output
    assert "20 compared, 1 different" in done.output
    assert "not checked" not in done.output and "to check it" in done.output


def test_one_stack_against_itself_is_the_same(model):
    done = run(f"zerogap:{model}", f"zerogap:{model},path=decode", "--path", "generate", "--max-tokens", 4)
    assert done.exit_code == 0, done.output
    assert "SAME" in done.output


def test_a_live_side_scores_the_sequences_of_a_trace(model, tmp_path):
    a = trace(tmp_path / "a")
    done = run(a, f"zerogap:{model}", "--json", tmp_path / "x.json")
    assert done.exit_code == 1, done.output
    facts = json.loads((tmp_path / "x.json").read_text())
    assert facts["statistics"]["count"] == 3
    assert facts["worst"][0]["text"]


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (("linear/order", "clean"), 0),
        (("linear/unattributed", "clean"), 1),
        (("linear/order", "norm/order"), 1),
        (("linear/split", "clean"), 1),
    ],
)
def test_the_bar_of_the_self_test(said, code, monkeypatch, tmp_path):
    expected = (("linear/order",), ("clean",))
    cases = tuple(
        self_test.Case(f"case{i}", e, s, "operators", "", 0.1) for i, (e, s) in enumerate(zip(expected, said))
    )

    def fake(folder, progress, workers):
        assert workers >= 1
        for case in cases:
            progress(case)
        return self_test.Score(cases)

    monkeypatch.setattr(self_test, "run", fake)
    done = run("--self-test", "--json", tmp_path / "score.json")
    assert done.exit_code == code, done.output
    assert json.loads((tmp_path / "score.json").read_text())["num_faults"] == 1
