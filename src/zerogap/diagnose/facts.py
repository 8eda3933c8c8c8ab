"""What the checks of one diagnosis share: both sides, their answers, what was already asked, and what was noted.

Mutated by `diagnose` and the checks alone: a check that shows that a pass is not the side's real answer (a warm-up,
say) puts the right one in its place, and later checks go on from there.
"""

import dataclasses
from collections.abc import Callable

from zerogap.diagnose.bisect import Walk, walk
from zerogap.diagnose.compare import Difference, difference
from zerogap.diagnose.findings import Attributed
from zerogap.diagnose.side import Ask, RecordedSide, Side
from zerogap.diagnose.trace import Pass


@dataclasses.dataclass(eq=False)
class Facts:
    """One diagnosis under way.

    Attributes:
        a, b: the sides.
        progress: told in words what comes next.
        thorough: dear checks run even where the sides agree.
        answers: each side's pass that is compared.
        aligned: a side's pass by the other's path or in the other's company, where that removes the difference.
        notes: what was set aside, for the report.
        attributions: operators that were replayed.
        substituted: cause part (`definition`, `state`) -> the difference that is left once it is substituted.
        replaced: passes with other operators, which `shares` asks for more than once; kept with what they were made of.
    """

    a: Side
    b: Side
    progress: Callable[[str], None] = lambda text: None
    thorough: bool = False
    answers: dict[str, Pass] = dataclasses.field(default_factory=dict)
    aligned: dict[str, Pass] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    attributions: list[Attributed] = dataclasses.field(default_factory=list)
    substituted: dict[str, Difference] = dataclasses.field(default_factory=dict)
    replaced: dict[tuple[object, ...], tuple[object, Pass | None]] = dataclasses.field(default_factory=dict)
    _walks: dict[tuple[int, int], tuple[Pass, Pass, Walk]] = dataclasses.field(
        default_factory=dict
    )  # passes stay alive
    _asked: dict[str, Pass | None] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.answers = {"a": self.a.trace.recorded, "b": self.b.trace.recorded}

    def side(self, which: str) -> Side:
        """`a` or `b`."""
        return {"a": self.a, "b": self.b}[which]

    @property
    def lengths(self) -> list[int]:
        """Rows of each sequence; the same on both sides wherever boundaries are compared."""
        return self.lengths_of("a")

    def lengths_of(self, which: str) -> list[int]:
        """Rows of each sequence of one side."""
        return [len(s.ids) for s in self.side(which).trace.sequences]

    def live(self, which: str) -> bool:
        """True if the side can compute."""
        return not isinstance(self.side(which), RecordedSide)

    @property
    def difference(self) -> Difference:
        """Of the answers as they stand."""
        return difference(self.a.trace, self.b.trace, self.answers["a"], self.answers["b"])

    def between(self, pass_a: Pass | None, pass_b: Pass | None) -> Difference:
        """Of two passes; None: the side's answer."""
        return difference(self.a.trace, self.b.trace, pass_a or self.answers["a"], pass_b or self.answers["b"])

    def within(self, which: str, one: Pass, other: Pass) -> Difference:
        """Of two passes of one side."""
        return difference(self.side(which).trace, self.side(which).trace, one, other)

    def again(self, which: str, ask: Ask) -> Pass | None:
        """The side's pass under an ask, computed once; None if it cannot. A recorded pass of another definition is no
        answer."""
        key = f"{which} {ask!r}"
        if ask.replace or key not in self._asked:
            found = self.side(which).again(ask)
            if found is not None and ask.definition is not None and found.definition != ask.definition:
                found = None
            self._asked[key] = found
        return self._asked[key]

    def walk(self, one: Pass | None = None, other: Pass | None = None, which: str = "a") -> Walk:
        """The walk over two passes, made once; None: the sides' answers with boundaries.

        Args:
            which: the side whose sequences the rows are.
        """
        one = self.captured("a") if one is None else one
        other = self.captured("b") if other is None else other
        key = (id(one), id(other))
        if key not in self._walks:
            self._walks[key] = one, other, walk(one, other, self.lengths_of(which))
        return self._walks[key][2]

    def fresh(self, which: str, ask: Ask) -> Pass | None:
        """The same, always computed anew."""
        return self.side(which).again(ask)

    def captured(self, which: str) -> Pass:
        """The side's answer with boundaries, if there is a way to them; of a recorded side another of its passes that
        has some, one by the same path first."""
        answer = self.answers[which]
        if answer.boundaries:
            return answer
        if not self.live(which):
            passes = [p for p in self.side(which).trace.passes if p.boundaries]
            return min(passes, key=lambda p: p.path != answer.path, default=answer)
        found = self.again(which, Ask(answer.path, answer.batches, capture=True))
        return answer if found is None else found
