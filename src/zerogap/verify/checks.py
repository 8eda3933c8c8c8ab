"""The checks of the parity ladder. Each compares two ways to the same numbers and counts the bits that differ.

Checks compare FP32 logits wherever logits exist on both sides, and log-probs, token ids or digests elsewhere. Numbers
follow the ladder of docs/architecture.md; 9 (parallel layouts) comes with that feature.
"""

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from zerogap.errors import ParityError
from zerogap.models.decoder import Decoder
from zerogap.ops.kv_scales import KVScales
from zerogap.rl.loss import PolicyLoss
from zerogap.rollout.engine import Engine
from zerogap.rollout.speculate import Speculation
from zerogap.train.optimizer import OptimizerSettings
from zerogap.train.trainer import Trainer
from zerogap.types import BlockCodes, Sample, SamplingKey, SamplingParams, TrainBatch
from zerogap.verify.paths import Ids, decode_logits, engine_logits, trainer_logits
from zerogap.weights import open_model, save_folder
from zerogap.weights.save import NUMERICS_FILE

NamedTensor = tuple[str, torch.Tensor | BlockCodes]

# Training of a model with experts moves all that a run can move; biases in steps so large that choices change at once.
BALANCE_LOSS, ROUTER_BIAS_RATE = 0.01, 0.1
TAILS = ((1,), (2, 3), (4, 5, 6))  # ends of check 6's prompts, whose beginning they share
GUESS_ALL = Speculation(draft_tokens=6, min_match=1, always=True)  # check 7 verifies all that can be guessed


@dataclasses.dataclass
class Tally:
    """Numbers compared and numbers that differ in at least one bit; remembers the first difference."""

    compared: int = 0
    differing: int = 0
    first: str = ""

    def arrays(self, what: str, ours: torch.Tensor | np.ndarray, theirs: torch.Tensor | np.ndarray) -> None:
        """Compare two arrays of equal shape and 4-byte dtype as bits."""
        a, b = (np.ascontiguousarray(x.detach().numpy() if isinstance(x, torch.Tensor) else x) for x in (ours, theirs))
        assert a.dtype == b.dtype and a.dtype.itemsize == 4, f"{what}: {a.dtype} against {b.dtype}"
        if a.shape != b.shape:
            self.values(what, a.shape, b.shape)
            return
        wrong = np.flatnonzero(a.view(np.uint32).ravel() != b.view(np.uint32).ravel())
        self.compared += a.size
        self.differing += len(wrong)
        if len(wrong) and not self.first:
            at = int(wrong[0])
            self.first = f"{what}, element {at}: {a.ravel()[at].item()!r} against {b.ravel()[at].item()!r}"

    def values(self, what: str, ours: object, theirs: object) -> None:
        """Compare two plain values."""
        self.compared += 1
        if ours != theirs:
            self.differing += 1
            self.first = self.first or f"{what}: {ours!r} against {theirs!r}"

    def counts(self, what: str, compared: int, differing: int) -> None:
        """Add what somebody else compared."""
        self.compared += compared
        self.differing += differing
        if differing and not self.first:
            self.first = f"{what}: {differing} of {compared}"

    def samples(self, what: str, ours: Sequence[Sample], theirs: Sequence[Sample]) -> None:
        """Compare token ids and log-prob bits of samples drawn twice."""
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            self.arrays(f"{what}, sample {index}, ids", a.completion_ids, b.completion_ids)
            self.arrays(f"{what}, sample {index}, log-probs", a.logprobs, b.logprobs)


@dataclasses.dataclass
class Subject:
    """What a ladder climbs on.

    Attributes:
        decoder: the model; checks 8 and 10 train it in place.
        sequences: token ids, of lengths around the KV block size and one beyond it.
        source: where the model came from (tokenizer files travel with check 8's export), or None.
        page_sizes: the two page sizes that check 6 compares.
        steps: optimizer steps of check 10.
        trainable: tensors that checks 8 and 10 train.
        reload: test seam of check 8: what is written for each tensor (a planted fault replaces it).
        rescale: test seam of check 8: what the KV scales of the export become.
        guessing: test seam of check 7: makes the engine that guesses.
        logged: test seam of check 10: what the rollout's record becomes before it is trained on.
    """

    decoder: Decoder
    sequences: Sequence[Ids]
    page_sizes: tuple[int, int] = (16, 64)
    steps: int = 4
    trainable: Sequence[str] = ("all",)
    reload: Callable[[Iterable[NamedTensor]], Iterable[NamedTensor]] = iter
    rescale: Callable[[list], list] = list
    guessing: Callable[..., Engine] = Engine
    logged: Callable[[list[Sample]], list[Sample]] = list

    @property
    def prompts(self) -> list[Ids]:
        """Beginnings whose last position a chunk border, a block border or neither falls on."""
        longest = max(self.sequences, key=len)
        cuts = [c for c in (2, 17, 63, 64, 65, 66, len(longest) - 1) if c < len(longest)]
        return [longest[:cut] for cut in cuts] + [s[: len(s) - 1] for s in self.sequences if len(s) > 2]


