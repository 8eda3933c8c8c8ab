"""Attribution by reproduction: which form of an operator gives each side's recorded bits, in which field they differ.

A form is named only if it was computed from the captured inputs and gave the recorded elements: all of them, but for at
most a hundredth as many as those in which the sides differ (where fewer than a hundred differ: all). Where several
forms fit equally, all are listed, and a field is named only if every smallest explanation contains it. What no form
reproduces is called unattributed.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch

from zerogap.diagnose.graph import Node
from zerogap.diagnose.simulate import SIMULATORS, Simulator
from zerogap.diagnose.simulate.variant import LIBRARY, Problem, Variant
from zerogap.diagnose.verdict import OPERATORS, UNATTRIBUTED, UNKNOWN, Cause

CLAIM = 0.99  # a form is named if what it does not give is at most 1 - CLAIM of the differing elements: few, so none
NEAR = (
    0.95  # share of the small sample, of all elements and of differing ones, from which on a form is looked at closely
)
ROWS, COLUMNS = 64, 1024  # of the sample that decides
SMALL_ROWS, SMALL_COLUMNS = 12, 32  # of the sample that sorts out
KEPT = 3  # best forms around which two fields are changed


@dataclasses.dataclass(frozen=True)
class Reproduction:
    """A form that gives one side's bits.

    Attributes:
        variant: the form.
        share_all, share_differing: of the sample's elements, and of those in which the sides differ.
        elements, differing: how many there were.
        alternatives: other forms that fit as well.
    """

    variant: Variant
    share_all: float
    share_differing: float
    elements: int
    differing: int
    alternatives: tuple[Variant, ...] = ()


@dataclasses.dataclass(frozen=True)
class Attribution:
    """What is known of one operator on two sides.

    Attributes:
        a, b: the form that reproduces each side, or None.
        cause: subject and field, or `UNKNOWN`.
        same: one form reproduces both sides from their own inputs: the operator is not the cause.
        fields: all fields in which the named forms differ.
        tried: forms that were computed.
    """

    a: Reproduction | None
    b: Reproduction | None
    cause: Cause
    same: bool = False
    fields: tuple[str, ...] = ()
    tried: int = 0


def explain(
    node: Node | str,
    kind: str,
    inputs: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    parameters: Mapping[str, object],
    out_a: torch.Tensor,
    out_b: torch.Tensor,
    *,
    inputs_b: Mapping[str, torch.Tensor] | None = None,
    weights_b: Mapping[str, torch.Tensor] | None = None,
    parameters_b: Mapping[str, object] | None = None,
) -> Attribution:
    """Search for the forms that reproduce both sides' rows of one operator.

    Args:
        node: the operator, for words and, where it is a `Node`, the order of its inputs.
        kind: subject of `verdict.OPERATORS`.
        inputs: node name -> [R, width] as side A read it.
        weights: checkpoint name -> tensor as side A has it.
        parameters: `Side.parameters` of A, with `lengths` (rows per sequence) and `positions` [R] where they matter.
        out_a, out_b: [R, N] recorded rows of the sides.
        inputs_b, weights_b, parameters_b: side B's, where they are not A's (bits differ).
    """
    name = node if isinstance(node, str) else node.name
    order = node.inputs if isinstance(node, Node) else ()
    unknown = (
        Cause(kind, UNATTRIBUTED, f"{name}: no form that was tried gives these bits") if kind in OPERATORS else None
    )
    simulator = SIMULATORS.get(kind)
    if simulator is None or unknown is None:
        return Attribution(None, None, unknown or UNKNOWN)
    a = _problem(kind, order, inputs, weights, parameters, out_a)
    alike = inputs_b is None and weights_b is None and parameters_b is None
    b = _problem(
        kind,
        order,
        inputs_b or inputs,
        weights_b or weights,
        parameters if parameters_b is None else parameters_b,
        out_b,
    )
    differs = _differs(a.out, b.out) if a.out.shape == b.out.shape else torch.ones(len(a.out), 1, dtype=torch.bool)
    search = _Search(simulator, _Pair(simulator, a, b, differs, alike))
    search.run()
    return _attribution(search, kind, name)


def _problem(
    kind: str,
    order: Sequence[str],
    inputs: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    parameters: Mapping[str, object],
    out: torch.Tensor,
) -> Problem:
    names = [n for n in order if n in inputs] if all(n in inputs for n in order) and order else list(inputs)
    tensors = tuple(inputs[n].detach() for n in names)
    plain = {n: t.detach() for n, t in weights.items()}
    everything = torch.arange(len(out)), torch.arange(out.shape[1])
    return Problem(kind, tensors, plain, parameters, out.detach(), *everything)


def _differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """bool [R, N]: other bits as FP32; NaN (nothing was recorded) is no difference."""
    left, right = a.to(torch.float32), b.to(torch.float32)
    other = left.contiguous().view(torch.int32) != right.contiguous().view(torch.int32)
    return other & ~left.isnan() & ~right.isnan()


class _Pair:
    """Both sides' problems on the sample that sorts out and on the one that decides.

    `alike`: inputs, weights and parameters are the same; `shared`: one computation serves both.
    """

    def __init__(self, simulator: Simulator, a: Problem, b: Problem, differs: torch.Tensor, alike: bool) -> None:
        self.alike, self.shared = alike, alike and a.out.dtype == b.out.dtype
        self.whole = (a, b)
        pick = simulator.sample or _sample
        small, large = (pick(a, differs, *size) for size in ((SMALL_ROWS, SMALL_COLUMNS), (ROWS, COLUMNS)))
        self.small = a.narrowed(*small), b.narrowed(*small)
        self.large = a.narrowed(*large), b.narrowed(*large)


def _sample(problem: Problem, differs: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows and columns with most differences, filled up with others at even distances."""
    picked = _picked(differs.sum(1), rows)
    return picked, _picked(differs.expand(-1, problem.out.shape[1])[picked].sum(0), columns)


