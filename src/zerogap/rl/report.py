"""The report of a run: one HTML file with curves and sample completions, readable anywhere and with no network.

`write_report` reads what a run logs and nothing else, so it can be called while the run goes on, after a crash, or on a
folder that was copied from another machine:

- `metrics.jsonl`: one JSON object per step with the key `step`; a step that was repeated after a resume counts once,
  as it was logged last;
- `eval.jsonl` (optional): {step, "eval/accuracy", ...};
- `completions.jsonl` (optional): {step, prompt, completion, answer, reward, finish_reason, length, tokens, logprobs}.

Numbers are shown as they were logged; the only arithmetic here is sums: of counts for the head of the page, of seconds
per phase for the table of phases.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from zerogap.errors import CheckpointError
from zerogap.rl.metrics import ONE_SIDED
from zerogap.text.html_page import write_page

TEMPLATE = Path(__file__).parent / "report_template.html"
MOST_COMPLETIONS = 4000
MOST_TOKENS = 200_000  # with text and log-prob; further completions are shown without


@dataclasses.dataclass(frozen=True)
class Panel:
    """One chart: `keys` are drawn as lines over steps, `band` widens the first by +- its value, `zero` expects 0."""

    title: str
    keys: tuple[str, ...]
    note: str = ""
    unit: str = ""
    band: str | None = None
    zero: bool = False
    percent: bool = False


PANELS = (
    Panel("Reward", ("reward",), "mean over the step's completions; band: one standard deviation", band="reward_std"),
    Panel("Held-out accuracy", ("eval/accuracy",), "prompts that are never trained on", percent=True),
    Panel("Groups of equal rewards", ("frac_reward_zero_std",), "share of prompts that teach nothing", percent=True),
    Panel(
        "Mismatched tokens",
        ("bit_wise/mismatched_tokens",),
        "tokens whose trainer log-prob differs in any bit from the one recorded by the rollout",
        zero=True,
    ),
    Panel("Largest logdiff", ("bit_wise/logprob_diff/max",), "max |logp_train - logp_rollout| of the step", zero=True),
    Panel(
        "Tokens sent to other experts",
        ("moe/different_experts",),
        "share of compared tokens that any layer of the trainer routes otherwise than the rollout did",
        zero=True,
    ),
    Panel("Largest load of an expert", ("moe/load_max",), "in mean loads of its layer; the worst layer"),
    Panel("Completion length", ("completions/mean_length",), "mean of the step", unit="tokens"),
    Panel("Entropy", ("entropy",), "mean over completion tokens", unit="nats"),
    Panel("Throughput", ("tokens_per_second",), "completion tokens drawn, by the time of the rollout", unit="tokens/s"),
    Panel("Step time", ("step_time",), "rollout, reward, training and update", unit="s"),
    Panel("Memory", ("memory/resident",), "held by the process after the step", unit="GiB"),
)


def read_lines(path: Path) -> list[dict]:
    """Objects of a JSONL file. A last line without a newline is a write that was cut off, and is left out.

    Raises:
        CheckpointError: another line is not a JSON object.
    """
    whole, _, _cut_off = path.read_bytes().rpartition(b"\n")  # it may have been cut off inside a character
    records = []
    for number, line in enumerate(whole.decode("utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(record, dict):
            raise CheckpointError(f"{path}, line {number}: an object is needed, this is {line[:60]!r}")
        records.append(record)
    return records


def _by_step(records: Iterable[dict], path: Path) -> list[dict]:
    """Records in ascending step order, the last one logged for each step."""
    steps: dict[int, dict] = {}
    for record in records:
        if not isinstance(record.get("step"), int):
            raise CheckpointError(f"{path}: a record without a whole-number `step`: {str(record)[:80]}")
        steps[record["step"]] = record
    return [steps[step] for step in sorted(steps)]


def _number(value: object) -> float | int | None:
    """A finite number as it is; anything else (NaN, infinity, text) as None, which leaves a gap in the curve."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def _series(records: Sequence[dict], key: str) -> list[list]:
    """[[step, value or None], ...] for the records that have `key`."""
    return [[record["step"], _number(record[key])] for record in records if key in record]