def batch_size(subject: Subject, tally: Tally) -> None:
    """1: packs of the trainer computed in one pass equal the same packs computed one by one."""
    order = list(range(len(subject.sequences)))
    packs = [order[0::2], order[1::2]]
    together = trainer_logits(subject.decoder, subject.sequences, packs)
    alone = [t for pack in packs for t in trainer_logits(subject.decoder, subject.sequences, [pack])]
    for index, (a, b) in enumerate(zip(together, alone, strict=True)):
        tally.arrays(f"sequence {index}", a, b)


def packing(subject: Subject, tally: Tally) -> None:
    """2: a sequence in a pack with others, in any order, equals itself alone."""
    count = len(subject.sequences)
    alone = [trainer_logits(subject.decoder, [s], [[0]])[0] for s in subject.sequences]
    for order in (list(range(count)), list(reversed(range(count)))):
        packed = trainer_logits(subject.decoder, subject.sequences, [order])
        for place, index in enumerate(order):
            tally.arrays(f"sequence {index} at place {place}", packed[place], alone[index])


def prefill(subject: Subject, tally: Tally) -> None:
    """3: the engine's prefill of whole prompts equals the trainer."""
    prompts = subject.prompts
    engine = engine_logits(subject.decoder, prompts, prefix_cache=False, max_batch_tokens=4096)
    for index, (prompt, row) in enumerate(zip(prompts, engine, strict=True)):
        expected = trainer_logits(subject.decoder, [[*prompt, 0]], [[0]])[0][-1]
        tally.arrays(f"prompt {index} of {len(prompt)} tokens", row, expected)


def chunked_prefill(subject: Subject, tally: Tally) -> None:
    """4: prefill in chunks, with borders swept around the KV block size, equals prefill in one piece."""
    by_length = {len(p): p for p in subject.prompts if len(p) > 60}  # what a border does depends on lengths alone
    prompts = list(by_length.values())
    whole = engine_logits(subject.decoder, prompts, prefix_cache=False, max_batch_tokens=4096)
    for size in (17, 48, 62, 63, 64, 65, 66, 96):
        # The last chunk of a prompt must not be a single row: that is decoding, which check 5 is about.
        fitting = [(p, row) for p, row in zip(prompts, whole, strict=True) if len(p) % size != 1]
        if not fitting:
            continue
        settings = {"prefix_cache": False, "max_batch_tokens": size, "max_sequences": 1}
        chunked = engine_logits(subject.decoder, [p for p, _ in fitting], **settings)
        for (prompt, row), other in zip(fitting, chunked, strict=True):
            tally.arrays(f"prompt of {len(prompt)} tokens in chunks of {size}", other, row)


def decoding(subject: Subject, tally: Tally) -> None:
    """5: logits while decoding token by token equal those of a prefill of prompt and completion together."""
    for index, prompt in enumerate([subject.prompts[1], subject.prompts[2]]):
        sample, rows = decode_logits(subject.decoder, prompt, 8, SamplingKey(seed=5, prompt=index))
        ids = [*prompt, *sample.completion_ids.tolist()]
        prefixes = [ids[: len(prompt) + i] for i in range(len(rows))]
        expected = engine_logits(subject.decoder, prefixes, prefix_cache=False, max_batch_tokens=4096)
        for step, (row, other) in enumerate(zip(rows, expected, strict=True)):
            tally.arrays(f"prompt {index}, token {step}", row, other)


