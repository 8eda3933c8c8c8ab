"""`zerogap eval` scores as a run does, repeats itself, and refuses what it cannot honour before a model is read."""

import json

import pytest
from typer.testing import CliRunner

from tests.tiny_runs import REWARD, write_model
from zerogap.cli import app
from zerogap.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    write_model(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"say {word}", "answer": word} for word in ("one", "two", "three", "four", "five")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def evaluated(folder, *words, name="out"):
    """Figures and table of one evaluation."""
    given = ["eval", str(folder / "model"), "--data", str(folder / "rows.jsonl"), "--max-tokens", "6", "--num-prompts"]
    files = ["--json", str(folder / f"{name}.json"), "--completions", str(folder / f"{name}.jsonl")]
    reward = ["--reward", f"{folder}/reward.py:even_ids"]
    done = CliRunner().invoke(app, [*given, "3", *reward, *files, *words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    figures = json.loads((folder / f"{name}.json").read_text())
    assert all(key in done.stdout for key in figures)
    return figures, [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


SAMPLED = ("--num-samples", "4", "--temperature", "1.0", "--pass-k", "1", "--pass-k", "4")


def test_figures_are_those_of_the_table(folder):
    figures, table = evaluated(folder, *SAMPLED)
    assert [(row["prompt_number"], row["sample"]) for row in table] == [(p, s) for p in range(3) for s in range(4)]
    assert figures["eval/mean@4"] == pytest.approx(sum(row["reward"] for row in table) / 12, abs=1e-15)
    assert figures["eval/accuracy"] == figures["eval/pass@1"] == sum(row["correct"] for row in table) / 12
    groups = [table[i : i + 4] for i in range(0, 12, 4)]
    assert figures["eval/pass@4"] == pytest.approx(sum(any(r["correct"] for r in g) for g in groups) / 3, abs=1e-15)
    assert figures["eval/num_prompts"] == 3
    assert {"eval/maj@4", "eval/completions/clipped_ratio", "eval/completions/max_length", "identity"} <= set(figures)


def test_one_seed_gives_samples_that_differ_and_repeat_and_another_gives_others(folder):
    """Samples of one prompt at one seed are distinct; the same command draws them again; a second replica, of another
    seed, draws others."""

    def texts(*words):
        return [row["completion"] for row in evaluated(folder, *SAMPLED, *words)[1]]

    first = texts("--seed", "7")
    assert all(len(set(first[i : i + 4])) == 4 for i in range(0, 12, 4))
    assert texts("--seed", "7") == first
    other = texts("--seed", "8")
    assert not any(a == b for a, b in zip(first, other, strict=True))


def test_the_contract_is_the_one_that_was_asked_for(folder):
    plain, low = evaluated(folder)[0], evaluated(folder, "--numerics", "{preset: fp8-kv, kv_scale: calibrated}")[0]
    assert plain["identity"] != low["identity"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--pass-k", "5", *SAMPLED[:4]), r"eval\.pass_k = \[5\]: choose at most num_samples \(4\)"),
        (("--num-samples", "4"), "eval.num_samples = 4: choose 1, or a temperature above 0"),
        (("--numerics", "fp7"), "fp7"),
        (("--completions", "/nowhere/table.jsonl"), "--completions = '/nowhere/table.jsonl': there is no folder"),
        (("--data", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--reward", "number_match"), "number"),
    ],
)
def test_what_is_refused(folder, words, message, monkeypatch):
    monkeypatch.setattr("zerogap.rl.setup.open_source", lambda config: pytest.fail("a model was opened"))
    with pytest.raises(ConfigError, match=message):
        evaluated(folder, *words)