def _chart(panel: Panel, records: Sequence[dict]) -> dict | None:
    lines = [{"key": key, "points": points} for key in panel.keys if (points := _series(records, key))]
    if not lines:
        return None
    chart = {"title": panel.title, "note": panel.note, "unit": panel.unit, "zero": panel.zero, "lines": lines}
    return chart | {"percent": panel.percent, "band": _series(records, panel.band) if panel.band else []}


def _other_charts(records: Sequence[dict]) -> list[dict]:
    """Every numeric metric that no panel shows, by name."""
    shown = {key for panel in PANELS for key in (*panel.keys, panel.band)} | {"step"}
    keys = sorted({key for record in records for key, value in record.items() if _number(value) is not None} - shown)
    charts = (_chart(Panel(key, (key,)), records) for key in keys)
    return [chart for chart in charts if chart]


def _total(records: Sequence[dict], key: str) -> int | float | None:
    values = [value for record in records if (value := _number(record.get(key))) is not None]
    return sum(values) if values else None


def _headline(metrics: Sequence[dict], evals: Sequence[dict]) -> list[dict]:
    """The few figures on top of the page: label, value, and whether the value is good, bad or neither."""

    def card(label: str, value: str, note: str = "", state: str = "") -> dict:
        return {"label": label, "value": value, "note": note, "state": state}

    cards = [card("Steps", str(len(metrics)))]
    mismatched, compared = _total(metrics, "bit_wise/mismatched_tokens"), _total(metrics, "bit_wise/compared_tokens")
    one_sided = any(record.get(ONE_SIDED) for record in metrics)
    if one_sided:
        cards.append(card("One-sided", "not exact", "rollout and trainer compute different bits, as asked", "bad"))
    if mismatched is not None:
        note = f"of {compared:,.0f} compared" if compared is not None else "over all steps"
        cards.append(card("Mismatched tokens", f"{mismatched:,.0f}", note, "bad" if mismatched else "good"))
    largest = [v for r in metrics if (v := _number(r.get("bit_wise/logprob_diff/max"))) is not None]
    if largest:
        exact = max(largest) == 0
        cards.append(card("Largest logdiff", "0.0" if exact else f"{max(largest):.3g}", "", "good" if exact else "bad"))
    accuracy = [point for point in _series(evals, "eval/accuracy") if point[1] is not None]
    if accuracy:
        note = f"{accuracy[0][1]:.1%} before" if len(accuracy) > 1 else f"step {accuracy[0][0]}"
        cards.append(card("Held-out accuracy", f"{accuracy[-1][1]:.1%}", note))
    rewards = [point for point in _series(metrics, "reward") if point[1] is not None]
    if rewards:
        cards.append(card("Reward", f"{rewards[-1][1]:.3f}", f"{rewards[0][1]:.3f} at the first step"))
    seconds = _total(metrics, "step_time")
    if seconds is not None:
        cards.append(card("Time in steps", f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"))
    return cards


def _phases(records: Sequence[dict]) -> list[list]:
    """[[phase, seconds over all steps, share of the steps' time], ...], longest first; `time/recalibrate` is part of
    another phase and left out. What no phase covers is the last row."""
    whole = _total(records, "step_time")
    names = {key for record in records for key in record if key.startswith("time/")} - {"time/recalibrate"}
    if not whole or not names:
        return []
    rows = [[name.removeprefix("time/"), float(_total(records, name) or 0.0)] for name in names]
    rows = sorted(rows, key=lambda row: (-row[1], row[0]))
    rows.append(["rest", max(0.0, whole - math.fsum(row[1] for row in rows))])
    return [[name, seconds, seconds / whole] for name, seconds in rows]


def _evaluations(records: Sequence[dict]) -> dict[str, list]:
    """Every figure of every held-out evaluation: `columns` (names without `eval/`) and `rows` [step, value, ...]."""
    columns = list(dict.fromkeys(key for record in records for key in record if key.startswith("eval/")))
    rows = [[record["step"], *(_number(record.get(key)) for key in columns)] for record in records]
    return {"columns": [key.removeprefix("eval/") for key in columns], "rows": rows if columns else []}


def _as_text(prompt: object) -> str:
    """A prompt as text: a list of chat messages becomes one `role: content` paragraph each."""
    if isinstance(prompt, list):
        return "\n".join(
            f"{m.get('role', '?')}: {m.get('content', '')}" if isinstance(m, Mapping) else str(m) for m in prompt
        )
    return "" if prompt is None else str(prompt)


def _completion(record: dict) -> dict:
    reward, answer = _number(record.get("reward")), record.get("answer")
    return {
        "step": record.get("step"),
        "prompt": _as_text(record.get("prompt")),
        "completion": _as_text(record.get("completion")),
        "answer": None if answer is None else str(answer),
        "reward": reward,
        "finish": str(record.get("finish_reason", "")),
        "length": _number(record.get("length")),
        "tokens": _tokens(record.get("tokens"), record.get("logprobs")),
    }


def _tokens(texts: object, logprobs: object) -> list[list]:
    """[[text, log-prob], ...] of a completion; empty where the file does not say them."""
    if not isinstance(texts, list) or not isinstance(logprobs, list) or len(texts) != len(logprobs):
        return []
    return [[str(text), _number(value)] for text, value in zip(texts, logprobs, strict=True)]


def _without_most_tokens(completions: Sequence[dict]) -> list[dict]:
    """The completions, of which at most `MOST_TOKENS` tokens keep their log-probs: those of the last steps."""
    left, light = MOST_TOKENS, []
    for completion in reversed(completions):
        left -= len(completion["tokens"])
        light.append(completion if left >= 0 else completion | {"tokens": []})
    return light[::-1]


def _completions(records: Sequence[dict]) -> tuple[list[dict], int]:
    """The completions to show, each once, and how many were left out so that the page stays light.

    What is left out lies in whole steps, evenly spread; the first and the last step are always kept.
    """
    unique = {json.dumps(c, sort_keys=True): c for c in map(_completion, records)}
    kept = sorted(unique.values(), key=lambda c: (c["step"] is None, c["step"]))
    steps = sorted({c["step"] for c in kept if c["step"] is not None})
    stride = math.ceil(len(kept) / MOST_COMPLETIONS)
    if stride <= 1:
        return kept, 0
    chosen = {*steps[::stride], steps[-1]} if steps else set()
    shown = [c for c in kept if c["step"] in chosen]
    return shown, len(kept) - len(shown)


def write_report(run_dir: str | Path, facts: Mapping[str, object] | None = None) -> Path:
    """Write `report.html` into a run folder, replacing an older one in a single rename.

    Args:
        run_dir: folder with `metrics.jsonl` and, where there are any, `eval.jsonl` and `completions.jsonl`.
        facts: short label -> value pairs for the head of the page (model, numerics, identity, hardware).

    Returns:
        Path of the report.

    Raises:
        CheckpointError: no `metrics.jsonl`, or a line that is not what the run writes.
    """
    folder = Path(run_dir)
    paths = {name: folder / f"{name}.jsonl" for name in ("metrics", "eval", "completions")}
    if not paths["metrics"].is_file():
        raise CheckpointError(f"{folder} holds no metrics.jsonl, so it is not the folder of a run")
    records = {name: read_lines(path) if path.is_file() else [] for name, path in paths.items()}
    metrics, evals = (_by_step(records[name], paths[name]) for name in ("metrics", "eval"))
    evals = evals or [record for record in metrics if "eval/accuracy" in record]
    completions, left_out = _completions(records["completions"])
    charts = (_chart(panel, evals if panel.keys == ("eval/accuracy",) else metrics) for panel in PANELS)
    data = {
        "title": folder.resolve().name,
        "facts": [[str(label), str(value)] for label, value in (facts or {}).items()],
        "cards": _headline(metrics, evals),
        "charts": [chart for chart in charts if chart],
        "others": _other_charts(metrics),
        "phases": _phases(metrics),
        "evaluations": _evaluations(evals),
        "completions": _without_most_tokens(completions),
        "left_out": left_out,
    }
    return write_page(TEMPLATE, data, folder / "report.html")
