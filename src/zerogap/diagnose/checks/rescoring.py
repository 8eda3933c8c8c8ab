"""What a side's own logits say its log-probs are, and what they would be under another definition.

For each side the definition is searched under which its recorded numbers follow from its own logits: the stated one,
raw, temperatures, filters, or the log-prob of another token. If the two sides' own definitions differ, the other side
is scored under this one's: only what removes the difference counts.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from zerogap.diagnose.adapters import solved_definitions
from zerogap.diagnose.adapters.logprobs import defined_logprobs
from zerogap.diagnose.checks.relations import Hypothesis
from zerogap.diagnose.compare import Difference
from zerogap.diagnose.facts import Facts
from zerogap.diagnose.side import Ask, Side
from zerogap.diagnose.trace import Definition, Trace

ROWS, FEWEST_ROWS = 64, 16  # tokens on which candidates are tried
FEWEST_OF_SEQUENCE = 4  # tokens that say a sequence's own temperature
NUMBERS = 1 << 20  # logits that are scored per candidate
FOLLOWS = 2e-3  # largest mean |error| of numbers that follow from logits (BF16 log-softmax included)
EXACT = 1e-6  # mean |error| of FP32 log-softmax in another order
TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.1, 1.2, 1.25, 1.3, 1.5, 2.0)
FILTERS = (
    *({"top_k": k} for k in (1, 5, 8, 10, 20, 32, 40, 50, 64, 100)),
    *({"top_p": p} for p in (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)),
    *({"min_p": p} for p in (0.01, 0.02, 0.05, 0.1, 0.2)),
)
PLAIN = Definition(1.0, True, 0, 1.0, 0.0)


def rescored(a: Side, b: Side, facts: Facts, before: Difference) -> Iterator[Hypothesis]:
    """Hypotheses on temperature, raw or processed, kept set and token, the simplest first."""
    yield from _stated(facts, before)
    for which in ("a", "b"):
        yield from _by_logits(which, facts, before)


def _plain(definition: Definition) -> Definition:
    """Full definition, what is left open being temperature 1 without filters."""
    if definition.processed is False:
        return PLAIN
    return Definition(
        definition.temperature or 1.0,
        True,
        definition.top_k or 0,
        1.0 if definition.top_p is None else definition.top_p,
        definition.min_p or 0.0,
    )


def _stated(facts: Facts, before: Difference) -> Iterator[Hypothesis]:
    """Live sides under the other side's stated definition, one field at a time first."""
    own = {which: facts.answers[which].definition for which in ("a", "b")}
    for which, other in (("a", "b"), ("b", "a")):
        theirs = own[other]
        if not facts.live(which) or theirs.processed is None or own[which] == theirs:
            continue
        field = _field(own[which], theirs, facts)
        if field is None:
            continue
        answer = facts.answers[which]
        found = facts.again(which, Ask(answer.path, answer.batches, definition=theirs))
        if found is None:
            continue
        after = before.with_arrays(**{which: found.logprobs})
        yield Hypothesis(field, f"{which.upper()}, scored under {other.upper()}'s definition, agrees", after)


def _field(one: Definition, other: Definition, facts: Facts) -> str | None:
    x, y = _plain(one), _plain(other)
    if x == y:
        return None
    if one.processed is not None and other.processed is not None and one.processed != other.processed:
        return "processed"
    if x.temperature != y.temperature:
        return "processed" if _same_sampling(facts) else "temperature"
    return "kept_set"


def _same_sampling(facts: Facts) -> bool:
    """True if both sides say that they drew at the same temperature, other than 1: then one recorded raw numbers."""
    stated = []
    for side in (facts.a, facts.b):
        definition = side.trace.recorded.definition
        value = definition.temperature if definition.temperature is not None else side.trace.settings.get("temperature")
        stated.append(value)
    return stated[0] is not None and stated[0] == stated[1] and stated[0] not in (0, 1, 1.0)


def logits_of(which: str, facts: Facts) -> torch.Tensor | None:
    """[R, V] logits of the side's answer, or None."""
    found = facts.captured(which).boundaries.get("lm_head")
    return None if found is None or not found.is_floating_point() else found


