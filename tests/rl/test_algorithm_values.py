"""Algorithms against verl 0.9.1 and TRL 1.16.0, frozen by freeze_algorithm_values.py in float64.

Bounds: theirs and ours are a few dozen roundings of FP64 apart, and our derivative is rounded once to FP32. verl adds
1e-8 to the number of tokens that a masked mean divides by; where it does, that is part of the bound.
"""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.rl.rows import make_sample
from zerogap.config import ALGORITHMS, AlgorithmConfig
from zerogap.rl.advantage import overlong_punishment, step_advantages
from zerogap.rl.loss import PolicyLoss
from zerogap.types import TrainBatch

FROZEN = json.loads(Path(__file__).with_name("algorithm_values.json").read_text(encoding="utf-8"))
INPUTS = FROZEN["inputs"]
UNITS = 64 * 2.0**-53  # of sums of at most 33 terms, an exponential, and a handful of products
VERL_EPS = 1e-8
SINGLE = 1.01 * 2.0**-24


def float32(name, column):
    return [np.array(row, np.float32) for row in INPUTS["batches"][name][column]]


def samples_of(name):
    return tuple(dataclasses.replace(make_sample(len(row)), logprobs=row) for row in float32(name, "old"))


def case_id(case):
    return "-".join(str(value) for key, value in case.items() if key not in ("advantages", "loss", "dlogp"))


@pytest.mark.parametrize("case", FROZEN["verl"]["advantages"], ids=case_id)
def test_advantages_of_verl(case):
    rewards, samples, ref = INPUTS["rewards"][case["rewards"]], samples_of("close"), float32("close", "ref")
    settings = {"kl_in_reward": True, "beta": INPUTS["beta"], "kl_estimator": case["kl"]} if case["kl"] else {}
    algorithm = AlgorithmConfig(name=case["name"], **settings)
    result = step_advantages(algorithm, 6, samples, rewards, INPUTS["groups"], reference=ref)
    ours = result.tokens or [np.full(len(s.completion_ids), v) for s, v in zip(samples, result.values, strict=True)]
    size = max(map(abs, rewards)) + (INPUTS["beta"] * 8 if case["kl"] else 0.0)  # sum of KL costs: below 8 here
    tokens = sum(len(a) for a in ours)
    scale, slack = 1.0, 0.0
    if algorithm.scale_rewards == "group":
        scale = 1e-4  # that of a group of equal rewards
    elif algorithm.scale_rewards == "whiten":
        # mean and variance are off by 1 part in tokens / 1e-8; the mean is below `size`, the deviation above 1/4
        scale, slack = 0.25, VERL_EPS / tokens
    for mine, theirs in zip(ours, case["advantages"], strict=True):
        theirs = np.array(theirs)
        bound = (UNITS * size * (1.0 + np.abs(theirs)) + slack * (size + np.abs(theirs))) / scale
        assert (np.abs(mine - theirs) <= bound).all()


def test_the_bounds_of_the_advantages_hold_what_they_assume():
    for scores in INPUTS["rewards"].values():
        for means in (np.zeros(8), np.repeat(np.reshape(scores, (2, 4)).mean(1), 4)):
            tokens = [r for r, row in zip(scores - means, float32("close", "old"), strict=True) for _ in row]
            assert np.std(tokens, ddof=1) > 0.25
    d = [o.astype(float) - r for o, r in zip(float32("close", "old"), float32("close", "ref"), strict=True)]
    assert max(np.abs(x).sum() + (np.expm1(-x) + x).sum() + (x * x).sum() for x in d) < 8


def result_of(case, loss, ref=False):
    name = case["batch"]
    content = INPUTS["batches"][name]
    samples = samples_of(name)
    batch = TrainBatch(
        samples=samples,
        advantages=np.array(content["advantages"]),
        masks=tuple(np.ones(len(s.completion_ids), bool) for s in samples),
        ref_logprobs=tuple(float32(name, "ref")) if ref else None,
    )
    logp = np.concatenate(float32(name, "logp"))
    rows = batch.rows(range(len(samples)), logp, np.zeros_like(logp), version=0)
    return loss(rows, loss.denominators(batch)), rows


def assert_close(case, result, rows, loss, eps):
    """Loss and derivative within the roundings of FP64, `eps`, and for the derivative one of FP32."""
    theirs = np.concatenate(case["dlogp"])
    np.testing.assert_allclose(result.dlogp, theirs, rtol=SINGLE + eps, atol=UNITS)
    ratio = np.exp(np.minimum(rows.logp.astype(float) - rows.old_logp, 20))
    size = np.maximum(ratio, 1.0 + loss.epsilon_high) * np.abs(rows.advantage) * np.maximum(1.0, np.abs(rows.logp))
    assert abs(float(result.loss) - case["loss"]) <= (UNITS + eps) * (size.sum() + len(size))


@pytest.mark.parametrize("case", FROZEN["verl"]["losses"], ids=case_id)
def test_losses_of_verl(case):
    surrogate = case["surrogate"]
    low, high = INPUTS["clips"][surrogate]
    loss = PolicyLoss(
        case["loss_type"],
        low,
        high,
        max_completion_length=INPUTS["max_length"],
        surrogate="cispo" if surrogate == "cispo" else "clip",
        level="sequence" if surrogate == "gspo" else "token",
    )
    assert_close(case, *result_of(case, loss), loss, VERL_EPS if case["loss_type"] == "grpo" else 0.0)


@pytest.mark.parametrize("case", FROZEN["trl"]["losses"], ids=case_id)
def test_losses_of_trl(case):
    """TRL's cispo has no lower bound; each of these losses has a KL."""
    cispo, sequence = case["loss_type"] == "cispo", case["level"] == "sequence"
    low, high = INPUTS["clips"]["cispo" if cispo else "gspo" if sequence else "clip"]
    loss = PolicyLoss(
        "dapo" if cispo else case["loss_type"],
        1.0 if cispo else low,
        high,
        beta=INPUTS["beta"],
        max_completion_length=INPUTS["max_length"],
        surrogate="cispo" if cispo else "clip",
        level=case["level"],
    )
    assert_close(case, *result_of(case, loss, ref=True), loss, 0.0)


def test_overlong_punishment_of_trl():
    overlong = FROZEN["trl"]["overlong"]
    ours = overlong_punishment(overlong["lengths"], 20, 8 / 20)
    assert np.abs(ours - overlong["values"]).max() <= UNITS
    assert ours.min() == -1.0 and (ours[:13] == 0.0).all() and -1.0 < ours[13] < 0.0


def test_the_frozen_cases_reach_what_they_should():
    assert (FROZEN["verl"]["version"], FROZEN["trl"]["version"]) == ("0.9.1", "1.16.0")
    assert {case["name"] for case in FROZEN["verl"]["advantages"]} < set(ALGORITHMS)
    names = INPUTS["batches"]
    gaps = {n: np.concatenate(float32(n, "logp")).astype(float) - np.concatenate(float32(n, "old")) for n in names}
    assert math.log(1.0004) < np.abs(gaps["close"]).max() < 0.2  # outside GSPO's range, inside PPO's
    assert np.abs(gaps["wide"]).max() > math.log(2.5) and np.abs(gaps["extreme"]).max() > 20
    for batch, gap in gaps.items():
        means = [part.mean() for part in np.split(gap, np.cumsum([len(r) for r in float32(batch, "old")])[:-1])]
        outside = [m for m in means if not math.log(1 - 3e-4) < m < math.log(1 + 4e-4)]
        assert len(outside) > 4
