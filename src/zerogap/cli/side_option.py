"""The sides of `zerogap diagnose` as words: the folder of a trace, or a stack and a model to be run now."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zerogap.cli.numerics_option import contract_from

if TYPE_CHECKING:
    from zerogap.diagnose.live import LiveModel
    from zerogap.diagnose.trace import Trace

OPTIONS = {
    "transformers": {
        "dtype": ("auto", "bfloat16", "float16", "float32"),
        "attn": ("sdpa", "eager"),
        "path": ("whole", "decode", "chunked", "prefix_hit"),
        "batch": ("alone", "together"),
        "logprobs": ("raw", "processed"),
    },
    "zerogap": {
        "numerics": (),
        "path": ("whole", "decode", "chunked", "prefix_hit"),
        "batch": ("alone", "together"),
        "logprobs": ("raw", "processed"),
    },
}
FORMS = (
    "give the folder of a trace, transformers:MODEL[,dtype=bfloat16][,attn=eager], or zerogap:MODEL[,numerics=bf16]; "
    "both live ones also take path=whole|decode|chunked|prefix_hit, batch=alone|together, logprobs=raw|processed"
)


def parse_side(which: str, text: str) -> Trace | LiveModel:
    """A recorded side is read; of a live one, only the words are.

    Args:
        which: `A` or `B`, for messages.

    Raises:
        ConfigError: neither, or an option or a value that the stack does not have.
    """
    from zerogap.diagnose.live import LiveModel
    from zerogap.diagnose.trace import load_trace
    from zerogap.errors import CheckpointError, ConfigError

    stack, colon, rest = text.partition(":")
    path = Path(text).expanduser()
    if not colon or path.exists() or stack not in OPTIONS:
        if stack == "vllm":
            mend = (
                "vLLM is recorded in its own environment: python -m zerogap.diagnose.adapters.vllm MODEL --out FOLDER"
            )
            raise ConfigError(which, text, f"{mend} ..., then give FOLDER here")
        if not path.is_dir():
            raise ConfigError(which, text, f"there is no such folder; {FORMS}")
        if (path / "config.json").is_file() and not (path / "trace.json").is_file():
            raise ConfigError(which, text, f"this is a model: write transformers:{text} or zerogap:{text}")
        try:
            return load_trace(path)
        except CheckpointError as error:
            raise ConfigError(which, text, str(error)) from error
    model, *words = _split(rest)
    if not model:
        raise ConfigError(which, text, f"name a model after {stack}:")
    given = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in OPTIONS[stack]:
            raise ConfigError(which, word, f"{stack} takes {', '.join(f'{n}=...' for n in OPTIONS[stack])}")
        choices = OPTIONS[stack][name]
        if choices and value not in choices:
            raise ConfigError(f"{which}: {name}", value, f"choose one of {', '.join(choices)}")
        given[name] = value
    return LiveModel(
        stack,
        model,
        dtype=given.get("dtype", "auto"),
        attention=given.get("attn", "sdpa"),
        numerics=contract_from(given.get("numerics", "bf16")) if stack == "zerogap" else None,
        path=given.get("path", ""),
        together=given.get("batch") == "together",
        logprobs=given.get("logprobs", ""),
    )


def _split(text: str) -> list[str]:
    """At commas that stand in no braces: `numerics={preset: fp8, scale_format: pow2}` is one word."""
    words, depth = [""], 0
    for character in text:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            words.append("")
        else:
            words[-1] += character
    return [word.strip() for word in words]
