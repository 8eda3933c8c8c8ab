"""A short real RL run of the public loop, small enough to certify and complete enough to be run again from its record.

The model, the contract, what is trained, the algorithm and the sampling are the recipe's (a bare model has plain ones);
steps, prompts and completions are few. Prompts are the recipe's first ones, or the multiplication task's, and stand in
the record with their token ids, so that nothing but the model is needed to run it again. The reward is one that differs
between completions, so that every step updates every trained tensor; no function that a record names is ever called.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from zerogap.config import RunConfig, load_config
from zerogap.errors import ConfigError
from zerogap.models.spec import ModelSpec
from zerogap.numerics import PRESETS, Numerics
from zerogap.rl import setup
from zerogap.rl.data import load_prompts
from zerogap.rl.data_rows import Message
from zerogap.rl.loop import Run
from zerogap.rl.observer import Observer
from zerogap.rl.rollout_log import read_rollout
from zerogap.rl.smoke import share_of_even_ids
from zerogap.text import Tokenizer
from zerogap.types import Sample
from zerogap.verify.certificate import Record, array_digest, as_text
from zerogap.verify.checks import BALANCE_LOSS, ROUTER_BIAS_RATE, Subject
from zerogap.verify.faults import Fault, planted

STEPS = 3
PROMPTS = 2  # per step
GENERATIONS = 4
COMPLETION_TOKENS = 16
POSITIONS = 272  # prompt and completion together, at most
LEARNING_RATE = 2e-4  # at least: an update must change the bits that the next step computes with
SECTIONS = (
    "data",
    "trainable",
    "numerics",
    "rollout",
    "algorithm",
    "optimizer",
    "moe",
    "seed",
)  # of a recipe, in a record
REWARD = f"{share_of_even_ids.__module__}:{share_of_even_ids.__name__}"
Messages = Sequence[Message]


@dataclasses.dataclass(frozen=True)
class ShortRun:
    """What is run.

    Attributes:
        recipe: the sections of the shrunk recipe, JSON-ready.
        prompts: the chat messages of each prompt of all steps, in order.
    """

    recipe: Mapping[str, Any]
    prompts: tuple[Messages, ...]

    def config(self, model: str, folder: Path, steps: int | None = None) -> RunConfig:
        """The recipe of a run in a folder, whose prompt file is written there.

        Args:
            steps: only the first ones; None: all.

        Raises:
            ConfigError: a setting that cannot be honoured.
        """
        lines = (json.dumps({"prompt": list(messages)}) + "\n" for messages in self.prompts)
        (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
        tree, longest = dict(self.recipe), self.recipe["data"]["max_prompt_length"]
        optimizer = dict(tree["optimizer"])
        if steps is not None:
            optimizer["max_steps"] = steps
        tree |= {
            "model": model,
            "data": {"train": str(folder / "prompts.jsonl"), "max_prompt_length": longest, "shuffle": False},
            "reward": {"functions": [REWARD], "timeout": None},
            "optimizer": optimizer,
            "parity": {"on_mismatch": "warn"},  # counted, and refused afterwards
            "eval": {"num_prompts": 0},
            "logging": {"audit_every": 1, "tensorboard": False},
            "output_dir": str(folder / "run"),
        }
        return load_config(tree)


def plan(model: str, numerics: Numerics, spec: ModelSpec, tokenizer: Tokenizer, asked: RunConfig | None) -> ShortRun:
    """The short run of a recipe, or of a bare model.

    Args:
        asked: the user's recipe; None: plain settings with sampling filters, and experts balanced where there are any.

    Raises:
        ConfigError: prompts that cannot be had or are all too long, or a one-sided recipe.
    """
    large = sum(np.prod(w.shape) for w in spec.weight_specs(numerics).values()) > 1e9  # as the parity ladder has it
    tree: dict[str, Any] = {"model": model, "data": {"train": "multiplication"}, "optimizer": {"max_steps": STEPS}}
    if asked is None:
        tree |= {"rollout": {"temperature": 0.8, "top_p": 0.95}, "trainable": ["last:1" if large else "all"]}
        if spec.moe is not None:
            rate = ROUTER_BIAS_RATE if spec.moe.has_bias else 0.0
            tree["moe"] = {"balance_loss": BALANCE_LOSS, "router_bias_rate": rate}
    config = load_config(tree) if asked is None else asked
    if config.one_sided:
        mend = "rollout and trainer are asked to compute different bits, so there is nothing to certify"
        raise ConfigError("rollout.numerics", config.rollout.numerics, mend)
    completion = min(COMPLETION_TOKENS, config.rollout.max_completion_length)
    longest = min(POSITIONS, spec.max_position) - completion
    prompts = _prompts(config, tokenizer, min(longest, config.data.max_prompt_length))
    full = config.model_dump(mode="json")
    recipe = {name: full[name] for name in SECTIONS}
    recipe |= {"numerics": asked_for(numerics), "data": {"max_prompt_length": longest}}
    recipe["rollout"] |= {
        "numerics": None,
        "prompts_per_step": PROMPTS,
        "num_generations": min(GENERATIONS, config.rollout.num_generations),
        "max_completion_length": completion,
        "kv_cache_memory": 0.5,
        "max_sequences": min(8, config.rollout.max_sequences),
        "max_batch_tokens": 256,
    }
    recipe["algorithm"] |= {"mask_truncated_completions": False}  # nearly all of so short completions are
    recipe["algorithm"] |= {"group_filter": {}, "dynamic_sampling": {}}  # every prompt that is drawn is trained on
    recipe["optimizer"] |= {"max_steps": STEPS, "warmup_steps": 0, "lr_scheduler_type": "constant"}
    recipe["optimizer"]["learning_rate"] = max(LEARNING_RATE, config.optimizer.learning_rate)
    recipe["moe"] |= {"record_routing": spec.moe is not None}
    return ShortRun(recipe, prompts)


def asked_for(numerics: Numerics) -> dict[str, Any]:
    """A contract as a recipe asks for it: its preset, and the fields that are replaced."""
    ours, base = numerics.fields(), PRESETS[numerics.name].fields()
    return {"preset": numerics.name} | {key: value for key, value in ours.items() if base[key] != value}


def _prompts(config: RunConfig, tokenizer: Tokenizer, limit: int) -> tuple[Messages, ...]:
    """The first prompts that a run of the recipe would train on, of those that are short enough."""
    data = load_prompts(config.data, config.seed, lambda path: False)
    short, _ = setup.tokenize(data.train, tokenizer, limit)
    order = data.order([prompt.row for prompt in short], config.seed, config.data.shuffle)
    return tuple(short[row].row.prompt for row in order.take(0, STEPS * PROMPTS))


# ---------------------------------------------------------------------------------------------------- running


class _Watch(Observer):
    """Takes the facts of every step as it ends. Mutated by the run's calls."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self.progress = progress
        self.run: Run | None = None
        self.counts: list[tuple[int, int, int]] = []  # version after the step, compared, mismatched
        self.weights: list[Record] = []
        self._known: dict[str, str] = {}
        self.num_steps = 0

    def take_weights(self) -> None:
        """Digests of the published weights that are not those of the version before."""
        assert self.run is not None, "set before the run begins"
        digests = self.run.decoder.digests()
        changed = {name: d for name, d in digests.items() if self._known.get(name) != d}
        self.weights.append({"version": self.run.decoder.version, "changed": changed})
        self._known = digests

    def started(self, facts: Sequence[tuple[str, str]], first_step: int, max_steps: int) -> None:
        self.num_steps = max_steps
        self.take_weights()

    def phase(self, step: int, name: str) -> None:
        self.progress(f"step {step} of {self.num_steps}: {name}")

    def step_done(self, record: Mapping[str, Any]) -> None:
        counts = (int(record[f"bit_wise/{name}_tokens"]) for name in ("compared", "mismatched"))
        self.counts.append((int(record["version"]), *counts))  # type: ignore[arg-type]
        self.take_weights()


