"""Experts that a file holds stacked, under the names of single experts.

transformers 5 computes with one tensor per layer for all experts: `mlp.experts.gate_up_proj` [E, 2I, H] (gate's rows,
then up's) and `mlp.experts.down_proj` [E, H, I], and some files hold that. Published checkpoints, and what is written
here, hold a matrix per expert. What is read gives the same tensors either way, bit by bit.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from zerogap.errors import CheckpointError
from zerogap.models.spec import ModelSpec
from zerogap.weights import block_fp8
from zerogap.weights.block_fp8 import Stored

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class Place(NamedTuple):
    """Rows `first` to `last` of matrix `expert` of a stacked tensor in a file."""

    stored_name: str
    expert: int
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Unstacked:
    """What a model's files hold, with stacks taken apart.

    Attributes:
        stored: name -> what the header says of it, single experts in place of stacks.
        places: name -> where it lies, of those that are part of a stack.
    """

    stored: dict[str, Stored]
    places: dict[str, Place]


def unstack(where: str, stored: Mapping[str, Stored], spec: ModelSpec) -> Unstacked:
    """Take the stacks among `stored` apart; scales of block-FP8 stacks (`*_scale_inv`), too.

    Raises:
        CheckpointError: a stack has another shape than the config says, an expert is in the files twice, or a block of
            scales holds rows of two matrices.
    """
    out = Unstacked(dict(stored), {})
    if spec.moe is None:
        return out
    for name, (dtype, shape) in stored.items():
        matrix = block_fp8.tensor_of(name)
        prefix, _, kind = matrix.rpartition(".experts.")
        if kind not in _PARTS:
            continue
        size, hidden = spec.moe.expert_size, spec.hidden_size
        rows, columns = (2 * size, hidden) if kind == "gate_up_proj" else (hidden, size)
        if scales := matrix != name:
            if kind == "gate_up_proj" and size % block_fp8.BLOCK:
                mend = f"a block of {block_fp8.BLOCK} rows lies in gate and up ({size} rows each)"
                raise CheckpointError(f"{where}: {name}: {mend}; use a file with separate experts")
            rows, columns = -(-rows // block_fp8.BLOCK), -(-columns // block_fp8.BLOCK)
        if shape != (spec.moe.num_experts, rows, columns):
            expected = [spec.moe.num_experts, rows, columns]
            raise CheckpointError(f"{where}: {name} is {list(shape)}, config.json implies {expected}")
        del out.stored[name]
        step = rows // len(_PARTS[kind])
        for expert in range(spec.moe.num_experts):
            for position, part in enumerate(_PARTS[kind]):
                single = f"{prefix}.experts.{expert}.{part}.weight" + (block_fp8.SCALES_SUFFIX if scales else "")
                if single in stored:
                    raise CheckpointError(f"{where}: {single} is there, and in {name}, too")
                out.stored[single] = Stored(dtype, (step, columns))
                out.places[single] = Place(name, expert, position * step, (position + 1) * step)
    return out