class Scorer:
    """Scores a side's tokens from its logits: all of them, or a sample."""

    def __init__(
        self, trace: Trace, logits: torch.Tensor, recorded: Sequence[np.ndarray], compared: np.ndarray
    ) -> None:
        """`compared`: bool [R'] of the aligned tokens, which may be fewer than the trace's."""
        starts = np.cumsum([0, *(len(s.ids) for s in trace.sequences)])
        tokens = []
        place = 0
        for i, sequence in enumerate(trace.sequences):
            known = ~np.isnan(recorded[i])
            known[0] = False
            rows = logits[starts[i] : starts[i + 1]]
            known[1:] &= ~rows[:-1].isnan().any(1).numpy() if len(rows) else True
            tokens += [(i, int(j)) for j in np.flatnonzero(known)]
            place += len(sequence.ids)
        self.trace, self.logits, self.starts, self.recorded, self.tokens = trace, logits, starts, recorded, tokens

    def sample(self) -> list[tuple[int, int]]:
        """At most `ROWS` (sequence, position), spread evenly; fewer of a large vocabulary, but `FEWEST_ROWS`."""
        count = min(ROWS, max(FEWEST_ROWS, NUMBERS // self.logits.shape[1]))
        if len(self.tokens) <= count:
            return self.tokens
        return [self.tokens[k * len(self.tokens) // count] for k in range(count)]

    def scores(self, tokens: Sequence[tuple[int, int]], definition: Definition, rank: int = -1) -> np.ndarray:
        """float32: log-probs of the tokens, or of the `rank`-th likeliest one in the place of each."""
        rows = torch.stack([self.logits[self.starts[i] + j - 1] for i, j in tokens])
        ids = np.array([self.trace.sequences[i].ids[j] for i, j in tokens])
        if rank >= 0:
            ids = rows.float().topk(rank + 1, dim=-1).indices[:, rank].numpy()
        # `defined_logprobs` scores id i by row i - 1.
        return defined_logprobs(np.concatenate([[0], ids]), torch.cat([rows, rows[:1]]), definition)[1:]

    def numbers(self, tokens: Sequence[tuple[int, int]]) -> np.ndarray:
        """What the side recorded for them."""
        return np.array([self.recorded[i][j] for i, j in tokens], np.float32)

    def rows(self, tokens: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits [N, V] that score the tokens, their ids, and what was recorded for them."""
        logits = torch.stack([self.logits[self.starts[i] + j - 1] for i, j in tokens]).float()
        ids = torch.tensor([int(self.trace.sequences[i].ids[j]) for i, j in tokens])
        return logits, ids, torch.from_numpy(self.numbers(tokens))

    def everywhere(self, definition: Definition, rank: int = -1) -> tuple[np.ndarray, ...]:
        """Per sequence, NaN where there are no logits."""
        out = tuple(np.full(len(s.ids), np.nan, np.float32) for s in self.trace.sequences)
        for value, (i, j) in zip(self.scores(self.tokens, definition, rank), self.tokens):
            out[i][j] = value
        return out


def scorer(which: str, facts: Facts) -> Scorer | None:
    """Of a side with logits and numbers for the same tokens."""
    logits = logits_of(which, facts)
    if logits is None:
        return None
    made = Scorer(facts.side(which).trace, logits, facts.answers[which].logprobs, np.zeros(0))
    return made if made.tokens else None


def _error(made: np.ndarray, recorded: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):
        gap = np.abs(made.astype(np.float64) - recorded)
    gap[(made == recorded)] = 0.0
    return float(gap.mean())


def borne_out(which: str, facts: Facts) -> bool | None:
    """Whether the side's numbers follow from its own logits under what it states; None without logits."""
    found = scorer(which, facts)
    if found is None:
        return None
    tokens = found.sample()
    stated = facts.answers[which].definition
    return _error(found.scores(tokens, _plain(stated)), found.numbers(tokens)) <= FOLLOWS


@dataclasses.dataclass(frozen=True)
class _Own:
    """Under which definition a side's numbers follow from its logits."""

    definition: Definition
    rank: int
    error: float


def _candidates(facts: Facts, which: str) -> Iterator[tuple[Definition, int]]:
    """What a side's numbers may mean, the simplest first."""
    stated = [_plain(facts.answers[w].definition) for w in (which, "a", "b")]
    temperatures = [1.0]
    for side in (facts.a, facts.b):
        for value in (side.trace.recorded.definition.temperature, side.trace.settings.get("temperature")):
            if isinstance(value, float | int) and value > 0:
                temperatures.append(float(value))
    yield from ((d, -1) for d in stated)
    for temperature in dict.fromkeys([*temperatures, *TEMPERATURES]):
        yield dataclasses.replace(PLAIN, temperature=temperature), -1
    for rank in (0, 1):
        for temperature in dict.fromkeys(temperatures):
            yield dataclasses.replace(PLAIN, temperature=temperature), rank
    for temperature in dict.fromkeys(temperatures):
        for changed in FILTERS:
            yield dataclasses.replace(PLAIN, temperature=temperature, **changed), -1  # type: ignore[arg-type]


def _own(which: str, facts: Facts, found: Scorer) -> _Own | None:
    """The first candidate that fits; or the best one, if it fits at all."""
    tokens = found.sample()
    recorded = found.numbers(tokens)
    finite = np.isfinite(recorded)
    tokens, recorded = [t for t, f in zip(tokens, finite) if f], recorded[finite]
    if not tokens:
        return None
    best: _Own | None = None
    stated = _plain(facts.answers[which].definition)
    solved = ((d, -1) for d in solved_definitions.definitions(*found.rows(tokens), stated))
    for definition, rank in itertools.chain(_candidates(facts, which), solved):
        error = _error(found.scores(tokens, definition, rank), recorded)
        if error <= FOLLOWS and (best is None or error * 4 < best.error):
            best = _Own(definition, rank, error)
            if error <= EXACT:
                break
    return best


def _by_logits(which: str, facts: Facts, before: Difference) -> Iterator[Hypothesis]:
    """This side's numbers mean something else than the other's: score this one under the other's meaning."""
    found = scorer(which, facts)
    if found is None:
        return
    own = _own(which, facts, found)
    other = "b" if which == "a" else "a"
    theirs = _plain(facts.answers[other].definition)
    their_scorer = scorer(other, facts)
    if their_scorer is not None and (their_own := _own(other, facts, their_scorer)) is not None:
        if their_own.rank >= 0:
            return  # the other side is the odd one; its own turn says so
        theirs = their_own.definition
    candidates = (
        [theirs] if their_scorer is not None else [theirs, PLAIN, *(d for d, r in _candidates(facts, which) if r < 0)]
    )
    for definition in dict.fromkeys(candidates):
        if own is not None and own.rank < 0 and own.definition == definition:
            continue
        after = before.with_arrays(**{which: found.everywhere(definition)})
        if own is None:
            continue
        yield Hypothesis(*_named(own, definition, which, facts), after)
    if own is None and (words := _in_part(found, theirs)):
        after = before.with_arrays(**{which: found.everywhere(theirs)})
        yield Hypothesis("wrong_token", f"{which.upper()} records the log-prob of {words}", after)
    if own is None and (words := _each_sequence(found)):
        after = before.with_arrays(**{which: found.everywhere(theirs)})
        text = f"{which.upper()}'s sequences are each under a temperature of their own: {words}"
        yield Hypothesis("temperature", text, after)


def _in_part(found: Scorer, definition: Definition) -> str:
    """Which other token's log-prob stands for some tokens, where all others have their own, in words; or empty."""
    tokens = found.tokens
    recorded, own = found.numbers(tokens), found.scores(tokens, definition)
    odd = [t for t, gap in zip(tokens, np.abs(own - recorded)) if not gap <= FOLLOWS]
    if not FEWEST_OF_SEQUENCE <= len(odd) < len(tokens):
        return ""
    for rank in range(2):
        gaps = np.abs(found.scores(odd, definition, rank) - found.numbers(odd))
        if (gaps <= FOLLOWS).all():
            place = ("the likeliest", "the second likeliest")[rank]
            return f"{place} token, not of its own, for {len(odd)} of {len(tokens)} tokens"
    return ""


def _each_sequence(found: Scorer) -> str:
    """Temperatures under which each sequence's numbers follow from its logits, in words; empty if they do not, or are
    all the same."""
    values = []
    for sequence in range(len(found.trace.sequences)):
        tokens = [t for t in found.tokens if t[0] == sequence][:FEWEST_ROWS]
        if len(tokens) < FEWEST_OF_SEQUENCE:
            continue
        value = solved_definitions.temperature(*found.rows(tokens))
        numbers = found.numbers(tokens)
        if value is None or not np.isfinite(numbers).all():
            return ""
        if _error(found.scores(tokens, dataclasses.replace(PLAIN, temperature=value)), numbers) > FOLLOWS:
            return ""
        values.append(f"{value:.3g}")
    return ", ".join(values) if len(set(values)) > 1 else ""


def _named(own: _Own, other: Definition, which: str, facts: Facts) -> tuple[str, str]:
    side = which.upper()
    if own.rank >= 0:
        place = ("the likeliest", "the second likeliest")[own.rank]
        return "wrong_token", f"{side} records the log-prob of {place} token, not of its own"
    mine = own.definition
    if mine.temperature != other.temperature:
        stated = [facts.answers[w].definition.processed for w in ("a", "b")]
        if _same_sampling(facts) or (None not in stated and stated[0] != stated[1]):
            raw = side if mine.temperature == 1.0 else ("B" if side == "A" else "A")
            return "processed", f"{raw} records raw log-probs, the other side those after the temperature"
        return "temperature", f"{side} is under temperature {mine.temperature:g}, the other under {other.temperature:g}"
    filters = {k: v for k, v in dataclasses.asdict(mine).items() if v != getattr(other, k)}
    return "kept_set", f"{side}'s numbers are under other filters: {filters}"
