"""What a diagnosis hands back: the verdict with all that was measured on the way, as plain values and as JSON.

Nothing here computes: `run.diagnose` fills it, `report` shows it, and `Report.as_json` is what other programs read.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from zerogap.diagnose.verdict import Cause, Finding, Verdict

FORMAT, VERSION = "zerogap-diagnosis", 1


@dataclasses.dataclass(frozen=True)
class Share:
    """A part of mean |d|.

    Attributes:
        part: `definition`, `state`, `routing`, `numeric` or `remaining`.
        share: what of the mean vanished when it was substituted; may be negative.
        substituted: what was put for what, in words.
    """

    part: str
    share: float
    substituted: str


@dataclasses.dataclass(frozen=True)
class OperatorShare:
    """Inside the numeric part.

    Attributes:
        kind: of the operators.
        share: 1 - mean|d with all operators of `kind` replaced by the other side's| / mean|d|; small or negative where
            other kinds keep the sides apart.
        alone: what this kind adds by itself: (mean|d with all other kinds replaced| - mean|d with all kinds replaced|)
            / mean|d|; None where that could not be computed.
    """

    kind: str
    share: float
    alone: float | None = None


@dataclasses.dataclass(frozen=True)
class Attributed:
    """An operator whose bits were reproduced.

    Attributes:
        node: where it stands (`3.o_proj`); cause: what was concluded from it.
        variant_a, variant_b: the variant that reproduces the side's bits, in words; empty if none does.
        share_a, share_b: of the side's elements that it reproduces, 0 to 1.
        elements, differing: elements of the sample, and those in which the two sides differ.
        alternatives: further variants that reproduce the same bits, in words.
        between: empty for the two sides; else whose passes these are (`two passes of side A`).
    """

    node: str
    cause: Cause
    variant_a: str = ""
    share_a: float = 0.0
    variant_b: str = ""
    share_b: float = 0.0
    elements: int = 0
    differing: int = 0
    alternatives: tuple[str, ...] = ()
    between: str = ""


@dataclasses.dataclass(frozen=True)
class Heat:
    """How much of each boundary differs along the sequences; cells are None where nothing was recorded.

    Attributes:
        nodes: boundaries that both sides recorded, in running order.
        positions: first token position of each column; a column reaches to the next.
        differing: [node][column] share of rows (of all sequences, at these positions) in which any bit differs.
        distance: [node][column] largest |x - y| of a row over its largest magnitude.
    """

    nodes: tuple[str, ...]
    positions: tuple[int, ...]
    differing: tuple[tuple[float | None, ...], ...]
    distance: tuple[tuple[float | None, ...], ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """A diagnosis.

    Attributes:
        a_name, b_name: the sides, as their traces call themselves.
        verdict: the end of it; findings: every check in its order.
        statistics: as `compare.statistics` gives them: `count`, `different`, `missing`, `mean`, `max`, `p999`, `k3`,
            `worst_sequence`, `histogram`, ...
        worst: as `compare.worst_tokens`: mappings with `sequence`, `position`, `id`, `a`, `b`, `d`, largest |d| first;
            `text` (the token) and `before` (what stands in front of it) where a tokenizer is known.
        facts: (label, of A, of B): versions, layout, definition, in the words of the sides.
        notes: what was set aside so that nothing harmless is blamed.
        shares: of mean |d|, by part; operators: inside the numeric part, largest first.
        attributions: operators that were replayed, in running order.
        heat: None where the two sides have no boundary in common.
        seconds: how long the diagnosis took.
    """

    a_name: str
    b_name: str
    verdict: Verdict
    findings: tuple[Finding, ...]
    statistics: Mapping[str, Any]
    worst: tuple[Mapping[str, Any], ...] = ()
    facts: tuple[tuple[str, str, str], ...] = ()
    shares: tuple[Share, ...] = ()
    operators: tuple[OperatorShare, ...] = ()
    attributions: tuple[Attributed, ...] = ()
    heat: Heat | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """JSON-ready, field for field; a cause has `name` besides; a number that is not finite becomes None."""
        return {"format": FORMAT, "version": VERSION, **_plain(self)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"name": value.name, **fields} if isinstance(value, Cause) else fields
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # arrays, tensors and their scalars
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
