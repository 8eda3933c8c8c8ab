"""The small mixture of experts: made and taught a little, trained by its recipe, and reported."""

import importlib.util
import itertools
import sys
from pathlib import Path

import pytest

from benchmarks import small_moe as benchmark
from zerogap.config import load_config
from zerogap.models.parameters import count_parameters, total
from zerogap.rl.loop import Run
from zerogap.rl.report import read_lines


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("small_moe_example", Path("examples/small_moe.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_problems_are_as_they_say(example):
    rows = list(itertools.islice(example.problems(0), 300))
    assert len({row["prompt"] for row in rows}) == 300
    for row in rows:
        digits = row["prompt"].removeprefix("sort ")
        assert row["answer"] == "".join(sorted(digits)) and len(digits) == example.DIGITS and "0" not in digits
    counts = total(count_parameters(example.small_spec()))
    assert (round(counts.total / 1e6, 1), round(counts.active / 1e6, 1)) == (3.6, 1.3)
    assert example.small_spec("qwen3").moe is None


def test_it_is_taught_and_then_trained_by_its_recipe(example, tmp_path, monkeypatch):
    words = ["small_moe.py", "--output", str(tmp_path), "--updates", "2", "--every", "2", "--skill", "0"]
    monkeypatch.setattr(sys, "argv", words)
    example.main()
    small = ["optimizer.max_steps=2", "rollout.prompts_per_step=2", "eval.num_prompts=2", "logging.tensorboard=false"]
    small += [f"model={tmp_path}/model", f"data.train={tmp_path}/train.jsonl", f"data.eval={tmp_path}/held-out.jsonl"]
    run = Run(load_config("recipes/small-moe.yaml", [*small, f"output_dir={tmp_path}/run"]), "never")
    assert run.train()
    records = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert [r["bit_wise/mismatched_tokens"] for r in records] == [0, 0]
    assert [r["moe/different_experts"] for r in records] == [0.0, 0.0]
    assert all(set(benchmark.FIGURES.values()) <= set(r) for r in records)


def test_the_report_of_the_arms(tmp_path):
    def result(arm, moved):
        steps = [
            {"step": i, "reward": i / 10, "compared_tokens": 100 * i, "mismatched_tokens": round(100 * i * moved),
             "different_experts": moved, "load_max": 1.5, "seconds": 2.0}
            for i in range(1, 9)
        ]  # fmt: skip
        held_out = [{"step": 0, "accuracy": 0.25}, {"step": 8, "accuracy": 0.75}]
        return {"arm": arm, "exact": not moved, "audit": "none", "steps": steps, "held_out": held_out}

    results = [result("bf16", 0.0), result("one-sided", 0.5)]
    rows = [benchmark.summary_of(r) for r in results]
    assert rows[1]["different_experts"] == pytest.approx(0.5) and rows[1]["mismatched_tokens"] == 1800
    assert rows[0]["reward_end"] == pytest.approx(0.6) and rows[0]["held_out_end"] == 0.75
    text = benchmark.table(rows)
    assert "| BF16 | 0.100 to 0.600 | 0.250 to 0.750 | 0 of 3,600 | 0.00% |" in text and "50.00%" in text
    paths = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for path in paths:
        benchmark.write_plot(path, results)
    assert paths[0].read_bytes() == paths[1].read_bytes()
