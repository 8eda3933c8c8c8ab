"""`zerogap eval`: score a model on held-out prompts, without a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from zerogap.cli.json_option import require_writable
from zerogap.cli.numerics_option import NUMERICS_HELP, contract_from

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerogap.config import RunConfig

PERCENT = ("eval/accuracy", "eval/maj@", "eval/pass@", "eval/completions/clipped_ratio")


def evaluate(
    model: Annotated[
        str, typer.Argument(help="A folder or .gguf file with a tokenizer, hub id, or smollm2-135m-instruct.")
    ],
    data: Annotated[
        str,
        typer.Option(help="Prompts with answers, as in a recipe's data.train; of a task its held-out problems."),
    ],
    reward: Annotated[
        list[str] | None, typer.Option(help="Reward function as in a recipe; may be repeated. Default: number_match.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=0, help="Most prompts, the first ones; 0: all.")] = 64,
    num_samples: Annotated[int, typer.Option(min=1, help="Completions per prompt: n of mean@n and maj@n.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy; more than one sample needs more.")] = 0.0,
    pass_k: Annotated[
        list[int] | None, typer.Option(min=1, help="Report pass@k; may be repeated; at most --num-samples.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most completion tokens.")] = 256,
    max_prompt_length: Annotated[int, typer.Option(min=1, help="Longer prompts are left out and counted.")] = 512,
    system: Annotated[str | None, typer.Option(help="System message for prompts that have none.")] = None,
    instruction: Annotated[str | None, typer.Option(help="Text added to the last user message.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Keys every draw; the same seed gives the same tokens.")] = 0,
    numerics: Annotated[str, typer.Option(help=NUMERICS_HELP)] = "bf16",
    completions: Annotated[Path | None, typer.Option(help="Write every completion to this file, a line each.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Score a model on held-out prompts: mean@n, maj@n, pass@k, lengths, truncation.

    Prompts, rewards and sampling are those of an evaluation in a run; a completion is correct if its reward is 1 or
    more.
    """
    contract_from(numerics)
    require_writable(completions, "--completions")
    require_writable(json_file)
    from zerogap.config import apply_overrides, load_config

    tree: dict[str, Any] = {
        "model": model,
        "data": {"train": data, "max_prompt_length": max_prompt_length, "system": system, "instruction": instruction},
        "reward": {"functions": list(reward or ["number_match"])},
        "rollout": {"max_completion_length": max_tokens},
        "optimizer": {"max_steps": 1},
        "eval": {"num_samples": num_samples, "temperature": temperature, "pass_k": list(pass_k or [1])},
        "seed": seed,
    }
    config = load_config(apply_overrides(tree, [f"numerics={numerics}"]))
    figures = _evaluate(config, num_prompts, completions)
    _print(Console(), figures)
    if json_file is not None:
        import json

        json_file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def _evaluate(config: RunConfig, num_prompts: int, completions: Path | None) -> dict[str, Any]:
    """The figures of the evaluation, and which model and contract they are of. Progress goes to standard error."""
    from zerogap.rl import setup
    from zerogap.rl.held_out import evaluate as evaluate_held_out
    from zerogap.rl.run_folder import write_table
    from zerogap.text import Tokenizer

    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    data, rewards = setup.load_data(config)
    for line in data.summary:
        errors.print(line, markup=False)
    files, _ = setup.open_source(config)
    tokenizer = Tokenizer.from_files(files.tokenizer_files(), files.chat_template)
    prompts, notes = setup.tokenize(data.held_out or data.train, tokenizer, config.data.max_prompt_length)
    for line in notes:
        errors.print(line, markup=False)
    prompts = prompts[:num_prompts] if num_prompts else prompts
    decoder = setup.load_decoder(config, files)
    if decoder.needs_calibration:
        decoder.calibrate([prompt.ids.tolist() for prompt in prompts])
    engine = setup.build_engine(config, decoder, tokenizer)
    try:
        with errors.status("") as status:
            held_out = evaluate_held_out(
                engine,
                config,
                prompts,
                lambda chosen, samples: rewards.score(
                    [prompt.row for prompt in chosen],
                    [sample.text for sample in samples],
                    [sample.completion_ids.tolist() for sample in samples],
                    0,
                ),
                progress=lambda p: status.update(f"{p.finished}/{p.total} completions, {p.tokens_per_second:,.0f}/s"),
            )
    finally:
        rewards.close()
    if completions is not None:
        write_table(completions, held_out.table)
    return {"model": config.model, "identity": str(decoder.identity), **held_out.figures}


def _print(console: Console, figures: Mapping[str, Any]) -> None:
    """A line per figure."""
    width = max(map(len, figures))
    for name, value in figures.items():
        shown = str(value)
        if isinstance(value, float):
            shown = f"{value:.1%}" if name.startswith(PERCENT) else f"{value:,.4g}"
        console.print(f"{name:<{width}}  {shown}", markup=False, highlight=False, soft_wrap=True)
