"""The quick-start task in every mode: one real run of each SmolLM2 recipe, and the audit of those that claim exactness.

A recipe runs as it stands, through the public loop. Rows: reward at the first and over the last three steps, held-out
accuracy before and after, tokens compared and tokens that differ in any bit, logdiff, k3 KL, speed, bytes of keys and
values per token, the share of a step spent on recalibrating KV scales, and what the audit found. Finished modes are
stored in --output and not run again; one-sided modes are not exact, say so, and cannot be audited.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.fp8_accuracy.runs import summary_of
from zerogap.config import load_config
from zerogap.rl.loop import Run
from zerogap.rl.report import read_lines
from zerogap.rl.rollout_log import write_json
from zerogap.verify.audit import audit_run

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
STEM = "smollm2-multiplication"
MODES = ("fp32", "bf16", "fp8", "fp8-kv", "fp8-kv-calibrated", "one-sided", "one-sided-tis")
FIGURES = (
    "reward_start",
    "reward_end",
    "compared_tokens",
    "mismatched_tokens",
    "logdiff_mean",
    "logdiff_max",
    "k3_kl",
    "tokens_per_second",
    "seconds_per_step",
    "recalibration_share",
)


def recipe_of(mode: str) -> Path:
    """The recipe of a mode; BF16 is the plain one."""
    return RECIPES / (f"{STEM}.yaml" if mode == "bf16" else f"{STEM}-{mode}.yaml")


def run_mode(mode: str, folder: Path) -> dict[str, Any]:
    """Train and audit one mode; the row of the table."""
    config = load_config(recipe_of(mode), [f"output_dir={folder / mode}"])
    run = Run(config, "auto" if (folder / mode / "checkpoints").is_dir() else "never")
    assert run.train(), "nobody asks the run to stop"
    figures = summary_of(read_lines(run.folder.path / "metrics.jsonl"))
    accuracy = [r["eval/accuracy"] for r in read_lines(run.folder.path / "eval.jsonl")]
    row: dict[str, Any] = {"mode": mode, "exact": not config.one_sided, "held_out_before": accuracy[0]}
    row |= {"held_out_after": accuracy[-1], **{name: figures[name] for name in FIGURES}}
    row["kv_bytes_per_token"] = run.sampled.codec().bytes_per_token() * len(run.sampled.blocks)
    if config.one_sided:
        return row | {"audit": "one-sided, not exact: nothing to audit"}
    found = audit_run(run.folder.path)
    verdict = "clean" if found.exact else "DIFFERS"
    return row | {"audit": f"{verdict}: {found.tokens:,} tokens three times, {found.differences:,} differences"}


def main() -> None:
    options = record.parser(__doc__)
    options.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    options.add_argument("--output", type=Path, default=Path("runs/smollm2-modes"), help="folder of runs and rows")
    args = options.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    rows = []
    for mode in args.modes:
        stored = args.output / f"{mode}.json"
        if not stored.is_file():
            write_json(stored, run_mode(mode, args.output))
        rows.append(json.loads(stored.read_text(encoding="utf-8")))
        print(json.dumps(rows[-1]), flush=True)
    record.write("smollm2_modes", rows, recipe=STEM)


if __name__ == "__main__":
    main()
