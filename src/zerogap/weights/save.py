"""Write a Hugging Face folder that transformers and `open_model` load: weights, config, tokenizer, chat template.

Everything is written to a sibling folder and synced to disk; only a whole folder gets the final name. A folder of that
name stays in place until then, is then moved aside and removed last: at no moment is there less than one whole copy.
Tensors are streamed into shards, so memory holds one shard at most.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from zerogap.errors import ConfigError
from zerogap.models.spec import ModelSpec
from zerogap.numerics import PRESETS, DType
from zerogap.types import BlockCodes
from zerogap.weights import block_fp8
from zerogap.weights.folder import INDEX, SINGLE
from zerogap.weights.model_files import ModelFiles, check_tensors
from zerogap.weights.whole_folder import replace_folder

MAX_SHARD_BYTES = 4 * 1024**3
NUMERICS_FILE = "zerogap.json"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def save_folder(
    path: str | os.PathLike[str],
    spec: ModelSpec,
    tensors: Iterable[tuple[str, torch.Tensor | BlockCodes]],
    files: ModelFiles | None = None,
    numerics_meta: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write the model to folder `path`, replacing a model folder of that name.

    Args:
        path: the folder; its parents are made.
        spec: what `config.json` will say.
        tensors: (Hugging Face name, tensor) pairs, exactly those of the spec, stored in their own dtypes. `config.json`
            says bfloat16 if all but the buffers are BF16, else float32, so that a loader loses nothing. Matrices given
            as `BlockCodes` are stored in block-FP8, and `config.json` gets their `quantization_config`.
        files: the model this one came from: its tokenizer, chat template, generation config and the config keys that
            the spec does not hold are carried over.
        numerics_meta: JSON-ready facts about the contract, written to zerogap.json.
        max_shard_bytes: a new shard begins before a file would exceed this.

    Raises:
        ConfigError: `path` is something else than a model folder or cannot be made, or a tensor is repeated or not
            floating point.
        CheckpointError: the tensors do not fit the spec.
    """
    target = Path(path).expanduser().absolute()
    if target.exists() and (not target.is_dir() or (any(target.iterdir()) and not (target / "config.json").exists())):
        raise ConfigError("path", str(path), "exists and is not a model folder; choose another name")
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError("path", str(path), f"the folder cannot be made: {error}") from error
    try:
        dtype, quantised = _write_shards(partial, spec, tensors, max_shard_bytes)
        for name, content in _other_files(spec, dtype, quantised, files, numerics_meta).items():
            (partial / name).write_bytes(content)
        replace_folder(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def _write_shards(
    folder: Path, spec: ModelSpec, tensors: Iterable[tuple[str, torch.Tensor | BlockCodes]], max_shard_bytes: int
) -> tuple[DType, list[str]]:
    """Stream tensors into safetensors files, and an index if there are several.

    Returns:
        the dtype of those that are not quantised (buffers stay FP32 beside any), and the names of those that are.
    """
    weights = spec.weight_specs(PRESETS["fp32"])
    buffers = {name for name, weight in weights.items() if weight.kind == "buffer"}
    quantised: list[str] = []
    shapes: dict[str, tuple[int, ...]] = {}
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    dtypes: set[torch.dtype] = set()
    size = total = 0

    def flush() -> None:
        path = folder / f"shard-{len(shards)}"
        save_file(shard, path, metadata={"format": "pt"})
        path.chmod(0o644)  # it is written for its owner only
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        if name in shapes:
            raise ConfigError("tensors", name, "give each tensor once")
        shapes[name] = tuple(tensor.shape)
        if isinstance(tensor, BlockCodes):
            quantised.append(name)
        elif tensor.dtype not in _DTYPES:
            raise ConfigError(f"tensors[{name}]", tensor.dtype, "give FP32, BF16 or FP16")
        elif name not in buffers:
            dtypes.add(tensor.dtype)
        parts = block_fp8.to_stored(name, tensor)
        nbytes = sum(part.nbytes for part in parts.values())
        if shard and size + nbytes > max_shard_bytes:
            flush()
            size = 0
        for part_name, part in parts.items():
            shard[part_name] = part.detach().cpu().contiguous().clone()  # a clone: no two names may share storage
        size += nbytes
        total += nbytes
    flush()
    check_tensors(str(folder), spec, shapes)
    storage = DType.BF16 if dtypes == {torch.bfloat16} else DType.FP32
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / SINGLE)
        return storage, quantised
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{index}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / INDEX).write_bytes(_json({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return storage, quantised


def _other_files(
    spec: ModelSpec,
    dtype: DType,
    quantised: list[str],
    files: ModelFiles | None,
    numerics_meta: Mapping[str, Any] | None,
) -> dict[str, bytes]:
    carried = {} if files is None else files.config
    config = {**carried, **spec.to_hf(dtype)}
    config.pop("quantization_config", None)  # of the model this one came from
    config.pop("auto_map", None)  # names code beside the model, which is neither run nor copied
    if quantised:
        weights = spec.weight_specs(PRESETS["fp32"])
        matrices = [name for name, weight in weights.items() if weight.kind in ("matrix", "heads")]
        config["quantization_config"] = block_fp8.quantization_config(matrices, quantised)
    # These ids are what ends a completion; an own generation_config.json would otherwise win over config.json.
    generation: dict[str, Any] = {} if files is None else dict(files.generation_config or {})
    for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        if config[key] is not None:
            generation[key] = config[key]
    out = {} if files is None else files.tokenizer_files()
    out["config.json"] = _json(config)
    out["generation_config.json"] = _json(generation)
    if numerics_meta is not None:
        out[NUMERICS_FILE] = _json(dict(numerics_meta))
    return out


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
