"""`zerogap demo`: the quick start. A real model, trained on this machine with every token compared, judged by others.

Held-out accuracy is measured with transformers on the saved folders, before and after: completions are drawn at
temperature 1, as in training, and greedily. The run is an ordinary one, so its folder can be audited and exported.
"""

from __future__ import annotations

import shutil
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from zerogap.cli.train import print_summary, train_or_stop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerogap.rl.data import Row
    from zerogap.rl.loop import Run

SAMPLES = 4  # held-out completions per prompt at temperature 1
SCORE_SEED = 2026
AUDITED = 4  # versions whose weights are saved, besides the last one


class Task(StrEnum):
    """Built-in tasks; each has a recipe of the same settings in recipes/."""

    multiplication = "multiplication"
    largest_of_three = "largest-of-three"


def demo(
    steps: Annotated[int, typer.Option(min=2, help="Steps of training.")] = 12,
    task: Annotated[Task, typer.Option(help="What the model learns.")] = Task.multiplication,
    output: Annotated[Path, typer.Option(help="The run's folder; an earlier one there is replaced.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Train SmolLM2-135M with GRPO on a small task, minutes on two cores, and show that no bit differs."""
    console = Console()
    from zerogap.cli.display import RunDisplay, as_time
    from zerogap.config import load_config
    from zerogap.rl.loop import Run

    config = load_config(demo_recipe(task, steps, str(output)))
    console.print("fetching SmolLM2-135M-Instruct (once) and reading it")
    run = Run(config, "never", RunDisplay(console))
    seconds = estimate(run)
    console.print(
        f"about [bold]{as_time(seconds * steps)}[/] of training on this machine: {steps} steps of {seconds:.0f} s\n"
    )
    before = score_folder(console, run, "before")
    began = time.perf_counter()
    train_or_stop(run, console)
    took = time.perf_counter() - began
    after = score_folder(console, run, "after")
    console.print(result_table(run, took, before, after))
    print_summary(run, console)


def demo_recipe(task: Task, steps: int, output: str) -> dict[str, Any]:
    """The recipe of the quick start, as a tree (recipes/ explains its choices)."""
    return {
        "model": "smollm2-135m-instruct",
        "data": {"train": task.name, "max_prompt_length": 128},
        "rollout": {
            "prompts_per_step": 8,
            "num_generations": 8,
            "max_completion_length": 24,
            "kv_cache_memory": 0.25,
        },
        "optimizer": {"max_steps": steps, "learning_rate": 5e-5, "lr_scheduler_type": "linear"},
        "eval": {
            "every": max(1, steps // 4),
            "num_prompts": 24,
            "num_samples": SAMPLES,
            "temperature": 1.0,
        },
        "logging": {"audit_every": max(1, -(-steps // AUDITED))},
        "output_dir": output,
    }


def estimate(run: Run) -> float:
    """Seconds of one step here, from rollouts and training passes over one and over three groups: a step has costs of
    its own and costs per group. Nothing is changed."""
    rollout = run.config.rollout
    few, more = (1, min(3, rollout.prompts_per_step))
    _probe(run, few, 2)  # what only the first pass costs
    seconds, longer = (_probe(run, groups, rollout.num_generations) for groups in (few, more))
    state = run.trainer.state()
    run.trainer.load_state(
        state["tensors"], state["updates"], state["version"], run.decoder.kv_scales
    )  # drops the gradient
    run.engine.update_weights(run.trainer)
    per_group = max(0.0, longer - seconds) / max(1, more - few)
    return seconds + per_group * (rollout.prompts_per_step - few)


def _probe(run: Run, num_prompts: int, size: int) -> float:
    """Seconds of a rollout and a training pass of some groups of that size."""
    from zerogap.rl import setup
    from zerogap.rl.advantage import build_batch, group_advantages
    from zerogap.types import SamplingKey

    ids = [prompt.ids for prompt in run.prompts[:num_prompts]]
    keys = [SamplingKey(run.config.seed, 0, slot) for slot in range(num_prompts)]
    began = time.perf_counter()
    samples = run.engine.generate(ids, setup.sampling_params(run.config), keys, num_samples=size)
    rewards = [float(i % 2) for i in range(len(samples))]
    advantages = group_advantages(rewards, [i // size for i in range(len(samples))], "none")
    run.trainer.forward_backward(build_batch(samples, advantages, False), run.loss)
    return time.perf_counter() - began


def score_folder(console: Console, run: Run, when: str) -> dict[str, float]:
    """Held-out accuracy of the model as it is now, by transformers: `sampled` at temperature 1 and `greedy`."""
    from zerogap.verify.transformers_score import complete
    from zerogap.weights import save_folder

    rows = [prompt.row for prompt in run.held_out]
    length = run.config.rollout.max_completion_length
    folder, kept = run.folder.model, run.folder.model.is_dir() and when == "after"
    if not kept:
        folder = run.folder.path.parent / f".{run.folder.path.name}-source"
        tensors = ((name, handle.stored()) for name, handle in run.decoder.weights.items())
        save_folder(folder, run.decoder.spec, tensors, files=run.files)
    sampled = complete(folder, rows, length, SAMPLES, SCORE_SEED)
    greedy = complete(folder, rows, length)
    if not kept:
        shutil.rmtree(folder)
    scores = {"sampled": accuracy(run, rows, sampled), "greedy": accuracy(run, rows, greedy)}
    console.print(
        f"held-out accuracy {when} training, by transformers: [bold]{scores['sampled']:.3f}[/] at temperature 1, "
        f"{scores['greedy']:.3f} greedy",
        highlight=False,
    )
    return scores


def accuracy(run: Run, rows: Sequence[Row], texts: Sequence[Sequence[str]]) -> float:
    """Share of completions with the full reward."""
    flat = [text for group in texts for text in group]
    repeated = [row for row, group in zip(rows, texts, strict=True) for _ in group]
    totals = run.rewards.score(repeated, flat, [[] for _ in flat], run.step).totals
    return sum(total is not None and total >= 1.0 for total in totals) / len(totals)


def result_table(run: Run, seconds: float, before: dict[str, float], after: dict[str, float]) -> Table:
    """What the demo has shown."""
    from zerogap.cli.display import as_time

    table = Table("", "", title="Result", show_header=False)
    held_out = f"held-out accuracy, {len(run.held_out)} prompts, by transformers"
    table.add_row("steps", f"{run.step} in {as_time(seconds)}")
    table.add_row("tokens compared", f"{run.compared_tokens:,}")
    table.add_row("mismatched tokens", f"[{'red' if run.mismatched_tokens else 'green'}]{run.mismatched_tokens:,}[/]")
    for kind, label in (("sampled", f"temperature 1, {SAMPLES} completions each"), ("greedy", "greedy")):
        gain = after[kind] - before[kind]
        table.add_row(f"{held_out}\n({label})", f"{before[kind]:.3f} before, {after[kind]:.3f} after ({gain:+.3f})")
    return table
