"""`zerogap generate`: complete prompts with the rollout engine, streaming."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from zerogap.cli.numerics_option import NUMERICS_HELP, contract_from


def generate(
    model: Annotated[
        str, typer.Argument(help="A folder or .gguf file with a tokenizer, hub id, or smollm2-135m-instruct.")
    ],
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A text file with one prompt per line.")] = None,
    chat: Annotated[bool, typer.Option(help="Put prompts through the model's chat template.")] = True,
    system: Annotated[str | None, typer.Option(help="System message, with --chat.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most completion tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Keep the k likeliest ids; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest ids of this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep ids of at least this share of the likeliest one's.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends a completion; may be repeated.")] = None,
    num_samples: Annotated[int, typer.Option(min=1, help="Completions per prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Keys every draw; the same seed gives the same tokens.")] = 0,
    numerics: Annotated[str, typer.Option(help=NUMERICS_HELP)] = "bf16",
    logprobs: Annotated[bool, typer.Option(help="Print each completion's total log-prob.")] = False,
) -> None:
    """Complete prompts. Sampling settings are those given here; none come from the model folder."""
    from zerogap.errors import ConfigError
    from zerogap.models.decoder import Decoder
    from zerogap.rollout.engine import Engine
    from zerogap.text import Tokenizer
    from zerogap.types import SamplingKey, SamplingParams
    from zerogap.weights import open_model, sampling_defaults_notice

    prompts = [*(prompt or []), *(_lines(prompt_file) if prompt_file else [])]
    if not prompts:
        raise ConfigError("prompt", None, "give --prompt TEXT or --prompt-file FILE")
    params = SamplingParams(temperature, top_k, top_p, min_p, max_tokens, stop=tuple(stop or ()))
    contract = contract_from(numerics)
    files = open_model(model)
    tokenizer = Tokenizer.from_files(files.tokenizer_files(), files.chat_template)
    if notice := sampling_defaults_notice(files):
        typer.echo(notice, err=True)
    requests = [_messages(p, system) if chat else p for p in prompts]
    ids = [tokenizer.prompt_ids(r).tolist() for r in requests]
    longest = max(len(i) for i in ids) + max_tokens
    decoder = Decoder(files.spec, contract, max_positions=max(longest, 64)).load(files.tensors())
    engine = Engine(decoder, tokenizer)
    keys = [SamplingKey(seed=seed, prompt=slot) for slot in range(len(ids))]
    totals: dict[int, float] = {}
    shown = 0  # requests run side by side; text is printed in input order
    waiting: dict[int, list[str]] = {}
    finished: dict[int, str] = {}
    for event in engine.stream(ids, params, keys, num_samples=num_samples):
        totals[event.index] = totals.get(event.index, 0.0) + event.logprob
        waiting.setdefault(event.index, []).append(event.text)
        if event.finish_reason:
            finished[event.index] = event.finish_reason
        while shown < len(ids) * num_samples:
            sys.stdout.write("".join(waiting.pop(shown, [])))
            sys.stdout.flush()
            if shown not in finished:
                break
            tail = f"  [log-prob {totals[shown]:.4f}]" if logprobs else ""
            sys.stdout.write(f"{tail}\n")
            shown += 1


def _lines(path: Path) -> list[str]:
    from zerogap.errors import ConfigError

    try:
        return [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--prompt-file", str(path), f"cannot be read as UTF-8 text: {error}") from None


def _messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": prompt}]
