"""A live side that computes with zerogap: the trainer's forward, and the engine's passes over known tokens.

Every path runs the decoder that was given, with whatever is wrong in its layers. `whole` is the trainer's packed
forward under autograd; `decode` and `chunked` are the engine's passes (prompt, then one row per step; chunks) over
pages of their own; `prefix_hit` runs a real `Engine`, whose prefix cache the sequence's beginning is taken from.
Boundaries come from the op tap, in the order of `graph.py`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from zerogap.diagnose.side import Ask
from zerogap.diagnose.sketch import sketch
from zerogap.diagnose.tap_boundaries import TapBoundaries, node_of
from zerogap.diagnose.trace import Definition, Pass, SequenceTrace, Trace
from zerogap.errors import ConfigError
from zerogap.models.decoder import Decoder
from zerogap.ops import tap
from zerogap.ops.logprob import token_logprobs
from zerogap.ops.sampling import SamplingRows
from zerogap.rollout.engine import Engine
from zerogap.train.packing import PAGE_SIZE, Pack, build_micro_batch
from zerogap.types import ForwardContext, LayerKV, Sample, SamplingKey, SamplingParams

RAW = Definition(temperature=1.0, processed=False, top_k=0, top_p=1.0, min_p=0.0)
ENGINE_PAGE = 16  # tokens per page of the engine's passes
CHUNK = 16  # tokens per chunk where an ask does not say

Span = tuple[int, int, int]  # (slot, first position, end)


def sampling_params(definition: Definition) -> SamplingParams:
    """How zerogap's ops score under a definition; raw log-probs are those of temperature 0."""
    if definition.processed is False:
        return SamplingParams(temperature=0.0)
    return SamplingParams(
        temperature=1.0 if definition.temperature is None else definition.temperature,
        top_k=definition.top_k or 0,
        top_p=1.0 if definition.top_p is None else definition.top_p,
        min_p=definition.min_p or 0.0,
    )


class _Watched:
    """A decoder that tells who watches which context every forward pass has; all else is the decoder's own."""

    def __init__(self, decoder: Decoder, begin: Callable[[ForwardContext], None]) -> None:
        self._decoder, self._begin = decoder, begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def hidden(self, ids_T: torch.Tensor, context: ForwardContext, kv: Sequence[LayerKV]) -> torch.Tensor:
        self._begin(context)
        return self._decoder.hidden(ids_T, context, kv)

    def logits(self, ids_T: torch.Tensor, context: ForwardContext, kv: Sequence[LayerKV]) -> torch.Tensor:
        self._begin(context)
        return self._decoder.logits(ids_T, context, kv)


@dataclasses.dataclass
class _Batch:
    """Sequences that share forward passes: theirs are numbered as the side's, neighbours' are -1."""

    ids: list[np.ndarray]
    prompts: list[int]
    sequences: list[int]


