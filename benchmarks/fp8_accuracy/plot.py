"""The picture: learning curves with bands, mismatch KL per step, held-out accuracy with intervals, per arm.

Needs matplotlib (`pip install 'zerogap[benchmarks]'`). Written as SVG without dates or random ids, so that the same
results give the same file.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.fp8_accuracy.arms import ARMS
from benchmarks.fp8_accuracy.intervals import interval
from benchmarks.fp8_accuracy.summary import by_arm, measure

COLOURS = dict(zip(ARMS, ("#222222", "#d62728", "#ff9f1c", "#1f77b4", "#2ca02c", "#9467bd"), strict=True))
SMALLEST_KL = 1e-5  # below it the axis is linear, down to the 0 of exact arms


def write_plot(
    path: Path, title: str, results: Sequence[Mapping[str, Any]], untrained: Mapping[str, Mapping[str, Any]]
) -> None:
    """Draw stored runs into an SVG file."""
    plt.rcParams.update({"svg.hashsalt": "zerogap", "svg.fonttype": "none", "font.size": 9})
    figure, (curves, kl, accuracy) = plt.subplots(1, 3, figsize=(13.5, 4.2), layout="constrained")
    arms = by_arm(results)
    for arm, runs in arms.items():
        _band(curves, arm, runs, "reward")
        _band(kl, arm, runs, "k3_kl", extremes=True)
    curves.set(title="mean reward of a step", xlabel="step", ylabel="reward", ylim=(0.0, 1.0))
    curves.legend(loc="lower right", frameon=False)
    kl.set(title="mismatch KL of a step (k3), band: all seeds", xlabel="step")
    kl.set_yscale("symlog", linthresh=SMALLEST_KL, linscale=0.5)
    kl.set_ylim(bottom=-SMALLEST_KL / 5)
    _accuracies(accuracy, arms, untrained)
    for axes in (curves, kl, accuracy):
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{title} (bands and bars: 95 % confidence over seeds)")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _band(axes: Axes, arm: str, runs: Sequence[Mapping[str, Any]], name: str, extremes: bool = False) -> None:
    """Mean over seeds by step, with its interval, or with the smallest and largest seed."""
    count = min(len(run["steps"]) for run in runs)
    steps = [step["step"] for step in runs[0]["steps"][:count]]
    values = [interval([run["steps"][i][name] for run in runs]) for i in range(count)]
    axes.plot(steps, [v.mean for v in values], color=COLOURS[arm], label=arm, linewidth=1.4)
    if len(runs) > 1:
        seeds = [[run["steps"][i][name] for run in runs] for i in range(count)]
        low = [min(s) if extremes or v.low is None else v.low for s, v in zip(seeds, values, strict=True)]
        high = [max(s) if extremes or v.high is None else v.high for s, v in zip(seeds, values, strict=True)]
        axes.fill_between(steps, low, high, color=COLOURS[arm], alpha=0.12, linewidth=0)


def _accuracies(
    axes: Axes, arms: Mapping[str, Sequence[Mapping[str, Any]]], untrained: Mapping[str, Mapping[str, Any]]
) -> None:
    """Held-out accuracy of each arm: under its rollout contract, under BF16, and before training."""
    for place, (arm, runs) in enumerate(arms.items()):
        for shift, name, marker in ((-0.12, "accuracy", "o"), (0.12, "accuracy_bf16", "s")):
            values = [measure(run, name) for run in runs]
            mean = interval(values)
            axes.plot([place + shift] * len(values), values, marker, color=COLOURS[arm], alpha=0.3, markersize=3)
            reach = 0.0 if mean.high is None else mean.high - mean.mean
            axes.errorbar(place + shift, mean.mean, reach, fmt=marker, color=COLOURS[arm], capsize=3, markersize=5)
        before = untrained.get(ARMS[arm].rollout)
        if before is not None:
            axes.hlines(before["accuracy"], place - 0.3, place + 0.3, color="#999999", linestyle=":", linewidth=1.2)
    axes.set_xticks(range(len(arms)), arms, rotation=20, ha="right")
    axes.set(title="held-out accuracy", xlabel="circle: own rollout contract, square: BF16, dotted: untrained")
