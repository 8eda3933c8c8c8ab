"""What a log-prob is the log-prob *of*: this token, after these tokens, at this temperature, over this kept set.

Equal bits alone would let both sides be wrong in the same way. So wherever rollout and trainer are compared as bits,
both are also held against the definition: a float64 log-softmax of the engine's FP32 logits, each value with the bound
of its own FP32 evaluation.
"""

import dataclasses
import json

import numpy as np
import pytest

from tests.bits import assert_same_bits
from tests.tiny import tiny_decoder, tiny_spec
from zerogap.rl.loss import PolicyLoss
from zerogap.rl.setup import scoring_trainer
from zerogap.rollout.engine import Engine
from zerogap.train.optimizer import OptimizerSettings
from zerogap.train.trainer import Trainer
from zerogap.types import Denominators, LossResult, Sample, SamplingParams, TokenRows, TrainBatch
from zerogap.weights.random_model import write_random_model

PROMPTS = [[5, 80, 200, 13, 44], [7], list(range(100, 170))]
LEAF = 128  # vocabulary leaf of the tiny model


@dataclasses.dataclass
class Seen:
    """A loss that keeps the rows it was given."""

    loss: PolicyLoss
    rows: list[TokenRows] = dataclasses.field(default_factory=list)

    def denominators(self, batch: TrainBatch) -> Denominators:
        return self.loss.denominators(batch)

    def __call__(self, rows: TokenRows, denominators: Denominators) -> LossResult:
        self.rows.append(rows)
        return self.loss(rows, denominators)


def make_trainer(family: str = "llama", numerics: str = "bf16") -> Trainer:
    decoder = tiny_decoder(family, numerics, peak=3.0)
    return Trainer(decoder, optimizer=OptimizerSettings(learning_rate=3e-3))


def batch_of(samples: list[Sample]) -> TrainBatch:
    advantages = np.array([1.0, -1.0] * len(samples))[: len(samples)]
    return TrainBatch(tuple(samples), advantages, tuple(np.ones(len(s.completion_ids), bool) for s in samples))


def definition(engine: Engine, sample: Sample, shift: int = 0, temperature: float | None = None):
    """(log-probs, bounds), float64 [C], of the completion by the definition; the kept set is a prefix of the ids by
    (logit descending, id ascending), as long as was recorded.

    Bound, u = 2^-24: a distance to the maximum carries 3 u (|y| + |max|); a summand that error, relative, and 1e-7 of
    exp; a sum over a leaf leaf / 16 + 7 additions; log 2 u |log sum| + 1e-7; the last subtraction u |log-prob|.

    Args:
        shift: look at the logits of this many rows later (a control).
        temperature: instead of the sample's own (a control).
    """
    first, u = len(sample.prompt_ids) - 1, 2.0**-24
    rows = engine.logits([*sample.prompt_ids, *sample.completion_ids], first).astype(np.float64)
    y = rows[np.arange(len(sample.completion_ids)) + shift]
    y /= np.float64(np.float32((sample.params.temperature if temperature is None else temperature) or 1.0))
    values, bounds = [], []
    for i, (row, token) in enumerate(zip(y, sample.completion_ids.tolist(), strict=True)):
        count = len(row) if sample.kept_counts is None else int(sample.kept_counts[i])
        kept = np.lexsort((np.arange(len(row)), -row))[:count]
        assert token in kept, f"token {i} is not in its kept set"
        distance = row[kept] - row.max()
        log_sum = np.log(np.exp(distance).sum())
        values.append(row[token] - row.max() - log_sum)
        error = 6 * u * (np.abs(row).max() + abs(row.max())) + 2e-7 + (LEAF / 16 + 7) * u + 2 * u * log_sum
        bounds.append(error + u * abs(values[-1]))
    return np.array(values), np.array(bounds)


def assert_defined(engine: Engine, sample: Sample, logprobs: np.ndarray) -> None:
    values, bounds = definition(engine, sample)
    assert (np.abs(logprobs - values) <= bounds).all(), np.abs(logprobs - values) / bounds


# ---- temperature


