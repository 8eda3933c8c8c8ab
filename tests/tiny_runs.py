"""Whole runs in a second or two: a random model with a byte-level tokenizer, a JSONL task, a reward from token ids."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.models_on_disk import tiny_spec
from zerogap.config import RunConfig, load_config
from zerogap.rl.loop import Run
from zerogap.rl.observer import Observer
from zerogap.text.byte_level import END, write_byte_tokenizer
from zerogap.weights.random_model import write_random_model

VOCAB = 264  # 256 bytes, 4 control tokens, 4 ids that no tokenizer token has
REWARD = """
def even_ids(completion_ids, **columns):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def sometimes(completion_ids, **columns):
    return [None if sum(ids) % 3 == 0 else float(ids[0] % 2) for ids in completion_ids]
"""


def write_model(folder: Path, family: str = "llama") -> Path:
    """A Hugging Face folder with random weights, tokenizer and chat template."""
    spec = tiny_spec(family, tied=family == "llama", vocab_size=VOCAB, eos_token_ids=(END,), bos_token_id=None)
    write_random_model(folder, spec, seed=1, peak=2.0)
    write_byte_tokenizer(folder)
    return folder


def recipe(folder: Path, *overrides: str, name: str = "run", family: str = "llama") -> RunConfig:
    """Three steps of 3 prompts x 4 completions of at most 6 tokens, in `folder/NAME`; files are made where missing."""
    if not (folder / "model").exists():
        write_model(folder / "model", family)
        (folder / "reward.py").write_text(REWARD)
        rows = [{"prompt": f"say {word}", "answer": word} for word in ("one", "two", "three", "four", "five")]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "eval.jsonl").write_text(json.dumps({"prompt": "say six", "answer": "six"}) + "\n")
    tree: dict[str, Any] = {
        "model": str(folder / "model"),
        "data": {
            "train": str(folder / "train.jsonl"),
            "eval": str(folder / "eval.jsonl"),
            "max_prompt_length": 40,
        },
        "reward": {"functions": [f"{folder}/reward.py:even_ids"]},
        "rollout": {
            "prompts_per_step": 3,
            "num_generations": 4,
            "max_completion_length": 6,
            "kv_cache_memory": 0.01,
            "max_sequences": 8,
            "max_batch_tokens": 64,
        },
        "optimizer": {"max_steps": 3, "learning_rate": 1e-3},
        "logging": {"tensorboard": False},
        "seed": 5,
        "output_dir": str(folder / name),
    }
    return load_config(tree, overrides)


def train(config: RunConfig, resume: str = "never", observer: Observer | None = None) -> Run:
    """The finished run."""
    run = Run(config, resume, observer)
    assert run.train()
    return run


def lines(run: Run, name: str) -> list[dict]:
    """Records of one of the run's JSONL files."""
    return [json.loads(line) for line in (run.folder.path / f"{name}.jsonl").read_text().splitlines()]


def without_times(records: Sequence[dict]) -> list[dict]:
    """Records without what a clock decides, or how much memory the process has."""
    return [
        {k: v for k, v in r.items() if not ("time" in k or k == "tokens_per_second" or k.startswith("memory/"))}
        for r in records
    ]
