"""One training run of one arm and seed: trained, evaluated, and stored as one JSON file, whole or not at all.

A run lies in a folder of its own while it trains; a process that was killed resumes there from its checkpoint, if it
has one, and else begins the run anew. With the stored file the run is finished and its folder goes.
"""

import contextlib
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.fp8_accuracy.arms import Arm, Experiment, what_decides
from benchmarks.fp8_accuracy.evaluate import Evaluator
from benchmarks.record import commit, cpu_name
from zerogap.models.decoder import Decoder
from zerogap.numerics import preset
from zerogap.ops.cpu import library
from zerogap.rl.loop import Run
from zerogap.rl.observer import Observer
from zerogap.rl.report import read_lines
from zerogap.rl.rollout_log import write_json
from zerogap.train.checkpoint import list_checkpoints

FORMAT = 1
END_STEPS = 3  # the reward at the end is the mean of so many last steps: one step's is the mean of 64 completions
PHASES = ("rollout", "old_logprobs", "train", "update_weights", "save")
OWN, PLAIN = "own", "bf16"
"""The two contracts a trained model is evaluated under: that of its arm's rollout, and BF16."""


def stored_path(folder: Path, arm: Arm, seed: int) -> Path:
    """Where the result of a run stands, or will."""
    return folder / f"{arm.name}-seed{seed}.json"


def read_stored(path: Path, wanted: Mapping[str, Any], held_out: str) -> dict[str, Any] | None:
    """A stored result; None if there is none.

    Raises:
        SystemExit: it was made with another recipe or other held-out prompts, so it cannot stand beside new ones.
    """
    if not path.is_file():
        return None
    stored = json.loads(path.read_text(encoding="utf-8"))
    for what, ours, theirs in (
        ("format", FORMAT, stored.get("format")),
        ("recipe", dict(wanted), stored.get("recipe")),
        ("held-out prompts", held_out, stored.get("held_out")),
    ):
        if ours != theirs:
            raise SystemExit(f"{path} was made with another {what}: take another --output, or remove the file")
    return stored


def train(
    experiment: Experiment,
    arm: Arm,
    seed: int,
    folder: Path,
    evaluator: Evaluator,
    observer: Observer,
    evaluated: Callable[[float], None],
) -> dict[str, Any]:
    """Train, evaluate and store one run; returns what is stored.

    Args:
        folder: of the experiment's results; the run lies in a folder beneath it until it is stored.
        evaluated: called after each evaluation with the seconds it took.
    """
    work = folder / "work" / f"{arm.name}-seed{seed}"
    config = experiment.recipe(arm, seed, work)
    began = perf_counter()
    found = list_checkpoints(work / "checkpoints") if (work / "checkpoints").is_dir() else []
    run = Run(config, str(found[-1]) if found else "never", observer, finished=True)
    start_digest = None if run.step else _digest(run.decoder)
    ready = perf_counter()
    if run.step < experiment.steps:
        finished = run.train()
        assert finished, "nobody asks the run to stop"
    trained = perf_counter()
    evaluations = _evaluate(run, evaluator, evaluated)
    result = {
        "format": FORMAT,
        "arm": arm.name,
        "seed": seed,
        "recipe": what_decides(config),
        "held_out": evaluator.digest,
        "identities": {"trainer": str(run.decoder.identity), "rollout": str(run.engine.decoder.identity)},
        "one_sided": run.decoder.identity != run.engine.decoder.identity,
        "circumstances": {"commit": commit(), "hardware": cpu_name(), "threads": library.num_threads()},
        "kv_bytes_per_token": run.engine.decoder.codec().bytes_per_token() * len(run.engine.decoder.blocks),
        "digests": {"start": start_digest, "end": _digest(run.decoder)},
        "seconds": {"setup": ready - began, "training": trained - ready},  # of this process, after a resume of the rest
        "evaluations": evaluations,
        **summary_of(read_lines(work / "metrics.jsonl")),
    }
    write_json(stored_path(folder, arm, seed), result)
    return result


