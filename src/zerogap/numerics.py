"""The numerics contract as a value.

`Numerics` says in which dtype numbers stand at every edge, how reductions are cut and in which order they are summed.
It is frozen, has a `fingerprint()`, is passed at construction, printed at start, stored in checkpoints and carried by
every sample. There is no global switch: two objects that follow different contracts can live in one process.

docs/numerics.md is the prose of this file; a change of bits changes `CONTRACT_VERSION` and stands in CHANGELOG.md.
"""

import dataclasses
import enum
import hashlib
import json
from typing import Any

from zerogap.errors import ConfigError, ContractError

CONTRACT_VERSION = 1


class DType(enum.Enum):
    """Storage types at the edges of ops. `ops.dtypes` maps them to torch."""

    FP32 = "fp32"
    BF16 = "bf16"

    @property
    def nbytes(self) -> int:
        return {"fp32": 4, "bf16": 2}[self.value]


@dataclasses.dataclass(frozen=True)
class Numerics:
    """One numerics contract. Every field changes bits (or, for `name`, only the label) and is fingerprinted.

    Attributes:
        name: what users call it (`fp32`, `bf16`).
        storage: dtype of weights as published, activations, gradients of activations, and the residual stream.
        kv: dtype of the KV cache, on both sides.
        max_leaves: upper bound for the leaves of a reduction that a layout may split; 1, 2, 4 or 8.
        kv_block: keys per softmax block in attention, aligned to absolute position 0.
        kv_split: keys per attention span; a multiple of `kv_block`; spans are merged ascending.
        grad_block: rows of a pack that are summed from +0 before they are added to a weight gradient.
        pack_tokens: most tokens in a pack of several samples.
        grad_bins: gradient bins per update (power of two); data-parallel sizes must divide it.
    """

    name: str = "bf16"
    storage: DType = DType.BF16
    kv: DType = DType.BF16
    max_leaves: int = 8
    kv_block: int = 64
    kv_split: int = 1024
    grad_block: int = 128
    pack_tokens: int = 1024
    grad_bins: int = 1
    version: int = CONTRACT_VERSION

    def __post_init__(self) -> None:
        if self.max_leaves not in (1, 2, 4, 8):
            raise ConfigError("numerics.max_leaves", self.max_leaves, "choose 1, 2, 4 or 8")
        if self.kv_block != 64:
            raise ConfigError("numerics.kv_block", self.kv_block, "the CPU kernels implement 64")
        if self.kv_split % self.kv_block or self.kv_split <= 0:
            raise ConfigError("numerics.kv_split", self.kv_split, f"choose a multiple of kv_block ({self.kv_block})")
        if self.grad_block != 128:
            raise ConfigError("numerics.grad_block", self.grad_block, "the CPU kernels implement 128")
        if self.pack_tokens < self.grad_block:
            raise ConfigError("numerics.pack_tokens", self.pack_tokens, f"choose at least {self.grad_block} tokens")
        if self.grad_bins < 1 or self.grad_bins & (self.grad_bins - 1):
            raise ConfigError("numerics.grad_bins", self.grad_bins, "choose a power of two")
        if self.version != CONTRACT_VERSION:
            raise ContractError(
                f"contract version {self.version} was asked for, this build computes version {CONTRACT_VERSION}"
            )

    def fields(self) -> dict[str, object]:
        """Plain, JSON-ready fields, in declaration order."""
        return {
            f.name: v.value if isinstance(v := getattr(self, f.name), DType) else v for f in dataclasses.fields(self)
        }

    @classmethod
    def from_fields(cls, fields: dict) -> "Numerics":
        """Inverse of `fields()`; an unknown or missing field raises `ContractError`."""
        known = {f.name for f in dataclasses.fields(cls)}
        if set(fields) != known:
            raise ContractError(f"contract fields differ from this build's: {sorted(set(fields) ^ known)}")
        typed: dict[str, Any] = {k: DType(v) if k in ("storage", "kv") else v for k, v in fields.items()}
        return cls(**typed)

    def fingerprint(self) -> str:
        """16 hex digits over all fields but the label."""
        fields = {k: v for k, v in self.fields().items() if k != "name"}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    # ---- leaves (docs/numerics.md, "Reductions that a layout may split") ----

    def axis_leaves(self, size: int) -> int:
        """Leaves of a split axis of `size` elements: the largest 2^j <= max_leaves with size % (2^j * 128) == 0."""
        leaves = self.max_leaves
        while leaves > 1 and size % (leaves * 128):
            leaves //= 2
        return leaves

    def head_leaves(self, num_heads: int, *widths: int) -> int:
        """Leaves of a head axis: 2^j divides `num_heads`, and every projection width per leaf is a multiple of 128."""
        leaves = self.max_leaves
        while leaves > 1 and (num_heads % leaves or any(w % (leaves * 128) for w in widths)):
            leaves //= 2
        return leaves

    def vocab_leaf_size(self, vocab: int) -> int:
        """Entries per vocabulary leaf: ceil(vocab / max_leaves) rounded up to 64; the last leaf is ragged."""
        return -(-(-(-vocab // self.max_leaves)) // 64) * 64


PRESETS = {
    "fp32": Numerics(name="fp32", storage=DType.FP32, kv=DType.FP32),
    "bf16": Numerics(name="bf16"),
}


def preset(name: "str | Numerics", **overrides: object) -> Numerics:
    """The named contract, with fields replaced; a `Numerics` passes through.

    Raises:
        ConfigError: unknown name, or a field that the contract does not have.
    """
    if isinstance(name, Numerics):
        base = name
    elif name in PRESETS:
        base = PRESETS[name]
    else:
        raise ConfigError("numerics", name, f"choose one of {', '.join(PRESETS)}")
    unknown = set(overrides) - {f.name for f in dataclasses.fields(Numerics)}
    if unknown:
        raise ConfigError(f"numerics.{min(unknown)}", overrides[min(unknown)], "the contract has no such field")
    return dataclasses.replace(base, **overrides)  # type: ignore[arg-type]


def require_equal(ours: Numerics, theirs: Numerics, what: str) -> None:
    """Raise `ContractError`, naming both fingerprints and the first differing field, unless the contracts are equal."""
    mine, other = ours.fields(), theirs.fields()
    for key in mine:
        if key != "name" and mine[key] != other[key]:
            raise ContractError(
                f"{what}: contract {theirs.fingerprint()} has {key} = {other[key]!r}, this side's "
                f"{ours.fingerprint()} has {mine[key]!r}"
            )
