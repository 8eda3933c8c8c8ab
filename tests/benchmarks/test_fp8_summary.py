"""Figures of a run, tables, verdicts and the plot of the accuracy benchmark, from made-up results."""

import math

import pytest

from benchmarks.fp8_accuracy import summary
from benchmarks.fp8_accuracy.arms import ARMS
from benchmarks.fp8_accuracy.runs import END_STEPS, step_figures, summary_of


def record(step, reward=0.5, d=(0.0, 0.0), corrected=False, **changes):
    """A line of metrics.jsonl for two tokens with log-ratios `d`."""
    ratios = [math.exp(v) for v in d]
    raw = {
        "sampling/importance_sampling_ratio/min": min(ratios),
        "sampling/importance_sampling_ratio/mean": sum(ratios) / len(ratios),
        "sampling/importance_sampling_ratio/max": max(ratios),
    }
    if corrected:
        raw = {key.replace("importance", "raw_importance"): value for key, value in raw.items()} | {
            "sampling/importance_sampling_ratio/mean": 0.9,
            "sampling/importance_sampling_ratio/max": 2.0,
            "sampling/effective_sample_size": 0.95,
            "sampling/frac_modified_importance_sampling_ratio": 0.25,
        }
    return {
        "step": step,
        "reward": reward,
        "bit_wise/mismatched_tokens": sum(v != 0.0 for v in d),
        "bit_wise/compared_tokens": len(d),
        "bit_wise/logprob_diff/mean": sum(map(abs, d)) / len(d),
        "bit_wise/logprob_diff/max": max(map(abs, d)),
        "sampling/kl": -sum(d) / len(d),
        "sampling/k3_kl": sum(math.exp(v) - 1 - v for v in d) / len(d),
        "sampling/chi2_token": sum(math.exp(2 * v) - 1 for v in d) / len(d),
        **raw,
        "entropy": 1.0,
        "grad_norm": 2.0,
        "completions/mean_length": 3.0,
        "tokens_per_second": 100.0,
        "step_time": 10.0,
        "time/rollout": 4.0,
        "time/train": 5.0,
        **changes,
    }


def run(arm, seed, accuracy, plain=None, one_sided=False, **changes):
    evaluation = {"accuracy": accuracy, "parts": {"products": accuracy + 0.1, "two-digit": accuracy - 0.1}}
    exact = not one_sided
    d = (0.0, 0.0) if exact else (0.1, -0.2)
    return {
        "arm": arm,
        "seed": seed,
        "one_sided": one_sided,
        "kv_bytes_per_token": 100,
        "identities": {"trainer": "a@cpu#build1", "rollout": "a@cpu#build1"},
        "circumstances": {"commit": "abc", "hardware": "cpu x2", "threads": 2},
        "evaluations": {"own": evaluation, "bf16": {**evaluation, "accuracy": accuracy if plain is None else plain}},
        **summary_of([record(step, 0.1 * step, d) for step in range(1, 6)]),
        **changes,
    }


UNTRAINED = {"bf16": {"accuracy": 0.3}, "fp8": {"accuracy": 0.31}}
NOISE = (0.0, 0.02, -0.01, 0.015)


def results(shift_of):
    """Four seeds of BF16 around 0.6, and of other arms shifted from it."""
    found = [run("bf16", seed, 0.6 + noise) for seed, noise in enumerate(NOISE)]
    for arm, shifts in shift_of.items():
        found += [
            run(arm, seed, 0.6 + NOISE[seed] + shift, one_sided=arm.startswith("fp8-rollout"))
            for seed, shift in enumerate(shifts)
        ]
    return found


def test_effective_sample_size_is_that_of_the_raw_ratios_with_and_without_a_correction():
    d = (0.3, -0.7, 0.0)
    ratios = [math.exp(v) for v in d]
    expected = sum(ratios) ** 2 / (len(ratios) * sum(r * r for r in ratios))
    for corrected in (False, True):
        figures = step_figures(record(1, d=d, corrected=corrected))
        assert math.isclose(figures["ess"], expected, rel_tol=1e-12)
        assert math.isclose(figures["ratio_max"], math.exp(0.3), rel_tol=1e-12)
        assert ("weight_max" in figures) == corrected
    assert figures["weight_max"] == 2.0
    assert step_figures(record(1))["ess"] == 1.0


def test_figures_of_a_run_are_pooled_over_tokens():
    records = [record(1, 0.2, (0.5,)), record(2, 0.4, (0.0, 0.0, 0.1)), record(3, 0.6, **{"time/recalibrate": 0.6})]
    figures = summary_of(records)
    d = (0.5, 0.0, 0.0, 0.1, 0.0, 0.0)
    assert figures["compared_tokens"] == 6
    assert figures["mismatched_tokens"] == 2
    assert math.isclose(figures["logdiff_mean"], sum(d) / 6, rel_tol=1e-12)
    assert math.isclose(figures["k3_kl"], sum(math.exp(v) - 1 - v for v in d) / 6, rel_tol=1e-12)
    assert figures["logdiff_max"] == 0.5
    assert math.isclose(figures["recalibration_share"], 0.6 / 30.0, rel_tol=1e-12)
    assert figures["tokens_per_second"] == 100.0
    assert figures["reward_start"] == 0.2
    assert math.isclose(figures["reward_end"], (0.2 + 0.4 + 0.6) / END_STEPS, rel_tol=1e-12)