def remove_work(folder: Path, arm: Arm, seed: int) -> None:
    """Remove the folder of a stored run."""
    shutil.rmtree(folder / "work" / f"{arm.name}-seed{seed}", ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty, or gone: another process may train other seeds beside this one
        (folder / "work").rmdir()


def _evaluate(run: Run, evaluator: Evaluator, evaluated: Callable[[float], None]) -> dict[str, Any]:
    """The trained weights under the rollout's contract and under BF16; once where those are one."""
    sampled = run.engine.decoder
    assert run.engine.version == run.decoder.version, "the engine samples from the trained weights"
    results = {OWN: evaluator.evaluate(sampled)}
    evaluated(results[OWN]["seconds"])
    contract = preset("bf16")
    if sampled.numerics == contract:
        return results | {PLAIN: results[OWN]}
    plain = run.decoder
    if plain.numerics != contract:
        plain = Decoder(plain.spec, contract, max_positions=plain.max_positions)
        plain.load((name, handle.value()) for name, handle in run.decoder.weights.items())
    results[PLAIN] = evaluator.evaluate(plain)
    evaluated(results[PLAIN]["seconds"])
    return results


def _digest(decoder: Decoder) -> str:
    """One digest over those of all published tensors."""
    return hashlib.sha256(json.dumps(decoder.digests(), sort_keys=True).encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------- figures


def summary_of(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures per step, and of the whole run, from the lines of its metrics.jsonl."""
    steps = [step_figures(record) for record in records]
    tokens = sum(step["compared_tokens"] for step in steps)

    def pooled(name: str) -> float:
        return math.fsum(step[name] * step["compared_tokens"] for step in steps) / tokens if tokens else 0.0

    last = steps[-END_STEPS:]
    seconds = math.fsum(step["seconds"] for step in steps)
    return {
        "reward_start": steps[0]["reward"],
        "reward_end": math.fsum(step["reward"] for step in last) / len(last),
        "mismatched_tokens": sum(step["mismatched_tokens"] for step in steps),
        "compared_tokens": tokens,
        "logdiff_mean": pooled("logdiff_mean"),
        "logdiff_max": max(step["logdiff_max"] for step in steps),
        "k3_kl": pooled("k3_kl"),
        "ess": math.fsum(step["ess"] for step in steps) / len(steps),
        "tokens_per_second": math.fsum(step["tokens"] for step in steps)
        / math.fsum(step["phases"]["rollout"] for step in steps),
        "seconds_per_step": seconds / len(steps),
        "recalibration_share": math.fsum(step["recalibration_seconds"] for step in steps) / seconds,
        "steps": steps,
    }


def step_figures(record: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of one line of metrics.jsonl.

    `ratio_*` are the raw ratios e^d of trainer and rollout; `ess` is their effective sample size per token, (mean
    ratio)^2 / mean squared ratio, so the same figure in every arm. `weight_*` are what a correction made of them, where
    there is one; `modified` is the share of tokens that it changed.
    """
    raw = "sampling/raw_importance_sampling_ratio"
    corrected = f"{raw}/mean" in record
    ratio = raw if corrected else "sampling/importance_sampling_ratio"
    mean = record[f"{ratio}/mean"]
    figures = {
        "step": record["step"],
        "reward": record["reward"],
        "mismatched_tokens": int(record["bit_wise/mismatched_tokens"]),
        "compared_tokens": int(record["bit_wise/compared_tokens"]),
        "logdiff_mean": record["bit_wise/logprob_diff/mean"],
        "logdiff_max": record["bit_wise/logprob_diff/max"],
        "kl": record["sampling/kl"],
        "k3_kl": record["sampling/k3_kl"],
        "ratio_min": record[f"{ratio}/min"],
        "ratio_mean": mean,
        "ratio_max": record[f"{ratio}/max"],
        "ess": mean * mean / (1.0 + record["sampling/chi2_token"]),
        "entropy": record["entropy"],
        "grad_norm": record["grad_norm"],
        "mean_length": record["completions/mean_length"],
        "tokens": round(record["tokens_per_second"] * record["time/rollout"]),
        "tokens_per_second": record["tokens_per_second"],
        "seconds": record["step_time"],
        "phases": {name: record[f"time/{name}"] for name in PHASES if f"time/{name}" in record},
        "recalibration_seconds": record.get("time/recalibrate", 0.0),
    }
    if corrected:
        figures |= {
            "weight_mean": record["sampling/importance_sampling_ratio/mean"],
            "weight_max": record["sampling/importance_sampling_ratio/max"],
            "weight_ess": record["sampling/effective_sample_size"],
            "modified": record["sampling/frac_modified_importance_sampling_ratio"],
        }
    return figures
