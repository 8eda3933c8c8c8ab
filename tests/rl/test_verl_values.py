"""Corrections against verl 0.9.1, frozen by freeze_verl_values.py: weights, masks and figures of random batches.

verl's float32 run is met within its own rounding (bounds derived below), its float64 run within that of FP64. Where the
two define something differently (see rl/correction.py), the test says so and converts.
"""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.rl.rows import make_sample
from zerogap.config import CorrectionConfig
from zerogap.rl.correction import correct, mismatch_metrics
from zerogap.rl.metrics import flatten
from zerogap.types import TrainBatch

FROZEN = json.loads(Path(__file__).with_name("verl_values.json").read_text(encoding="utf-8"))
CASES = [pytest.param(case, id=f"{case['batch']}-{i}") for i, case in enumerate(FROZEN["cases"])]
UNIT = {"float32": 2.0**-24, "float64": 2.0**-53}
EXP = 4  # units: an exponential of up to 1 ulp (2 units of the smallest mantissa), twice over for ours


def bools(rows):
    return np.array([[c == "1" for c in row] for row in rows])


def train_batch(name):
    """The frozen batch, with NaN wherever the mask is 0: what stands there must not matter."""
    content = FROZEN["batches"][name]
    mask = bools(content["mask"])
    old, rollout = (np.where(mask, np.array(content[k], np.float32), np.float32(np.nan)) for k in ("old", "rollout"))
    samples = tuple(dataclasses.replace(make_sample(mask.shape[1]), logprobs=row) for row in rollout)
    return TrainBatch(samples, np.ones(len(mask)), tuple(mask), old_logprobs=tuple(old))


def log_ratios(name):
    """float64 [S, T], 0 where masked."""
    content = FROZEN["batches"][name]
    old, rollout = (np.array(content[key], np.float32).astype(np.float64) for key in ("old", "rollout"))
    return np.where(bools(content["mask"]), old - rollout, 0.0)


def weight_bound(case, unit):
    """Relative error [S, T] of verl's weight.

    d is rounded once (|d| units), a sum of T of them adds T sum|d|, exp turns both into relative errors; dividing by a
    mean of N positive weights adds the largest error of them, N + 2 for the sum and the division, and T for the mean of
    equal weights that verl takes per row.
    """
    d = log_ratios(case["batch"])
    size = np.abs(d)
    if case["verl"]["rollout_is"] == "sequence":
        size = np.broadcast_to((d.shape[1] + 1) * size.sum(-1, keepdims=True), d.shape)
    relative = (size + EXP) * unit
    if case["verl"]["rollout_is_batch_normalize"]:
        relative = relative + relative.max() + (d.size + d.shape[1] + 2) * unit
    return relative * 1.01


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("case", CASES)
def test_weights_and_masks(case, dtype):
    batch, _ = correct(train_batch(case["batch"]), CorrectionConfig(**case["correction"], veto=0.0))
    expected = case[dtype]
    masks = np.array(batch.masks)
    assert (masks == bools(expected["mask"])).all()
    live = bools(FROZEN["batches"][case["batch"]]["mask"])
    assert (np.array(batch.rejected) == (live & ~masks)).all()
    ours = np.array(batch.weights)
    assert (ours[~masks] == 0.0).all()
    if expected["weights"] is None:
        assert (ours[masks] == 1.0).all()
        return
    theirs = np.zeros(live.shape)
    theirs[live] = np.array(expected["weights"], dtype)
    bound = weight_bound(case, UNIT[dtype]) * theirs
    assert (np.abs(ours - theirs)[masks] <= bound[masks]).all()
    assert (ours[masks] == 0.0).tolist() == (theirs[masks] == 0.0).tolist()


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("case", CASES)
def test_figures_of_the_weights(case, dtype):
    """verl's are those of its weights before rejection and normalisation: only comparable where neither is asked."""
    _, metrics = correct(train_batch(case["batch"]), CorrectionConfig(**case["correction"], veto=0.0))
    flat, expected = flatten(metrics), case[dtype]["metrics"]
    assert flat["sampling/frac_rejected_tokens"] == pytest.approx(
        expected.get("rollout_rs_masked_fraction", 0.0), rel=16 * UNIT[dtype]
    )
    if "rollout_is_mean" not in expected or case["verl"].get("rollout_rs"):
        return
    num_tokens = metrics["sampling/raw_importance_sampling_ratio"].count
    relative = weight_bound(case, UNIT[dtype]).max() + (num_tokens + 4) * UNIT[dtype]
    if not case["verl"]["rollout_is_batch_normalize"]:
        assert flat["sampling/importance_sampling_ratio/mean"] == pytest.approx(
            expected["rollout_is_mean"], rel=relative
        )
    # (sum w)^2 / (n sum w^2): twice the mean's error and once that of the squares, and verl adds 1e-8 to the mean.
    shift = (1.0 + 1e-8 / expected["rollout_is_mean"]) ** 2
    assert flat["sampling/effective_sample_size"] * shift == pytest.approx(
        expected["rollout_is_eff_sample_size"], rel=5 * relative
    )


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("name", FROZEN["batches"])
def test_figures_of_the_gap(name, dtype):
    batch, d = train_batch(name), log_ratios(name)
    expected, unit = FROZEN["batches"][name][dtype], UNIT[dtype]
    logp = np.concatenate(batch.old_logprobs)
    rows = batch.rows(range(len(batch.samples)), logp, np.zeros_like(logp), version=0)
    flat = flatten(mismatch_metrics(rows))
    live = np.array(batch.masks)
    tokens, rows_live, terms = int(live.sum()), int(live.any(-1).sum()), d.size + 8
    size = np.abs(d[live])
    assert abs(flat["sampling/kl"] - expected["kl"]) <= terms * unit * size.mean()
    if size.max() <= 20:  # verl does not clamp here
        rho = np.exp(d[live])
        bound = terms * unit * (rho * (size + EXP) + size + 1).mean()
        assert abs(flat["sampling/k3_kl"] - expected["k3_kl"]) <= bound
    rho = np.exp(np.clip(d, -20, 20))[live]
    bound = unit * ((rho**2 * (2 * size + 2 * EXP + terms)).sum() / tokens + 2)
    assert abs(flat["sampling/chi2_token"] - expected["chi2_token"]) <= bound
    total = np.clip(d.sum(-1), -20, 20)
    error = 2 * (d.shape[1] + 1) * np.abs(d).sum(-1) + 2 * EXP + terms
    bound = unit * ((np.exp(2 * total) * error).sum() / len(d) + 2)
    # verl averages over all rows, those without a live token (ratio 1) included.
    assert abs(flat["sampling/chi2_seq"] * rows_live / len(d) - expected["chi2_seq"]) <= bound


def test_the_frozen_batches_reach_what_they_should():
    assert FROZEN["verl"] == "0.9.1"
    largest = {name: np.abs(log_ratios(name)).max() for name in FROZEN["batches"]}
    assert largest["close"] < math.log(1.2) < math.log(2) < largest["wide"] < 20 < largest["extreme"]
    kinds = {case["correction"]["kind"] for case in FROZEN["cases"]}
    statistics = {name for case in FROZEN["cases"] for name in case["correction"].get("reject", {})}
    assert len(kinds) == 8 and len(statistics) == 11
