"""Ids and two log-prob arrays become two traces, whatever the layout of the file; what is unclear is refused."""

import json

import numpy as np
import pytest

from zerogap.diagnose.adapters.arrays import FIELDS, load_arrays, pair_of_traces
from zerogap.diagnose.trace import Definition, load_trace, save_trace
from zerogap.errors import CheckpointError, ConfigError

IDS = [[5, 6, 7, 8, 9], [3, 4, 1]]
A = [[-0.5, -0.25, -1.5], [-2.0]]  # of the completion: prompts have 2 tokens
B = [[-0.5, -0.125, -1.5], [-2.5]]
NAN = float("nan")


def rows(**more):
    return [{"ids": i, "logprobs_a": a, "logprobs_b": b, "prompt_length": 2, **more} for i, a, b in zip(IDS, A, B)]


def check(pair):
    assert [trace.recorded.path for trace in pair] == ["decode", "whole"]
    for trace, wanted in zip(pair, (A, B)):
        assert [s.ids.tolist() for s in trace.sequences] == IDS
        assert [s.prompt_length for s in trace.sequences] == [2, 2]
        assert [s.counted.tolist() for s in trace.sequences] == [[False, False, True, True, True], [False, False, True]]
        for got, values in zip(trace.recorded.logprobs, wanted):
            np.testing.assert_array_equal(got, np.array([NAN, NAN, *values], np.float32))


def test_completion_only_one_per_token_and_one_fewer_mean_the_same():
    check(pair_of_traces(rows()))
    check(pair_of_traces([{**r, "logprobs_a": [0, -9, *r["logprobs_a"]]} for r in rows()]))
    check(pair_of_traces([{**r, "logprobs_b": [-9, *r["logprobs_b"]]} for r in rows()]))


def test_the_prompt_follows_from_the_mask_or_from_short_logprobs():
    bare = [{k: v for k, v in r.items() if k != "prompt_length"} for r in rows()]
    check(pair_of_traces(bare))
    check(pair_of_traces([{**r, "mask": [0, 0, *[1] * (len(r["ids"]) - 2)]} for r in bare]))
    full = {"ids": [1, 2, 3], "logprobs_a": [-1.0, -1.0], "logprobs_b": [-1.0, -1.0, -1.0]}
    with pytest.raises(ConfigError, match="prompt_length"):
        pair_of_traces([full])


def test_tokens_outside_the_mask_have_no_number():
    mask = [0, 0, 1, 0, 1]
    a, _ = pair_of_traces([{**rows()[0], "mask": mask}])
    np.testing.assert_array_equal(a.recorded.logprobs[0], np.array([NAN, NAN, -0.5, NAN, -1.5], np.float32))


@pytest.mark.parametrize("names", [FIELDS["a"], FIELDS["b"], FIELDS["ids"]])
def test_every_known_name_is_read(names):
    ours = names[0]
    for name in names[1:]:
        lines = [{name if k == ours else k: v for k, v in row.items()} for row in rows()]
        check(pair_of_traces(lines))


@pytest.mark.parametrize("suffix", [".jsonl", ".npz", ".parquet"])
def test_files(suffix, tmp_path):
    path = tmp_path / f"run{suffix}"
    lines = rows(temperature=0.7, processed=False)
    if suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    elif suffix == ".npz":
        flat = {"ids": np.concatenate(IDS), "length": np.array([5, 3]), "prompt_length": np.array([2, 2])}
        flat["logprobs_a"], flat["logprobs_b"] = (np.concatenate([[0, 0, *p] for p in side]) for side in (A, B))
        np.savez(path, temperature=0.7, processed=False, **flat)
    else:
        reason = "parquet is read through pyarrow, which is not installed"
        table = pytest.importorskip("pyarrow", reason=reason).Table.from_pylist(lines)
        pytest.importorskip("pyarrow.parquet", reason=reason).write_table(table, path)
    pair = load_arrays(path)
    check(pair)
    assert pair[0].recorded.definition == Definition(temperature=0.7, processed=False)
    for trace in pair:
        saved = load_trace(save_trace(trace, tmp_path / "trace"))
        np.testing.assert_array_equal(saved.recorded.logprobs[0], trace.recorded.logprobs[0])
    assert load_arrays(path, Definition(temperature=0.5))[1].recorded.definition.temperature == 0.5


