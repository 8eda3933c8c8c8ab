"""FP8 in the rollout alone is labelled as such wherever anything is reported: walk every output of such a run."""

import io
import json
import re

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from tests.tiny_runs import lines, recipe
from zerogap.cli import app
from zerogap.cli.display import RunDisplay
from zerogap.cli.train import print_summary
from zerogap.errors import ConfigError
from zerogap.rl.loop import Run
from zerogap.verify.audit import audit_run

LABEL = "one-sided, not exact"
SETTINGS = (
    *("optimizer.max_steps=2", "logging.tensorboard=true", "checkpoint.every=1", "eval.every=1"),
    *("rollout.numerics={preset: fp8, bf16_layers: {first: 1}}", "algorithm.correction={kind: token_tis}"),
)


class Watched:
    """A finished run, what its display printed (live and plain), and its summary."""

    def __init__(self, folder, *settings):
        self.plain, self.live = io.StringIO(), io.StringIO()
        displays = [
            RunDisplay(Console(file=self.plain, width=200)),
            RunDisplay(Console(file=self.live, width=200, force_terminal=True, color_system="standard")),
        ]
        run = Run(recipe(folder, *settings), "never")
        for name in ("started", "phase", "rollout_progress", "step_done", "evaluated", "note", "ended"):
            setattr(run.observer, name, lambda *args, name=name: [getattr(d, name)(*args) for d in displays])
        assert run.train()
        print_summary(run, displays[0].console)
        self.run, self.path = run, run.folder.path


@pytest.fixture(scope="module")
def one_sided(tmp_path_factory):
    return Watched(tmp_path_factory.mktemp("one-sided"), *SETTINGS)


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    return Watched(tmp_path_factory.mktemp("exact"), *SETTINGS[:-2], "numerics=fp8")


def test_facts_name_both_sides_and_what_each_quantises(one_sided, exact):
    text = " ".join(one_sided.plain.getvalue().split())
    assert text.startswith("warning ONE-SIDED, NOT EXACT: rollout fp8")
    assert "training bf16; correction token_tis" in text
    assert re.search(r"identity trainer \w+@\S+, rollout \w+@\S+: not exact", text)
    assert "quantised rollout: 7 of 20 tensors" in text and "training: nothing" in text
    assert "one-sided" not in exact.plain.getvalue().lower()


def test_every_line_of_a_step_and_the_summary(one_sided, exact):
    steps = [line for line in one_sided.plain.getvalue().splitlines() if line.startswith("step ")]
    assert len(steps) == 2 and all(f"{LABEL}: " in line for line in steps)
    (summary,) = [line for line in one_sided.plain.getvalue().splitlines() if line.startswith("tokens ")]
    assert LABEL in summary
    assert "zerogap audit" not in one_sided.plain.getvalue()
    live = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", one_sided.live.getvalue())
    assert LABEL in live and not re.search(r"mismatched [\d,]+ of", live)
    for line in re.findall(r"held-out accuracy.*", one_sided.plain.getvalue()):
        assert "by the one-sided rollout" in line
    assert "mismatched 0 of" in exact.plain.getvalue() and "zerogap audit" in exact.plain.getvalue()


def test_every_record_and_event(one_sided, exact):
    for name in ("metrics", "eval"):
        assert [record["one_sided"] for record in lines(one_sided.run, name)] == [1.0] * (2 if name == "metrics" else 3)
        assert {record["one_sided"] for record in lines(exact.run, name)} == {0.0}
    assert all(record["bit_wise/mismatched_tokens"] > 0 for record in lines(one_sided.run, "metrics"))
    events = EventAccumulator(str(one_sided.run.folder.tensorboard)).Reload()
    assert {event.value for event in events.Scalars("one_sided")} == {1.0}


def test_the_report(one_sided, exact):
    page = (one_sided.path / "report.html").read_text()
    assert "ONE-SIDED, NOT EXACT: rollout fp8" in page
    assert '"label":"One-sided","value":"not exact"' in page
    assert "one-sided" not in (exact.path / "report.html").read_text().lower()


def test_the_facts_of_saved_weights_models_and_checkpoints(one_sided, exact):
    files = [*one_sided.path.rglob("zerogap.json"), *one_sided.path.rglob("state.json")]
    assert len(files) == 2 + 1 + 2  # weights of two steps, the model, two checkpoints
    for path in files:
        facts = json.loads(path.read_text())
        facts |= facts.get("extra", {})
        assert facts["one_sided"] is True, path
        assert facts["rollout_numerics"]["linear"] == "fp8" and facts["numerics"]["linear"] == "bf16"
    for path in [*exact.path.rglob("zerogap.json"), *exact.path.rglob("state.json")]:
        facts = json.loads(path.read_text())
        facts |= facts.get("extra", {})
        assert facts["one_sided"] is False and facts["rollout_numerics"] == facts["numerics"]


def test_the_audit_refuses(one_sided, exact):
    with pytest.raises(ConfigError, match=r"rollout\.numerics.*not exact"):
        audit_run(one_sided.path)
    done = CliRunner().invoke(app, ["audit", str(one_sided.path)])
    assert done.exit_code != 0 and "not exact" in str(done.exception)
    assert audit_run(exact.path).exact
