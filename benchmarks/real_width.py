"""Two layers at the true widths of Qwen3-30B-A3B and Moonlight-16B-A3B: a real run on this machine, and its audit.

Random weights in the Hugging Face format, the last layer trained, one copy of the weights for rollout and trainer. Each
row is two steps of the public loop (8 completions of up to 64 tokens, compared bit by bit, one update; then again under
the new weights) and the audit of both: tokens compared, tokens that differ, seconds by phase, and the most memory that
the process held. A row runs in a process of its own, so that its peak is its own; finished rows are not run again.
"""

import json
import math
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import record
from zerogap.config import load_config
from zerogap.models.published import PUBLISHED
from zerogap.models.spec import ModelSpec
from zerogap.rl.loop import Run
from zerogap.rl.report import read_lines
from zerogap.rl.rollout_log import write_json
from zerogap.text.byte_level import END, write_byte_tokenizer
from zerogap.verify.audit import audit_run
from zerogap.weights.random_model import write_random_model

MODELS = {"qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B", "moonlight-16b-a3b": "moonshotai/Moonlight-16B-A3B-Instruct"}
LAYERS = 2
NUMERICS = ("bf16", "fp8-kv")


def spec_of(model: str) -> ModelSpec:
    """The published model with two layers, and the end of sequence of the byte tokenizer."""
    return ModelSpec.from_hf(
        {**PUBLISHED[MODELS[model]], "num_hidden_layers": LAYERS, "eos_token_id": END, "bos_token_id": None}
    )


def write_model(model: str, folder: Path) -> Path:
    """The model's folder with random weights, made once."""
    path = folder / model
    if not (path / "tokenizer.json").is_file():
        write_random_model(path, spec_of(model), peak=2.0)
        write_byte_tokenizer(path)
    return path


def recipe(model: Path, numerics: str, output: Path) -> dict[str, Any]:
    """Two steps of 2 prompts x 4 completions of 64 tokens."""
    return {
        "model": str(model),
        "numerics": numerics,
        "trainable": ["last:1"],
        "data": {"train": "multiplication", "max_prompt_length": 64},
        "reward": {"functions": ["zerogap.rl.smoke:share_of_even_ids"], "timeout": None},
        "rollout": {
            "prompts_per_step": 2,
            "num_generations": 4,
            "max_completion_length": 64,
            "kv_cache_memory": 0.05,
            "max_sequences": 8,
        },
        "optimizer": {"max_steps": 2, "learning_rate": 1e-4, "warmup_steps": 0, "lr_scheduler_type": "constant"},
        "logging": {"audit_every": 1},
        "eval": {"num_prompts": 0},
        "output_dir": str(output),
    }


def peak_gib() -> float:
    """Most memory that this process held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(model: str, numerics: str, folder: Path) -> dict[str, Any]:
    """One row of the table."""
    path, output = write_model(model, folder), folder / f"{model}-{numerics}"
    shutil.rmtree(output, ignore_errors=True)
    began = time.perf_counter()
    run = Run(load_config(recipe(path, numerics, output)), "never")
    loaded = time.perf_counter() - began
    assert run.train(), "nobody asks the run to stop"
    trained, peak = time.perf_counter() - began - loaded, peak_gib()
    lines = read_lines(run.folder.path / "metrics.jsonl")
    row: dict[str, Any] = {"model": model, "numerics": numerics, "layers": LAYERS, "trained": run.config.trainable}
    row |= {"parameters": sum(math.prod(h.spec.shape) for h in run.decoder.weights.values())}
    row |= {"compared": run.compared_tokens, "mismatched": run.mismatched_tokens}
    row |= {"load_seconds": loaded, "two_steps_seconds": trained, "train_peak_gib": peak}
    row["steps"] = [{k: v for k, v in line.items() if k.startswith(("time/", "moe/", "step_time"))} for line in lines]
    del run
    found = audit_run(output)
    row |= {"audit_exact": found.exact, "audit_tokens": found.tokens, "audit_differences": found.differences}
    return row | {"audit_seconds": time.perf_counter() - began - loaded - trained, "peak_gib": peak_gib()}


def with_phases(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the mean seconds of each phase of its steps."""
    phases = [key for key in row["steps"][0] if key.startswith("time/")]
    mean = {key: sum(step[key] for step in row["steps"]) / len(row["steps"]) for key in phases}
    return row | {f"{key.removeprefix('time/')} seconds": seconds for key, seconds in mean.items()}


def main() -> None:
    options = record.parser(__doc__)
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options.add_argument("--numerics", nargs="+", choices=NUMERICS, default=list(NUMERICS))
    options.add_argument("--output", type=Path, default=Path("runs/real-width"), help="models, runs and rows")
    options.add_argument("--one", action="store_true", help="measure the one named row in this process")
    args = options.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    rows = []
    for model in args.models:
        write_model(model, args.output)
        for numerics in args.numerics:
            stored = args.output / f"{model}-{numerics}.json"
            if args.one:
                write_json(stored, measure(model, numerics, args.output))
                return
            if not stored.is_file():
                command = [sys.executable, "-m", "benchmarks.real_width", "--one", "--output", str(args.output)]
                subprocess.run([*command, "--models", model, "--numerics", numerics], check=True)
                shutil.rmtree(args.output / f"{model}-{numerics}")
            rows.append(with_phases(json.loads(stored.read_text(encoding="utf-8"))))
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "steps"}), flush=True)
    record.write("real_width", rows, layers=LAYERS)


if __name__ == "__main__":
    main()
