"""The rollout engine: continuous batching over a paged KV cache, around the same decoder that the trainer uses.

A step is four statements: schedule, lay out the batch, run, take over what was drawn. The forward pass with head and
sampling is recorded once, as a program over fixed buffers, and replayed for any number of rows; while an op tap is open
the same code runs op by op instead. Neither that nor batching, chunking, cache state, preemption or the order of
requests can change a token or a log-prob, which is tested as equality of bits.

The engine inherits nothing from a model folder's sampling defaults: how a request is sampled is what its
`SamplingParams` say.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from typing import Any

import numpy as np
import torch

from zerogap.errors import ConfigError, NonFiniteError
from zerogap.models.decoder import Decoder
from zerogap.numerics import require_equal
from zerogap.ops import tap
from zerogap.ops.cpu import library
from zerogap.ops.logprob import token_logprobs
from zerogap.ops.sampling import Drawn, SamplingRows
from zerogap.rollout.batch import BatchBuffers
from zerogap.rollout.completion_text import CompletionText
from zerogap.rollout.kv_cache import KVCache
from zerogap.rollout.pages import PagePool, root_key
from zerogap.rollout.prefill import prefill_chunks
from zerogap.rollout.progress import Progress, Statistics, TokenEvent
from zerogap.rollout.requests import Prompt, RequestLimits
from zerogap.rollout.sampler import DrawnRows, Sampler
from zerogap.rollout.scheduler import Chunk, Scheduler
from zerogap.rollout.sequence import Sequence
from zerogap.rollout.speculate import PassCost, Speculation, Speculator
from zerogap.routing import RoutingRecord
from zerogap.text import Tokenizer
from zerogap.types import ForwardContext, Sample, SamplingKey, SamplingParams


class Engine:
    """Draws samples from a decoder. Not for use by several threads at once.

    Attributes:
        decoder, tokenizer: as given; the decoder is shared with whoever trains it, there is one copy of the weights.
        version, scale_set: weight version of everything in the cache, and the name of its KV scale set, if calibrated.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer | None = None,
        *,
        page_size: int = 16,
        kv_cache_bytes: int = 1 << 30,
        max_batch_tokens: int = 512,
        max_sequences: int = 32,
        prefix_cache: bool = True,
        record_routing: bool = False,
        speculation: Speculation | None = None,
    ) -> None:
        """
        Args:
            decoder: loaded weights.
            tokenizer: for prompts as text or messages, stop strings, and the text of samples; ids work without.
            page_size: tokens per page of the KV cache, a multiple of 16.
            kv_cache_bytes: budget of the KV cache; less is taken where `max_sequences` cannot use it.
            max_batch_tokens: most tokens of one forward pass; longer prompts are computed in chunks.
            max_sequences: most sequences that are decoded together.
            prefix_cache: reuse the pages of equal beginnings. None of these five changes a bit of any result.
            record_routing: samples of a mixture-of-experts model say which experts each token went to.
            speculation: guess tokens and verify several at once; None: do not. Changes no bit either.

        Raises:
            ConfigError: a setting out of range.
            CapacityError: the budget does not hold one page.
        """
        if max_sequences < 1:
            raise ConfigError("max_sequences", max_sequences, "choose at least 1")
        if max_batch_tokens < max_sequences:
            raise ConfigError(
                "max_batch_tokens", max_batch_tokens, f"choose at least max_sequences ({max_sequences}): one token each"
            )
        self.decoder, self.tokenizer = decoder, tokenizer
        # Twice what all sequences at full length need: one half for them, one for prefixes that may come again.
        pages_each = -(-decoder.max_positions // page_size) if page_size > 0 else 1
        self._cache = KVCache.of(decoder, page_size, kv_cache_bytes, 2 * max_sequences * pages_each)
        pages_each = min(pages_each, self._cache.num_pages)
        self._record_routing = record_routing
        speculation = speculation or Speculation()
        self._cost = PassCost.under(decoder.numerics)
        self._speculator = Speculator(speculation, self._cost) if speculation.draft_tokens else None
        outputs = min(max_batch_tokens, speculation.most_rows(max_sequences))
        self._batch = BatchBuffers(
            max_batch_tokens, max_sequences, pages_each, page_size, self._new_routing_record(max_batch_tokens), outputs
        )
        self._sampler = Sampler(max_sequences, decoder.head.spec.out_leaf_size, outputs)
        pool = PagePool(self._cache.num_pages, page_size, prefix_cache)
        self._scheduler = Scheduler(pool, self._batch.page_table.numpy(), max_batch_tokens, max_sequences)
        self._limits = RequestLimits(decoder.spec, decoder.max_positions, self._cache, tokenizer)
        self._program: library.Program | None = None  # recorded at the first step, with the tensors it draws into
        self._outputs: Drawn | None = None
        self._counts = Statistics()
        self._num_requests = 0
        self._take_version()

    @classmethod
    def for_trainer(cls, trainer: Any, tokenizer: Tokenizer | None = None, **settings: Any) -> "Engine":
        """An engine on the trainer's own weights. `trainer` needs an attribute `decoder`; the tokenizer is the
        trainer's where it has one and none is given; settings are those of the constructor."""
        return cls(trainer.decoder, tokenizer or getattr(trainer, "tokenizer", None), **settings)

    # ---- what callers do

    def generate(
        self,
        prompts: List[Prompt],
        params: SamplingParams | List[SamplingParams],
        keys: List[SamplingKey] | None = None,
        *,
        num_samples: int = 1,
        progress: Callable[[Progress], None] | None = None,
    ) -> list[Sample]:
        """Draw completions.

        Args:
            prompts: texts, chat messages or lists of token ids.
            params: for all prompts, or one per prompt.
            keys: one per prompt, all distinct; with `num_samples` the members of a group count up from the key's own
                `sample`. None: seed 0, each prompt's place in the list as its slot.
            num_samples: completions per prompt.
            progress: called after every step.

        Returns:
            Samples in input order, the samples of one prompt next to each other.

        Where the contract calibrates the KV cache's scales and none are known, they are taken from these prompts.

        Raises:
            ConfigError, CapacityError: a request that cannot be honoured, before any work starts.
            NonFiniteError: the model's logits are not finite.
        """
        sequences = self._checked(prompts, params, keys, num_samples)
        began = time.perf_counter()
        unfinished = sequences
        try:
            self._queue(sequences)
            while unfinished:
                stepped = self.step()
                if any(s.finish_reason for s in stepped):
                    unfinished = [s for s in unfinished if s.finish_reason is None]
                if progress is not None:
                    finished, tokens = len(sequences) - len(unfinished), sum(s.num_drawn for s in sequences)
                    progress(Progress(finished, len(sequences), tokens, time.perf_counter() - began))
        finally:
            self._abort(sequences)
        return [s.to_sample(self.decoder.identity, self.scale_set, self._text(s)) for s in sequences]

    def stream(
        self,
        prompts: List[Prompt],
        params: SamplingParams | List[SamplingParams],
        keys: List[SamplingKey] | None = None,
        *,
        num_samples: int = 1,
    ) -> Iterator[TokenEvent]:
        """`generate`, token by token as they are drawn. Requests are checked at once; closing the iterator aborts what
        is not finished."""
        return self._events(self._checked(prompts, params, keys, num_samples, with_text=True))

    def update_weights(self, source: Any) -> None:
        """Take over the weights of a trainer or decoder after they changed.

        Weights are shared, so nothing is copied: every key and value is dropped, those of running sequences included,
        and computed again when it is next needed; tokens drawn from now on carry the new weight version.

        Raises:
            ContractError: the source follows another numerics contract.
            ConfigError: the source is another model.
        """
        decoder = getattr(source, "decoder", source)
        require_equal(self.decoder.numerics, decoder.numerics, "update_weights")
        if decoder.spec != self.decoder.spec or decoder.max_positions < self._limits.max_positions:
            raise ConfigError("update_weights", decoder.spec, "give a decoder of the same model and positions")
        if decoder is not self.decoder:
            # A program points at the weights it was recorded with, pages at the scales that they are read with.
            self.decoder, self._program, self._cache = decoder, None, self._cache.serving(decoder)
        self._take_version()

    @torch.no_grad()
    def score(
        self,
        prompt_ids: List[int],
        completion_ids: List[int],
        params: SamplingParams,
        *,
        chunk_tokens: int | None = None,
    ) -> np.ndarray:
        """Log-probs of given completion tokens, computed as this engine would have while drawing them.

        Args:
            params: temperature and filters; the kept sets are found anew.
            chunk_tokens: tokens of one forward pass; None: `max_batch_tokens`.

        Returns:
            float32 [C]; -inf for a token that the filters exclude.

        Raises:
            ConfigError, CapacityError: as for `generate`.
        """
        ids = self._known_ids(prompt_ids, completion_ids)
        targets, parts = torch.from_numpy(ids.astype(np.int64)), []
        for ids_T, context in self._prefill(ids[:-1], len(prompt_ids) - 1, chunk_tokens):
            hidden = self.decoder.hidden(ids_T, context, self._cache.layers)
            start, rows = int(context.positions[0]) + 1, context.output_rows
            assert rows is not None
            sampling = SamplingRows.of([params], [len(rows)])
            logp, _ = token_logprobs(hidden, self.decoder.head, targets[start + rows], sampling, None, context)
            parts.append(logp)
        return torch.cat(parts).numpy()

    @torch.no_grad()
    def logits(self, ids: List[int], first: int = 0, *, chunk_tokens: int | None = None) -> np.ndarray:
        """FP32 logits [len(ids) - first, V] of the rows from position `first` on (two ids at least), through pages and
        chunks; what stands before may come from the prefix cache."""
        known = self._known_ids(ids[:-1], ids[-1:])
        parts = [
            self.decoder.logits(ids_T, context, self._cache.layers)
            for ids_T, context in self._prefill(known, first, chunk_tokens)
        ]
        return torch.cat(parts).numpy()

    def remember(self, samples: List[Sample]) -> None:
        """Samples of earlier runs, oldest first, that speculation may copy from. What the engine draws itself it
        remembers anyway. Changes no bit; nothing without speculation."""
        if self._speculator is not None:
            self._speculator.remember(samples)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Running sequences keep their pages."""
        self._scheduler.pool.forget()

    @property
    def statistics(self) -> Statistics:
        """A copy of the counts so far."""
        scheduler = self._scheduler
        return dataclasses.replace(
            self._counts, cache_hit_tokens=scheduler.cache_hit_tokens, preemptions=scheduler.preemptions
        )

    # ---- one step

    def step(self) -> list[Sequence]:
        """Compute one batch; returns the sequences that drew a token in it."""
        self._require_current()
        began = time.perf_counter()
        try:
            if self._speculator is not None:
                self._speculator.propose(self._scheduler.running)
            if not (chunks := self._scheduler.schedule()):
                return []
            num_tokens, drawing = self._batch.fill(chunks)
            drawn = self._run(num_tokens, drawing)
        except BaseException:
            self._scheduler.drop_all()  # pages were published before they were computed
            raise
        accepted, stepped = self._apply(chunks, drawn)
        self._count(chunks, accepted, time.perf_counter() - began)
        return stepped

    def _run(self, num_tokens: int, drawing: list[tuple[Sequence, int]]) -> DrawnRows:
        """Forward, head and sampling of the rows in the buffers."""
        batch, count = self._batch, len(drawing)
        self._sampler.fill(drawing)
        if tap.is_open():
            with torch.no_grad():
                context = batch.context(num_tokens, count)
                logits = self.decoder.logits(batch.ids[:num_tokens], context, self._cache.layers)
                return DrawnRows.of(self._sampler.draw(logits), count)
        if self._program is None:
            self._program, self._outputs = self._record()
        assert self._outputs is not None
        self._program.run(tokens=num_tokens, outputs=count)
        return DrawnRows.of(self._outputs, count)

    def _record(self) -> tuple[library.Program, Drawn]:
        batch, sampler = self._batch, self._sampler
        tokens = (batch.ids, batch.positions, batch.sequences)
        with torch.no_grad(), library.record(tokens=tokens, outputs=(batch.output_rows, *sampler.inputs)) as program:
            logits = self.decoder.logits(batch.ids, batch.context(), self._cache.layers)
            outputs = sampler.draw(logits)
        return program, outputs

    def _new_routing_record(self, rows: int) -> RoutingRecord | None:
        """Buffers for what the routers of one step choose, where that is asked for."""
        if not self._record_routing:
            return None
        spec = self.decoder.spec
        if spec.moe is None:
            raise ConfigError("record_routing", True, "this model has no experts to route to: leave it False")
        return RoutingRecord.allocate(spec.moe.routed_layers(spec.num_layers), rows, spec.moe.top_k)

    def _apply(self, chunks: list[Chunk], drawn: DrawnRows) -> tuple[int, list[Sequence]]:
        """Take over what was computed and drawn; finished sequences leave. Returns how many guesses were accepted, and
        the sequences that drew."""
        stepped: list[Sequence] = []
        first = row = accepted = 0
        for chunk in chunks:
            sequence, valid = chunk.sequence, chunk.size - chunk.drafts
            if chunk.draws:
                right = self._take_over(sequence, drawn, row, chunk.drafts)
                row, accepted, valid = row + 1 + chunk.drafts, accepted + right, valid + right
                stepped.append(sequence)
            if sequence.routing is not None and self._batch.routing is not None:
                sequence.routing.write(chunk.start, self._batch.routing.trace(first, valid))
            first += chunk.size
            sequence.computed += valid
            if sequence.finish_reason is not None:
                self._leave(sequence)
        return accepted, stepped

    def _take_over(self, sequence: Sequence, drawn: DrawnRows, row: int, drafts: int) -> int:
        """Append what the row drew, and what the rows after it drew as long as they computed what was drawn before
        them; returns how many of the guesses are now tokens with keys and values."""
        tested = right = 0
        for ahead in range(drafts + 1):
            if not math.isfinite(drawn.logprobs[row + ahead]):
                self._refuse_row(sequence)
            token, guess = drawn.ids[row + ahead], int(sequence.ids[sequence.length]) if ahead < drafts else None
            sequence.append(token, drawn.logprobs[row + ahead], self.version)
            if sequence.params.filters:
                sequence.kept_counts.append(drawn.kept_counts[row + ahead])
                sequence.kept_digests.append(drawn.kept_digests[row + ahead])
            if sequence.text is not None:
                self._grow_text(sequence)
            tested, right = tested + (guess is not None), right + (token == guess)
            if token != guess or sequence.finish_reason is not None:
                break
        if self._speculator is not None and tested:
            self._speculator.verified(sequence, tested, right)
        return ahead

    def _leave(self, sequence: Sequence) -> None:
        """A finished or aborted sequence gives up what it holds."""
        self._scheduler.release(sequence)
        if self._speculator is not None:
            self._speculator.finish(sequence)

    def _refuse_row(self, sequence: Sequence) -> None:
        self._scheduler.drop_all()  # rows after this one were computed, but not taken over
        raise NonFiniteError(
            f"logits of request {sequence.index} ({sequence.key}) are not finite at completion token "
            f"{sequence.num_drawn}: the weights or the input hold a NaN or infinity"
        )

    @staticmethod
    def _grow_text(sequence: Sequence) -> None:
        text = sequence.text
        assert text is not None
        text.push(int(sequence.ids[sequence.length - 1]))
        if text.stopped:
            sequence.finish_reason = "stop"
        if sequence.finish_reason is not None:
            text.finish()

    def _count(self, chunks: list[Chunk], accepted: int, seconds: float) -> None:
        counts = self._counts
        rows, drafts = sum(chunk.size for chunk in chunks), sum(chunk.drafts for chunk in chunks)
        decode = sum(c.size - c.drafts == 1 and c.start >= c.sequence.prompt_length for c in chunks)
        counts.steps += 1
        counts.prefill_tokens += rows - decode - drafts
        counts.decode_tokens += decode
        counts.draft_tokens += drafts
        counts.accepted_tokens += accepted
        if decode:
            counts.decode_cost += self._cost(decode + drafts)
            counts.plain_cost += self._cost(decode) * (decode + accepted) / decode
        counts.decode_seconds += seconds * (decode + drafts) / rows
        counts.prefill_seconds += seconds * (rows - decode - drafts) / rows

    # ---- requests

    def _checked(
        self,
        prompts: List[Prompt],
        params: SamplingParams | List[SamplingParams],
        keys: List[SamplingKey] | None,
        num_samples: int,
        with_text: bool = False,
    ) -> list[Sequence]:
        """Check everything; one sequence per request, not queued yet."""
        sequences: list[Sequence] = []
        for request in self._limits.requests(prompts, params, keys, num_samples):
            sequence = Sequence.of(self._num_requests, request)
            if self._batch.routing is not None:
                sequence.record_routing(self._batch.routing)
            if self.tokenizer is not None and (with_text or request.params.stop):
                sequence.text = CompletionText(self.tokenizer, request.params)
            sequences.append(sequence)
            self._num_requests += 1
        if self.decoder.needs_calibration and sequences:
            self._require_same_weights()
            self.decoder.calibrate([s.ids[: s.prompt_length].tolist() for s in sequences[::num_samples]])
            self._take_version()
        return sequences

    def _queue(self, sequences: List[Sequence]) -> None:
        for sequence in sequences:
            self._scheduler.add(sequence)

    def _abort(self, sequences: List[Sequence]) -> None:
        """Take out what is not finished, after an error or when nobody wants it any more."""
        for sequence in sequences:
            if sequence.finish_reason is None:
                self._leave(sequence)
                sequence.finish_reason = "abort"

    def _text(self, sequence: Sequence) -> str:
        if sequence.text is not None:
            return sequence.text.text
        return (
            "" if self.tokenizer is None else self.tokenizer.decode(sequence.completion_ids, skip_special_tokens=True)
        )

    def _events(self, sequences: list[Sequence]) -> Iterator[TokenEvent]:
        given = [0] * len(sequences)
        try:
            self._queue(sequences)  # not before it is iterated: an iterator nobody starts cannot clean up
            while any(given[i] < s.num_drawn or s.finish_reason is None for i, s in enumerate(sequences)):
                if all(given[i] == s.num_drawn for i, s in enumerate(sequences)):
                    self.step()
                for i, s in enumerate(sequences):
                    for j in range(given[i], s.num_drawn):
                        last = s.finish_reason is not None and j + 1 == s.num_drawn
                        text = s.text.pieces[j] if s.text is not None else ""
                        token = int(s.completion_ids[j])
                        given[i] = j + 1
                        yield TokenEvent(i, token, s.logprobs[j], text, s.finish_reason if last else None)
        finally:
            self._abort(sequences)

    def _known_ids(self, prompt_ids: List[int], completion_ids: List[int]) -> np.ndarray:
        """int32 ids of both, checked like a request that would draw the completion."""
        prompt = self._limits.prompt_ids(prompt_ids, "prompt_ids")
        if not len(completion_ids):
            raise ConfigError("completion_ids", completion_ids, "give at least one token")
        completion = self._limits.known_ids(completion_ids, "completion_ids")
        self._limits.check_size(len(prompt), len(completion), "prompt_ids")
        return np.concatenate([prompt, completion])

    def _prefill(
        self, ids: np.ndarray, first: int, chunk_tokens: int | None
    ) -> Iterator[tuple[torch.Tensor, ForwardContext]]:
        self._require_current()
        return prefill_chunks(self._scheduler, ids, first, chunk_tokens or self._scheduler.max_batch_tokens)

    def _require_current(self) -> None:
        self._require_same_weights()
        self.decoder.require_calibrated()
        scales = self.decoder.kv_scales
        if self.scale_set != (None if scales is None else scales.name):
            mend = f"the decoder now holds {scales and scales.name}: call update_weights after set_kv_scales"
            raise ConfigError("engine.scale_set", self.scale_set, mend)

    def _require_same_weights(self) -> None:
        if self.decoder.version != self.version:
            mend = f"the weights are at version {self.decoder.version}: call update_weights after optim_step"
            raise ConfigError("engine.version", self.version, mend)
        if self.decoder.loads != self._loads:
            mend = "other weights were loaded since: call update_weights after load or load_state"
            raise ConfigError("engine.version", self.version, mend)

    def _take_version(self) -> None:
        self.version, self._loads = self.decoder.version, self.decoder.loads
        self._scheduler.drop_all()
        for sequence in self._scheduler.waiting:
            if sequence.routing is not None:
                sequence.routing.forget()  # a trace is of one weight version, and prefix hits leave gaps in it
        scales = self.decoder.kv_scales
        self.scale_set = None if scales is None else scales.name
        self._scheduler.root_key = root_key(self.version, self.scale_set, self.decoder.numerics.fingerprint())
