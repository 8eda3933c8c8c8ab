"""Block-FP8 checkpoints, as DeepSeek-V3 and the Qwen3-FP8 models have them, to `BlockCodes` and back.

A quantised matrix `NAME` [N, K] is stored as float8_e4m3fn codes, and beside it stands `NAME_scale_inv`, one scale per
block of 128 x 128 (FP32, in some models BF16): value = code * scale. `config.json` says so under `quantization_config`,
where `modules_to_not_convert` lists the linear layers that are not quantised. Both directions keep every bit.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from zerogap.errors import CheckpointError
from zerogap.types import BlockCodes

CODES_DTYPE = "F8_E4M3"  # as safetensors names it
BLOCK = 128
SCALES_SUFFIX = "_scale_inv"
_SCALE_DTYPES = ("F32", "BF16")


class Stored(NamedTuple):
    """What a file's header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]


def tensor_of(name: str) -> str:
    """The tensor that a stored name belongs to: itself, or the one whose scales it names."""
    return name.removesuffix(SCALES_SUFFIX)


def scales_of(where: str, stored: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, str]:
    """Names of quantised tensors -> names of their scales, after checking that they fit each other and the config.

    Raises:
        CheckpointError: scales are missing, have another shape or dtype, or belong to nothing; codes where `config`
            (config.json) has no quantization_config.
    """
    pairs = {name: name + SCALES_SUFFIX for name, (dtype, _) in stored.items() if dtype == CODES_DTYPE}
    if pairs and config.get("quantization_config") is None:
        raise CheckpointError(f"{where}: {min(pairs)} is {CODES_DTYPE}, but config.json has no quantization_config")
    for name in stored:
        if name.endswith(SCALES_SUFFIX) and tensor_of(name) not in pairs:
            raise CheckpointError(f"{where}: {name} has no {CODES_DTYPE} tensor {tensor_of(name)}")
    for name, scales in pairs.items():
        shape = stored[name].shape
        if len(shape) != 2:
            raise CheckpointError(f"{where}: {name} is {CODES_DTYPE} of shape {list(shape)}, not a matrix")
        expected = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
        if scales not in stored:
            raise CheckpointError(f"{where}: {name} is {CODES_DTYPE}, and its scales {scales} are missing")
        if stored[scales].dtype not in _SCALE_DTYPES or stored[scales].shape != expected:
            given = f"{stored[scales].dtype} {list(stored[scales].shape)}"
            raise CheckpointError(
                f"{where}: {scales} is {given}; blocks of {BLOCK} x {BLOCK} need F32 {list(expected)}"
            )
    return pairs


def from_stored(codes: torch.Tensor, scales: torch.Tensor) -> BlockCodes:
    """A float8_e4m3fn tensor and its scales, as they were read."""
    return BlockCodes(codes.view(torch.uint8), scales.to(torch.float32))


def to_stored(name: str, tensor: torch.Tensor | BlockCodes) -> dict[str, torch.Tensor]:
    """The tensors that a file holds for one tensor of the model, by name."""
    if isinstance(tensor, BlockCodes):
        return {name: tensor.codes.view(torch.float8_e4m3fn), name + SCALES_SUFFIX: tensor.scales}
    return {name: tensor}


def quantization_config(matrices: Iterable[str], quantised: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of a model.

    Args:
        matrices: names of all its matrices.
        quantised: names of those that are stored as codes.
    """
    kept = {name.removesuffix(".weight") for name in set(matrices) - set(quantised)} | {"lm_head"}
    # To transformers the experts of a layer are one module: it stays as it is where all of them do.
    kept |= {_experts_of(name) for name in kept} - {_experts_of(name) for name in quantised} - {""}
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(kept),
    }


def _experts_of(name: str) -> str:
    """`model.layers.3.mlp.experts` for the tensors in it, else nothing."""
    before, found, _ = name.partition(".mlp.experts.")
    return before + ".mlp.experts" if found else ""
