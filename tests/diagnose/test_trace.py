"""Traces on disk: what is written is what is read, and damage is named."""

import json

import numpy as np
import pytest
import torch

from zerogap.diagnose.trace import Definition, Pass, SequenceTrace, Trace, load_trace, save_trace
from zerogap.errors import CheckpointError, ConfigError


def small() -> Trace:
    sequences = (
        SequenceTrace(np.arange(5, dtype=np.int32), 2, versions=np.array([0, 0, 0, 1, 1])),
        SequenceTrace(np.arange(3, dtype=np.int32), 3, mask=np.array([False, True, False]), hit_length=2),
    )
    logprobs = (np.array([np.nan, -1, -2, -3, -4], np.float32), np.full(3, -0.0, np.float32))
    first = Pass(logprobs, definition=Definition(0.7, True), boundaries={"0.q_proj": torch.randn(8, 4).bfloat16()})
    again = Pass(logprobs, "decode", batches=((0,), (1,)), meaning={"embed": "residual included"}, note="again")
    return Trace("mine", sequences, (first, again), weights={"w": {"digest": "ab"}}, layout={"tp": 2})


def test_a_trace_comes_back_as_it_was(tmp_path):
    trace = small()
    save_trace(trace, tmp_path / "t")
    found = load_trace(save_trace(trace, tmp_path / "t"))  # written over itself
    assert (found.name, found.weights, found.layout) == (trace.name, trace.weights, trace.layout)
    for ours, theirs in zip(trace.sequences, found.sequences, strict=True):
        assert np.array_equal(ours.ids, theirs.ids) and np.array_equal(ours.counted, theirs.counted)
        assert (ours.prompt_length, ours.hit_length) == (theirs.prompt_length, theirs.hit_length)
    assert np.array_equal(found.sequences[0].versions, [0, 0, 0, 1, 1]) and found.sequences[1].versions is None
    for ours, theirs in zip(trace.passes, found.passes, strict=True):
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert np.array_equal(a.view(np.int32), b.view(np.int32))
        assert (ours.path, ours.batches, ours.definition) == (theirs.path, theirs.batches, theirs.definition)
        assert (dict(ours.meaning), ours.note) == (theirs.meaning, theirs.note)
    assert torch.equal(found.recorded.boundaries["0.q_proj"], trace.recorded.boundaries["0.q_proj"])


def test_an_existing_folder_of_something_else_is_not_touched(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds no trace"):
        save_trace(small(), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_damage_is_named(tmp_path):
    folder = save_trace(small(), tmp_path / "t")
    facts = json.loads((folder / "trace.json").read_text())
    for change, words in (
        ({"version": 9}, "version 9"),
        ({"format": "x"}, "format"),
        ({"passes": []}, "at least one pass"),
    ):
        (folder / "trace.json").write_text(json.dumps(facts | change))
        with pytest.raises(CheckpointError, match=words):
            load_trace(folder)
    (folder / "trace.json").write_text(json.dumps(facts))
    (folder / "tensors.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(CheckpointError, match="readable"):
        load_trace(folder)


def test_counts_must_fit():
    sequence = SequenceTrace(np.arange(4, dtype=np.int32), 1)
    with pytest.raises(ConfigError, match="one number per token"):
        Trace("x", (sequence,), (Pass((np.zeros(3, np.float32),)),))
    with pytest.raises(ConfigError, match="one row per token"):
        Trace("x", (sequence,), (Pass((np.zeros(4, np.float32),), boundaries={"embed": torch.zeros(3, 2)}),))
    with pytest.raises(ConfigError, match="prompt_length"):
        SequenceTrace(np.arange(4, dtype=np.int32), 5)
