"""What an opened model offers, whatever file it came from; and the checks that both readers share.

Opening reads headers only and proves that the tensors on disk are exactly those of the spec: each missing, unexpected
or wrongly shaped one is named before a byte of weights is read. Sampling defaults of the folder are never applied:
`sampling_defaults_notice` says which ones were found and are being ignored. End-of-sequence ids are facts about the
model, not sampling defaults, so those of config.json and generation_config.json are joined.
"""

import abc
import dataclasses
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from zerogap.errors import CheckpointError
from zerogap.models.refusals import extra_layers
from zerogap.models.spec import ModelSpec, token_ids
from zerogap.numerics import PRESETS
from zerogap.types import BlockCodes

# Keys of generation_config.json that do not influence which token is drawn.
_NOT_SAMPLING = {
    "_from_model_config",
    "bos_token_id",
    "cache_implementation",
    "eos_token_id",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "return_dict_in_generate",
    "transformers_version",
    "use_cache",
}
_MAX_NAMED = 5


class ModelFiles(abc.ABC):
    """One opened model. Holds no weights; `tensors()` streams them.

    Attributes:
        source: what the user named, for messages.
        config: the `config.json` mapping (from a GGUF file: its equivalent).
        generation_config: the `generation_config.json` mapping, or None. Never applied to sampling.
        spec: what the decoder needs; its end-of-sequence ids are the union over both mappings.
        chat_template: the Jinja source, or None.
        stored_codes: names of the tensors that are stored in block-FP8.
    """

    stored_codes: frozenset[str] = frozenset()

    def __init__(
        self,
        source: Path,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any] | None,
        chat_template: str | None,
    ) -> None:
        self.source = source
        self.config = dict(config)
        self.generation_config = None if generation_config is None else dict(generation_config)
        self.chat_template = chat_template
        spec = ModelSpec.from_hf(self.config)
        more = token_ids((self.generation_config or {}).get("eos_token_id"))
        self.spec = dataclasses.replace(spec, eos_token_ids=token_ids([*spec.eos_token_ids, *more]))

    @abc.abstractmethod
    def tensors(self) -> Iterator[tuple[str, torch.Tensor | BlockCodes]]:
        """(Hugging Face name, tensor) in checkpoint-name order, each of the spec's tensors exactly once.

        Dtypes are the stored ones (quantised GGUF blocks become BF16); a matrix in block-FP8 comes as `BlockCodes`. A
        tied head is not repeated.

        Raises:
            CheckpointError: a file cannot be read.
        """

    @abc.abstractmethod
    def tokenizer_files(self) -> dict[str, bytes]:
        """The files a Hugging Face tokenizer is loaded from, by name; empty if the model has no tokenizer.

        Raises:
            ConfigError: the model has a tokenizer of a kind that cannot be carried over.
        """


def check_tensors(where: str, spec: ModelSpec, found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `CheckpointError`, naming tensors, unless `found` (name -> shape) is exactly what `spec` needs."""
    wanted = {name: weight.shape for name, weight in spec.weight_specs(PRESETS["fp32"]).items()}
    problems = []
    if missing := [name for name in wanted if name not in found]:
        problems.append(f"missing: {_some(missing)}")
    if unexpected := sorted(set(found) - set(wanted)):
        problems.append(f"unexpected: {_some(unexpected)}")
    wrong = [n for n, shape in wanted.items() if n in found and tuple(found[n]) != shape]
    if wrong:
        shapes = [f"{n} is {list(found[n])}, config.json implies {list(wanted[n])}" for n in wrong]
        problems.append(f"wrong shape: {_some(shapes)}")
    if problems:
        raise CheckpointError(f"{where}: tensors do not fit the model. " + "; ".join(problems))


def is_derived(name: str, spec: ModelSpec) -> bool:
    """True for tensors that a checkpoint may repeat although the config implies them: never read, never an error."""
    return name.endswith("rotary_emb.inv_freq") or (spec.tied and name == "lm_head.weight")


def extra_layer(name: str, spec: ModelSpec, config: Mapping[str, Any]) -> int | None:
    """The layer of extra prediction heads that a tensor belongs to, or None: they stand behind the decoder's layers."""
    parts = name.split(".")
    if parts[:2] != ["model", "layers"] or not parts[2:] or not parts[2].isdigit():
        return None
    layer = int(parts[2])
    return layer if spec.num_layers <= layer < spec.num_layers + extra_layers(config) else None


def warn_of_extra_layers(where: str, names: Iterable[str], spec: ModelSpec) -> None:
    """Say loudly which tensors are not read."""
    names = sorted(names)
    if names:
        warnings.warn(
            f"{where}: {len(names)} tensors of extra prediction heads are skipped (model.layers.{spec.num_layers} and "
            f"above, num_nextn_predict_layers): {_some(names)}; nothing computes them, and exports leave them out",
            stacklevel=3,
        )


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file.

    Raises:
        CheckpointError: the file is missing, is not valid JSON, or holds something else than a mapping.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not a mapping")
    return content


def sampling_defaults_notice(files: ModelFiles) -> str | None:
    """A message naming the file and every sampling default in it that is being ignored, or None if there is none."""
    config = files.generation_config or {}
    keys = {k: v for k, v in config.items() if k not in _NOT_SAMPLING and v is not None}
    if not keys:
        return None
    listed = ", ".join(f"{key} = {value!r}" for key, value in sorted(keys.items()))
    return (
        f"{files.source / 'generation_config.json'}: sampling defaults are ignored ({listed}); "
        "set them in the sampling parameters if you want them"
    )


def _some(items: list[str]) -> str:
    more = f" and {len(items) - _MAX_NAMED} more" if len(items) > _MAX_NAMED else ""
    return ", ".join(items[:_MAX_NAMED]) + more