def test_a_missing_figure_is_an_error_and_not_a_gap():
    with pytest.raises(KeyError, match="k3_kl"):
        step_figures({key: value for key, value in record(1).items() if key != "sampling/k3_kl"})


def test_verdicts_follow_the_paired_differences():
    shifts = {
        "fp8": (0.001, -0.002, 0.0, 0.002),
        "fp8-rollout": (-0.1, -0.12, -0.09, -0.11),
        "fp8-kv": (0.05, -0.06, 0.02, 0.0),
        "fp8-rollout-tis": (0.1, 0.12, 0.09, 0.11),
    }
    found = {c.arm: c for c in summary.comparisons(results(shifts), 0.02) if c.measure == "accuracy"}
    assert {arm: c.verdict for arm, c in found.items()} == {
        "fp8-rollout": "worse",
        "fp8-rollout-tis": "better",
        "fp8": "equal within 0.02",
        "fp8-kv": "not resolved",
    }
    assert math.isclose(found["fp8-rollout"].difference.mean, -0.105, rel_tol=1e-9)
    assert found["fp8"].difference.count == 4


def test_every_measure_reads_its_own_number():
    one = run("fp8", 0, 0.5, plain=0.4)
    assert summary.measure(one, "accuracy") == 0.5
    assert summary.measure(one, "accuracy_bf16") == 0.4
    assert summary.measure(one, "products") == 0.6
    assert summary.measure(one, "two-digit") == 0.4
    assert math.isclose(summary.measure(one, "reward_end"), 0.4, rel_tol=1e-12)
    assert set(summary.MEASURES) == {"accuracy", "accuracy_bf16", "products", "two-digit", "reward_end"}


def test_without_a_baseline_nothing_is_compared():
    assert summary.comparisons([run("fp8", 0, 0.5)], 0.02) == []
    text = summary.page("t", ["f"], [run("fp8", 0, 0.5)], UNTRAINED, 0.02)
    assert "No arm has a seed in common" in text
    assert "\n\n-\n\n## Cost" in text


def test_one_sided_runs_are_never_called_exact():
    rows = {
        r["arm"]: r for r in summary.arm_rows(results({"fp8-rollout": (0.0,) * 4, "fp8": (0.0,) * 4}), UNTRAINED, 0.02)
    }
    assert rows["fp8-rollout"]["log-probs"] == "one-sided, not exact: 40 of 40 differ"
    assert rows["fp8"]["log-probs"] == "exact: 0 of 40 differ"
    broken = run("fp8", 0, 0.5, mismatched_tokens=1)
    assert summary.parity([broken]) == "BROKEN: 1 of 10 differ"
    assert rows["bf16"]["minus bf16"] == rows["bf16"]["verdict"] == ""
    assert rows["fp8"]["untrained"] == 0.31
    assert rows["fp8-rollout"]["untrained"] == ""


def test_the_page_holds_every_arm_rule_and_verdict():
    text = summary.page("A title", ["a fact"], results({"fp8-rollout": (-0.1, -0.12, -0.09, -0.11)}), UNTRAINED, 0.02)
    assert text.startswith("# A title\n\n- a fact\n")
    assert "**fp8-rollout** (rollout FP8 with FP8 KV, training BF16, uncorrected) against BF16: worse (-0.105 [" in text
    assert "4 paired seeds" in text
    assert "equal within 0.02" in text
    assert summary.table([{"a|b": 0.12345}]) == "| a\\|b |\n| --- |\n| 0.123 |"


def test_details_are_complete_and_plain():
    found = summary.details(results({"fp8": (0.0,) * 4}), 0.02)
    assert set(found["means"]) == {"bf16", "fp8"}
    assert set(found["means"]["fp8"]) == set(summary.MEASURES)
    assert len(found["differences"]) == len(summary.MEASURES)
    assert found["circumstances"]["kernel build"] == ["build1"]
    assert found["circumstances"]["threads"] == [2]


def test_the_plot_is_the_same_file_for_the_same_results(tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib: pip install 'zerogap[benchmarks]'")
    from benchmarks.fp8_accuracy.plot import COLOURS, write_plot

    assert set(COLOURS) == set(ARMS)
    found = results({"fp8-rollout": (-0.1, -0.12, -0.09, -0.11), "fp8-kv": (0.0,) * 4})
    for name in ("a.svg", "b.svg"):
        write_plot(tmp_path / name, "a title", found, UNTRAINED)
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert all(word in text for word in ("a title", "fp8-rollout", "mismatch KL", "held-out accuracy"))
    write_plot(tmp_path / "one.svg", "one seed", [run("bf16", 0, 0.5)], {})
    assert (tmp_path / "one.svg").stat().st_size