@pytest.mark.parametrize("temperature", [0.5, 0.6, 1.0, 1.3])
@pytest.mark.parametrize(("family", "numerics"), [("llama", "bf16"), ("qwen3", "fp32")])
def test_rollout_policy_old_and_reference_share_one_temperature(temperature, family, numerics):
    trainer, reference = make_trainer(family, numerics), scoring_trainer(tiny_decoder(family, numerics, peak=3.0), 4096)
    engine, cold = Engine.for_trainer(trainer), Engine.for_trainer(reference)
    params = SamplingParams(temperature=temperature, max_tokens=12)
    samples = engine.generate(PROMPTS, params, num_samples=2)
    for sample, by_reference in zip(samples, reference.logprobs(samples), strict=True):
        assert_defined(engine, sample, sample.logprobs)
        assert_same_bits(by_reference, sample.logprobs, "reference pass at equal weights")
        other, bounds = definition(engine, sample, temperature=temperature * 1.1)
        assert (np.abs(sample.logprobs - other) > 10 * bounds).any(), "the control: another temperature shows"

    batch, seen = batch_of(samples), Seen(PolicyLoss())
    result = trainer.forward_backward(batch, seen)
    assert (result.mismatched_tokens, result.compared_tokens) == (0, 12 * len(samples))
    trainer.optim_step()
    engine.update_weights(trainer)
    assert trainer.forward_backward(batch, seen).compared_tokens == 0, "the samples are older than the weights now"
    first, second = seen.rows
    drawn = np.concatenate([s.logprobs for s in samples])
    assert_same_bits(first.logp, drawn, "policy, first update")
    assert_same_bits(second.old_logp, drawn, "old log-probs of the second update")
    assert (second.logp != drawn).mean() > 0.5, "the weights changed"
    later = np.split(second.logp, len(samples))
    for sample, policy, scored in zip(samples, later, trainer.logprobs(samples), strict=True):
        assert_defined(engine, sample, policy)
        assert_same_bits(policy, scored, "policy, second update, against a scoring pass")
        assert_same_bits(policy, engine.score(sample.prompt_ids, sample.completion_ids, params), "and the engine")
        assert_defined(cold, sample, sample.logprobs)  # the reference is where it was


def test_a_batch_may_mix_temperatures_greedy_and_filtered_requests():
    trainer = make_trainer()
    engine = Engine.for_trainer(trainer)
    each = [SamplingParams(temperature=t, max_tokens=8) for t in (0.0, 0.6, 1.3, 0.0, 1.0, 0.5)]
    each.append(SamplingParams(temperature=0.8, top_k=7, max_tokens=8))
    samples = engine.generate([PROMPTS[0]] * 3 + [PROMPTS[2]] * 4, each)
    for sample, scored in zip(samples, trainer.logprobs(samples), strict=True):
        assert_same_bits(scored, sample.logprobs, str(sample.params))
        assert_defined(engine, sample, scored)
        if sample.params.temperature == 0:
            logits = engine.logits([*sample.prompt_ids, *sample.completion_ids], len(sample.prompt_ids) - 1)[:-1]
            assert sample.completion_ids.tolist() == logits.argmax(1).tolist()
    result = trainer.forward_backward(batch_of(samples), PolicyLoss(entropy_coef=0.1))
    assert (result.mismatched_tokens, result.compared_tokens) == (0, 8 * 7)
    assert 0 < trainer.optim_step().grad_norm < float("inf")


# ---- rows


def test_entry_i_belongs_to_token_i_of_each_packed_sample():
    trainer = make_trainer("qwen3")  # whose head is its own, so that tokens do not repeat themselves
    engine = Engine.for_trainer(trainer)
    samples = [
        engine.generate([prompt], SamplingParams(temperature=1.3, max_tokens=length))[0]
        for prompt, length in zip(PROMPTS, (9, 30, 4), strict=True)
    ]
    for sample, packed in zip(samples, trainer.logprobs(samples), strict=True):
        assert_defined(engine, sample, packed)
        values, bounds = definition(engine, sample, shift=1)
        assert (np.abs(packed - values) > 10 * bounds).all(), "the control: the next row's logits give other values"


