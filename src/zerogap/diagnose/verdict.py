"""What a diagnosis can say: causes by subject and field, findings of single checks, and the verdict drawn from them.

The table `SUBJECTS` is closed: a verdict, and the expected verdict of a planted fault, names a subject of it and one of
the subject's fields, or `UNATTRIBUTED`. docs/diagnose.md explains each line.
"""

import dataclasses
from collections.abc import Mapping

from zerogap.errors import ConfigError

UNATTRIBUTED = "unattributed"

_NUMERIC = ("order", "split", "primitive", "operands", "accumulate", "rounding", "output", "formula")
FRAMEWORK: Mapping[str, tuple[str, ...]] = {
    "ids": ("template", "tokens", "special_tokens"),
    "definition": ("temperature", "kept_set", "processed", "shift", "eos", "wrong_token", "unit"),
    "weights": ("missing", "stale", "transposed", "permuted", "swapped", "tied", "quantised", "dtype", "scaled"),
    "buffers": ("missing", "stale", "dtype"),
    "cache": ("stale_weights", "wrong_prefix", "positions", "scales"),
    "rerun": ("nondeterministic",),
    "neighbours": ("batch_size", "row", "content", "padding"),
    "path": ("decode", "chunked", "prefix_hit", "speculative"),
    "layout": ("ranks",),
    "routing": ("near_tie",),
}
OPERATORS: Mapping[str, tuple[str, ...]] = {
    "embedding": ("formula", "output"),
    "norm": _NUMERIC,
    "linear": (*_NUMERIC, "scale", "block"),
    "rope": ("primitive", "rounding", "formula", "positions"),
    "attention": (*_NUMERIC, "scale", "block", "mask"),
    "activation": ("primitive", "rounding", "formula"),
    "residual": ("rounding", "accumulate", "formula"),
    "router": (*_NUMERIC, "tie_rule", "scale"),
    "experts": (*_NUMERIC, "scale", "block"),
    "head": (*_NUMERIC, "scale"),
    "logprob": ("order", "primitive", "rounding", "formula"),
}
SUBJECTS: Mapping[str, tuple[str, ...]] = {**FRAMEWORK, **OPERATORS}


@dataclasses.dataclass(frozen=True)
class Cause:
    """One cause: a subject of `SUBJECTS` and one of its fields, or `UNATTRIBUTED` for what is not known.

    Attributes:
        detail: where and what in words (tensor name, node, variants), for people.
    """

    subject: str
    field: str
    detail: str = ""

    def __post_init__(self) -> None:
        if self.subject == UNATTRIBUTED and self.field == UNATTRIBUTED:
            return
        if self.subject not in SUBJECTS:
            raise ConfigError("subject", self.subject, f"choose one of {', '.join(SUBJECTS)}, {UNATTRIBUTED}")
        if self.field not in (*SUBJECTS[self.subject], UNATTRIBUTED):
            raise ConfigError("field", self.field, f"{self.subject} has {', '.join(SUBJECTS[self.subject])}")

    @property
    def name(self) -> str:
        """`subject/field`."""
        return f"{self.subject}/{self.field}"


UNKNOWN = Cause(UNATTRIBUTED, UNATTRIBUTED)


@dataclasses.dataclass(frozen=True)
class Finding:
    """How one check ended.

    Attributes:
        check: its name (`ids`, `definition`, `weights`, `cache`, `rerun`, `neighbours`, `path`, `layout`, `operators`,
            `routing`).
        outcome: `passed`, `failed`, or `not checked`; the last never counts as passed.
        text: one sentence with numbers: what was compared and what was seen.
        causes: what it names when it failed, the likeliest first; may be empty (then nothing is attributed yet).
        needs: what to record so that the check can be made, when it was not.
        evidence: JSON-ready numbers and names for the report.
    """

    check: str
    outcome: str
    text: str
    causes: tuple[Cause, ...] = ()
    needs: str = ""
    evidence: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.outcome in ("passed", "failed", "not checked"), f"unknown outcome {self.outcome!r}"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The end of a diagnosis.

    Attributes:
        same: True if no compared number differs; then there is no cause.
        check: the first check that failed (`operators` if only numerics differ), or empty.
        cause: the cause that accounts for the logdiff, or `UNKNOWN`.
        further: other causes that were found, in order of their share.
        next_step: what to do or what to record next, in one sentence.
    """

    same: bool
    check: str
    cause: Cause | None
    further: tuple[Cause, ...] = ()
    next_step: str = ""
