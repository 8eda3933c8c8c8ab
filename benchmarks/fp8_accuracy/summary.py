"""From stored runs to tables and verdicts: a row per arm, and every arm against BF16, seed by seed."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.fp8_accuracy.arms import ARMS, BASELINE
from benchmarks.fp8_accuracy.held_out import PARTS
from benchmarks.fp8_accuracy.intervals import CONFIDENCE, Interval, interval, paired_difference, verdict
from benchmarks.fp8_accuracy.runs import OWN, PLAIN

Result = Mapping[str, Any]

MEASURES = {
    "accuracy": "held-out accuracy, drawn under the arm's rollout contract (the measure that decides)",
    "accuracy_bf16": "held-out accuracy of the trained weights, drawn under BF16",
    "products": "the part *products* of the held-out accuracy",
    "two-digit": "the part *two-digit* of the held-out accuracy",
    "reward_end": "reward of the last steps of training",
}


def measure(result: Result, name: str) -> float:
    """One number of a run that is compared over arms."""
    if name == "reward_end":
        return result["reward_end"]
    if name in PARTS:
        return result["evaluations"][OWN]["parts"][name]
    return result["evaluations"][PLAIN if name == "accuracy_bf16" else OWN]["accuracy"]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """An arm against BF16 in one measure, over the seeds that both have."""

    arm: str
    measure: str
    difference: Interval
    verdict: str


def by_arm(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Runs of each arm that has any, arms in their own order, runs by seed."""
    found = {name: sorted((r for r in results if r["arm"] == name), key=lambda r: r["seed"]) for name in ARMS}
    return {name: runs for name, runs in found.items() if runs}


def comparisons(results: Sequence[Result], margin: float) -> list[Comparison]:
    """Every arm against the baseline in every measure; none where the baseline has no run."""
    arms = by_arm(results)
    found = []
    for name in MEASURES:
        values = {arm: {r["seed"]: measure(r, name) for r in runs} for arm, runs in arms.items()}
        for arm in values:
            difference = None if arm == BASELINE else paired_difference(values[arm], values.get(BASELINE, {}))
            if difference is not None:
                found.append(Comparison(arm, name, difference, verdict(difference, margin)))
    return found


def parity(runs: Sequence[Result]) -> str:
    """`exact`, `one-sided`, or how many tokens differ where none may."""
    mismatched, compared = (sum(r[f"{name}_tokens"] for r in runs) for name in ("mismatched", "compared"))
    if any(r["one_sided"] for r in runs):
        return f"one-sided, not exact: {mismatched:,} of {compared:,} differ"
    return f"{'exact' if not mismatched else 'BROKEN'}: {mismatched:,} of {compared:,} differ"


def _mean(runs: Sequence[Result], name: str) -> float:
    return math.fsum(r[name] for r in runs) / len(runs)


def arm_rows(results: Sequence[Result], untrained: Mapping[str, Result], margin: float) -> list[dict[str, Any]]:
    """One flat row per arm, for the result file and the first table."""
    decided = {c.arm: c for c in comparisons(results, margin) if c.measure == "accuracy"}
    rows = []
    for arm, runs in by_arm(results).items():
        compared = decided.get(arm)
        before = untrained.get(ARMS[arm].rollout)
        rows.append(
            {
                "arm": arm,
                "seeds": len(runs),
                "log-probs": parity(runs),
                "untrained": "" if before is None else before["accuracy"],
                "accuracy": str(interval([measure(r, "accuracy") for r in runs])),
                "minus bf16": "" if compared is None else compared.difference.signed(),
                "verdict": "" if compared is None else compared.verdict,
                "mismatch KL (k3)": _mean(runs, "k3_kl"),
                "mean abs logdiff": _mean(runs, "logdiff_mean"),
                "max abs logdiff": max(r["logdiff_max"] for r in runs),
                "reward at start": _mean(runs, "reward_start"),
                "reward at end": str(interval([r["reward_end"] for r in runs])),
            }
        )
    return rows


