"""A small mixture of experts that can half do something: made, taught, and ready for reinforcement learning.

    python examples/small_moe.py                 # a minute or two on two idle cores; writes runs/small-moe/
    zerogap train recipes/small-moe.yaml         # reinforcement learning takes it from there

The model is a Qwen3-MoE of a few million parameters over a tokenizer of bytes; the task is one that a program can
check: put eight digits from 1 to 9 in order. Supervised training with zerogap's own trainer stops as soon as the model
has some skill (`--skill`, greedy, on problems it was not taught), so that most groups of samples hold right and wrong
answers. What is written is a Hugging Face folder and two files of problems: those to train on, and others that stay
held out.

One process, the public API, nothing hidden: the loop in `teach` is all of supervised training.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import zerogap as zg
from zerogap.models.moe_spec import MoESpec
from zerogap.models.rope_spec import RopeSpec
from zerogap.models.spec import ModelSpec
from zerogap.ops.moe import Routing
from zerogap.rl.supervised import SupervisedLoss, supervised_batch
from zerogap.text.byte_level import END, NUM_IDS, write_byte_tokenizer
from zerogap.train.optimizer import OptimizerSettings
from zerogap.weights import save_folder
from zerogap.weights.random_model import write_random_model

DIGITS = 8
HELD_OUT = 200
VALIDATION = 100
BATCH = 39  # problems per update: a pack of nearly 1,024 tokens
FAMILIES = ("qwen3_moe", "qwen3")


def small_spec(family: str = "qwen3_moe") -> ModelSpec:
    """4 layers of 16 experts, 4 per token: 3.6 million parameters, 1.3 million of which a token uses. Widths are whole
    blocks of 128, so that FP8 scales are what they are in a large model."""
    routing = Routing(num_experts=16, top_k=4, scoring="softmax", normalise=True, scaling=1.0)
    return ModelSpec(
        family=family,
        hidden_size=128,
        intermediate_size=512,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=-(-NUM_IDS // 16) * 16,
        norm_eps=1e-6,
        rope=RopeSpec(10000.0),
        tied=False,
        qkv_bias=False,
        o_bias=False,
        qk_norm=True,
        max_position=256,
        eos_token_ids=(END,),
        moe=MoESpec(routing, expert_size=128) if family == "qwen3_moe" else None,
    )


def problem(digits: Sequence[int]) -> dict[str, str]:
    """One row of the task."""
    return {"prompt": "sort " + "".join(map(str, digits)), "answer": "".join(map(str, sorted(digits)))}


def problems(seed: int) -> Iterator[dict[str, str]]:
    """Endless random problems; none comes twice."""
    drawn, chosen = set(), random.Random(seed)
    while True:
        digits = tuple(chosen.randrange(1, 10) for _ in range(DIGITS))
        if digits not in drawn:
            drawn.add(digits)
            yield problem(digits)


def ids_of(trainer: zg.Trainer, row: dict[str, str]) -> tuple[list[int], list[int]]:
    """Prompt and completion ids of a row, the end of the message included."""
    prompt = trainer.tokenizer.encode_chat([{"role": "user", "content": row["prompt"]}])
    return prompt.tolist(), [*trainer.tokenizer.encode(row["answer"]).tolist(), END]


def accuracy(trainer: zg.Trainer, engine: zg.Engine, rows: Sequence[dict[str, str]]) -> float:
    """Share of greedy answers that are right."""
    engine.update_weights(trainer)
    prompts = [ids_of(trainer, row)[0] for row in rows]
    samples = engine.generate(prompts, zg.SamplingParams(temperature=0.0, max_tokens=DIGITS + 3))
    return sum(s.text.strip() == row["answer"] for s, row in zip(samples, rows, strict=True)) / len(rows)


def teach(
    trainer: zg.Trainer, rows: Iterator[dict[str, str]], validation: Sequence[dict[str, str]], args: Any
) -> float:
    """Supervised training until the model has the wanted skill; its accuracy then."""
    engine = zg.Engine.for_trainer(trainer, kv_cache_bytes=16 << 20)
    loss, skill, began = SupervisedLoss(), 0.0, time.perf_counter()
    for update in range(1, args.updates + 1):
        pairs = [ids_of(trainer, next(rows)) for _ in range(BATCH)]
        result = trainer.forward_backward(supervised_batch(pairs, trainer.rollout_identity), loss)
        trainer.optim_step()
        if update % args.every == 0:
            skill = accuracy(trainer, engine, validation)
            seconds = time.perf_counter() - began
            print(f"update {update:4}  loss {result.loss:.3f}  accuracy {skill:.2f}  {seconds:.0f} s", flush=True)
            if skill >= args.skill:
                break
    return skill


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--output", type=Path, default=Path("runs/small-moe"))
    options.add_argument("--family", choices=FAMILIES, default="qwen3_moe", help="qwen3: the same with a dense MLP")
    options.add_argument("--skill", type=float, default=0.5, help="greedy accuracy at which teaching ends")
    options.add_argument("--updates", type=int, default=2000, help="at most so many updates")
    options.add_argument("--every", type=int, default=20, help="updates between looks at the skill")
    options.add_argument("--learning-rate", type=float, default=2e-3)
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    start, target = args.output / "start", args.output / "model"
    args.output.mkdir(parents=True, exist_ok=True)
    write_random_model(start, small_spec(args.family), seed=args.seed, peak=0.5)
    write_byte_tokenizer(start)
    settings = OptimizerSettings(learning_rate=args.learning_rate, warmup_updates=20)
    trainer = zg.Trainer(start, numerics="bf16", optimizer=settings, micro_batch_tokens=2048)
    rows = problems(args.seed)
    held_out, validation, train = ([next(rows) for _ in range(n)] for n in (HELD_OUT, VALIDATION, 4000))
    for name, chosen in (("held-out", held_out), ("train", train)):
        (args.output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    skill = teach(trainer, rows, validation, args)
    tensors = ((name, handle.stored()) for name, handle in trainer.decoder.weights.items())
    save_folder(target, trainer.decoder.spec, tensors, files=zg.open_model(start))
    print(f"wrote {target}: greedy accuracy {skill:.2f}. Next: zerogap train recipes/small-moe.yaml")


if __name__ == "__main__":
    main()
