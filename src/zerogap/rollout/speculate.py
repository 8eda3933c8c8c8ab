"""Speculation: guess a sequence's next tokens, compute the guesses in one pass, keep those that are right.

A pass over the newest token and k guessed ones gives k + 1 rows of logits. The first draws the next token as plain
decoding does; where that is the first guess, the second row is what plain decoding would have computed next, and so
on: a guess is accepted while it is the token that its position draws. Sampling is a function of logits, key and
position, and a row of logits does not depend on how many rows a pass has, so tokens and log-probs are those of plain
decoding, bit for bit, at any temperature and with filters. Keys and values of rejected guesses stand where the next
pass writes, before anything reads there, and no page with them is offered to the prefix cache.

What is decided here is only how much to guess, from counts, never from clocks. A guess is copied from a text of the
same prompt (`draft_texts`) where the last tokens agree, for the longest agreement that there is. The chance that a
copied token is drawn again is taken to be the probability it was recorded with, times how often such copies were right.
The likeliest guesses of all sequences are computed as long as each lowers the cost of a token: rows are cheap while a
pass waits for weights to be read, so few sequences guess far, and many only what is nearly certain.
"""

import dataclasses
import math
from collections.abc import Sequence as List

from zerogap.errors import ConfigError
from zerogap.numerics import DType, Numerics
from zerogap.rollout.draft_texts import MOST_COMPARED, Place, PromptTexts, TextStore
from zerogap.rollout.sequence import Sequence
from zerogap.types import Sample

MOST_DRAFT_TOKENS = 16
DRAFT_ROWS = 128  # most guessed rows of one pass: with more, a pass costs as much per row as without
GREEDY, SAMPLED = 0, 1
_LENGTHS = (4, 8, MOST_COMPARED)  # matches shorter than these, from these on, and of everything from the prompt on
_PRIOR = (0.6, 0.8, 0.9, 1.0, 1.0)  # rightness of each before any was verified
_WEIGHT = 8.0  # expected tokens that a prior counts as
_FADE = 0.999  # per pass; what was learned long ago counts less, and a kind once found bad is tried again


@dataclasses.dataclass(frozen=True)
class PassCost:
    """What a pass costs, in rows of a large one: r + waiting * (1 - r / 18) for less than 18 rows, else r.

    Measured by `benchmarks/speculation.py --rows` with 135M parameters, and alike with 1B: a pass over one row takes as
    long as 11 more rows in a large one (7 where weights are FP8), and from about 18 rows on nothing waits for weights.

    Attributes:
        waiting: how much longer than one of no rows an empty pass would take.
    """

    waiting: float

    @classmethod
    def under(cls, numerics: Numerics) -> "PassCost":
        """For weights as a contract stores them."""
        return cls(6.5 if numerics.linear is DType.FP8 else 10.5)

    def __call__(self, rows: float) -> float:
        return rows + self.waiting * max(0.0, 1.0 - rows / 18.0)


@dataclasses.dataclass(frozen=True)
class Speculation:
    """How an engine speculates. Changes no bit of any result.

    Attributes:
        draft_tokens: most guessed tokens of one sequence in one pass; 0: none.
        min_match: fewest equal tokens before a place that guesses are copied from.
        always: compute every guess that is found, also where it is not worth its row; for checks.

    Raises:
        ConfigError: a number out of range.
    """

    draft_tokens: int = 0
    min_match: int = 2
    always: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.draft_tokens <= MOST_DRAFT_TOKENS:
            raise ConfigError(
                "speculation.draft_tokens", self.draft_tokens, f"choose 0 (off) to {MOST_DRAFT_TOKENS} tokens"
            )
        if not 1 <= self.min_match <= MOST_COMPARED:
            raise ConfigError("speculation.min_match", self.min_match, f"choose 1 to {MOST_COMPARED} tokens")

    def most_rows(self, max_sequences: int) -> int:
        """Most rows of a pass that draw."""
        return max_sequences + min(DRAFT_ROWS, max_sequences * self.draft_tokens)


