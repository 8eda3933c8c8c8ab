"""The numerics contract as a value.

`Numerics` says in which dtype numbers stand at every edge, how reductions are cut and in which order they are summed.
It is frozen, has a `fingerprint()`, is passed at construction, printed at start, stored in checkpoints and carried by
every sample. There is no global switch: two objects that follow different contracts can live in one process.

docs/numerics.md is the prose of this file; a change of bits changes `CONTRACT_VERSION` and stands in CHANGELOG.md.
"""

import dataclasses
import enum
import fnmatch
import hashlib
import json
from typing import Any

from zerogap.errors import ConfigError, ContractError

CONTRACT_VERSION = 1
SCALE_FORMATS = ("fp32", "pow2")
KV_SCALES = ("per_token_head", "calibrated")


class DType(enum.Enum):
    """Storage types at the edges of ops. `ops.dtypes` maps them to torch."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"  # E4M3 codes with scales beside them

    @property
    def nbytes(self) -> int:
        """Bytes of one element, scales not counted."""
        return {"fp32": 4, "bf16": 2, "fp8": 1}[self.value]


@dataclasses.dataclass(frozen=True)
class Numerics:
    """One numerics contract. Every field changes bits (or, for `name`, only the label) and is fingerprinted.

    Attributes:
        name: what users call it (`fp32`, `bf16`, `fp8`, `fp8-kv`).
        storage: dtype of weights as published, activations, gradients of activations, and the residual stream.
        linear: operands of linear layers: the storage dtype, or FP8 (weights in blocks of 128 x 128, activations of
            1 x 128). Embeddings, head, norms, residual stream and softmax are never quantised.
        linear_grad: operands of the linear layers' input and weight gradients: the storage dtype, or FP8.
        scale_format: scales of every FP8 block: `fp32`, or `pow2` (rounded up to a power of two).
        bf16_first, bf16_last: so many first and last decoder layers whose linear layers are not quantised.
        bf16_tensors: patterns of tensors that are not quantised (`names_tensor`).
        kv: dtype of the KV cache, on both sides: the storage dtype, or FP8.
        kv_scale: scales of an FP8 cache: `per_token_head` (of each token and KV head, beside its codes), `calibrated`
            (one per layer and KV head and weight version); `none` for other caches.
        kv_margin: a calibrated scale is kv_margin * amax / 448.
        attention_math: operands of the score and value products: the storage dtype (an FP8 cache is read into it
            exactly), or FP8 (queries and probabilities are quantised, too).
        max_leaves: upper bound for the leaves of a reduction that a layout may split; 1, 2, 4 or 8.
        kv_block: keys per softmax block in attention, aligned to absolute position 0.
        kv_split: keys per attention span; a multiple of `kv_block`; spans are merged ascending.
        grad_block: rows of a pack that are summed from +0 before they are added to a weight gradient.
        pack_tokens: most tokens in a pack of several samples.
        grad_bins: gradient bins per update (power of two); data-parallel sizes must divide it.
    """

    name: str = "bf16"
    storage: DType = DType.BF16
    linear: DType = DType.BF16
    linear_grad: DType = DType.BF16
    scale_format: str = "fp32"
    bf16_first: int = 0
    bf16_last: int = 0
    bf16_tensors: tuple[str, ...] = ()
    kv: DType = DType.BF16
    kv_scale: str = "none"
    kv_margin: float = 2.0
    attention_math: DType = DType.BF16
    max_leaves: int = 8
    kv_block: int = 64
    kv_split: int = 1024
    grad_block: int = 128
    pack_tokens: int = 1024
    grad_bins: int = 1
    version: int = CONTRACT_VERSION

    def __post_init__(self) -> None:
        self._check_dtypes()
        self._check_kept()
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

    def _check_dtypes(self) -> None:
        """Which dtypes, and which scales, go together."""

        def refuse(key: str, mend: str) -> None:
            value = getattr(self, key)
            raise ConfigError(f"numerics.{key}", value.value if isinstance(value, DType) else value, mend)

        if self.storage is DType.FP8:
            refuse("storage", "choose fp32 or bf16; numerics.linear and numerics.kv may be fp8")
        for key in ("linear", "linear_grad", "kv", "attention_math"):
            if getattr(self, key) is not self.storage and getattr(self, key) is not DType.FP8:
                refuse(key, f"choose {self.storage.value} (the storage dtype) or fp8")
            if getattr(self, key) is DType.FP8 and self.storage is not DType.BF16:
                refuse(key, "fp8 needs numerics.storage: bf16")
        if self.linear_grad is DType.FP8 and self.linear is not DType.FP8:
            refuse("linear_grad", "fp8 gradients need numerics.linear: fp8")
        if self.attention_math is DType.FP8 and self.kv is not DType.FP8:
            refuse("attention_math", "fp8 operands need numerics.kv: fp8")
        if self.scale_format not in SCALE_FORMATS:
            refuse("scale_format", f"choose {' or '.join(SCALE_FORMATS)}")
        if self.kv is DType.FP8 and self.kv_scale not in KV_SCALES:
            refuse("kv_scale", f"an fp8 cache needs {' or '.join(KV_SCALES)}")
        if self.kv is not DType.FP8 and self.kv_scale != "none":
            refuse("kv_scale", "only numerics.kv: fp8 has scales: choose preset: fp8-kv, or none")
        if not 1.0 <= self.kv_margin <= 64.0:
            refuse("kv_margin", "choose a number from 1 to 64")

    def _check_kept(self) -> None:
        """What is said of layers that stay as they are."""
        for key in ("bf16_first", "bf16_last"):
            if getattr(self, key) < 0:
                raise ConfigError(f"numerics.{key}", getattr(self, key), "choose 0 or more layers")
        given = self.bf16_first or self.bf16_last or self.bf16_tensors
        if given and self.linear is not DType.FP8:
            raise ConfigError("numerics.bf16_layers", given, "only numerics.linear: fp8 quantises anything")

    def quantises(self, name: str, layer: int, num_layers: int) -> bool:
        """True if the linear weight `name` of decoder layer `layer` is quantised."""
        return (
            self.linear is DType.FP8
            and self.bf16_first <= layer < num_layers - self.bf16_last
            and not any(names_tensor(pattern, name) for pattern in self.bf16_tensors)
        )

    def fields(self) -> dict[str, object]:
        """Plain, JSON-ready fields, in declaration order."""

        def plain(value: object) -> object:
            return value.value if isinstance(value, DType) else list(value) if isinstance(value, tuple) else value

        return {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_fields(cls, fields: dict) -> "Numerics":
        """Inverse of `fields()`; an unknown or missing field raises `ContractError`."""
        known = {f.name for f in dataclasses.fields(cls)}
        if set(fields) != known:
            raise ContractError(f"contract fields differ from this build's: {sorted(set(fields) ^ known)}")
        return cls(**typed_fields(fields))

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


def names_tensor(pattern: str, name: str) -> bool:
    """True if `pattern` means the tensor `name`: a run of whole parts of it (`mlp.gate` means `...mlp.gate.weight` and
    not `...mlp.gate_proj.weight`), where each part may be a shell pattern (`layers.*.mlp.down_proj`)."""
    wanted, parts = pattern.split("."), name.split(".")
    starts = range(len(parts) - len(wanted) + 1)
    return any(
        all(fnmatch.fnmatchcase(p, w) for w, p in zip(wanted, parts[i : i + len(wanted)], strict=True)) for i in starts
    )


def typed_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Plain values (of JSON or YAML) as the types of `Numerics`' fields.

    Raises:
        ConfigError: a value of another type, or a dtype that does not exist.
    """
    kinds = {f.name: f.type for f in dataclasses.fields(Numerics)}
    return {key: _typed(key, kinds.get(key), value) for key, value in fields.items()}