@pytest.mark.parametrize("fewer", [0, 1])
def test_a_rectangle_is_cut_to_its_lengths(fewer, tmp_path):
    ids = np.array([IDS[0], [*IDS[1], 0, 0]])
    sides = [np.array([[0, 0, *s[0]], [0, 0, *s[1], 0, 0]], np.float32)[:, fewer:] for s in (A, B)]
    np.savez(
        tmp_path / "x.npz", ids=ids, rollout_logprobs=sides[0], trainer_logprobs=sides[1], lengths=[5, 3],
        prompt_lengths=[2, 2],
    )  # fmt: skip
    check(load_arrays(tmp_path / "x.npz"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs_b": None}, "add b"),
        ({"ids": None}, "add ids"),
        ({"token_ids": [1]}, "give ids once"),
        ({"logprobs_a": [-1.0] * 7}, "one per token"),
        ({"logprobs_a": ["x", "y", "z"]}, "list of numbers"),
        ({"ids": [[5, 6, 7, 8, 9]], "length": 1}, "one list of token ids"),
        ({"length": 9}, "has 5 ids"),
        ({"length": [5]}, "one whole number per sequence"),
        ({"prompt_length": [2]}, "one whole number per sequence"),
        ({"ids": [5.5, 6, 7, 8, 9]}, "one list of token ids"),
        ({"prompt_length": 6}, "prompt_length"),
        ({"mask": [1] * 7}, "mask"),
        ({"mask": ["0", "1", "1", "1", "1"]}, "0 or 1"),
        ({"mask": [0, 0, float("nan"), 1, 1]}, "0 or 1"),
        ({"ids": [5, 6, 7, 8, 2**40]}, "below 2"),
        ({"prompt_length": 1.5}, "one whole number"),
        ({"length": "5"}, "one whole number"),
        ({"temperature": "0.7"}, "a number from 0"),
        ({"temperature": -1}, "a number from 0"),
        ({"processed": "no"}, "true or false"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    row = {k: v for k, v in {**rows()[0], **change}.items() if v is not None}
    with pytest.raises(ConfigError, match=message):
        pair_of_traces([row])


def test_files_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match="kinds"):
        load_arrays(tmp_path / "x.csv")
    with pytest.raises(CheckpointError):
        load_arrays(tmp_path / "absent.npz")
    for name, text in (("a.npz", "no"), ("b.jsonl", "{"), ("c.jsonl", "[1]")):
        (tmp_path / name).write_text(text)
        with pytest.raises(CheckpointError, match=name):
            load_arrays(tmp_path / name)
    (tmp_path / "d.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="at least one"):
        load_arrays(tmp_path / "d.jsonl")
    np.savez(tmp_path / "e.npz", ids=np.arange(5), logprobs_a=np.zeros(5), logprobs_b=np.zeros(5), length=[2, 2])
    with pytest.raises(ConfigError, match="add up"):
        load_arrays(tmp_path / "e.npz")
    two = [{**rows()[0], "temperature": 1.0}, {**rows()[1], "temperature": 0.7}]
    with pytest.raises(ConfigError, match="one setting"):
        pair_of_traces(two)


@pytest.mark.parametrize("content", [b"not a zip", b"PK\x03\x04 cut", b""])
def test_a_broken_npz_is_refused(content, tmp_path):
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(CheckpointError, match="not an npz"):
        load_arrays(tmp_path / "x.npz")


def test_lengths_below_zero_are_refused(tmp_path):
    flat = {"ids": np.arange(8), "rollout_logprobs": np.zeros(8), "trainer_logprobs": np.zeros(8)}
    np.savez(tmp_path / "x.npz", **flat, length=np.array([-2, 10]), prompt_length=np.array([1, 1]))
    with pytest.raises(ConfigError, match="from 0 on"):
        load_arrays(tmp_path / "x.npz")
