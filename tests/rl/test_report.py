"""The report says what the run logged, stands alone, and survives what a crash leaves behind."""

import json
import math
import re

import pytest

from zerogap.errors import CheckpointError
from zerogap.rl import report


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def metric(step, **more):
    learned = 1 - math.exp(-step / 6)
    return {
        "step": step,
        "reward": 0.2 + 0.75 * learned + 0.03 * math.sin(9 * step),
        "reward_std": 0.42 - 0.3 * learned,
        "completions/mean_length": 19 - 9 * learned + math.sin(5 * step),
        "entropy": 1.6 - 1.1 * learned,
        "bit_wise/logprob_diff/max": 0.0,
        "bit_wise/mismatched_tokens": 0,
        "bit_wise/compared_tokens": 900 + step,
        "step_time": 14.0 + math.sin(step),
        "tokens_per_second": 300 + 40 * learned,
        "grad_norm": 1.0 + 0.3 * math.cos(3 * step),
        "learning_rate": 2e-5,
        **more,
    }


def completion(step, number, reward, text="7 x 8 = 56"):
    return {
        "step": step,
        "prompt": f"What is {number} times 8?",
        "completion": text,
        "answer": str(number * 8),
        "reward": reward,
        "finish_reason": "stop",
        "length": 9,
    }


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "multiplication"
    folder.mkdir()
    write_lines(folder / "metrics.jsonl", [metric(step) for step in range(1, 25)])
    write_lines(folder / "eval.jsonl", [{"step": 0, "eval/accuracy": 0.25}, {"step": 24, "eval/accuracy": 0.875}])
    write_lines(folder / "completions.jsonl", [completion(s, n, float(n % 2)) for s in range(1, 25) for n in range(4)])
    return folder


def embedded(path):
    """The data of a report as a browser would read it."""
    html = path.read_text(encoding="utf-8")
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, flags=re.DOTALL)
    return json.loads(text)


def charts(data):
    return {chart["title"]: chart for chart in data["charts"]}


def test_curves_are_the_logged_numbers(run_dir):
    data = embedded(report.write_report(run_dir, {"model": "tiny", "numerics": "bf16"}))
    assert data["title"] == "multiplication"
    assert data["facts"] == [["model", "tiny"], ["numerics", "bf16"]]
    routed = [panel.title for panel in report.PANELS if panel.keys[0].startswith("moe/")]
    not_logged = {*routed, "Groups of equal rewards", "Memory"}
    assert routed and list(charts(data)) == [p.title for p in report.PANELS if p.title not in not_logged]
    assert charts(data)["Reward"]["lines"][0]["points"] == [[s, metric(s)["reward"]] for s in range(1, 25)]
    assert charts(data)["Reward"]["band"][3] == [4, metric(4)["reward_std"]]
    assert charts(data)["Held-out accuracy"]["lines"][0]["points"] == [[0, 0.25], [24, 0.875]]
    assert [chart["title"] for chart in data["others"]] == ["bit_wise/compared_tokens", "grad_norm", "learning_rate"]
    assert len(data["completions"]) == 96
    assert data["left_out"] == 0


def cards(run_dir):
    return {card["label"]: card for card in embedded(report.write_report(run_dir))["cards"]}


def test_head_counts_every_mismatch(run_dir):
    assert cards(run_dir)["Mismatched tokens"] | {"note": ""} == {
        "label": "Mismatched tokens",
        "value": "0",
        "note": "",
        "state": "good",
    }
    assert cards(run_dir)["Held-out accuracy"]["value"] == "87.5%"
    worse = metric(25, **{"bit_wise/mismatched_tokens": 3, "bit_wise/logprob_diff/max": 2.5e-4})
    write_lines(run_dir / "metrics.jsonl", [metric(1), worse, metric(26)])
    assert (cards(run_dir)["Mismatched tokens"]["value"], cards(run_dir)["Mismatched tokens"]["state"]) == ("3", "bad")
    assert (cards(run_dir)["Largest logdiff"]["value"], cards(run_dir)["Largest logdiff"]["state"]) == (
        "0.00025",
        "bad",
    )


def test_a_step_repeated_after_a_resume_counts_once_as_logged_last(run_dir):
    write_lines(run_dir / "metrics.jsonl", [metric(1), metric(2, reward=0.1), metric(2, reward=0.9), metric(3)])
    data = embedded(report.write_report(run_dir))
    assert [p for p in charts(data)["Reward"]["lines"][0]["points"] if p[0] == 2] == [[2, 0.9]]
    assert data["cards"][0]["value"] == "3"


def test_a_line_cut_off_by_a_crash_is_left_out(run_dir):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 25, "rew')
    assert embedded(report.write_report(run_dir))["cards"][0]["value"] == "24"


@pytest.mark.parametrize("line", ["not json", "[1, 2]", '{"reward": 1.0}', '{"step": "one"}'])
def test_foreign_lines_are_refused_by_file(run_dir, line):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl"):
        report.write_report(run_dir)