def _typed(key: str, kind: Any, value: Any) -> Any:
    if kind is DType and not isinstance(value, DType):
        names = [d.value for d in DType]
        if value not in names:
            raise ConfigError(f"numerics.{key}", value, f"choose one of {', '.join(names)}")
        return DType(value)
    if kind is int and type(value) is not int:
        raise ConfigError(f"numerics.{key}", value, "give a whole number")
    if kind is float:
        if type(value) not in (int, float):
            raise ConfigError(f"numerics.{key}", value, "give a number")
        return float(value)
    if kind is str and not isinstance(value, str):
        raise ConfigError(f"numerics.{key}", value, "give a word")
    if kind == tuple[str, ...]:
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list | tuple) or not all(isinstance(v, str) for v in listed):
            raise ConfigError(f"numerics.{key}", value, "give a list of patterns such as mlp.down_proj")
        return tuple(listed)
    return value


PRESETS = {
    "fp32": Numerics(
        name="fp32",
        storage=DType.FP32,
        linear=DType.FP32,
        linear_grad=DType.FP32,
        kv=DType.FP32,
        attention_math=DType.FP32,
    ),
    "bf16": Numerics(name="bf16"),
    "fp8": Numerics(name="fp8", linear=DType.FP8, linear_grad=DType.FP8),
    "fp8-kv": Numerics(name="fp8-kv", linear=DType.FP8, linear_grad=DType.FP8, kv=DType.FP8, kv_scale="per_token_head"),
}


def preset(name: "str | Numerics", **overrides: Any) -> Numerics:
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
    known = [f.name for f in dataclasses.fields(Numerics)]
    if unknown := sorted(set(overrides) - set(known)):
        mend = f"the contract has no such field; there are {', '.join(known)}"
        raise ConfigError(f"numerics.{unknown[0]}", overrides[unknown[0]], mend)
    return dataclasses.replace(base, **typed_fields(overrides))


def require_equal(ours: Numerics, theirs: Numerics, what: str) -> None:
    """Raise `ContractError`, naming both fingerprints and the first differing field, unless the contracts are equal."""
    mine, other = ours.fields(), theirs.fields()
    for key in mine:
        if key != "name" and mine[key] != other[key]:
            raise ContractError(
                f"{what}: contract {theirs.fingerprint()} has {key} = {other[key]!r}, this side's "
                f"{ours.fingerprint()} has {mine[key]!r}"
            )
