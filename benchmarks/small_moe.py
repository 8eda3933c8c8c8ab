"""A small mixture of experts under reinforcement learning: BF16, FP8 on both sides, FP8 in the rollout alone.

The model and the problems are those of `examples/small_moe.py` (run it first); the arms are the three recipes
`small-moe*.yaml` as they stand, one run each. Per step: reward, tokens whose log-prob differs between rollout and
trainer, and the share of tokens that the trainer sends to other experts than the rollout did; held-out accuracy where
the recipe evaluates. Exact arms are audited. Results are written as JSON, as a table, and as a picture; finished arms
are stored in --output and not run again.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt

from benchmarks import record
from zerogap.config import load_config
from zerogap.rl.loop import Run
from zerogap.rl.report import read_lines
from zerogap.rl.rollout_log import write_json
from zerogap.verify.audit import audit_run

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
ARMS = {"bf16": "small-moe", "fp8": "small-moe-fp8", "one-sided": "small-moe-one-sided"}
NAMES = {"bf16": "BF16", "fp8": "FP8 on both sides", "one-sided": "FP8 in the rollout alone"}
COLOURS = {"bf16": "#222222", "fp8": "#1f77b4", "one-sided": "#d62728"}
END_STEPS = 5
FIGURES = {
    "reward": "reward",
    "compared_tokens": "bit_wise/compared_tokens",
    "mismatched_tokens": "bit_wise/mismatched_tokens",
    "different_experts": "moe/different_experts",
    "load_max": "moe/load_max",
    "seconds": "step_time",
}


def run_arm(arm: str, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Train one arm, and audit it where it claims exactness; what is stored."""
    config = load_config(RECIPES / f"{ARMS[arm]}.yaml", [*overrides, f"output_dir={folder / arm}"])
    run = Run(config, "never")
    assert run.train(), "nobody asks the run to stop"
    steps = [
        {"step": line["step"], **{name: line.get(key, 0.0) for name, key in FIGURES.items()}}
        for line in read_lines(run.folder.path / "metrics.jsonl")
    ]
    held_out = [
        {"step": line["step"], "accuracy": line["eval/accuracy"]} for line in read_lines(run.folder.path / "eval.jsonl")
    ]
    audit = "one-sided, not exact: nothing to audit"
    if not config.one_sided:
        found = audit_run(run.folder.path)
        audit = f"{'clean' if found.exact else 'DIFFERS'}: {found.tokens:,} tokens, {found.differences:,} differences"
    return {"arm": arm, "exact": not config.one_sided, "audit": audit, "steps": steps, "held_out": held_out}


def summary_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """The row of the table. Experts: mean over steps, weighted with tokens."""
    steps, held_out = result["steps"], result["held_out"]
    tokens = sum(step["compared_tokens"] for step in steps)
    last = steps[-END_STEPS:]
    moved = sum(step["different_experts"] * step["compared_tokens"] for step in steps)
    return {
        "arm": result["arm"],
        "exact": result["exact"],
        "reward_start": steps[0]["reward"],
        "reward_end": sum(step["reward"] for step in last) / len(last),
        "held_out_start": held_out[0]["accuracy"],
        "held_out_end": held_out[-1]["accuracy"],
        "compared_tokens": tokens,
        "mismatched_tokens": sum(step["mismatched_tokens"] for step in steps),
        "different_experts": moved / tokens if tokens else 0.0,
        "seconds_per_step": sum(step["seconds"] for step in steps) / len(steps),
        "audit": result["audit"],
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown."""
    head = "| arm | reward | held out | differing log-probs | tokens with another expert | audit |"
    lines = [head, "| --- | --- | --- | ---: | ---: | --- |"]
    for row in rows:
        lines.append(
            f"| {NAMES[row['arm']]} | {row['reward_start']:.3f} to {row['reward_end']:.3f} | "
            f"{row['held_out_start']:.3f} to {row['held_out_end']:.3f} | "
            f"{row['mismatched_tokens']:,} of {row['compared_tokens']:,} | {row['different_experts']:.2%} | "
            f"{row['audit']} |"
        )
    return "\n".join(lines) + "\n"


def write_plot(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Reward, held-out accuracy, and the share of tokens with another expert; the same results give the same file."""
    plt.rcParams.update({"svg.hashsalt": "zerogap", "svg.fonttype": "none", "font.size": 9})
    figure, (rewards, held_out, experts) = plt.subplots(1, 3, figsize=(13.5, 4.0), layout="constrained")
    for result in results:
        look = {"color": COLOURS[result["arm"]], "label": NAMES[result["arm"]], "linewidth": 1.4}
        steps = [step["step"] for step in result["steps"]]
        rewards.plot(steps, [step["reward"] for step in result["steps"]], **look)
        experts.plot(steps, [step["different_experts"] for step in result["steps"]], **look)
        looked = result["held_out"]
        held_out.plot([line["step"] for line in looked], [line["accuracy"] for line in looked], marker="o", **look)
    rewards.set(title="mean reward of a step", ylim=(0.0, 1.0))
    held_out.set(title="held-out accuracy, greedy", ylim=(0.0, 1.0))
    experts.set(title="share of tokens that training sends to another expert")
    for axes in (rewards, held_out, experts):
        axes.set_xlabel("step")
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    rewards.legend(loc="lower right", frameon=False)
    figure.suptitle("A Qwen3-MoE of 3.6 million parameters puts eight digits in order; one run per arm")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    options = record.parser(__doc__)
    options.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    options.add_argument("--output", type=Path, default=Path("runs/small-moe-arms"), help="folder of runs and rows")
    options.add_argument("--override", action="append", default=[], help="key=value of all recipes, for a trial")
    args = options.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    results = []
    for arm in args.arms:
        stored = args.output / f"{arm}.json"
        if not stored.is_file():
            write_json(stored, run_arm(arm, args.output, args.override))
        results.append(json.loads(stored.read_text(encoding="utf-8")))
        print(json.dumps(summary_of(results[-1])), flush=True)
    rows = [summary_of(result) for result in results]
    path = record.write("small_moe", rows, recipes=ARMS, overrides=args.override, runs=results)
    path.with_suffix(".md").write_text(
        f"# Small mixture of experts, {path.stem[-10:]}\n\n{table(rows)}", encoding="utf-8"
    )
    write_plot(path.with_suffix(".svg"), results)
    print(f"wrote {path.with_suffix('.md')} and .svg")


if __name__ == "__main__":
    main()
