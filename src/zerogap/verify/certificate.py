"""The file format of a certificate: a JSON record of what was compared, sealed by digests. docs/certificate.md.

The seal is a SHA-256 over the canonical JSON of everything else. It finds damage and careless edits. It is no
signature: an edited record that was sealed again is found by running it again (`recheck`). Each section has a digest of
its own, so that a broken seal names the section. Reading checks every field by name and type before anything is done
with it, and never unpickles, imports or executes anything that the file names.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zerogap.errors import CheckpointError
from zerogap.rl.rollout_log import write_json

FORMAT, VERSION = "zerogap-certificate", 1
MOST_BYTES = 256 << 20
Record = dict[str, Any]

_HEX16, _HEX32, _HEX64 = (re.compile(f"[0-9a-f]{{{n}}}") for n in (16, 32, 64))
_IDS = re.compile(r"\d{1,9}( \d{1,9})*")
_DRAWN = re.compile(r"(\d{1,9}( \d{1,9})*)?")
_DIGEST = re.compile(r"([0-9a-f]{32})?")
_COUNTS = {"compared": int, "differing": int, "first": str}
_SAMPLE = {
    "prompt": int,
    "ids": _DRAWN,
    "logprobs": _DIGEST,
    "kept": _DIGEST,
    "experts": _DIGEST,
    "finish_reason": str,
}
SHAPE: Mapping[str, Any] = {
    "format": str,
    "version": int,
    "identity": {"contract": _HEX16, "backend": str, "build": str},
    "contract": {"*": object},
    "model": {
        "source": str,
        "kind": str,
        "parameters": int,
        "spec": {"*": object},
        "tokenizer": _HEX64,
        "tensors": {"*": _HEX32},
    },
    "versions": {"zerogap": str, "python": str, "torch": str, "numpy": str, "transformers": str},
    "hardware": {"machine": str, "cores": int, "flags": [str]},
    "layouts": {"run": str, "audit": str, "neighbours": str},
    "seed": int,
    "sequences": [_IDS],
    "neighbours": {
        "trials": int,
        "drawn": _HEX64,
        "victims": [{"prompt": _IDS, "drawn": _IDS, "logprobs": _HEX32, "logits": _HEX32}],
        **_COUNTS,
    },
    "ladder": [{"number": int, "name": str, **_COUNTS}],
    "run": {
        "recipe": {
            "data": {"max_prompt_length": int},
            "trainable": [str],
            "seed": int,
            **{name: {"*": object} for name in ("numerics", "rollout", "algorithm", "optimizer", "moe")},
        },
        "prompts": [{"messages": [{"role": str, "content": str}], "ids": _IDS}],
        "steps": [{"step": int, "version": int, "compared": int, "mismatched": int, "samples": [_SAMPLE]}],
    },
    "weights": [{"version": int, "changed": {"*": str}}],
    "audit": [
        {"step": int, "version": int, "tokens": int, "trainer": int, "engine": int, "redrawn": int, "experts": int}
    ],
    "made": {"at": str, "seconds": {"*": float}},
    "sections": {"*": _HEX64},
    "seal": _HEX64,
}
"""What a record holds: types, patterns of texts, [items], and {"*": values} where names are free."""


# ---------------------------------------------------------------------------------------------------- digests


def canonical(value: object) -> bytes:
    """The one JSON text of a value: keys sorted, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest_of(value: object) -> str:
    """64 hex digits over the canonical JSON of a value."""
    return hashlib.sha256(canonical(value)).hexdigest()


def array_digest(*arrays: np.ndarray) -> str:
    """32 hex digits over dtypes, shapes and little-endian bytes of arrays, in this order."""
    name = hashlib.sha256()
    for array in arrays:
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        name.update(f"{little.dtype.str} {little.shape}\0".encode() + little.tobytes())
    return name.hexdigest()[:32]


def as_text(ids: Sequence[int] | np.ndarray) -> str:
    """Token ids as a record holds them: `12 55 901`."""
    return " ".join(str(int(i)) for i in ids)


def as_ids(text: str) -> list[int]:
    """Inverse of `as_text`."""
    return [int(word) for word in text.split()]


