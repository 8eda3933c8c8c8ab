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
class Statistics:
    """Of d = logp_b - logp_a over the tokens that both sides count and recorded.

    Attributes:
        compared, different: tokens; those whose two log-probs differ in any bit.
        mean, max, p99_9: of |d|, in nats; 0.0 where nothing was compared.
        k3: mean of exp(d) - 1 - d: an estimate of KL(A || B) on tokens that were drawn from A.
        worst_sequence: index of the sequence with the largest mean |d|, or None.
        worst_mean: that mean.
        distribution: (e, tokens with 2**e <= |d| < 2**(e+1)), e ascending; equal tokens are in none.
    """

    compared: int = 0
    different: int = 0
    mean: float = 0.0
    max: float = 0.0
    p99_9: float = 0.0
    k3: float = 0.0
    worst_sequence: int | None = None
    worst_mean: float = 0.0
    distribution: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class WorstToken:
    """A token with its two log-probs; diff = logp_b - logp_a. `text`: the token, empty where no tokenizer is known;
    `before`: the text in front of it, as far as it is shown."""

    sequence: int
    position: int
    id: int
    logp_a: float
    logp_b: float
    diff: float
    text: str = ""
    before: str = ""


@dataclasses.dataclass(frozen=True)
class Share:
    """A part of mean |d|: `part` is `definition`, `state`, `routing`, `numeric` or `remaining`, `share` what of the mean
    vanished when it was substituted (may be negative), `substituted` what was put for what, in words."""

    part: str
    share: float
    substituted: str


@dataclasses.dataclass(frozen=True)
class OperatorShare:
    """Inside the numeric part: 1 - mean|d with all operators of `kind` replaced by the other side's| / mean|d|."""

    kind: str
    share: float


@dataclasses.dataclass(frozen=True)
class Attributed:
    """An operator whose bits were reproduced.

    Attributes:
        node: where it stands (`3.o_proj`); cause: what was concluded from it.
        variant_a, variant_b: the variant that reproduces the side's bits, in words; empty if none does.
        share_a, share_b: of the side's elements that it reproduces, 0 to 1.
        elements, differing: elements of the sample, and those in which the two sides differ.
        alternatives: further variants that reproduce the same bits, in words.
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


@dataclasses.dataclass(frozen=True)
class Heat:
    """How much of each boundary differs along the sequences.

    Attributes:
        nodes: boundaries that both sides recorded, in running order.
        positions: first token position of each column; a column reaches to the next.
        differing: [node][column] share of elements (over all sequences' rows there) whose bits differ; None where
            nothing was recorded.
    """

    nodes: tuple[str, ...]
    positions: tuple[int, ...]
    differing: tuple[tuple[float | None, ...], ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """A diagnosis.

    Attributes:
        a_name, b_name: the sides, as their traces call themselves.
        verdict: the end of it; findings: every check in its order.
        facts: (label, of A, of B): versions, layout, definition, in the words of the sides.
        shares: of mean |d|, by part; operators: inside the numeric part, largest first.
        worst: tokens with the largest |d|, largest first.
        attributions: operators that were replayed, in running order.
        heat: None where the two sides have no boundary in common.
        seconds: how long the diagnosis took.
    """

    a_name: str
    b_name: str
    verdict: Verdict
    findings: tuple[Finding, ...]
    statistics: Statistics
    facts: tuple[tuple[str, str, str], ...] = ()
    shares: tuple[Share, ...] = ()
    operators: tuple[OperatorShare, ...] = ()
    worst: tuple[WorstToken, ...] = ()
    attributions: tuple[Attributed, ...] = ()
    heat: Heat | None = None
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