def run_short(
    short: ShortRun,
    model: str,
    folder: Path,
    *,
    steps: int | None = None,
    fault: Fault | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[Record, list[Record]]:
    """Run it in a folder, which `audit_run` can audit afterwards.

    Args:
        steps: only the first ones.
        fault: planted in the run's decoder.

    Returns:
        The record's sections `run` and `weights`.
    """
    watch = _Watch(progress)
    run = watch.run = Run(short.config(model, folder, steps), "never", watch)
    with planted(fault, Subject(run.decoder, [])) if fault is not None else nullcontext():
        finished = run.train()
    assert finished, "nobody asked it to stop"
    found: list[Record] = []
    for number, (_, compared, mismatched) in enumerate(watch.counts, 1):
        samples = read_rollout(run.folder.rollouts, number).samples
        entries = [_entry(sample) for sample in samples]
        version = watch.weights[number - 1]["version"]
        found.append(
            {"step": number, "version": version, "compared": compared, "mismatched": mismatched, "samples": entries}
        )
    prompts = [
        {"messages": [dict(m) for m in messages], "ids": as_text(prompt.ids)}
        for messages, prompt in zip(short.prompts, run.prompts, strict=True)
    ]
    return {"recipe": dict(short.recipe), "prompts": prompts, "steps": found}, watch.weights


def _entry(sample: Sample) -> Record:
    """A sample in a record: what was drawn, and digests of what was logged with it."""
    kept = (sample.kept_counts, sample.kept_digests)
    routing = sample.routing
    return {
        "prompt": sample.key.prompt,
        "ids": as_text(sample.completion_ids),
        "logprobs": array_digest(sample.logprobs),
        "kept": "" if kept[0] is None or kept[1] is None else array_digest(kept[0], kept[1]),
        "experts": "" if routing is None else array_digest(routing.experts, routing.margins),
        "finish_reason": sample.finish_reason,
    }
