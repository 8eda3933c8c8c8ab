"""Which tensor stands in which form under a contract, why, and how many bytes that takes; known before any is read.

Both sides build their weights from `ModelSpec.weight_specs`, and so does this list: it cannot say anything else than
what is computed with. It is stored with checkpoints and saved weights, and `require_same_list` refuses another one.
Bytes are those of the published values: codes with their scales, or the storage dtype. A trainer holds more (masters,
moments, a second packing for input gradients), and packing pads some shapes.
"""

import dataclasses
import math
from collections.abc import Iterable

from zerogap.errors import CheckpointError, ContractError
from zerogap.models.cache import codec_of
from zerogap.models.spec import ModelSpec
from zerogap.models.tensors import ROUTER
from zerogap.numerics import DType, Numerics, names_tensor
from zerogap.types import WeightSpec

BLOCK = 128  # rows and columns of a weight block, which shares one FP32 scale (docs/numerics.md, "FP8")
SCALE_BYTES = 4


@dataclasses.dataclass(frozen=True)
class TensorForm:
    """One tensor of a model under a contract.

    Attributes:
        name, shape: as in the checkpoint.
        layer: decoder layer, or None.
        quantised: True if it stands in FP8 codes.
        why: what keeps it from being quantised; empty for a quantised one.
        plain_bytes: bytes in the storage dtype.
        code_bytes, scale_bytes: bytes of its codes and scales; 0 for one that is not quantised.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    quantised: bool
    why: str
    plain_bytes: int
    code_bytes: int = 0
    scale_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes in the form that it has."""
        return self.code_bytes + self.scale_bytes if self.quantised else self.plain_bytes

    @property
    def size(self) -> int:
        """Number of parameters."""
        return math.prod(self.shape)


def inventory(spec: ModelSpec, numerics: Numerics) -> list[TensorForm]:
    """Every tensor of the model, in checkpoint-name order.

    Raises:
        ConfigError: the contract names a tensor that the model does not have.
    """
    return [_form(spec, numerics, weight) for weight in spec.weight_specs(numerics).values()]


def require_same_list(ours: Iterable[str], stored: object, where: str) -> None:
    """Raise unless `stored`, a list from a file, names exactly the tensors that are quantised here.

    Raises:
        CheckpointError: `stored` is no list of names.
        ContractError: the lists differ; names the first tensor that does, in checkpoint-name order.
    """
    if not isinstance(stored, list) or not all(isinstance(name, str) for name in stored):
        raise CheckpointError(f"{where}: does not say which tensors are quantised")
    here, there = set(ours), set(stored)
    if here == there and len(stored) == len(there):
        return
    first = min(here ^ there, default=None)
    if first is None:
        raise CheckpointError(f"{where}: names a quantised tensor twice")
    sides = "quantised here and not there" if first in here else "quantised there and not here"
    raise ContractError(f"{where}: the lists of quantised tensors differ ({len(here ^ there)}): {first} is {sides}")


def kv_bytes(spec: ModelSpec, numerics: Numerics) -> tuple[int, int]:
    """Bytes of the KV cache per token over all layers: (keys and values, or latent rows; the scales beside them)."""
    codec = codec_of(spec, numerics)
    beside = SCALE_BYTES * math.prod(codec.scale_shape) if codec.kv_scale == "per_token_head" else 0
    return spec.num_layers * (codec.bytes_per_token() - beside), spec.num_layers * beside


def layer_of(name: str) -> int | None:
    """Decoder layer of a checkpoint name."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else None


def _form(spec: ModelSpec, numerics: Numerics, weight: WeightSpec) -> TensorForm:
    size, layer = math.prod(weight.shape), layer_of(weight.name)
    plain = size * (DType.FP32 if weight.kind == "buffer" else numerics.storage).nbytes
    if weight.fp8 is None:
        return TensorForm(weight.name, weight.shape, layer, False, _why(spec, numerics, weight, layer), plain)
    blocks = math.prod(-(-width // BLOCK) for width in weight.shape)
    return TensorForm(weight.name, weight.shape, layer, True, "", plain, size, blocks * SCALE_BYTES)


def _why(spec: ModelSpec, numerics: Numerics, weight: WeightSpec, layer: int | None) -> str:
    """What keeps a tensor in the storage dtype: what it is, or an option of the contract."""
    if weight.kind == "embedding":
        return "embedding, also the head" if spec.tied else "embedding"
    if layer is None:
        return "head" if weight.kind == "matrix" else "norm"
    if weight.kind == "vector":
        return "bias" if weight.name.endswith(".bias") else "norm"
    if weight.kind == "buffer":
        return "buffer of the router, FP32"
    if weight.name.endswith(ROUTER):
        return "router: its choice is discrete"
    if weight.kind == "heads":
        return "latent expansion, used head by head"
    if numerics.linear is not DType.FP8:
        return f"contract: linear {numerics.linear.value}"
    if layer < numerics.bf16_first:
        return f"option: first {numerics.bf16_first}"
    if layer >= spec.num_layers - numerics.bf16_last:
        return f"option: last {numerics.bf16_last}"
    pattern = next(p for p in numerics.bf16_tensors if names_tensor(p, weight.name))
    return f"option: {pattern}"
