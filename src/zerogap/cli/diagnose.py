"""`zerogap diagnose`: why two stacks give different log-probs, or that they do not."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from zerogap.cli.json_option import require_writable
from zerogap.cli.side_option import parse_side
from zerogap.env import num_threads
from zerogap.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerogap.diagnose.findings import Report
    from zerogap.diagnose.live import LiveModel, Loaded
    from zerogap.diagnose.side import Replacement, Side
    from zerogap.text import Tokenizer

MOST_WORKERS = 8  # that are started unless asked: each holds about 1 GB
PRECISION, RECALL = 0.95, 0.9  # that the self-test has to reach
STYLES = {"head": "bold", "good": "green", "bad": "red", "open": "yellow", "soft": "dim", "": ""}


A = Annotated[
    str | None, typer.Argument(help="The reference or rollout: a trace's folder, transformers:MODEL or zerogap:MODEL.")
]
B = Annotated[str | None, typer.Argument(help="The other side, in the same words.")]
ARRAYS = Annotated[
    Path | None,
    typer.Option(
        help="Instead of A and B: one .npz, .parquet or .jsonl file with ids and two log-prob arrays. The definition "
        "is checked only if it also holds `processed`; --temperature alone does not say it."
    ),
]
NEMO_RL = Annotated[
    Path | None, typer.Option("--nemo-rl", help="Instead of A and B: a train_data_step*.jsonl of NeMo RL.")
]
PROMPTS = Annotated[
    Path | None,
    typer.Option(
        help="What live sides compute: one prompt per line, or .jsonl with `prompt` (text, messages or ids) and "
        "perhaps `completion`, or `ids` and `prompt_length`. Default: built-in texts."
    ),
]
PATH = Annotated[
    str,
    typer.Option(
        help="text: both sides score the given texts. generate: A samples completions of the prompts (token by "
        "token) and both sides score those."
    ),
]
MAX_TOKENS = Annotated[int, typer.Option(min=1, help="Most completion tokens, with --path generate.")]
TEMPERATURE = Annotated[
    float | None,
    typer.Option(min=0.01, help="Of sampling; log-probs are then of that distribution. Default: 1, or the trace's."),
]
SEED = Annotated[int, typer.Option(min=0, help="Of the sampled completions.")]
REPORT = Annotated[Path | None, typer.Option(help="Write report.html and report.json to this folder.")]
JSON = Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")]
SELF_TEST = Annotated[
    bool, typer.Option("--self-test", help="Diagnose planted faults and clean controls, and score the verdicts.")
]
FAULTS = Annotated[
    Path | None, typer.Option(help="With --self-test: your own fault files instead of the built-in ones.")
]
WORKERS = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="With --self-test: processes that share the files, one thread each. Default: the cores, at most 8.",
    ),
]


@dataclasses.dataclass(frozen=True)
class Asked:
    """Where the two sides come from, and what live ones compute: options of the command."""

    a: str | None
    b: str | None
    arrays: Path | None
    nemo_rl: Path | None
    prompts: Path | None
    generate: bool
    max_tokens: int
    temperature: float | None
    seed: int


def diagnose(
    a: A = None,
    b: B = None,
    arrays: ARRAYS = None,
    nemo_rl: NEMO_RL = None,
    prompts: PROMPTS = None,
    path: PATH = "text",
    max_tokens: MAX_TOKENS = 32,
    temperature: TEMPERATURE = None,
    seed: SEED = 0,
    report: REPORT = None,
    json_file: JSON = None,
    self_test: SELF_TEST = False,
    faults: FAULTS = None,
    workers: WORKERS = None,
) -> None:
    """Name the cause of a difference between two stacks' log-probs, with evidence.

    Sides are recorded traces (zg.capture and the adapters for vLLM, TRL and verl
    write them) or models that are run now. Cheap and common causes are ruled out
    first: ids, what a log-prob means, weights, cache, determinism, neighbours,
    path, layout. Only then is an operator blamed, and a field of its numerics
    (order, split, rounding ...) only if the bits of both sides were reproduced.
    What the data does not show is called unattributed, with what to record next.

    zerogap diagnose rollout-trace trainer-trace --report why

    zerogap diagnose rollout-trace transformers:MODEL,dtype=bfloat16

    zerogap diagnose transformers:MODEL,attn=eager zerogap:MODEL,numerics=bf16

    zerogap diagnose transformers:MODEL transformers:MODEL --path generate

    zerogap diagnose --arrays step_12.npz --temperature 0.7

    zerogap diagnose --self-test

    Live sides also take path=whole|decode|chunked|prefix_hit,
    batch=alone|together and logprobs=raw|processed. Exit code: 0 if nothing
    differs, 1 if something does, 2 if the input cannot be used; of --self-test 0
    if precision is at least 0.95, recall at least 0.9 and no control is blamed.
    """
    require_writable(json_file)
    _check_report(report)
    given = [n for n, v in (("A", a), ("--arrays", arrays), ("--nemo-rl", nemo_rl), ("--self-test", self_test)) if v]
    if len(given) != 1 or (a is None) != (b is None):
        raise ConfigError("diagnose", given, "give two sides A and B, or one of --arrays, --nemo-rl, --self-test")
    if path not in ("text", "generate"):
        raise ConfigError("--path", path, "choose text or generate")
    if faults is not None and not self_test:
        raise ConfigError("--faults", str(faults), "it belongs to --self-test")
    if workers is not None and not self_test:
        raise ConfigError("--workers", workers, "it belongs to --self-test")
    console = Console(highlight=False)
    if self_test:
        _self_test(console, faults, workers or min(num_threads(), MOST_WORKERS), json_file)
        return
    asked = Asked(a, b, arrays, nemo_rl, prompts, path == "generate", max_tokens, temperature, seed)
    found = _run(console, asked)
    _show(console, found)
    if json_file is not None:
        from zerogap.diagnose.report import write_json

        console.print(f"results: {write_json(found, json_file)}", soft_wrap=True)
    if report is not None:
        from zerogap.diagnose.report import write_report

        console.print(f"report: {write_report(found, report)}", soft_wrap=True)
    if not found.verdict.same:
        raise typer.Exit(1)


def _run(console: Console, asked: Asked) -> Report:
    with contextlib.ExitStack() as stack:
        say = _progress(console, stack)
        if asked.a is None or asked.b is None:
            return _diagnosed(_recorded(asked), None, say)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zerogap-diagnose-")))
        sides, tokenizer = _sides(asked.a, asked.b, asked, scratch, say)
        return _diagnosed(sides, tokenizer, say)


def _progress(console: Console, stack: contextlib.ExitStack) -> Callable[[str], None]:
    """Shows what is done now: a line that changes, or on what is no terminal, lines of standard error."""
    began, last = time.perf_counter(), [""]
    status = stack.enter_context(console.status("reading")) if console.is_terminal else None
    lines = Console(stderr=True, highlight=False)

    def say(text: str) -> None:
        if status is not None:
            status.update(f"{text}  [{time.perf_counter() - began:.0f} s]")
        elif text != last[0]:
            lines.print(f"{time.perf_counter() - began:5.0f} s  {text}", markup=False, soft_wrap=True)
        last[0] = text

    return say


def _check_report(folder: Path | None) -> None:
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ConfigError("--report", str(folder), "it is a file; name a folder")


def _recorded(asked: Asked) -> tuple[Side, Side]:
    from zerogap.diagnose.adapters.arrays import load_arrays
    from zerogap.diagnose.adapters.nemo_rl import load_nemo_rl
    from zerogap.diagnose.side import RecordedSide
    from zerogap.diagnose.trace import Definition

    definition = None if asked.temperature is None else Definition(temperature=asked.temperature)
    option, file = ("--arrays", asked.arrays) if asked.arrays else ("--nemo-rl", asked.nemo_rl)
    assert file is not None, "one of the two was given"
    if not file.is_file():
        raise ConfigError(option, str(file), "there is no such file")
    try:
        pair = load_arrays(file, definition) if asked.arrays else load_nemo_rl(file, definition)
    except CheckpointError as error:
        raise ConfigError(option, str(file), str(error)) from error
    return RecordedSide(pair[0]), RecordedSide(pair[1])


def _sides(
    a: str, b: str, asked: Asked, scratch: Path, say: Callable[[str], None]
) -> tuple[tuple[Side, Side], Tokenizer | None]:
    """Both sides, recorded or loaded, over the same sequences, and a tokenizer for the report if there is one."""
    from zerogap.diagnose.live import definition_for, read_prompts, sequences_of, trace_tokenizer
    from zerogap.diagnose.side import RecordedSide
    from zerogap.diagnose.trace import Trace

    parsed = parse_side("A", a), parse_side("B", b)
    traces = [p for p in parsed if isinstance(p, Trace)]
    if traces and (asked.prompts is not None or asked.generate):
        raise ConfigError("--prompts" if asked.prompts else "--path", asked.prompts, "a trace has its own sequences")
    if len(traces) == 2:
        tokenizer = trace_tokenizer(traces[0]) or trace_tokenizer(traces[1])
        return (RecordedSide(traces[0]), RecordedSide(traces[1])), tokenizer
    rows = read_prompts(asked.prompts) if asked.prompts else []
    loaded = [None if isinstance(p, Trace) else _loaded(p, scratch / str(i), say) for i, p in enumerate(parsed)]
    lead = loaded[0] or loaded[1]
    assert lead is not None, "one side is live"
    definition = definition_for(asked.temperature, traces[0] if traces else None)
    if traces:
        sequences = list(traces[0].sequences)
    else:
        sequences = sequences_of(rows, lead.tokenizer, lead.vocabulary, complete=asked.generate)
    if asked.generate:
        say(f"{lead.asked.name}: sampling completions")
        prompts = [s.ids for s in sequences]
        sequences = lead.complete(prompts, asked.max_tokens, asked.temperature or 1.0, asked.seed)
    sides: list[Side] = []
    for i, (recorded, model) in enumerate(zip(parsed, loaded)):
        if isinstance(recorded, Trace) or model is None:
            sides.append(RecordedSide(traces[0]))
        else:
            say(f"{model.asked.name}: computing")
            sides.append(model.side(sequences, definition, "decode" if asked.generate and i == 0 else ""))
    return (sides[0], sides[1]), lead.tokenizer


def _loaded(asked: LiveModel, scratch: Path, say: Callable[[str], None]) -> Loaded:
    from zerogap.diagnose.live import Loaded

    say(f"loading {asked.name}")
    try:
        return Loaded(asked, scratch)
    except CheckpointError as error:
        raise ConfigError(asked.stack, asked.model, str(error)) from error


def _diagnosed(sides: tuple[Side, Side], tokenizer: Tokenizer | None, say: Callable[[str], None]) -> Report:
    from zerogap.diagnose.report import with_texts
    from zerogap.diagnose.run import diagnose as run

    found = run(*sides, progress=say, replacements=_replacements(*sides))
    if tokenizer is None:
        return found
    return with_texts(found, sides[0].trace, tokenizer.decode)


def _replacements(a: Side, b: Side) -> dict[str, dict[str, Replacement]]:
    """What a live torch side computes with instead to tell operators' shares: the other side's contract."""
    from zerogap.diagnose.adapters.contract_ops import contract_replacements
    from zerogap.diagnose.adapters.torch_side import TorchSide
    from zerogap.diagnose.zerogap_side import ZerogapSide

    for which, side, other in (("a", a, b), ("b", b, a)):
        if isinstance(side, TorchSide) and isinstance(other, ZerogapSide):
            meant = other.trace.recorded.definition
            temperature = 1.0 if not meant.processed else meant.temperature or 1.0
            return {which: contract_replacements(side, other.decoder.numerics, temperature)}
    return {}


def _show(console: Console, report: Report) -> None:
    from zerogap.diagnose.terminal import summary

    for line in summary(report):
        console.print(line.text, style=STYLES[line.tone], markup=False, soft_wrap=True)


def _self_test(console: Console, faults: Path | None, workers: int, json_file: Path | None) -> None:
    from zerogap.diagnose import self_test

    def show(case: self_test.Case) -> None:
        mark, style = ("ok  ", "green") if case.right else ("MISS", "red")
        said = f"{case.said}" if case.right else f"{case.said}, expected {' or '.join(case.expected)}"
        console.print(f"{mark} {case.name:<36} {said}  {case.seconds:.1f} s", style=style, markup=False, soft_wrap=True)

    score = self_test.run(faults, progress=show, workers=workers)
    console.print(score.summary(), markup=False, soft_wrap=True)
    if json_file is not None:
        self_test.write_json(score, json_file)
        console.print(f"results: {json_file}")
    if score.precision < PRECISION or score.recall < RECALL or score.blamed:
        raise typer.Exit(1)