def cache_states(subject: Subject, tally: Tally) -> None:
    """6: prefix hits, preemption and another page size equal a cold engine with room for everything."""
    prompts = [[*subject.prompts[-1], *tail] for tail in TAILS]
    small, large = subject.page_sizes
    params = SamplingParams(max_tokens=small + 1, stop_token_ids=())  # all but the last are stored: one more page each
    keys = [SamplingKey(seed=6, prompt=i) for i in range(len(prompts))]

    def drawn(times: int = 1, **settings: object) -> tuple[list[Sample], Engine]:
        engine = Engine(subject.decoder, **settings)  # type: ignore[arg-type]
        for _ in range(times):
            samples = engine.generate(prompts, params, keys)
        return samples, engine

    cold, _ = drawn(prefix_cache=False, page_size=small)
    warm, engine = drawn(times=2, page_size=small)
    tally.samples("prefix hit", warm, cold)
    tally.values("the prefix cache was hit", engine.statistics.cache_hit_tokens > 0, True)
    tally.samples(f"page size {large}", drawn(prefix_cache=False, page_size=large)[0], cold)
    pages = sum(-(-len(p) // small) for p in prompts[:2]) + 1  # room for two prompts, but not for both completions
    budget = pages * small * subject.decoder.codec().bytes_per_token() * len(subject.decoder.blocks)
    tight, engine = drawn(prefix_cache=False, page_size=small, kv_cache_bytes=budget)
    tally.samples("preemption", tight, cold)
    tally.values("a sequence was preempted", engine.statistics.preemptions > 0, True)


def speculation(subject: Subject, tally: Tally) -> None:
    """7: tokens guessed and verified several at a time equal plain decoding: greedy, tempered and filtered, where all
    guesses are right and where most are wrong; and what continues them finds the right pages."""
    prompts = [[*subject.prompts[-1], *tail] for tail in TAILS]
    greedy = SamplingParams(temperature=0.0, max_tokens=17, stop_token_ids=())  # a full page more, as in check 6
    params = [
        greedy,
        dataclasses.replace(greedy, temperature=1.0),
        dataclasses.replace(greedy, temperature=0.7, top_k=20, top_p=0.9),
    ]
    plain = Engine(subject.decoder)
    guessing = subject.guessing(subject.decoder, speculation=GUESS_ALL)

    def drawn(engine: Engine, step: int) -> list[Sample]:
        keys = [SamplingKey(seed=7, step=step, prompt=i) for i in range(len(prompts))]
        return engine.generate(prompts, params, keys, num_samples=2)

    for step, what in ((0, "first epoch"), (1, "fresh noise"), (0, "the same noise again")):
        samples = drawn(guessing, step)
        tally.samples(what, samples, drawn(plain, step))
    for sample in samples[::2]:
        ids = [*sample.prompt_ids.tolist(), *sample.completion_ids.tolist()]
        rows = (engine.logits(ids, len(ids) - 1) for engine in (guessing, plain))
        tally.arrays("logits after a completion that was guessed", *rows)
    counts = guessing.statistics
    tally.values("a guess was accepted", counts.accepted_tokens > 0, True)
    tally.values("a guess was rejected", counts.draft_tokens > counts.accepted_tokens, True)


def second_step(subject: Subject, tally: Tally) -> None:
    """8: after an optimizer step, an update, an export and a reload: equal digests, and checks 3 to 7 once more."""
    _train(subject, Tally(), steps=1, seed=8)
    decoder = subject.decoder
    with tempfile.TemporaryDirectory() as folder:
        tensors = ((name, handle.stored()) for name, handle in decoder.weights.items())
        scales = None if decoder.kv_scales is None else subject.rescale(decoder.kv_scales.to_list())
        save_folder(Path(folder) / "model", decoder.spec, subject.reload(tensors), numerics_meta={"kv_scales": scales})
        files = open_model(Path(folder) / "model")
        again = Decoder(files.spec, decoder.numerics, max_positions=decoder.max_positions).load(files.tensors())
        if decoder.calibrated:
            stored = json.loads((Path(folder) / "model" / NUMERICS_FILE).read_text())["kv_scales"]
            again.set_kv_scales(KVScales.from_list(stored))
    ours, theirs = decoder.digests(), again.digests()
    for name in ours:
        tally.values(f"digest of {name}", theirs.get(name), ours[name])
    prompts = subject.prompts
    expected = [trainer_logits(decoder, [[*p, 0]], [[0]])[0][-1] for p in prompts]
    rows = engine_logits(again, prompts, prefix_cache=False, max_batch_tokens=4096)
    for index, (row, other) in enumerate(zip(rows, expected, strict=True)):
        tally.arrays(f"reloaded engine, prompt {index}", row, other)
    for check in (prefill, chunked_prefill, decoding, cache_states, speculation):
        check(subject, tally)


def direct(subject: Subject, tally: Tally) -> None:
    """10: over real optimizer steps, the log-probs that the rollout logged are the trainer's."""
    _train(subject, tally, subject.steps, seed=10)


def _train(subject: Subject, tally: Tally, steps: int, seed: int) -> None:
    """`steps` rounds of rollout, training on the drawn samples, and update, on the subject's own decoder.

    Of a model with experts, which ones the rollout chose for each token is compared, too.
    """
    moe = subject.decoder.spec.moe
    trainer = Trainer(
        subject.decoder,
        optimizer=OptimizerSettings(learning_rate=1e-3),
        trainable=subject.trainable,
        on_mismatch="warn",
        balance_loss=BALANCE_LOSS if moe is not None else 0.0,
        router_bias_rate=ROUTER_BIAS_RATE if moe is not None and moe.has_bias else 0.0,
    )
    engine = Engine.for_trainer(trainer, record_routing=moe is not None)
    prompts = [list(p) for p in (subject.prompts[0], subject.prompts[1], subject.prompts[-1])]
    for step in range(steps):
        params = SamplingParams(temperature=0.8, max_tokens=10, stop_token_ids=())
        keys = [SamplingKey(seed=seed, step=step, prompt=i) for i in range(len(prompts))]
        samples = subject.logged(engine.generate(prompts, params, keys, num_samples=2))
        advantages = np.array([1.0 if i % 2 else -1.0 for i in range(len(samples))])
        masks = tuple(np.ones(len(s.completion_ids), bool) for s in samples)
        result = trainer.forward_backward(TrainBatch(tuple(samples), advantages, masks), PolicyLoss())
        if not result.compared_tokens:
            raise ParityError("no token of the rollout carries the trainer's weight version")
        tally.counts(f"step {step}: log-probs", result.compared_tokens, result.mismatched_tokens)
        tally.counts(f"step {step}: tokens' experts", result.routing_compared, result.routing_mismatched)
        trainer.optim_step()
        engine.update_weights(trainer)
