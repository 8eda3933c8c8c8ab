"""The adversarial search for a neighbour: does anything that is computed beside a sequence change a bit of it?

A few *victims* are computed alone first, along both sides: drawn token by token by an engine that holds nothing else,
and by the trainer in a pack of their own. Then many *trials* compute them again among others: other batch compositions,
places, lengths around every border (pages, chunks, key blocks, gradient blocks), page sizes, chunk sizes, warm and full
caches, and contents chosen to disturb (copies, shared beginnings, the loudest token of the vocabulary over and over,
as a scale or a maximum that is shared between rows would show it). A victim's log-probs, ids and logits must keep every
bit. What was found is made small: neighbours are left out while the difference stays.

Everything is drawn from (seed, trial) by rules that no library version changes, so a search can be repeated anywhere.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence

import numpy as np
import torch

from zerogap.models.decoder import Decoder
from zerogap.ops import tap
from zerogap.rollout.engine import Engine
from zerogap.types import Sample, SamplingKey, SamplingParams
from zerogap.verify.certificate import array_digest, digest_of
from zerogap.verify.checks import Tally
from zerogap.verify.paths import HeadLogits, Ids, decode_logits, trainer_logits

TRIALS = 24
DRAWN = 4  # tokens drawn of a victim
NEIGHBOUR_TOKENS = 320  # of all neighbours of a trial together
PATHS = ("rollout", "packs", "rollout", "logits")  # of the trials, in turn
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 66, 127, 128, 129)
CHUNKS = (17, 33, 48, 63, 64, 65, 96, 512)
PAGES = (16, 32, 48, 64, 128)
KINDS = ("random", "same", "beginning", "last token", "loudest", "quietest")
SEED, OTHERS = 7, 1000  # sampling keys: of the victims, and the first slot of neighbours


@dataclasses.dataclass(frozen=True)
class Neighbour:
    """A sequence beside the victims: what it is, its prompt, how many tokens are drawn of it."""

    kind: str
    ids: tuple[int, ...]
    max_tokens: int


@dataclasses.dataclass(frozen=True)
class Trial:
    """One composition.

    Attributes:
        path: `rollout` (the engine's recorded program: ids and log-probs), `logits` (the engine op by op: all logits of
            drawn tokens, too), `packs` (the trainer: logits of every position).
        victims: which victims take part.
        places: order of victims, then neighbours, in the batch.
        packs: into how many packs the trainer's pass is cut.
        page_size, chunk, sequences, prefix_cache: settings of the engine.
        warm: the neighbours were computed once before, so that their pages are cached.
        tight: the cache cannot hold all sequences at once.
    """

    path: str
    victims: tuple[int, ...]
    neighbours: tuple[Neighbour, ...]
    places: tuple[int, ...]
    packs: int
    page_size: int
    chunk: int
    sequences: int
    prefix_cache: bool
    warm: bool
    tight: bool

    def __str__(self) -> str:
        beside = ", ".join(f"{n.kind} {len(n.ids)}" for n in self.neighbours) or "nobody"
        if self.path == "packs":
            return f"{self.packs} packs, beside {beside}"
        states = [name for name in ("prefix_cache", "warm", "tight") if getattr(self, name)]
        sizes = f"pages of {self.page_size}, chunks of {self.chunk}, {self.sequences} sequences at once"
        return f"{self.path}: {', '.join([sizes, *states])}, beside {beside}"


@dataclasses.dataclass(frozen=True, eq=False)
class Victim:
    """A sequence alone: prompt, drawn sample, FP32 [V] logits of each drawn token, [N - 1, V] logits by the trainer."""

    prompt: tuple[int, ...]
    sample: Sample
    drawn: tuple[torch.Tensor, ...]
    trained: torch.Tensor

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.sample.completion_ids.tolist()]

    def digests(self) -> tuple[str, str]:
        """Of the log-probs, and of all logits."""
        logits = [*(row.numpy() for row in self.drawn), self.trained.numpy()]
        return array_digest(self.sample.logprobs), array_digest(*logits)


class _Stream:
    """Draws that depend on the seed and a name alone (`random.random` of a text seed is the same in every version)."""

    def __init__(self, *name: object) -> None:
        self._source = random.Random("/".join(map(str, name)))

    def below(self, count: int) -> int:
        return int(self._source.random() * count)

    def one_of(self, values: Sequence) -> object:
        return values[self.below(len(values))]

    def shuffled(self, count: int) -> tuple[int, ...]:
        left = list(range(count))
        return tuple(left.pop(self.below(len(left))) for _ in range(count))


# ---------------------------------------------------------------------------------------------------- what is tried


def victim_prompts(sequences: Sequence[Ids]) -> list[Ids]:
    """Prompts around the key block of 64, one of three tokens, and the last sequence (real text where there is any)."""
    longest = max(sequences, key=len)
    found = [list(longest[:17]), list(longest[:63]), list(longest[:64]), list(sequences[0]), list(sequences[-1])]
    return [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in found)]


def draw_trials(decoder: Decoder, prompts: Sequence[Ids], seed: int, count: int = TRIALS) -> list[Trial]:
    """The first `count` trials of a seed for victims with these prompts."""
    sizes = decoder.embed.value().detach().abs().amax(1)
    loud, quiet = int(sizes.argmax()), int(sizes.argmin())
    room = decoder.max_positions - 2 * DRAWN
    found = []
    for number in range(count):
        stream = _Stream(seed, number)
        victims = tuple(i for i in stream.shuffled(len(prompts)))[: 1 + stream.below(min(3, len(prompts)))]
        neighbours: list[Neighbour] = []
        left = NEIGHBOUR_TOKENS
        for _ in range(1 + stream.below(6)):
            kind, length = str(stream.one_of(KINDS)), int(stream.one_of(LENGTHS))  # type: ignore[call-overload]
            about = prompts[victims[0]]
            noise = [stream.below(decoder.spec.vocab_size) for _ in range(length)]
            ids = {
                "random": noise,
                "same": list(about),
                "beginning": [*about[: max(1, len(about) // 2)], *noise],
                "last token": [*about[:-1], noise[0]],
                "loudest": [loud] * length,
                "quietest": [quiet] * length,
            }[kind][: min(room, left)]
            if not ids:
                break
            left -= len(ids)
            neighbours.append(Neighbour(kind, tuple(ids), 1 + stream.below(2 * DRAWN)))
        chunk = int(stream.one_of(CHUNKS))  # type: ignore[call-overload]
        found.append(
            Trial(
                path=PATHS[number % len(PATHS)],
                victims=victims,
                neighbours=tuple(neighbours),
                places=stream.shuffled(len(victims) + len(neighbours)),
                packs=1 + stream.below(3),
                page_size=int(stream.one_of(PAGES)),  # type: ignore[call-overload]
                chunk=chunk,
                sequences=1 + stream.below(min(8, chunk)),
                prefix_cache=stream.below(2) == 1,
                warm=stream.below(2) == 1,
                tight=stream.below(3) == 0,
            )
        )
    return found


def trials_digest(trials: Sequence[Trial]) -> str:
    """64 hex digits over all that the trials are."""
    return digest_of([dataclasses.asdict(trial) for trial in trials])


# ---------------------------------------------------------------------------------------------------- alone


def alone(decoder: Decoder, prompt: Ids, index: int) -> Victim:
    """Victim `index`, computed without any neighbour."""
    sample, rows = decode_logits(decoder, prompt, DRAWN, _victim_key(index))
    ids = [*prompt, *sample.completion_ids.tolist()]
    (trained,) = trainer_logits(decoder, [ids], [[0]])
    return Victim(tuple(prompt), sample, tuple(rows), trained.detach())


def _victim_key(index: int) -> SamplingKey:
    return SamplingKey(seed=SEED, prompt=index)


# ---------------------------------------------------------------------------------------------------- among others


def search(
    decoder: Decoder,
    victims: Sequence[Victim],
    trials: Sequence[Trial],
    tally: Tally,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Compute victims in every trial and compare them with themselves alone.

    Args:
        victims: all that the trials may name, by index.
        progress: called with the number of trials done.
    """
    for number, trial in enumerate(trials):
        before = tally.differing, tally.first
        attempt(decoder, victims, trial, tally)
        if tally.differing > before[0] and not before[1]:
            small = _made_small(decoder, victims, trial)
            tally.first = f"{tally.first} (trial {number}; the smallest that still differs: {small})"
        progress(number + 1)