def _picked(counts: torch.Tensor, wanted: int) -> torch.Tensor:
    """Indices, ascending: three quarters by count, the rest even."""
    if len(counts) <= wanted:
        return torch.arange(len(counts))
    best = torch.argsort(counts, descending=True, stable=True)[: wanted - wanted // 4]
    even = torch.linspace(0, len(counts) - 1, wanted // 4).long()
    return torch.cat([best, even]).unique()


@dataclasses.dataclass(frozen=True)
class _Fit:
    """How a variant's result compares with one side on one sample."""

    variant: Variant
    share_all: float
    share_differing: float
    elements: int
    differing: int

    @property
    def wrong(self) -> int:
        """Elements that the form does not give."""
        return round((1.0 - self.share_all) * self.elements)

    @property
    def holds(self) -> bool:
        """True if hardly more is wrong than would be a hundredth of what is to be explained."""
        return self.elements > 0 and self.wrong <= (1.0 - CLAIM) * self.differing

    @property
    def promising(self) -> bool:
        """True if a form is worth the sample that decides."""
        return self.share_all >= NEAR and self.share_differing >= NEAR

    @property
    def order(self) -> tuple[float, float]:
        return self.share_differing, self.share_all


class _Search:
    """The forms tried so far, and how they fit. Mutated by `run` only."""

    def __init__(self, simulator: Simulator, pair: _Pair) -> None:
        self.simulator, self.pair = simulator, pair
        self.seen: dict[Variant, tuple[_Fit, _Fit]] = {}
        self.fits: tuple[list[_Fit], list[_Fit]] = ([], [])
        self.expanded: set[Variant] = set()
        self.any_difference = bool(_differs(pair.large[0].expected, pair.large[1].expected).any())

    def run(self) -> None:
        """Whole forms; one field changed around what fits, then around all forms; then dear changes, and two fields."""
        bases = self._bases()
        self._try(bases)
        if self.pair.alike and not self.any_difference and self._done():
            return
        self._expand(1)
        for variant in self._near(bases):
            if self._done():
                return
            self._try(self._changes(variant, 1))
        self._expand(1)
        for side in (0, 1):
            around = [*(f.variant for s in (0, 1) for f in self.best(s)[:1]), *bases[:2]]
            for variant in around if not self.fits[side] else ():
                self._try(v for v in self._changes(variant, 2) if self.simulator.cost(v) == 2)
        self._expand(2)
        for side in (0, 1):
            for variant in self._nearest(side) if not self.fits[side] else ():
                if not self.fits[side]:
                    self._try(self._changes(variant, self.simulator.cost(variant)))
        self._expand(0)

    def _expand(self, cost: int) -> None:
        """One field changed around what fits, so that the smallest difference and all alternatives are seen."""
        for side in (0, 1, 0, 1):
            fresh = [f.variant for f in self.best(side) if f.variant not in self.expanded]
            for variant in sorted(fresh, key=lambda v: v.opaque)[:1]:
                if len(self.expanded) >= 2 and self._done():
                    return
                self.expanded.add(variant)
                self._try(self._changes(variant, 0 if self._done() else cost))

    def _bases(self) -> list[Variant]:
        found = [v for problem in self.pair.whole for v in self.simulator.bases(problem)]
        return list(dict.fromkeys(found))

    def _changes(self, variant: Variant, cost: int) -> Iterator[Variant]:
        for problem in self.pair.whole:  # both: some changes are read off a side's rows
            yield from (v for v in self.simulator.changes(variant, problem) if self.simulator.cost(v) <= cost)

    def _done(self) -> bool:
        return all(any(f.share_all == 1.0 for f in fits) for fits in self.fits)

    def best(self, side: int) -> list[_Fit]:
        """The forms that fit a side, and none fits better."""
        top = max((f.order for f in self.fits[side]), default=None)
        return [f for f in self.fits[side] if f.order == top]

    def _near(self, variants: list[Variant]) -> list[Variant]:
        """Those that come closest to a side that nothing reproduces yet."""
        open_sides = [side for side in (0, 1) if not self.fits[side]]
        known = [v for v in variants if v in self.seen]
        ranked = [sorted(known, key=lambda v: self.seen[v][side].order, reverse=True)[:KEPT] for side in open_sides]
        return list(dict.fromkeys(v for found in ranked for v in found))

    def _nearest(self, side: int) -> list[Variant]:
        """The forms that came closest to a side on the small sample, most of all where the sides differ."""
        ranked = sorted(self.seen, key=lambda v: self.seen[v][side].order, reverse=True)
        return ranked[:KEPT]

    def _try(self, variants: Sequence[Variant] | Iterator[Variant]) -> None:
        for variant in variants:
            if variant in self.seen or not self.simulator.applies(variant, self.pair.whole[0]):
                continue
            fits = self._fit(variant, self.pair.small)
            self.seen[variant] = fits
            if any(f.promising for f in fits):
                final = self._fit(variant, self.pair.large)
                for side in (0, 1):
                    if final[side].holds:
                        self.fits[side].append(final[side])

    def _fit(self, variant: Variant, problems: tuple[Problem, Problem]) -> tuple[_Fit, _Fit]:
        first = self.simulator.simulate(variant, problems[0])
        second = first if self.pair.shared else self.simulator.simulate(variant, problems[1])
        if self.pair.alike:
            differing = problems[0].once("differing", lambda: _differs(problems[0].expected, problems[1].expected))
        else:
            differing = torch.zeros_like(first, dtype=torch.bool)
        return tuple(_compare(variant, found, p.expected, differing) for found, p in zip((first, second), problems))  # type: ignore[return-value]


def _compare(variant: Variant, found: torch.Tensor, expected: torch.Tensor, differing: torch.Tensor) -> _Fit:
    recorded = ~expected.isnan()
    fits = ~_differs(found, expected) & ~(found.isnan() & recorded)
    count, other = int(recorded.sum()), int((differing & recorded).sum())
    share = float((fits & recorded).sum()) / count if count else 0.0
    share_other = float((fits & differing & recorded).sum()) / other if other else share
    return _Fit(variant, share, share_other, count, other)


# ---------------------------------------------------------------------------------------------------- the answer


def _attribution(search: _Search, kind: str, name: str) -> Attribution:
    found = [search.best(side) for side in (0, 1)]
    tried = len(search.seen)
    both = {f.variant for f in found[0]} & {f.variant for f in found[1]}
    if both and (not search.pair.alike or not search.any_difference):
        shown = [_reproduction([f for f in fits if f.variant in both], fits) for fits in found]
        return Attribution(shown[0], shown[1], UNKNOWN, same=True, tried=tried)
    if not (found[0] and found[1]):
        known = "A" if found[0] else "B" if found[1] else ""
        words = f"side {known} is reproduced, the other is not" if known else "no form that was tried gives these bits"
        one, two = (_reproduction(fits, fits) if fits else None for fits in found)
        return Attribution(one, two, Cause(kind, UNATTRIBUTED, f"{name}: {words}"), tried=tried)
    pairs = _smallest(*_taken_apart(found[0], found[1]))
    sets = {left.differences(right) for left, right in pairs}
    left, right = pairs[0]
    field = _field(search, sets, left, right)
    chosen = [
        _reproduction([f for f in found[0] if f.variant == left], found[0]),
        _reproduction([f for f in found[1] if f.variant == right], found[1]),
    ]
    cause = _cause(kind, field, name, left, right, sets)
    fields = tuple(sorted(frozenset.union(*sets)))
    return Attribution(chosen[0], chosen[1], cause, fields=fields, tried=tried)


def _reproduction(chosen: list[_Fit], fits: list[_Fit]) -> Reproduction:
    best = chosen[0]
    others = tuple(f.variant for f in fits if f.variant != best.variant)
    return Reproduction(best.variant, best.share_all, best.share_differing, best.elements, best.differing, others)


def _smallest(left: list[Variant], right: list[Variant]) -> list[tuple[Variant, Variant]]:
    """Pairs of forms with the fewest differing fields; forms that are taken apart before replayed ones."""
    pairs = [(a, b) for a, b in itertools.product(left, right)]
    fewest = min(len(a.changed(b)) for a, b in pairs)
    kept = [(a, b) for a, b in pairs if len(a.changed(b)) == fewest]
    plain = [(a, b) for a, b in kept if not any(v[f].startswith(LIBRARY) for v in (a, b) for f in a.differences(b))]
    return sorted(plain or kept, key=lambda p: p[0].opaque + p[1].opaque)


def _taken_apart(left: list[_Fit], right: list[_Fit]) -> tuple[list[Variant], list[Variant]]:
    """The forms of both sides without a library's part in them, if both have any; else those that are not a library's
    whole op: a side that only a library's call reproduces is compared with that call on the other side, too."""
    sides = [[f.variant for f in fits] for fits in (left, right)]
    plain = [[v for v in variants if not v.opaque] for variants in sides]
    if plain[0] and plain[1]:
        return plain[0], plain[1]
    parts = [[v for v in variants if not v.whole] or variants for variants in sides]
    return parts[0], parts[1]


def _field(search: _Search, sets: set[frozenset[str]], left: Variant, right: Variant) -> str:
    """The field that every smallest explanation has; of several, the one that alone explains most."""
    if left.whole or right.whole:
        return UNATTRIBUTED
    shared = frozenset.intersection(*sets)
    if len(shared) == 1:
        return next(iter(shared))
    if not shared or len(sets) > 1:
        return UNATTRIBUTED
    problem = search.pair.large[1]
    expected, base = problem.expected, search.simulator.simulate(left, problem)
    moved = _differs(base, expected)
    shares = {}
    for name in sorted(shared):  # how much of the difference it makes alone, and how much is left without it
        key = name.replace("/", "__")
        forward, backward = left.but(**{key: right[name]}), right.but(**{key: left[name]})
        counts = [0]
        for mixed, wanted in ((forward, expected), (backward, base)):
            if search.simulator.applies(mixed, problem):
                counts.append(int((~_differs(search.simulator.simulate(mixed, problem), wanted) & moved).sum()))
        shares[name] = max(counts)
    if max(shares.values()) == 0:
        return UNATTRIBUTED
    return max(shares, key=lambda n: shares[n])


def _cause(kind: str, field: str, name: str, left: Variant, right: Variant, sets: set[frozenset[str]]) -> Cause:
    told = {f: f"{f}: A {left[f]}, B {right[f]}" for f in sorted(left.differences(right))}
    words = "; ".join(told.values())
    if field in told and len(told) > 1:
        beside = "; ".join(text for f, text in told.items() if f != field)
        words = f"{told[field]} (the forms also differ, to less effect, in {beside})"
    if len(sets) > 1:
        fields = " | ".join(sorted(" + ".join(sorted(s)) for s in sets))
        words += f" (these fields explain the bits equally: {fields})"
    subject, _, inner = field.rpartition("/")
    subject = subject or kind
    known = inner if inner in OPERATORS[subject] else UNATTRIBUTED
    return Cause(subject, known, f"{name}: {words}")
