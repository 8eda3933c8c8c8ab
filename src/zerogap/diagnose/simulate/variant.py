"""A variant: one complete way to compute an operator, field by field, and the problem that it is tried on.

Field names are those of `verdict.OPERATORS`; `subject/field` names another subject's field where one node shows two
operators' choices (the experts' output shows the router's). Two variants of a kind have the same fields, so what
distinguishes them is a set of names. A value that starts with `library:` is a call of a foreign library whose inner
order is not known: it can be replayed, not taken apart, and such a difference is named only if no other field differs.
`library op: ...` is the whole operator of a library; nothing is known of its fields.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

LIBRARY, WHOLE = "library:", "library op:"
FACTORS = ("times", "over", "rows")  # scales that are no part of the operands' format
PRODUCTS = ("linear", "head", "router")
Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Variant:
    """`fields`: (name, value) pairs in one order per kind."""

    kind: str
    fields: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, kind: str, fields: Mapping[str, str]) -> "Variant":
        return cls(kind, tuple(fields.items()))

    def __getitem__(self, name: str) -> str:
        return dict(self.fields)[name]

    def but(self, **changes: str) -> "Variant":
        """The same with other values (`name__with` a slash is written `name__with`)."""
        changed = {name.replace("__", "/"): value for name, value in changes.items()}
        assert set(changed) <= {name for name, _ in self.fields}, f"{self.kind} has no fields {sorted(changed)}"
        return Variant(self.kind, tuple((name, changed.get(name, value)) for name, value in self.fields))

    @property
    def opaque(self) -> bool:
        """True if a part of it is a foreign library's own."""
        return any(value.startswith((LIBRARY, WHOLE)) for _, value in self.fields)

    @property
    def whole(self) -> str:
        """Name of the field that says that all of it is a library's, or empty."""
        return next((name for name, value in self.fields if value.startswith(WHOLE)), "")

    @property
    def sealed(self) -> bool:
        """True for a product that is one call of a library."""
        one_call = dict(self.fields).get("split") == "1" and dict(self.fields).get("operands") == "stored"
        return self.kind in PRODUCTS and one_call and self["order"].startswith(LIBRARY)

    def changed(self, other: "Variant") -> frozenset[str]:
        """Names of the fields in which two variants differ; block and scale come with the operands' format."""
        theirs = dict(other.fields)
        if self != other and (self.whole or other.whole):
            return frozenset({self.whole or other.whole})
        if self.sealed != other.sealed and not (self["order"].startswith(LIBRARY) and other.opaque):
            return frozenset({"order"})
        names = {name for name, value in self.fields if value != theirs[name]}
        if "operands" in names:
            pairs = {n: (dict(self.fields).get(n), theirs.get(n)) for n in ("block", "scale")}
            factors = {n for n, pair in pairs.items() if any(str(v).startswith(FACTORS) for v in pair)}
            plain = {n for n, pair in pairs.items() if any(str(v).endswith(("none", "stored")) for v in pair)}
            names -= plain - factors
            names -= {n for n, (x, y) in pairs.items() if str(x).split(", cache")[0] == str(y).split(", cache")[0]}
        return frozenset(names)

    def differences(self, other: "Variant") -> frozenset[str]:
        """The changed fields that may be blamed: those that only say `library:` count if nothing else has changed."""
        names = self.changed(other)
        plain = {n for n in names if not (self[n].startswith(LIBRARY) or other[n].startswith(LIBRARY))}
        return frozenset(plain or names)

    def __str__(self) -> str:
        return ", ".join(f"{name}: {value}" for name, value in self.fields)


@dataclasses.dataclass(eq=False)
class Problem:
    """One side's operator with what it read, and the sample of its output that variants have to reproduce.

    `cache` is written by `once`; all else is constant.

    Attributes:
        kind: of the operator.
        inputs: tensors [R, width] in the node's order.
        weights: by checkpoint name.
        parameters: as `Side.parameters` gives them, with `lengths` (rows of each sequence) and `positions` [R].
        out: [R, N] recorded output.
        rows, columns: indices of the sample.
    """

    kind: str
    inputs: tuple[torch.Tensor, ...]
    weights: Mapping[str, torch.Tensor]
    parameters: Mapping[str, object]
    out: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    cache: dict[Hashable, object] = dataclasses.field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """make(), computed the first time only."""
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]  # type: ignore[return-value]

    def narrowed(self, rows: torch.Tensor, columns: torch.Tensor) -> "Problem":
        """The same with another sample; results over all rows are shared."""
        shared: dict[Hashable, object] = self.once("whole", dict)
        return dataclasses.replace(self, rows=rows, columns=columns, cache={"whole": shared})

    def whole(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """make(): all rows and columns, computed once for every sample; returns the sample of it."""
        shared: dict[Hashable, torch.Tensor] = self.once("whole", dict)
        if key not in shared:
            shared[key] = make()
        return self.cut(shared[key])

    def cut(self, rows: torch.Tensor) -> torch.Tensor:
        """The sample of [R, N], FP32."""
        return rows[self.rows][:, self.columns].to(torch.float32)

    @property
    def expected(self) -> torch.Tensor:
        """The recorded sample, FP32."""
        return self.once("expected", lambda: self.cut(self.out))

    def number(self, name: str, default: float | None = None) -> float | None:
        """A parameter as a number, `default` where it is not known."""
        value = self.parameters.get(name)
        return float(value) if isinstance(value, int | float) else default

    def weight(self, ending: str = ".weight") -> torch.Tensor | None:
        """The first weight whose name ends so."""
        return next((t for name, t in self.weights.items() if name.endswith(ending)), None)

    @property
    def storage(self) -> str:
        """Name of the dtype of the first input."""
        return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(self.inputs[0].dtype, "fp32")

    @property
    def recorded(self) -> str:
        """Name of the dtype of the output."""
        return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(self.out.dtype, "fp32")

    @property
    def lengths(self) -> list[int]:
        """Rows of each sequence; all of one where nothing is said."""
        given = self.parameters.get("lengths")
        return [int(n) for n in given] if isinstance(given, list | tuple) else [len(self.out)]  # type: ignore[misc]
