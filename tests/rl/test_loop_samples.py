"""Single samples on their way through the loop: ids, rewards and NaN stay with the sample they belong to."""

import json
import zlib

import numpy as np
import pytest
import torch

from tests.tiny_runs import lines, recipe, train
from zerogap.errors import NonFiniteError
from zerogap.rl.loop import Run
from zerogap.rl.rollout_log import read_rollout

REWARDS = """
import zlib


def of_row(prompts, answer, **columns):
    return [zlib.crc32(repr((p[-1]["content"], a)).encode()) / 2**32 for p, a in zip(prompts, answer)]

"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("samples")


class Between:
    """Keeps what the engine drew for training and what the trainer was given; may change the former in between."""

    def __init__(self, run, change=lambda samples: samples):
        self.drawn, self.trained = [], []
        draw, learn = run.engine.generate, run.trainer.forward_backward

        def generate(*args, **kwargs):
            samples = draw(*args, **kwargs)
            if kwargs.get("num_samples", 1) > 1:
                self.drawn += samples
                samples = change(samples)
            return samples

        def forward_backward(batch, loss):
            self.trained.append(batch)
            return learn(batch, loss)

        run.engine.generate, run.trainer.forward_backward = generate, forward_backward


def test_sampled_ids_are_trained_though_their_text_has_other_ids(base):
    """Random bytes are rarely UTF-8, so hardly any completion is the encoding of its own text."""
    run = Run(recipe(base, "rollout.max_completion_length=40", name="ids"), "never")
    between = Between(run)
    assert run.train()
    trained = [sample for batch in between.trained for sample in batch.samples]
    assert len(trained) == len(between.drawn) == 36
    for sample, drawn in zip(trained, between.drawn, strict=True):
        assert sample.completion_ids.tolist() == drawn.completion_ids.tolist()
        assert sample.logprobs.tobytes() == drawn.logprobs.tobytes()
    again = [run.tokenizer.encode(s.text).tolist() if s.text else [] for s in trained]
    assert sum(ids != s.completion_ids.tolist() for ids, s in zip(again, trained, strict=True)) > 30
    assert run.mismatched_tokens == 0
    assert run.compared_tokens == sum(len(s.completion_ids) for s in trained)


def test_an_end_id_that_pads_elsewhere_is_live_and_nothing_follows_a_cut(base):
    """The tokenizer's padding token is its end token."""
    run = Run(recipe(base, "rollout.max_completion_length=60", name="ends"), "never")
    between = Between(run)
    assert run.tokenizer.backend.pad_token_id == run.tokenizer.backend.eos_token_id == 256
    assert run.train()
    reasons = set()
    for batch in between.trained:
        for sample, mask in zip(batch.samples, batch.masks, strict=True):
            reasons.add(sample.finish_reason)
            ids = sample.completion_ids.tolist()
            assert mask.all()
            assert 256 not in ids[:-1]
            assert (sample.finish_reason == "stop") == (ids[-1] == 256)
            assert sample.finish_reason == "stop" or len(ids) == 60
    assert reasons == {"stop", "length"}


def test_rewards_stay_with_rows_that_repeat_or_are_left_out(base):
    rows = [{"prompt": f"say {word}", "answer": f"{word}{i}"} for i in range(3) for word in ("one", "two")]
    rows.insert(2, {"prompt": "say " + "far too long " * 9, "answer": "never"})
    (base / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (base / "rows.py").write_text(REWARDS)
    recipe(base)
    settings = (f"data.train={base}/rows.jsonl", f"reward.functions={base}/rows.py:of_row")
    run = train(recipe(base, *settings, "optimizer.max_steps=4", name="rows"))
    assert len(run.prompts) == 6
    assert "1 prompts are longer than 40 tokens and left out" in (run.folder.path / "report.html").read_text()
    seen = set()
    for step in range(1, 5):
        logged = read_rollout(run.folder.rollouts, step)
        chosen = run.order.take(3 * (step - 1), 3)
        for i, (sample, reward) in enumerate(zip(logged.samples, logged.rewards, strict=True)):
            row = run.prompts[chosen[i // 4]].row
            prompt, answer = row.prompt[-1]["content"], row.columns["answer"]
            seen.add((prompt, answer))
            assert f"<|user|>{prompt}</s>" in run.tokenizer.decode(sample.prompt_ids)
            assert reward == zlib.crc32(repr((prompt, answer)).encode()) / 2**32
    assert len(seen) == 6


def test_a_nan_of_the_rollout_ends_the_run_named_in_its_log(base):
    def spoil(samples):
        samples[5].logprobs[1] = np.nan
        return samples

    run = Run(recipe(base, "parity.on_mismatch=warn", name="nan"), "never")
    Between(run, spoil)
    before = run.decoder.digests()
    with pytest.raises(NonFiniteError, match="rollout log-prob is nan at sample 5, completion position 1"):
        run.train()
    assert run.decoder.digests() == before
    (error,) = lines(run, "errors")
    assert error["step"] == 1
    assert "NonFiniteError: rollout log-prob is nan at sample 5, completion position 1" in error["error"]


def test_a_gradient_that_is_not_finite_ends_the_run_named_in_its_log(base):
    run = Run(recipe(base, name="gradient"), "never")
    learn = run.trainer.forward_backward

    def forward_backward(batch, loss):
        result = learn(batch, loss)
        run.trainer._gradients[3].view(-1)[0] = torch.inf
        return result

    run.trainer.forward_backward = forward_backward
    before = run.decoder.digests()
    with pytest.raises(NonFiniteError, match=run.trainer.trainable[3]):
        run.train()
    assert run.decoder.digests() == before
    assert run.trainer.trainable[3] in lines(run, "errors")[0]["error"]


def test_sampling_defaults_of_the_model_folder_are_named_and_not_applied(base):
    plain = train(recipe(base, "optimizer.max_steps=1", name="plain"))
    path = base / "model" / "generation_config.json"
    original = path.read_text()
    path.write_text(json.dumps(json.loads(original) | {"repetition_penalty": 1.3, "top_k": 3}))
    run = train(recipe(base, "optimizer.max_steps=1", name="defaults"))
    path.write_text(original)
    page = (run.folder.path / "report.html").read_text()
    assert "sampling defaults are ignored (repetition_penalty = 1.3, top_k = 3)" in page
    assert run.decoder.digests() == plain.decoder.digests()
    assert all(s.kept_counts is None for s in read_rollout(run.folder.rollouts, 1).samples)
