"""Speculative decoding against plain decoding: equal tokens and log-prob bits first, then acceptance and speed.

Both engines draw the same prompts in two epochs, the second with fresh noise, as a rollout of the next epoch does, all
samples of an epoch in one call. Guesses come from the prompt, from the samples drawn beside it, and in the second epoch
from the completions of the first. Weights stay the same, so acceptance is what a slowly changing model gives. Token ids
and log-prob bits of both epochs are compared; the second is timed, the engines taking turns, each repetition with new
engines and new noise. At temperature 0 the second epoch repeats the first, and a prompt has one sample.

`--rows` prints instead what a pass over some rows takes, from which `zerogap.rollout.speculate.PassCost` comes.
`--add` appends to the day's result file.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmarks.record import parser, write
from zerogap.config import DataConfig
from zerogap.models.decoder import Decoder
from zerogap.numerics import preset
from zerogap.rl.data import load_prompts
from zerogap.rollout.engine import Engine
from zerogap.rollout.progress import Statistics
from zerogap.rollout.speculate import Speculation
from zerogap.text import Tokenizer
from zerogap.types import Sample, SamplingKey, SamplingParams
from zerogap.weights import ModelFiles, open_model
from zerogap.weights.quick_start import fetch_quick_start_model

GROUP = 8


def prompts_of(files: ModelFiles, args: argparse.Namespace, count: int) -> list[list[int]]:
    """Token ids of the first `count` prompts of the data."""
    tokenizer = Tokenizer.from_files(files.tokenizer_files(), files.chat_template)
    rows = load_prompts(DataConfig(train=args.data, instruction=args.instruction), 0, lambda path: False).train
    assert len(rows) >= count, f"{args.data} has {len(rows)} rows, {count} are needed"
    return [tokenizer.encode_chat(row.prompt).tolist() for row in rows[:count]]


def differing(ours: Sequence[Sample], theirs: Sequence[Sample]) -> tuple[int, int]:
    """Tokens compared, and tokens whose id or log-prob differs in any bit."""
    compared = wrong = 0
    for a, b in zip(ours, theirs, strict=True):
        length = max(len(a.completion_ids), len(b.completion_ids))
        same = min(len(a.completion_ids), len(b.completion_ids))
        equal = (a.completion_ids[:same] == b.completion_ids[:same]) & (
            a.logprobs[:same].view(np.uint32) == b.logprobs[:same].view(np.uint32)
        )
        compared, wrong = compared + length, wrong + length - int(equal.sum())
    return compared, wrong


class Arm:
    """One engine, drawing epoch after epoch."""

    def __init__(self, decoder: Decoder, sequences: int, speculation: Speculation | None) -> None:
        self.engine = Engine(decoder, max_sequences=sequences, max_batch_tokens=1024, speculation=speculation)
        self.seconds, self.before = 0.0, Statistics()

    def epoch(
        self, prompts: list[list[int]], params: SamplingParams, first_step: int, step: int, samples: int
    ) -> list[Sample]:
        keys = [SamplingKey(seed=first_step, step=step, prompt=i) for i in range(len(prompts))]
        self.before, began = self.engine.statistics, perf_counter()
        drawn = self.engine.generate(prompts, params, keys, num_samples=samples)
        self.seconds = perf_counter() - began
        return drawn


def cell(decoder: Decoder, files: ModelFiles, args: argparse.Namespace, temperature: float, sequences: int) -> dict:
    """The row of one temperature and number of sequences."""
    group = GROUP if temperature else 1
    prompts = prompts_of(files, args, max(GROUP, sequences) // group)
    params = SamplingParams(temperature=temperature, max_tokens=args.new_tokens)
    tokens = wrong = 0
    rates: dict[str, list[float]] = {"plain": [], "guessing": [], "first": []}
    counts = Statistics()
    for repeat in range(args.repeats):
        plain = Arm(decoder, sequences, None)
        guessing = Arm(decoder, sequences, Speculation(args.draft_tokens, args.min_match))
        for step in range(2):
            theirs = plain.epoch(prompts, params, repeat, step, group)
            ours = guessing.epoch(prompts, params, repeat, step, group)
            compared, different = differing(ours, theirs)
            tokens, wrong = tokens + compared, wrong + different
            rates["first" if step == 0 else "guessing"].append(plain.seconds / guessing.seconds)
        rates["plain"].append(compared / plain.seconds)
        for name in ("decode_tokens", "draft_tokens", "accepted_tokens", "decode_cost", "plain_cost"):
            now, then = (getattr(state, name) for state in (guessing.engine.statistics, guessing.before))
            setattr(counts, name, getattr(counts, name) + now - then)
    return {
        "numerics": decoder.numerics.name,
        "temperature": temperature,
        "sequences": sequences,
        "tokens_compared": tokens,
        "tokens_differing": wrong,
        "acceptance_rate": counts.accepted_tokens / max(1, counts.draft_tokens),
        "tokens_per_pass": (counts.decode_tokens + counts.accepted_tokens) / counts.decode_tokens,
        "plain_tokens_per_second": statistics.median(rates["plain"]),
        "speed_up": statistics.median(rates["guessing"]),
        "estimated_speed_up": counts.plain_cost / counts.decode_cost,
        "first_epoch_speed_up": statistics.median(rates["first"]),
    }


def rows_cost(decoder: Decoder) -> None:
    """Milliseconds of a decoding pass: of many sequences, and of one with guesses that are all right."""
    generator = np.random.default_rng(0)
    params = SamplingParams(max_tokens=96, stop_token_ids=())
    for count in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64):
        engine = Engine(decoder, prefix_cache=False, max_sequences=count, max_batch_tokens=1024)
        prompts = generator.integers(0, decoder.spec.vocab_size, (count, 64)).tolist()
        print(f"{count:3d} sequences {1e3 * _pass_seconds(engine, prompts, params):7.2f} ms", flush=True)
    for drafts in (1, 3, 7, 11, 15):
        engine = Engine(decoder, max_sequences=1, speculation=Speculation(drafts, 1, always=True))
        prompts = generator.integers(0, decoder.spec.vocab_size, (1, 64)).tolist()
        engine.generate(prompts, params)
        print(f"{1 + drafts:3d} rows of one {1e3 * _pass_seconds(engine, prompts, params):7.2f} ms", flush=True)


def _pass_seconds(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> float:
    """The faster of two calls with equal keys: decoding seconds per pass."""
    found = []
    for _ in range(2):
        before = engine.statistics
        engine.generate(prompts, params)
        after = engine.statistics
        passes = (after.decode_tokens - before.decode_tokens) / len(prompts)
        found.append((after.decode_seconds - before.decode_seconds) / passes)
    return min(found)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--numerics", nargs="+", default=["bf16", "fp8-kv"])
    options.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    options.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16, 64])
    options.add_argument("--data", default="largest_of_three", help="as data.train of a recipe")
    options.add_argument("--instruction", default="Explain step by step how you find it.")
    options.add_argument("--new-tokens", type=int, default=128)
    options.add_argument("--draft-tokens", type=int, default=16)
    options.add_argument("--min-match", type=int, default=2)
    options.add_argument("--rows", action="store_true")
    options.add_argument("--add", type=Path, help="a result file whose rows and these are written as the day's")
    args = options.parse_args()
    files = open_model(args.model or fetch_quick_start_model())
    rows = json.loads(args.add.read_text(encoding="utf-8"))["rows"] if args.add else []
    for numerics in args.numerics:
        decoder = Decoder(files.spec, preset(numerics), max_positions=1024).load(files.tensors())
        if args.rows:
            rows_cost(decoder)
            continue
        for temperature in args.temperature:
            for sequences in args.sequences:
                rows.append(cell(decoder, files, args, temperature, sequences))
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    if not args.rows:
        settings = {name: getattr(args, name) for name in ("new_tokens", "draft_tokens", "min_match", "repeats")}
        write("speculation", rows, data=Path(args.data).name, instruction=args.instruction, **settings)


if __name__ == "__main__":
    main()
