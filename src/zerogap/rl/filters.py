"""Which groups of a step are trained on, and what takes the place of the others.

A group (all completions of one prompt) whose rewards are all equal teaches nothing: its advantages are 0, and its
tokens still count in the loss's denominators. A filter leaves such groups out; *dynamic sampling* (Yu et al. 2025,
DAPO, equation 11) goes on with further prompts until a step has as many groups as it should.

A step has a fixed number of slots. Round r draws a group for every slot that has none to keep, from the next prompts of
the run's order, with the slot as the key's prompt and r as its attempt: no draw is ever repeated. So which prompts a
step takes, and where the next one begins, is a function of where this one began and of the rewards; it is logged, and a
checkpoint holds it. Where the rounds run out first, a slot keeps its last group, left out of the loss.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from zerogap.config import AlgorithmConfig
from zerogap.moments import Moments
from zerogap.rl.reward import RewardScores
from zerogap.rl.setup import Prompt
from zerogap.types import Sample


@dataclasses.dataclass(frozen=True)
class GroupFilter:
    """Which groups are kept, by the rewards of their completions (before any shaping by length or KL).

    Attributes:
        drops_equal: groups whose rewards are all equal go; also those with no reward at all.
        mean_range: groups whose mean reward is outside [low, high] go; None: none.
    """

    drops_equal: bool = False
    mean_range: tuple[float, float] | None = None

    @classmethod
    def from_config(cls, algorithm: AlgorithmConfig) -> "GroupFilter":
        """The filter that a recipe asks for."""
        return cls(algorithm.drops_equal_rewards, algorithm.group_filter.mean_reward)

    @property
    def active(self) -> bool:
        """True if any group could go."""
        return self.drops_equal or self.mean_range is not None

    def keeps(self, rewards: Sequence[float | None]) -> bool:
        """True if the group with these rewards takes part in the loss; a missing reward (None) counts nowhere."""
        if not self.active:
            return True
        given = [r for r in rewards if r is not None]
        if not given or (self.drops_equal and min(given) == max(given)):
            return False
        low, high = self.mean_range or (-float("inf"), float("inf"))
        return low <= Moments.of(np.array(given)).mean <= high


@dataclasses.dataclass(frozen=True, eq=False)
class Round:
    """Groups that were drawn together: one prompt, sample and score per completion, group after group."""

    prompts: list[Prompt]
    samples: list[Sample]
    scores: RewardScores


@dataclasses.dataclass(frozen=True, eq=False)
class StepGroups:
    """The groups that a step has in the end, in order of its slots.

    Attributes:
        chosen: their prompts, samples and scores.
        kept: one per sample; False where its group is left out of the loss.
        position: where the next step's prompts begin.
        num_rounds, num_prompts: rounds that were sampled, and prompts that they took.
        drawn_tokens, all_tokens: completion tokens of all rounds; the same with their prompts.
        filtered: whether any group could have been left out.
    """

    chosen: Round
    kept: tuple[bool, ...]
    position: int
    num_rounds: int
    num_prompts: int
    drawn_tokens: int
    all_tokens: int
    filtered: bool

    def metrics(self) -> dict[str, float]:
        """What is logged of a run whose groups are filtered: nothing of any other."""
        if not self.filtered:
            return {}
        return {
            "groups/kept_ratio": sum(self.kept) / len(self.kept),
            "groups/rounds": self.num_rounds,
            "groups/prompts": self.num_prompts,
            "groups/position": self.position,
        }


def fill_slots(
    draw: Callable[[list[int], int, int], Round],
    group_filter: GroupFilter,
    num_slots: int,
    max_rounds: int,
    position: int,
) -> StepGroups:
    """Draw a step's groups.

    Args:
        draw: (slots, round, position) -> one group for each slot, of the prompts from `position` on.
        num_slots: groups that a step should have.
        max_rounds: most rounds; 0 and 1: one, nothing is replaced.
        position: of the step's first prompt in the run's order.
    """
    open_slots, rounds = list(range(num_slots)), list[Round]()
    first, keeps, base, begin = [0] * num_slots, [False] * num_slots, 0, position
    while open_slots and len(rounds) < max(1, max_rounds):
        drawn = draw(open_slots, len(rounds), position)
        size = len(drawn.samples) // len(open_slots)
        rounds.append(drawn)
        position += len(open_slots)
        for index, slot in enumerate(open_slots):
            first[slot] = base + index * size
            keeps[slot] = group_filter.keeps(drawn.scores.totals[index * size : (index + 1) * size])
        base += len(drawn.samples)
        open_slots = [slot for slot in open_slots if not keeps[slot]]
    chosen = rounds[0] if len(rounds) == 1 else _joined(rounds, [f + i for f in first for i in range(size)])
    samples = [sample for drawn in rounds for sample in drawn.samples]
    return StepGroups(
        chosen=chosen,
        kept=tuple(keep for keep in keeps for _ in range(size)),
        position=position,
        num_rounds=len(rounds),
        num_prompts=position - begin,
        drawn_tokens=sum(len(s.completion_ids) for s in samples),
        all_tokens=sum(s.num_tokens for s in samples),
        filtered=group_filter.active,
    )


def _joined(rounds: Sequence[Round], chosen: Sequence[int]) -> Round:
    """The chosen completions of several rounds, by their index in all of them one after the other.

    A column that a function logged in some rounds only has None in the others; metrics are means over rounds, each
    counted by its completions.
    """
    scores = [r.scores for r in rounds]
    sizes = [len(r.samples) for r in rounds]
    totals = [t for s in scores for t in s.totals]
    columns = [[v for s in scores for v in s.columns[f]] for f in range(len(scores[0].columns))]
    extra: dict[str, list] = {}
    for name in dict.fromkeys(name for s in scores for name in s.extra):
        parts = [s.extra.get(name, []) for s in scores]
        whole = [v for p, n in zip(parts, sizes, strict=True) for v in (p if len(p) == n else [None] * n)]
        extra[name] = [whole[i] for i in chosen]
    metrics = {}
    for name in dict.fromkeys(name for s in scores for name in s.metrics):
        having = [(s.metrics[name], n) for s, n in zip(scores, sizes, strict=True) if name in s.metrics]
        metrics[name] = sum(v * n for v, n in having) / sum(n for _, n in having)
    prompts, samples = [p for r in rounds for p in r.prompts], [s for r in rounds for s in r.samples]
    return Round(
        prompts=[prompts[i] for i in chosen],
        samples=[samples[i] for i in chosen],
        scores=dataclasses.replace(
            scores[0],
            totals=[totals[i] for i in chosen],
            columns=[[column[i] for i in chosen] for column in columns],
            extra=extra,
            metrics=metrics,
            errors=sum(s.errors for s in scores),
            timeouts=sum(s.timeouts for s in scores),
        ),
    )
