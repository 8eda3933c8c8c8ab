"""One request on its way through the engine: what it has been given, what it has drawn, and which pages it holds.

Prefill and decode are one thing here. A sequence *knows* `length` tokens and has *computed* keys and values for the
first `computed` of them; a step computes some more, and a step that computes the last known one draws the next. Decode
is the step where exactly one was missing; a preempted sequence forgets its pages and starts again from `computed = 0`.
"""

import dataclasses

import numpy as np

from zerogap.rollout.completion_text import CompletionText
from zerogap.routing import RoutingRecord, RoutingTrace
from zerogap.types import Identity, Sample, SamplingKey, SamplingParams


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One completion to draw: int32 [P] prompt ids, how, and under which key."""

    prompt_ids: np.ndarray
    params: SamplingParams
    key: SamplingKey
    stop_ids: frozenset[int]


@dataclasses.dataclass(eq=False, slots=True)
class Sequence:
    """State of one request. Mutated by the scheduler (place, pages) and by the engine (tokens).

    Attributes:
        index: order of arrival; a lower one has precedence for pages.
        params, key: as given by the caller.
        stop_ids: ids that end it.
        ids: int32 [prompt + max_tokens]; the first `length` are known.
        drafts: guessed tokens that stand behind the known ones in `ids`, for the next pass to verify.
        computed: tokens whose keys and values stand in pages.
        slot: row of the page table while running, else -1.
        pages: page of each run of `page_size` tokens.
        page_keys: chained prefix-cache key of each full page that was offered to the cache.
        logprobs, versions, kept_counts, kept_digests: one entry per drawn token.
        text: its text, kept only where stop strings or a stream need it.
        routing: experts of every computed token, where they are recorded; a token that is computed again is written
            again.
    """

    index: int
    prompt_length: int
    params: SamplingParams
    key: SamplingKey
    stop_ids: frozenset[int]
    ids: np.ndarray
    length: int
    drafts: int = 0
    computed: int = 0
    slot: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    page_keys: list[bytes] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    kept_counts: list[int] = dataclasses.field(default_factory=list)
    kept_digests: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    text: CompletionText | None = None
    routing: RoutingTrace | None = None

    @classmethod
    def of(cls, index: int, request: Request) -> "Sequence":
        """A request that has computed and drawn nothing yet."""
        length = len(request.prompt_ids)
        ids = np.zeros(length + request.params.max_tokens, np.int32)
        ids[:length] = request.prompt_ids
        return cls(index, length, request.params, request.key, request.stop_ids, ids, length)

    def record_routing(self, record: RoutingRecord) -> None:
        """Keep a trace of what the routers choose, in the shape of `record`."""
        num_layers, _, top_k = record.experts.shape
        self.routing = RoutingTrace.unrecorded(len(self.ids), num_layers, top_k)

    @property
    def num_drawn(self) -> int:
        """Completion tokens so far, which is also the position of the next one in the completion."""
        return self.length - self.prompt_length

    @property
    def completion_ids(self) -> np.ndarray:
        return self.ids[self.prompt_length : self.length]

    def append(self, token: int, logprob: float, version: int) -> None:
        """Take over one drawn token; a stop id or the token limit sets the finish reason."""
        self.ids[self.length] = token
        self.length += 1
        self.logprobs.append(logprob)
        self.versions.append(version)
        drawn = self.length - self.prompt_length
        if token in self.stop_ids and drawn >= self.params.min_tokens:
            self.finish_reason = "stop"
        elif drawn == self.params.max_tokens:
            self.finish_reason = "length"

    def to_sample(self, identity: Identity, scale_set: str | None, text: str) -> Sample:
        """The immutable record handed to the caller; `scale_set` is that of its newest token."""
        assert self.finish_reason is not None, "only finished sequences become samples"
        filters = self.params.filters
        return Sample(
            prompt_ids=self.ids[: self.prompt_length].copy(),
            completion_ids=self.completion_ids.copy(),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int64),
            identity=identity,
            key=self.key,
            params=self.params,
            finish_reason=self.finish_reason,
            kept_counts=np.array(self.kept_counts, np.int32) if filters else None,
            kept_digests=np.array(self.kept_digests, np.uint64) if filters else None,
            scale_set=scale_set,
            text=text,
            routing=None if self.routing is None else self.routing.first(self.length - 1),
        )