def cost_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One flat row per arm: time, throughput, memory; means over seeds and steps."""
    rows = []
    for arm, runs in by_arm(results).items():
        steps = [step for run in runs for step in run["steps"]]
        phases = sorted({name for step in steps for name in step["phases"]})
        rows.append(
            {
                "arm": arm,
                "seconds per step": _mean(runs, "seconds_per_step"),
                **{
                    f"{name.replace('_', ' ')}, s": math.fsum(s["phases"].get(name, 0.0) for s in steps) / len(steps)
                    for name in phases
                },
                "rollout tokens/s": _mean(runs, "tokens_per_second"),
                "KV bytes per token": runs[0]["kv_bytes_per_token"],
                "recalibration, % of a step": 100.0 * _mean(runs, "recalibration_share"),
                "effective sample size": _mean(runs, "ess"),
            }
        )
    return rows


def comparison_rows(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """The comparisons as rows."""
    return [
        {"measure": c.measure, "arm": c.arm, "minus bf16": c.difference.signed(), "verdict": c.verdict} for c in found
    ]


def circumstances(results: Sequence[Result]) -> dict[str, list[Any]]:
    """Every commit, machine, number of threads and kernel build that runs were made with."""
    found = {name: sorted({r["circumstances"][name] for r in results}) for name in ("commit", "hardware", "threads")}
    builds = {identity.split("#")[-1] for r in results for identity in r["identities"].values()}
    return found | {"kernel build": sorted(builds)}


def details(results: Sequence[Result], margin: float) -> dict[str, Any]:
    """Every mean, interval and comparison in full, JSON-ready."""
    return {
        "measures": MEASURES,
        "means": {
            arm: {name: dataclasses.asdict(interval([measure(r, name) for r in runs])) for name in MEASURES}
            for arm, runs in by_arm(results).items()
        },
        "differences": [dataclasses.asdict(c) for c in comparisons(results, margin)],
        "cost": cost_rows(results),
        "circumstances": circumstances(results),
    }


# ---------------------------------------------------------------------------------------------------- text


def shown(value: object) -> str:
    """A cell: three significant digits of a float, anything else as it is; bars escaped."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value).replace("|", "\\|")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a markdown table; a dash where there are none."""
    if not rows:
        return "-"
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [
        "| " + " | ".join(shown(column) for column in columns) + " |",
        "| --- " * len(columns) + "|",
        *("| " + " | ".join(shown(row.get(column, "")) for column in columns) + " |" for row in rows),
    ]
    return "\n".join(lines)


def sentences(results: Sequence[Result], margin: float) -> list[str]:
    """The verdicts of the deciding measure, in words."""
    lines = []
    for c in comparisons(results, margin):
        if c.measure == "accuracy":
            seeds = f"{c.difference.count} paired seed{'s' if c.difference.count > 1 else ''}"
            lines.append(
                f"- **{c.arm}** ({ARMS[c.arm].text}) against BF16: {c.verdict} "
                f"({c.difference.signed()} of held-out accuracy, {seeds})."
            )
    return lines


def page(
    title: str, facts: Sequence[str], results: Sequence[Result], untrained: Mapping[str, Result], margin: float
) -> str:
    """The whole summary as markdown."""
    rule = (
        f"Intervals are {CONFIDENCE:.0%} (Student's t over seeds), differences are taken seed by seed. A verdict was "
        f"decided beforehand to be `equal within {margin:g}` if the whole interval of the difference is within "
        f"+-{margin:g}; else `better` or `worse` if the whole interval is above or below 0; else `not resolved`. "
        "Intervals are not adjusted for the number of comparisons."
    )
    named = "\n".join(f"- `{name}`: {text}" for name, text in MEASURES.items())
    return (
        "\n\n".join(
            [
                f"# {title}",
                "\n".join(f"- {fact}" for fact in facts),
                rule,
                "## Verdicts",
                "\n".join(sentences(results, margin)) or "No arm has a seed in common with BF16.",
                "## Arms",
                table(arm_rows(results, untrained, margin)),
                "## Every measure against BF16",
                named,
                table(comparison_rows(comparisons(results, margin))),
                "## Cost",
                "Seconds are wall time of this machine, which other programs may have shared. `effective sample "
                "size` is that of the raw ratios, 1 where every ratio is 1.",
                table(cost_rows(results)),
            ]
        )
        + "\n"
    )
