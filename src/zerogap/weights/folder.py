"""Read a Hugging Face folder: safetensors (one file, or shards with an index), tokenizer files, chat template.

Tensors are FP32, FP16 or BF16, or matrices in block-FP8 (`zerogap.weights.block_fp8`); experts stand alone or stacked
(`zerogap.weights.expert_stacks`). Extra prediction heads are skipped with a warning.

Only safetensors are read, never pickles. A truncated or corrupt file is a `CheckpointError` with the file's name.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from zerogap.errors import CheckpointError
from zerogap.types import BlockCodes
from zerogap.weights import block_fp8
from zerogap.weights.expert_stacks import unstack
from zerogap.weights.model_files import (
    ModelFiles,
    check_tensors,
    extra_layer,
    is_derived,
    read_json,
    warn_of_extra_layers,
)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_STORED_DTYPES = ("F32", "F16", "BF16", block_fp8.CODES_DTYPE)


class FolderFiles(ModelFiles):
    """A Hugging Face folder.

    Raises:
        CheckpointError: files are missing or corrupt, or tensors do not fit `config.json`.
        ConfigError: `config.json` asks for something unsupported.
    """

    def __init__(self, folder: Path) -> None:
        generation = folder / "generation_config.json"
        super().__init__(
            folder,
            read_json(folder / "config.json"),
            read_json(generation) if generation.exists() else None,
            _chat_template(folder),
        )
        self._file_of: dict[str, Path] = {}
        found: dict[str, block_fp8.Stored] = {}
        extra: list[str] = []
        for path in _weight_files(folder):
            for name, stored in _read_header(path).items():
                if name in found:
                    raise CheckpointError(f"{path}: {name} is also in {self._file_of[name].name}")
                if extra_layer(name, self.spec, self.config) is not None:
                    extra.append(name)
                elif not is_derived(block_fp8.tensor_of(name), self.spec):
                    self._file_of[name], found[name] = path, stored
        single = unstack(str(folder), found, self.spec)
        self._places = single.places
        self._scales_of = block_fp8.scales_of(str(folder), single.stored, self.config)
        self.stored_codes = frozenset(self._scales_of)
        shapes = {name: stored.shape for name, stored in single.stored.items() if block_fp8.tensor_of(name) == name}
        check_tensors(str(folder), self.spec, shapes)
        self._names = sorted(shapes)
        warn_of_extra_layers(str(folder), extra, self.spec)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | BlockCodes]]:
        with contextlib.ExitStack() as stack:
            readers: dict[Path, Any] = {}

            def read(name: str) -> torch.Tensor:
                place = self._places.get(name)
                path = self._file_of[name if place is None else place.stored_name]
                try:
                    if path not in readers:
                        readers[path] = stack.enter_context(safe_open(path, framework="pt"))
                    if place is None:
                        return readers[path].get_tensor(name)
                    return readers[path].get_slice(place.stored_name)[place.expert, place.first : place.last]
                except (SafetensorError, OSError) as error:
                    raise CheckpointError(f"{path}: cannot read {name} ({error})") from error

            for name in self._names:
                if name in self._scales_of:
                    yield name, block_fp8.from_stored(read(name), read(self._scales_of[name]))
                else:
                    yield name, read(name)

    def tokenizer_files(self) -> dict[str, bytes]:
        files = {name: (self.source / name).read_bytes() for name in TOKENIZER_FILES if (self.source / name).is_file()}
        return files if {"tokenizer.json", "tokenizer.model", "vocab.json"} & set(files) else {}


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model; with an index, its files, checked against its weight map."""
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{folder / INDEX}: has no weight_map from tensor names to file names")
        paths = {name: folder / name for name in sorted(set(weight_map.values()))}
        for name, path in paths.items():
            if Path(name).name != name:
                raise CheckpointError(f"{folder / INDEX}: {name!r} is not a plain file name")
            if not path.is_file():
                raise CheckpointError(f"{path}: listed in {INDEX}, but there is no such file")
            listed = {tensor for tensor, file in weight_map.items() if file == name}
            if absent := sorted(listed - set(_read_header(path))):
                raise CheckpointError(f"{path}: {INDEX} says that it holds {absent[0]}; it does not")
        return list(paths.values())
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    hint = f" ({pickles[0]} is a pickle, which is never read: convert it to safetensors)" if pickles else ""
    raise CheckpointError(f"{folder}: has neither {SINGLE} nor {INDEX}{hint}")


def _read_header(path: Path) -> dict[str, block_fp8.Stored]:
    """Dtypes and shapes in a safetensors file by name, after checking that it is whole and of dtypes that are read."""
    stored: dict[str, block_fp8.Stored] = {}
    try:
        with safe_open(path, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 (a method, not a mapping)
                view = reader.get_slice(name)
                dtype = view.get_dtype()
                if dtype not in _STORED_DTYPES:
                    raise CheckpointError(f"{path}: {name} is {dtype}; only {', '.join(_STORED_DTYPES)} are read")
                stored[name] = block_fp8.Stored(dtype, tuple(view.get_shape()))
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size if path.exists() else 0
        raise CheckpointError(f"{path}: truncated or corrupt, {size} bytes ({error})") from error
    return stored


def _chat_template(folder: Path) -> str | None:
    """The chat template, from chat_template.jinja, chat_template.json or tokenizer_config.json, in that order."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            template = read_json(folder / name).get("chat_template")
            if isinstance(template, list):  # several named templates
                template = {entry["name"]: entry["template"] for entry in template}.get("default")
            if template is not None:
                return template
    return None