@dataclasses.dataclass
class Draft:
    """Guesses for one sequence.

    Attributes:
        ids: guessed tokens, in order.
        recorded: for each, the probability it was recorded with.
        chances: for each, the estimated chance that it and all before it are accepted.
        kind: what the estimate was made from (`_Rightness`).
    """

    ids: list[int]
    recorded: list[float]
    chances: list[float]
    kind: tuple[int, int]


class _Rightness:
    """How often copied tokens were drawn, as a factor on their recorded probability; by kind of draw and of match."""

    def __init__(self) -> None:
        self._expected = [[_WEIGHT] * len(_PRIOR) for _ in (GREEDY, SAMPLED)]
        self._accepted = [[_WEIGHT * factor for factor in _PRIOR] for _ in (GREEDY, SAMPLED)]

    def factor(self, kind: tuple[int, int]) -> float:
        drawing, match = kind
        return self._accepted[drawing][match] / self._expected[drawing][match]

    def learn(self, kind: tuple[int, int], expected: float, accepted: int) -> None:
        drawing, match = kind
        self._expected[drawing][match] += expected
        self._accepted[drawing][match] += accepted

    def fade(self) -> None:
        for expected, accepted in zip(self._expected, self._accepted, strict=True):
            for match, prior in enumerate(_PRIOR):
                expected[match] = _WEIGHT + (expected[match] - _WEIGHT) * _FADE
                accepted[match] = _WEIGHT * prior + (accepted[match] - _WEIGHT * prior) * _FADE


class _Follower:
    """One running sequence's own text, and the places in other texts that have agreed with it so far."""

    def __init__(self, texts: PromptTexts) -> None:
        start = texts.prompt_length
        self._texts, self._prompt_length = texts, start
        self._places: list[Place] = [(text, start) for text in texts.texts if len(text.ids) > start]
        self._whole, self._matched = True, start
        self._text = texts.new_text()
        self.draft: Draft | None = None

    def catch_up(self, sequence: Sequence) -> None:
        """Take over the tokens that were drawn since."""
        for index in range(len(self._text.ids), sequence.length):
            token = int(sequence.ids[index])
            chance = math.exp(sequence.logprobs[index - self._prompt_length])
            self._texts.grow(self._text, token, chance)
            self._places = _agreeing(self._places, token)
            self._matched += 1

    def guess(self, most: int, floor: float, greedy: bool, rightness: _Rightness) -> Draft | None:
        """Copy up to `most` tokens while the chance that all are right is above `floor`; None if there is none."""
        if not any(index < len(text.ids) for text, index in self._places):
            self._places, self._matched = self._texts.matches(self._text)
            self._whole = False
        match = len(_LENGTHS) + 1 if self._whole else sum(self._matched >= length for length in _LENGTHS)
        kind = (GREEDY if greedy else SAMPLED, match)
        draft, factor, chance = Draft([], [], [], kind), rightness.factor(kind), 1.0
        places = self._places
        while len(draft.ids) < most:
            token, recorded = _likeliest(places)
            # Greedy drawing takes the likeliest token: one that was drawn in more than half of all cases is that.
            expected = min(1.0, 2.0 * recorded) if greedy else recorded
            chance *= min(1.0, factor * expected)
            if token < 0 or chance <= floor:
                break
            draft.ids.append(token)
            draft.recorded.append(expected)
            draft.chances.append(chance)
            places = _agreeing(places, token)
        return draft if draft.ids else None


def _agreeing(places: list[Place], token: int) -> list[Place]:
    """Of these, the ones where `token` follows, one token further."""
    return [(text, index + 1) for text, index in places if index < len(text.ids) and text.ids[index] == token]


def _likeliest(places: list[Place]) -> tuple[int, float]:
    """The token with the highest recorded probability that follows at one of the places; -1: nothing follows."""
    best, token = -1.0, -1
    for text, index in places:
        if index < len(text.ids) and text.chances[index] > best:
            best, token = text.chances[index], text.ids[index]
    return token, best