def attempt(decoder: Decoder, victims: Sequence[Victim], trial: Trial, tally: Tally) -> None:
    """One trial."""
    if trial.path == "packs":
        _pack(decoder, victims, trial, tally)
    else:
        _roll_out(decoder, victims, trial, tally)


def _made_small(decoder: Decoder, victims: Sequence[Victim], trial: Trial) -> Trial:
    """The trial without those neighbours that the difference does not need."""
    for index in reversed(range(len(trial.neighbours))):
        gone = len(trial.victims) + index
        fewer = dataclasses.replace(
            trial,
            neighbours=trial.neighbours[:index] + trial.neighbours[index + 1 :],
            places=tuple(p - (p > gone) for p in trial.places if p != gone),
        )
        tally = Tally()
        attempt(decoder, victims, fewer, tally)
        if tally.differing:
            trial = fewer
    return trial


def _roll_out(decoder: Decoder, victims: Sequence[Victim], trial: Trial, tally: Tally) -> None:
    """Victims drawn by an engine among the trial's neighbours."""
    own, others = [victims[i] for i in trial.victims], trial.neighbours
    prompts = [list(v.prompt) for v in own] + [list(n.ids) for n in others]
    keys = [_victim_key(i) for i in trial.victims] + [SamplingKey(SEED, prompt=OTHERS + i) for i in range(len(others))]
    limits = [DRAWN] * len(own) + [n.max_tokens for n in others]
    params = [SamplingParams(max_tokens=limit, stop_token_ids=()) for limit in limits]
    pages = [-(-(len(p) + limit) // trial.page_size) for p, limit in zip(prompts, limits, strict=True)]
    num_pages = max(pages) + 1 if trial.tight else 2 * sum(pages) + 1
    page_bytes = trial.page_size * decoder.codec().bytes_per_token() * len(decoder.blocks)
    engine = Engine(
        decoder,
        page_size=trial.page_size,
        kv_cache_bytes=num_pages * page_bytes,
        max_batch_tokens=trial.chunk,
        max_sequences=trial.sequences,
        prefix_cache=trial.prefix_cache,
    )
    order = trial.places

    def draw(chosen: Sequence[int]) -> list[Sample]:
        return engine.generate([prompts[i] for i in chosen], [params[i] for i in chosen], [keys[i] for i in chosen])

    if trial.warm and others:
        draw([i for i in order if i >= len(own)])
    seen = HeadLogits()
    if trial.path == "logits":
        with tap.listen(seen):
            samples = draw(order)
    else:
        samples = draw(order)
    for place, index in enumerate(order):
        if index < len(own):
            what = f"victim {trial.victims[index]}, {trial.path}"
            tally.samples(what, [samples[place]], [own[index].sample])
            for token, row in enumerate(own[index].drawn if trial.path == "logits" else ()):
                _same_row(f"{what}, logits of token {token}", seen.rows, row, tally)


def _same_row(what: str, rows: Sequence[torch.Tensor], expected: torch.Tensor, tally: Tally) -> None:
    """One of the batch's rows of logits must be the expected one; the nearest is counted. The engine may serve rows of
    several sequences in any order, so nothing says which one it is."""
    bits = expected.numpy().view(np.uint32)
    different = [int((row.numpy().view(np.uint32) != bits).sum()) for row in rows]
    tally.counts(what, bits.size, min(different, default=bits.size))


def _pack(decoder: Decoder, victims: Sequence[Victim], trial: Trial, tally: Tally) -> None:
    """Victims in packs of the trainer among the trial's neighbours."""
    own = [victims[i] for i in trial.victims]
    sequences = [v.ids for v in own] + [list(n.ids) if len(n.ids) > 1 else [*n.ids, *n.ids] for n in trial.neighbours]
    packs: list[list[int]] = [[]]
    share = -(-len(trial.places) // trial.packs)
    for index in trial.places:
        tokens = sum(len(sequences[i]) for i in packs[-1]) + len(sequences[index])
        if packs[-1] and (len(packs[-1]) >= share or tokens > decoder.numerics.pack_tokens):
            packs.append([])
        packs[-1].append(index)
    logits = trainer_logits(decoder, sequences, packs)
    for place, index in enumerate(i for pack in packs for i in pack):
        if index < len(own):
            tally.arrays(f"victim {trial.victims[index]}, packs", logits[place], own[index].trained)