class ZerogapSide:
    """A decoder over given token sequences. Implements `side.Side`.

    Attributes:
        decoder: loaded weights; its layers may be anything that is called like the real ones.
        engine: what makes the engine of `prefix_hit`, called like `Engine`.
        disturb: a tap callback that is open in every pass, before the recording (a planted fault writes through it).
    """

    def __init__(
        self,
        decoder: Decoder,
        sequences: Sequence[Sequence[int]],
        *,
        prompt_lengths: Sequence[int] | None = None,
        path: str = "whole",
        batches: tuple[tuple[int, ...], ...] | None = None,
        definition: Definition = RAW,
        name: str = "zerogap",
        source: str = "",
        engine: Callable[..., Engine] = Engine,
        disturb: tap.Callback | None = None,
        recorded: Sequence[np.ndarray] | None = None,
        sketches: bool = False,
    ) -> None:
        """
        Args:
            sequences: token ids, prompt and completion, at least two tokens each.
            prompt_lengths: one per sequence; None: 1 each.
            path, batches, definition: of the side's own answer, as in `Ask`.
            recorded: log-probs float32 [N] per sequence that stand in place of the answer's own (a rollout's record).
            sketches: the trace holds sketches of all weights, as a trace that is saved should.

        Raises:
            ConfigError: a sequence that the model cannot read.
            ContractError: the contract calibrates the KV cache's scales and none are known.
        """
        decoder.require_calibrated()
        self.decoder, self.engine, self.disturb = decoder, engine, disturb
        self._ids = [np.asarray(ids, np.int32) for ids in sequences]
        self._prompts = [1] * len(self._ids) if prompt_lengths is None else list(prompt_lengths)
        for i, ids in enumerate(self._ids):
            if len(ids) < 2 or len(ids) > decoder.max_positions:
                raise ConfigError(f"sequences[{i}]", len(ids), f"give 2 to {decoder.max_positions} tokens")
            if ids.min() < 0 or ids.max() >= decoder.spec.vocab_size:
                raise ConfigError(f"sequences[{i}]", ids, f"token ids are 0 to {decoder.spec.vocab_size - 1}")
        self._starts = np.concatenate([[0], np.cumsum([len(ids) for ids in self._ids])]).tolist()
        self._definition = definition
        answer, seen = self._compute(Ask(path, batches, definition=definition, capture=True))
        if recorded is not None:
            answer = dataclasses.replace(answer, logprobs=tuple(np.asarray(p, np.float32) for p in recorded))
        self._trace = self._record(answer, seen, name, source, sketches)

    # ---- the protocol

    @property
    def trace(self) -> Trace:
        return self._trace

    def again(self, ask: Ask) -> Pass | None:
        """See `Side.again`. None for `speculative`, for replaced operators, and for a prefix hit in company."""
        if ask.path == "speculative" or ask.replace or (ask.path == "prefix_hit" and (ask.batches or ask.neighbours)):
            return None
        return self._compute(ask)[0]

    def weight(self, name: str) -> torch.Tensor | None:
        if name == "rope_table":
            return self.decoder.rope_table
        handle = self.decoder.head if name == "lm_head.weight" else self.decoder.weights.get(name)
        return None if handle is None else handle.value()

    def parameters(self, node: str) -> Mapping[str, object]:
        spec, numerics = self.decoder.spec, self.decoder.numerics
        operator = node.rsplit(".", 1)[-1]
        facts: dict[str, object] = {"implementation": "zerogap", "dtype": numerics.storage.value}
        if operator.endswith("norm"):
            heads = {"q_norm": spec.num_heads, "k_norm": spec.num_kv_heads}.get(operator, 1)
            return facts | {"eps": spec.norm_eps, "num_heads": heads}
        if operator.endswith("_rope"):
            rope = {"theta": spec.rope.theta, "head_dim": spec.rope_dim, "rope": spec.rope}
            return facts | rope | {"num_heads": spec.num_heads if operator == "q_rope" else spec.num_kv_heads}
        if operator == "attention":
            shape = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
            cache = {"kv_split": numerics.kv_split, "kv": numerics.kv.value}
            return facts | shape | cache | {"scale": spec.head_dim**-0.5, "causal": True}
        if operator == "activation":
            return facts | {"activation": "silu"}
        if operator in ("router", "experts") and spec.moe is not None:
            return facts | dataclasses.asdict(spec.moe.routing) | {"activation": "silu"}
        if operator.endswith("_proj"):
            handle = next((h for n, h in self.decoder.weights.items() if _computes(n, node)), None)
            fp8 = handle is not None and handle.spec.fp8 is not None
            return facts | {"fp8": fp8, "leaves": 1 if handle is None else handle.spec.in_leaves}
        if operator == "logprob":
            return facts | dataclasses.asdict(self._definition)
        return facts

    # ---- passes

    def _compute(self, ask: Ask) -> tuple[Pass, TapBoundaries]:
        definition = ask.definition or self._definition
        params = sampling_params(definition)
        seen = TapBoundaries(self._starts, self.decoder.spec.num_layers)
        logprobs = [np.full(len(ids), np.nan, np.float32) for ids in self._ids]
        batches = ask.batches or tuple((i,) for i in range(len(self._ids)))
        with contextlib.ExitStack() as stack:
            if self.disturb is not None:
                stack.enter_context(tap.listen(self.disturb))
            if ask.capture:
                stack.enter_context(tap.listen(seen))
            for batch in batches:
                if ask.path == "whole":
                    self._whole(self._batch(batch, ask), params, seen, logprobs)
                elif ask.path == "prefix_hit":
                    self._prefix_hit(batch[0], params, seen, logprobs)
                else:
                    self._stepwise(self._batch(batch, ask), ask, params, seen, logprobs)
                seen.finish()
        found = Pass(
            tuple(logprobs),
            ask.path,
            batches,
            definition,
            seen.boundaries,
            {"router": "FP32 logits", "residual": "residual stream after the addition"} if seen.boundaries else {},
            f"with {len(ask.neighbours)} neighbours" if ask.neighbours else "",
        )
        return found, seen

    def _batch(self, sequences: Sequence[int], ask: Ask) -> _Batch:
        others = [np.asarray(ids, np.int32) for ids in ask.neighbours]
        return _Batch(
            [*others, *(self._ids[i] for i in sequences)],
            [*(max(1, len(ids) // 2) for ids in others), *(self._prompts[i] for i in sequences)],
            [*([-1] * len(others)), *sequences],
        )

    def _whole(self, batch: _Batch, params: SamplingParams, seen: TapBoundaries, logprobs: list[np.ndarray]) -> None:
        """The trainer's forward pass over one pack."""
        samples = [self._sample(ids, params) for ids in batch.ids]
        pack = Pack(tuple(range(len(samples))), sum(s.num_tokens for s in samples))
        micro = build_micro_batch([pack], samples)
        context = dataclasses.replace(micro.context, output_rows=None)  # every row is one to be compared
        layers = self.decoder.scratch_kv(self.decoder.codec().allocate(micro.num_pages, PAGE_SIZE))
        with torch.enable_grad():
            self._score(batch, micro.ids, context, layers, params, seen, logprobs)

    def _stepwise(
        self, batch: _Batch, ask: Ask, params: SamplingParams, seen: TapBoundaries, logprobs: list[np.ndarray]
    ) -> None:
        """The engine's passes over pages of their own."""
        pages = -(-max(len(ids) for ids in batch.ids) // ENGINE_PAGE)
        table = torch.arange(len(batch.ids) * pages, dtype=torch.int32).view(len(batch.ids), pages)
        layers = self.decoder.new_kv(table.numel(), ENGINE_PAGE)
        lengths = [len(ids) for ids in batch.ids]
        chunk = ask.chunk or CHUNK
        steps = _decode_steps(lengths, batch.prompts) if ask.path == "decode" else _chunk_steps(lengths, chunk)
        for spans in steps:
            context = ForwardContext(
                positions=torch.cat([torch.arange(a, b, dtype=torch.int32) for _, a, b in spans]),
                sequences=torch.cat([torch.full((b - a,), slot, dtype=torch.int32) for slot, a, b in spans]),
                page_table=table,
                page_size=ENGINE_PAGE,
            )
            ids = torch.from_numpy(np.concatenate([batch.ids[slot][a:b] for slot, a, b in spans]).astype(np.int64))
            with torch.no_grad():
                self._score(batch, ids, context, layers, params, seen, logprobs)

    def _score(
        self,
        batch: _Batch,
        ids: torch.Tensor,
        context: ForwardContext,
        layers: Sequence[LayerKV],
        params: SamplingParams,
        seen: TapBoundaries,
        logprobs: list[np.ndarray],
    ) -> None:
        """One forward pass, all of whose rows go to the head; the last token of a sequence has no next one."""
        seen.begin(context, batch.sequences)
        hidden = self.decoder.hidden(ids, context, layers)
        places = list(zip(context.sequences.tolist(), (context.positions + 1).tolist(), strict=True))
        targets = [int(batch.ids[slot][at]) if at < len(batch.ids[slot]) else 0 for slot, at in places]
        rows = SamplingRows.of([params], [len(targets)])
        logp, _ = token_logprobs(hidden, self.decoder.head, torch.tensor(targets), rows, None, context)
        values = logp.detach().numpy()
        for row, (slot, at) in enumerate(places):
            if at == len(batch.ids[slot]):
                values[row] = np.nan
            elif (sequence := batch.sequences[slot]) >= 0:
                logprobs[sequence][at] = values[row]

    def _prefix_hit(self, index: int, params: SamplingParams, seen: TapBoundaries, logprobs: list[np.ndarray]) -> None:
        """A real engine that has served the sequence before, and takes its beginning from the prefix cache now.

        Log-probs start with the completion, or behind the first page where the prompt is shorter than one.
        """
        ids = self._ids[index]
        watched: Any = _Watched(self.decoder, lambda context: seen.begin(context, [index]))
        tokens = 4 * (len(ids) + ENGINE_PAGE)
        engine = self.engine(
            watched,
            page_size=ENGINE_PAGE,
            kv_cache_bytes=tokens * self.decoder.codec().bytes_per_token() * self.decoder.spec.num_layers,
            max_batch_tokens=max(16, len(ids)),
            max_sequences=1,
        )
        engine.generate([ids[:-1].tolist()], SamplingParams(temperature=0.0, max_tokens=1, stop_token_ids=()))
        first = self._prompts[index]
        if first <= ENGINE_PAGE < len(ids) - 1:
            first = ENGINE_PAGE + 1
        prompt, completion = ids[:first].tolist(), ids[first:].tolist()
        logprobs[index][first:] = engine.score(prompt, completion, params)

    def _sample(self, ids: np.ndarray, params: SamplingParams) -> Sample:
        count = len(ids) - 1
        return Sample(
            prompt_ids=ids[:1],
            completion_ids=ids[1:],
            logprobs=np.zeros(count, np.float32),
            versions=np.full(count, self.decoder.version, np.int64),
            identity=self.decoder.identity,
            key=SamplingKey(),
            params=params,
            finish_reason="length",
        )

    # ---- the record

    def _record(self, answer: Pass, seen: TapBoundaries, name: str, source: str, sketches: bool) -> Trace:
        decoder = self.decoder
        scales = "" if decoder.kv_scales is None else decoder.kv_scales.name
        layers = sorted(seen.experts)
        sequences = []
        for i, ids in enumerate(self._ids):
            rows = slice(self._starts[i], self._starts[i + 1])
            experts = margins = None
            if layers:
                experts = torch.stack([seen.experts[layer][rows] for layer in layers], 1).numpy()
                margins = torch.stack([seen.margins[layer][rows] for layer in layers], 1).numpy()
            versions = np.full(len(ids), decoder.version, np.int64)
            sequences.append(
                SequenceTrace(
                    ids, self._prompts[i], versions=versions, scale_set=scales, experts=experts, margins=margins
                )
            )
        return Trace(
            name=name,
            sequences=tuple(sequences),
            passes=(answer,),
            weights={n: sketch(handle.value()) for n, handle in decoder.weights.items()} if sketches else {},
            settings={"numerics": decoder.numerics.fields()},
            model=decoder.spec.to_hf(),
            source=source,
            versions={"torch": torch.__version__, "zerogap": str(decoder.identity)},
            layout={"ranks": 1},
        )


def _computes(weight: str, node: str) -> bool:
    """True if a weight's output is that node's."""
    return weight.endswith(".weight") and node_of(weight) == node


def _decode_steps(lengths: Sequence[int], prompts: Sequence[int]) -> Iterator[list[Span]]:
    """The prompts in one pass, then one row per sequence and pass."""
    yield [(slot, 0, prompt) for slot, prompt in enumerate(prompts)]
    for step in range(max(n - p for n, p in zip(lengths, prompts, strict=True))):
        places = [(slot, prompts[slot] + step) for slot in range(len(lengths))]
        yield [(slot, at, at + 1) for slot, at in places if at < lengths[slot]]


def _chunk_steps(lengths: Sequence[int], chunk: int) -> Iterator[list[Span]]:
    """Chunks of every sequence; a last one of a single row joins the one before, for a single row is decoding."""
    done = [0] * len(lengths)
    while any(at < n for at, n in zip(done, lengths, strict=True)):
        spans = []
        for slot, (at, n) in enumerate(zip(done, lengths, strict=True)):
            end = min(at + chunk, n)
            end = n if n - end == 1 and chunk > 1 else end
            if end > at:
                spans.append((slot, at, end))
            done[slot] = end
        yield spans