def seal(record: Mapping[str, Any]) -> Record:
    """The record with a digest per section and the seal over everything."""
    body = {key: value for key, value in record.items() if key not in ("sections", "seal")}
    sealed = {**body, "sections": {name: digest_of(value) for name, value in body.items()}}
    return {**sealed, "seal": digest_of(sealed)}


def broken_seals(record: Mapping[str, Any]) -> list[str]:
    """Sections that are not what was sealed; `seal` where the seal itself is broken. Empty: whole."""
    again = seal(record)
    names = sorted({*again["sections"], *record["sections"]})
    found = [name for name in names if again["sections"].get(name) != record["sections"].get(name)]
    if not found and again["seal"] != record["seal"]:
        found.append("seal")
    return found


# ---------------------------------------------------------------------------------------------------- files


def write_certificate(path: Path, record: Mapping[str, Any]) -> Record:
    """Seal a record and write it whole or not at all: an older file stays until the new one is there."""
    sealed = seal(record)
    require_shape(sealed, SHAPE, str(path))
    write_json(path, sealed)
    return sealed


def read_certificate(path: Path) -> Record:
    """A record, its fields checked by name and type. Whether its seal holds is for `broken_seals` to say.

    Raises:
        CheckpointError: no such file, not whole, of another format, or a field that is missing, unknown or of another
            type, by name.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise CheckpointError(f"{path}: larger than {MOST_BYTES >> 20} MiB, which no certificate is")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: damaged, not UTF-8 text ({error})") from error
    try:
        record = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        what = "cut short, the JSON does not end" if cut else f"damaged, not JSON ({error})"
        raise CheckpointError(f"{path}: {what}{_last_section(text[: error.pos])}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged ({error or type(error).__name__})") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a certificate (format is not {FORMAT!r})")
    if record.get("version") != VERSION:
        raise CheckpointError(f"{path}: version {record.get('version')!r}, this build reads version {VERSION}")
    require_shape(record, SHAPE, str(path))
    return record


def _once(pairs: list[tuple[str, Any]]) -> Record:
    found: Record = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"field {key!r} stands there twice")
        found[key] = value
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number of JSON")


def _last_section(text: str) -> str:
    """Which section the text had come to."""
    names = [name for name in re.findall(r'^ "(\w+)":', text, re.MULTILINE) if name in SHAPE]
    return f", in section `{names[-1]}`" if names else ""


# ---------------------------------------------------------------------------------------------------- shape


def require_shape(value: object, shape: Any, where: str, field: str = "") -> None:
    """Raise `CheckpointError`, naming the field, unless a value has a shape as `SHAPE` describes them."""

    def refuse(problem: str) -> None:
        raise CheckpointError(f"{where}: field `{field or 'record'}` {problem}")

    if isinstance(shape, re.Pattern):
        if not isinstance(value, str) or not shape.fullmatch(value):
            refuse(f"is {_short(value)}, which does not fit {shape.pattern}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            refuse(f"is {_short(value)}, a list is needed")
        for index, item in enumerate(list(value)):  # type: ignore[call-overload]
            require_shape(item, shape[0], where, f"{field}[{index}]")
    elif isinstance(shape, Mapping):
        if not isinstance(value, dict):
            refuse(f"is {_short(value)}, a mapping is needed")
        assert isinstance(value, dict), "refused otherwise"
        prefix = f"{field}." if field else ""
        if "*" not in shape:
            for name in shape:
                if name not in value:
                    raise CheckpointError(f"{where}: field `{prefix}{name}` is missing")
            for name in value:
                if name not in shape:
                    raise CheckpointError(f"{where}: field `{prefix}{name}` is unknown")
        for name, item in value.items():
            require_shape(item, shape.get(name, shape.get("*")), where, f"{prefix}{name}")
    elif shape is not object:
        kinds = (int, float) if shape is float else shape
        if not isinstance(value, kinds) or isinstance(value, bool) or (shape is int and value < 0):  # type: ignore[operator]
            refuse(f"is {_short(value)}, {'a count' if shape is int else f'a {shape.__name__}'} is needed")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
