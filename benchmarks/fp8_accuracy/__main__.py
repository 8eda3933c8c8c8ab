"""Train every arm with every seed, evaluate, and summarise; goes on where a killed process was.

    python -m benchmarks.fp8_accuracy                          the table: 5 arms x 5 seeds x 10 steps, about an hour
    python -m benchmarks.fp8_accuracy --long                   a longer run at a higher learning rate, 1 seed
    python -m benchmarks.fp8_accuracy --summary-only           tables, verdicts and plot of what is there

Results of single runs lie in --output; tables and plot are written to benchmarks/results/.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import record
from benchmarks.fp8_accuracy import held_out, plot, summary
from benchmarks.fp8_accuracy.arms import ARMS, DEFAULT_ARMS, Arm, Experiment, what_decides
from benchmarks.fp8_accuracy.clock import Clock
from benchmarks.fp8_accuracy.evaluate import Evaluator
from benchmarks.fp8_accuracy.intervals import MARGIN
from benchmarks.fp8_accuracy.runs import read_stored, remove_work, stored_path, train
from zerogap.models.decoder import Decoder
from zerogap.ops.cpu import library
from zerogap.rl import setup
from zerogap.rl.observer import Observer
from zerogap.rl.rollout_log import write_json
from zerogap.text import Tokenizer

LONG_ARMS = ("bf16", "fp8-rollout", "fp8-rollout-tis", "fp8-kv")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="default: all but the optional ones; --long: four")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 0 1 2 3 4; --long: 0")
    parser.add_argument("--long", action="store_true", help="the longer run: other defaults, results of its own")
    parser.add_argument("--steps", type=int, help="of each run; default: 10; --long: 40")
    parser.add_argument("--learning-rate", nargs="+", type=float, help="one or a sweep; default: 5e-5; --long: 2e-4")
    parser.add_argument("--checkpoint-every", type=int, help="steps; 0: a killed run begins anew; --long: 10, else 0")
    parser.add_argument("--margin", type=float, default=MARGIN, help="differences within it are equal (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/fp8-accuracy"), help="folder of the single runs")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the runs, for `zerogap audit`")
    parser.add_argument("--summary-only", action="store_true", help="train nothing; summarise what is there")
    parser.add_argument("--no-record", action="store_true", help="print the summary, write nothing to results/")
    args = parser.parse_args()
    args.arms = args.arms or (LONG_ARMS if args.long else DEFAULT_ARMS)
    args.seeds = args.seeds or ([0] if args.long else list(range(5)))
    args.steps = args.steps or (40 if args.long else 10)
    args.learning_rate = args.learning_rate or [2e-4 if args.long else 5e-5]
    if args.checkpoint_every is None:
        args.checkpoint_every = 10 if args.long else 0
    return args


class Progress(Observer):
    """Prints a line per step, with the time that is left. Mutated by the run's calls."""

    def __init__(self, clock: Clock, arm: Arm, label: str, steps: int) -> None:
        self._clock, self._arm, self._label, self._steps = clock, arm, label, steps
        self._left = steps

    def started(self, facts: Sequence[tuple[str, str]], first_step: int, max_steps: int) -> None:
        """A resumed run has fewer steps left."""
        self._skip(first_step - 1)

    def step_done(self, record: Mapping[str, Any]) -> None:
        """One line."""
        self._clock.done("step", self._arm.name, record["step_time"])
        self._left -= 1
        print(
            f"{self._label}  step {record['step']:>2}/{self._steps}  reward {record.get('reward', float('nan')):.3f}  "
            f"k3 KL {record['sampling/k3_kl']:.1e}  differ {record['bit_wise/mismatched_tokens']:,.0f} of "
            f"{record['bit_wise/compared_tokens']:,.0f}  {record['step_time']:.1f} s  left {self._clock}",
            flush=True,
        )

    def evaluated_in(self, seconds: float) -> None:
        """An evaluation on the held-out prompts ended, so no step is left: a resumed run may have had none."""
        self._skip(self._left)
        self._clock.done("evaluation", self._arm.name, seconds)
        print(f"{self._label}  evaluated in {seconds:.0f} s  left {self._clock}", flush=True)

    def _skip(self, count: int) -> None:
        self._clock.skip("step", self._arm.name, count)
        self._left -= count


def evaluations_of(arm: Arm) -> int:
    """How many evaluations a run of the arm ends with."""
    return 1 if arm.rollout == "bf16" else 2


