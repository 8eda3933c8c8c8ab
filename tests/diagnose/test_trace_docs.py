"""docs/trace-format.md says what the reader reads: its snippets run and its tables name what exists."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import torch

from zerogap.diagnose.adapters import loop_hooks
from zerogap.diagnose.adapters.arrays import FIELDS
from zerogap.diagnose.graph import model_nodes
from zerogap.diagnose.trace import PATHS, Definition, Pass, SequenceTrace, Trace, load_trace

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "trace-format.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
BY_HAND, SKETCHES, RECORDER, TRL, VERL = BLOCKS


def test_a_trace_written_by_hand_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(BY_HAND.splitlines()) <= 15
    assert "zerogap." not in BY_HAND
    exec(compile(BY_HAND, "trace-format.md", "exec"), {})
    trace = load_trace(tmp_path / "engine-trace")
    assert trace.sequences[0].ids.tolist() == [9707, 11, 1879, 0]
    assert trace.sequences[0].counted.tolist() == [False, False, True, True]
    np.testing.assert_array_equal(trace.recorded.logprobs[0], np.array([np.nan, np.nan, -0.731, -0.0125], np.float32))
    assert trace.recorded.definition == Definition(temperature=0.7, processed=True)
    assert (trace.recorded.path, trace.recorded.batches, trace.weights) == ("whole", None, {})


def test_the_weights_line_runs():
    scope = {"model": torch.nn.Linear(3, 2)}
    exec(compile(SKETCHES, "trace-format.md", "exec"), scope)
    assert scope["weights"]["weight"]["shape"] == [2, 3]


def test_the_recorder_of_an_own_engine(tmp_path, monkeypatch):
    """An engine of a prefill and one decoding pass; the last token's row does not exist."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "engine-trace").mkdir()
    (tmp_path / "engine-trace" / "trace.json").write_text("{}")  # an older trace makes room
    scope = {"prompt": [5, 6], "Path": Path}

    def generate(prompt):
        for rows in (torch.ones(len(prompt), 3), torch.full((1, 3), 2.0)):
            scope["recorder"].record("0.q_proj", rows)
        return [*prompt, 7, 8], [-0.5, -0.25]

    exec(compile(RECORDER, "trace-format.md", "exec"), scope | {"generate": generate}, scope)
    found = load_trace(tmp_path / "engine-trace")
    assert found.sequences[0].ids.tolist() == [5, 6, 7, 8] and found.recorded.path == "decode"
    assert found.recorded.boundaries["0.q_proj"].isnan().all(1).tolist() == [False, False, False, True]
    assert found.recorded.logprobs[0][2:].tolist() == [-0.5, -0.25]


def test_hooks_are_short_and_exist():
    for block in (TRL, VERL):
        assert len(block.splitlines()) <= 15
        for name in re.findall(r"from zerogap\.diagnose\.adapters\.loop_hooks import (\w+)", block):
            assert hasattr(loop_hooks, name)


def test_every_field_is_on_the_page():
    words = set(re.findall(r"[\w.]+", " ".join(re.findall(r"`([^`\n]+)`", PAGE))))
    fields = {f.name for kind in (Trace, SequenceTrace, Pass, Definition) for f in dataclasses.fields(kind)}
    known = {"ids", "mask", "positions", "experts", "margins", "logprobs", "boundaries"}  # as tensors
    assert fields - known <= words
    assert {f"sequence.0.{n}" for n in ("ids", "mask", "positions", "versions", "experts", "margins")} <= words
    assert set(PATHS) <= words
    assert {name for names in FIELDS.values() for name in names} <= words
    for moe in (frozenset(), frozenset({3})):
        nodes = {n.name for n in model_nodes(4, qk_norm=True, moe_layers=moe) if n.name[0] not in "012"}
        assert nodes <= words