@pytest.mark.parametrize("numerics", ["bf16", "fp32"])
def test_a_sample_has_the_same_bits_at_every_place_among_seven(numerics):
    """Alone, and with 0 to 6 samples of a token to 130 tokens before it: packed together, and drawn in one batch."""
    trainer = make_trainer("llama", numerics)
    engine = Engine.for_trainer(trainer, max_sequences=7)
    params = SamplingParams(max_tokens=70)
    (mine,) = engine.generate([PROMPTS[2]], params)
    rng = np.random.default_rng(0)
    lengths = (17, 1, 130, 64, 5, 33)
    others = engine.generate([rng.integers(0, 500, n).tolist() for n in lengths], SamplingParams(max_tokens=6))
    (alone,) = trainer.logprobs([mine])
    assert_same_bits(alone, mine.logprobs, "alone, against the rollout")
    for place in range(7):
        scored = trainer.logprobs([*others[:place], mine, *others[place:]])
        assert_same_bits(scored[place], alone, f"packed at place {place}")
        prompts = [s.prompt_ids for s in others]
        prompts.insert(place, mine.prompt_ids)
        keys = [s.key for s in others]
        keys = [dataclasses.replace(k, seed=1) for k in keys]
        keys.insert(place, mine.key)
        again = engine.generate(prompts, params, keys)[place]
        assert again.completion_ids.tolist() == mine.completion_ids.tolist()
        assert_same_bits(again.logprobs, mine.logprobs, f"drawn at place {place}")


# ---- kept sets


@pytest.mark.parametrize(
    "filters", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.9, "top_k": 50, "min_p": 0.01}], ids=str
)
def test_a_tie_at_the_border_of_a_kept_set_is_cut_alike_and_probabilities_are_over_the_set(filters):
    """Rows of the head come in equal fours, so that every logit has three exact ties."""
    trainer = make_trainer("qwen3")
    head = trainer.decoder.head
    head.load(head.value()[np.arange(500) // 4 * 4])
    engine = Engine.for_trainer(trainer)
    samples = engine.generate(PROMPTS, SamplingParams(**filters, max_tokens=16), num_samples=2)
    cut = 0
    for sample, scored in zip(samples, trainer.logprobs(samples), strict=True):
        assert_same_bits(scored, sample.logprobs, "the trainer finds the same set")
        assert_defined(engine, sample, scored)
        rows = np.sort(engine.logits([*sample.prompt_ids, *sample.completion_ids], len(sample.prompt_ids) - 1)[:-1])
        rows, counts = rows[:, ::-1], sample.kept_counts
        assert (rows[:, 0] == rows[:, 3]).all() and counts.max() < 500
        cut += sum(row[count - 1] == row[count] for row, count in zip(rows, counts.tolist(), strict=True))
    assert cut > 0 or "min_p" in filters, "some borders fall between ids of equal logits"
    assert trainer.forward_backward(batch_of(samples), PolicyLoss()).mismatched_tokens == 0


# ---- dropout


def test_dropout_in_the_config_of_a_model_drops_nothing(tmp_path):
    folder = write_random_model(tmp_path, tiny_spec(), seed=1, peak=3.0)
    plain = Trainer(folder)
    config = json.loads((folder / "config.json").read_text())
    rates = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout")
    (folder / "config.json").write_text(json.dumps(config | dict.fromkeys(rates, 0.5)))
    trainer = Trainer(folder)
    samples = Engine.for_trainer(trainer).generate(PROMPTS, SamplingParams(max_tokens=12))
    passes = [t.logprobs(samples) for t in (trainer, trainer, plain)]
    seen = Seen(PolicyLoss())
    for _ in range(2):
        assert trainer.forward_backward(batch_of(samples), seen).mismatched_tokens == 0
        passes.append(np.split(seen.rows[-1].logp, len(samples)))
    for scored in passes:
        for sample, logprobs in zip(samples, scored, strict=True):
            assert_same_bits(logprobs, sample.logprobs, "pass against the rollout")