class Speculator:
    """Guesses for the sequences of one engine, and learns from what became of the guesses."""

    def __init__(self, settings: Speculation, cost: PassCost) -> None:
        self._settings, self._cost = settings, cost
        self._store = TextStore(settings.min_match)
        self._rightness = _Rightness()
        self._followers: dict[Sequence, _Follower] = {}

    def remember(self, samples: List[Sample]) -> None:
        """Samples drawn elsewhere or earlier, to copy from; oldest first."""
        for sample in samples:
            self._store.add(sample.prompt_ids, sample.completion_ids, sample.logprobs)

    def propose(self, running: List[Sequence]) -> None:
        """Write guesses behind the known tokens of the sequences that are being decoded."""
        decoding: list[tuple[Sequence, Draft | None]] = []
        alone = sum(s.length - s.computed == 1 for s in running)
        floor = 0.0 if self._settings.always or not alone else self._worth(alone, alone)
        for sequence in running:
            sequence.drafts = 0
            if sequence.length - sequence.computed == 1 and sequence.num_drawn:
                decoding.append((sequence, self._guess(sequence, floor)))
        self._rightness.fade()
        for sequence, count in self._worthwhile(decoding, alone):
            draft = self._followers[sequence].draft
            assert draft is not None, "only sequences with a draft are chosen"
            sequence.ids[sequence.length : sequence.length + count] = draft.ids[:count]
            sequence.drafts = count

    def _guess(self, sequence: Sequence, floor: float) -> Draft | None:
        follower = self._followers.get(sequence)
        if follower is None:
            prompt = sequence.ids[: sequence.prompt_length]
            follower = self._followers[sequence] = _Follower(self._store.open(prompt))
        follower.catch_up(sequence)
        most = min(self._settings.draft_tokens, sequence.params.max_tokens - sequence.num_drawn - 1)
        greedy = sequence.params.temperature == 0.0
        follower.draft = follower.guess(most, floor, greedy, self._rightness)
        return follower.draft

    def _worthwhile(self, decoding: List[tuple[Sequence, Draft | None]], rows: int) -> list[tuple[Sequence, int]]:
        """How many of each one's guesses to compute: the likeliest of all, while they lower the cost of a token."""
        chances = [
            (chance, place)
            for place, (_, draft) in enumerate(decoding)
            if draft is not None
            for chance in draft.chances
        ]
        chances.sort(key=lambda pair: -pair[0])  # stable, and chances fall along a draft: no guess before its elders
        counts = [0] * len(decoding)
        tokens = float(rows)
        for chance, place in chances[:DRAFT_ROWS]:
            if not self._settings.always and chance <= self._worth(tokens, rows):
                break
            counts[place] += 1
            tokens, rows = tokens + chance, rows + 1
        return [(sequence, count) for (sequence, _), count in zip(decoding, counts, strict=True) if count]

    def _worth(self, tokens: float, rows: int) -> float:
        """The chance above which one guess more lowers the cost of a token, in a pass over `rows` rows that is expected
        to draw `tokens`. It grows with every guess that is above it."""
        return tokens * (self._cost(rows + 1) / self._cost(rows) - 1.0)

    def verified(self, sequence: Sequence, tested: int, right: int) -> None:
        """The first `tested` guesses of a sequence were compared with what was drawn, and the first `right` were it."""
        draft = self._followers[sequence].draft
        assert draft is not None, "guesses were verified that nobody made"
        self._rightness.learn(draft.kind, sum(draft.recorded[:tested]), right)

    def finish(self, sequence: Sequence) -> None:
        """The sequence has left; its text stays."""
        follower = self._followers.pop(sequence, None)
        if follower is not None:
            follower.catch_up(sequence)
            self._store.close(sequence.ids[: sequence.prompt_length])