def untrained_figures(
    experiment: Experiment, arms: Sequence[Arm], evaluator: Evaluator, folder: Path, clock: Clock
) -> None:
    """Evaluate the untrained model once per rollout contract; stored beside the experiments."""
    chosen = {arm.rollout: arm for arm in reversed(arms)}.values()
    for arm in chosen:
        clock.plan("evaluation", arm.name, 1)
    for arm in chosen:
        path = folder / f"untrained-{arm.rollout}.json"
        config = experiment.recipe(arm, 0, folder)
        contract = config.rollout_contract()
        wanted = {"model": config.model, "numerics": contract.fields()}
        stored = read_stored(path, wanted, evaluator.digest)
        if stored is not None:
            clock.done("evaluation", arm.name, stored["seconds"])
        else:
            files, _ = setup.open_source(config)
            decoder = Decoder(files.spec, contract, max_positions=setup.positions(config)).load(files.tensors())
            figures = evaluator.evaluate(decoder)
            clock.done("evaluation", arm.name, figures["seconds"])
            write_json(path, {"format": 1, "recipe": wanted, "held_out": evaluator.digest, **figures})
            print(
                f"untrained, {arm.rollout}: accuracy {figures['accuracy']:.3f} in {figures['seconds']:.0f} s",
                flush=True,
            )


def train_all(args: argparse.Namespace, experiments: Sequence[Experiment]) -> None:
    """Every run that is not stored yet: seed by seed, so that what is there at any time is paired."""
    first = experiments[0]
    arms = [ARMS[name] for name in args.arms]
    config = first.recipe(arms[0], 0, args.output)
    files, _ = setup.open_source(config)
    tokenizer = Tokenizer.from_files(files.tokenizer_files(), files.chat_template)
    evaluator = Evaluator(held_out.held_out_prompts(), tokenizer, config.rollout.max_completion_length)
    clock = Clock()
    todo = []
    for experiment in experiments:
        for seed in args.seeds:
            for arm in arms:
                path = stored_path(args.output / experiment.name, arm, seed)
                wanted = what_decides(experiment.recipe(arm, seed, args.output))
                stored = read_stored(path, wanted, evaluator.digest)
                if stored is not None:
                    clock.seen("step", arm.name, stored["seconds_per_step"])
                else:
                    todo.append((experiment, arm, seed))
                    clock.plan("step", arm.name, experiment.steps)
                    clock.plan("evaluation", arm.name, evaluations_of(arm))
    args.output.mkdir(parents=True, exist_ok=True)
    untrained_figures(first, arms, evaluator, args.output, clock)
    for number, (experiment, arm, seed) in enumerate(todo, 1):
        folder = args.output / experiment.name
        label = f"[{number}/{len(todo)}] {experiment.learning_rate:g} {arm.name} seed {seed}"
        progress = Progress(clock, arm, label, experiment.steps)
        began = perf_counter()
        result = train(experiment, arm, seed, folder, evaluator, progress, progress.evaluated_in)
        if not args.keep:
            remove_work(folder, arm, seed)
        accuracy = {name: round(e["accuracy"], 3) for name, e in result["evaluations"].items()}
        print(f"{label}  done in {perf_counter() - began:.0f} s, held-out accuracy {accuracy}", flush=True)


def summarise(args: argparse.Namespace, experiment: Experiment) -> None:
    """Print and write tables, verdicts and plot of one experiment's stored runs."""
    folder = args.output / experiment.name
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*-seed*.json"))]
    results = [r for r in results if r["arm"] in args.arms and r["seed"] in args.seeds]
    if not results:
        print(f"{folder}: no finished run yet")
        return
    untrained = {
        path.stem.removeprefix("untrained-"): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(args.output.glob("untrained-*.json"))
    }
    title = f"FP8 accuracy: SmolLM2-135M-Instruct, {experiment.steps} steps, learning rate {experiment.learning_rate:g}"
    facts = [
        f"Runs of 8 x 8 completions a step, learning rate {experiment.learning_rate:g} ({experiment.schedule}).",
        f"Held-out set: {held_out.TEXT}; greedy, by zerogap's own engine.",
        f"Seeds: {', '.join(str(s) for s in sorted({r['seed'] for r in results}))}.",
        *(f"Runs' {name}: {', '.join(map(str, each))}." for name, each in summary.circumstances(results).items()),
    ]
    text = summary.page(title, facts, results, untrained, args.margin)
    print(text)
    if args.no_record:
        return
    name = "fp8_accuracy_long" if args.long else "fp8_accuracy"
    if len(args.learning_rate) > 1:
        name += f"_{experiment.name}"
    path = record.write(
        name,
        summary.arm_rows(results, untrained, args.margin),
        steps=experiment.steps,
        learning_rate=experiment.learning_rate,
        schedule=experiment.schedule,
        margin=args.margin,
        held_out=held_out.TEXT,
        details=summary.details(results, args.margin),
    )
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    lines = [json.dumps(r, separators=(",", ":")) for r in results]
    path.with_suffix(".runs.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    plot.write_plot(path.with_suffix(".svg"), title, results, untrained)
    print(f"wrote {path.with_suffix('.md')}, .runs.jsonl and .svg")


def main() -> None:
    args = options()
    schedule = "constant" if args.long else "linear"
    experiments = [Experiment(args.steps, rate, schedule, args.checkpoint_every) for rate in args.learning_rate]
    if not args.summary_only:
        print(f"{library.backend()}, {library.num_threads()} threads", flush=True)
        train_all(args, experiments)
    for experiment in experiments:
        summarise(args, experiment)


if __name__ == "__main__":
    main()