def test_a_folder_without_metrics_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no metrics\.jsonl"):
        report.write_report(tmp_path)


def test_numbers_that_are_not_finite_leave_a_gap(run_dir):
    write_lines(run_dir / "metrics.jsonl", [metric(1), metric(2, entropy=math.nan), metric(3, entropy=math.inf)])
    entropy = charts(embedded(report.write_report(run_dir)))["Entropy"]["lines"][0]["points"]
    assert entropy == [[1, metric(1)["entropy"]], [2, None], [3, None]]


def test_completions_cannot_break_out_of_the_page(run_dir):
    hostile = "</script><script>alert(1)</script><!-- \u2028 \ud800 & \U0001f642"
    write_lines(run_dir / "completions.jsonl", [completion(1, 2, 1.0, hostile)])
    path = report.write_report(run_dir)
    assert embedded(path)["completions"][0]["completion"] == hostile.replace("\ud800", "?")
    assert "alert(1)</script>" not in path.read_text(encoding="utf-8")


def test_the_page_asks_nothing_of_any_network(run_dir):
    html = report.write_report(run_dir).read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\"'\s<]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of SVG's elements, never fetched
    assert not re.search(r"<link|@import|url\(|<img|<iframe|fetch\(|XMLHttpRequest", html)


def test_chat_prompts_missing_rewards_and_zero_rewards_are_told_apart(run_dir):
    chat = completion(1, 2, 0.0) | {"prompt": [{"role": "user", "content": "Hi"}]}
    write_lines(run_dir / "completions.jsonl", [chat, completion(1, 3, None)])
    first, second = embedded(report.write_report(run_dir))["completions"]
    assert (first["prompt"], first["reward"], second["reward"]) == ("user: Hi", 0.0, None)


def test_a_long_run_keeps_first_and_last_step(run_dir, monkeypatch):
    monkeypatch.setattr(report, "MOST_COMPLETIONS", 20)
    data = embedded(report.write_report(run_dir))
    shown = {sample["step"] for sample in data["completions"]}
    assert {1, 24} <= shown
    assert len(data["completions"]) + data["left_out"] == 96
    assert len(data["completions"]) <= 20 + 4


def test_only_metrics_are_needed(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "reward": 0.5}])
    data = embedded(report.write_report(tmp_path))
    assert list(charts(data)) == ["Reward"]
    assert data["completions"] == []


def test_seconds_of_phases_are_summed_and_the_rest_is_named(run_dir):
    times = {"time/rollout": 6.0, "time/train": 3.0, "time/recalibrate": 1.0}
    write_lines(run_dir / "metrics.jsonl", [metric(1, step_time=10.0, **times), metric(2, step_time=10.0, **times)])
    phases = embedded(report.write_report(run_dir))["phases"]
    assert phases == [["rollout", 12.0, 0.6], ["train", 6.0, 0.3], ["rest", 2.0, 0.1]]
    write_lines(run_dir / "metrics.jsonl", [metric(1)])
    assert embedded(report.write_report(run_dir))["phases"] == []


def test_every_figure_of_every_evaluation_is_in_the_table(run_dir):
    first, last = {"step": 0, "eval/accuracy": 0.25}, {"step": 9, "eval/accuracy": 0.5, "eval/maj@4": 0.75}
    write_lines(run_dir / "eval.jsonl", [first, last])
    table = embedded(report.write_report(run_dir))["evaluations"]
    assert table == {"columns": ["accuracy", "maj@4"], "rows": [[0, 0.25, None], [9, 0.5, 0.75]]}
    (run_dir / "eval.jsonl").unlink()
    assert embedded(report.write_report(run_dir))["evaluations"] == {"columns": [], "rows": []}


def with_tokens(step, texts, logprobs):
    return completion(step, 2, 1.0, "".join(texts)) | {"tokens": texts, "logprobs": logprobs, "length": len(texts)}


def test_tokens_keep_their_log_probs(run_dir):
    lines = [with_tokens(1, ["<b>", " x"], [-0.25, None]), with_tokens(2, ["a"], [-1.0, -2.0]), completion(3, 1, 0.0)]
    write_lines(run_dir / "completions.jsonl", lines)
    shown = embedded(report.write_report(run_dir))["completions"]
    assert [c["tokens"] for c in shown] == [[["<b>", -0.25], [" x", None]], [], []]


def test_a_long_run_keeps_the_log_probs_of_its_last_steps(run_dir, monkeypatch):
    monkeypatch.setattr(report, "MOST_TOKENS", 5)
    write_lines(run_dir / "completions.jsonl", [with_tokens(s, ["a", "b"], [-1.0, -2.0]) for s in range(1, 6)])
    shown = embedded(report.write_report(run_dir))["completions"]
    assert [(c["step"], len(c["tokens"])) for c in shown] == [(1, 0), (2, 0), (3, 0), (4, 2), (5, 2)]
