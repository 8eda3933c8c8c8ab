"""Every correction on log-ratios whose results can be worked out by hand, and what no correction may do."""

import dataclasses
import math
import typing

import numpy as np
import pytest

from tests.rl.rows import make_batch, make_sample
from zerogap.config import CorrectionConfig, load_config
from zerogap.config.correction import RATIO_BOUNDS, REJECTIONS
from zerogap.errors import ConfigError, NonFiniteError
from zerogap.rl.correction import LogRatios, correct, mismatch_metrics
from zerogap.rl.metrics import flatten
from zerogap.types import TrainBatch

E = math.exp
NAN = float("nan")
KINDS = tuple(RATIO_BOUNDS)


def batch_of(*rows):
    """One completion per row of log-ratios; None: a masked token whose log-probs are NaN. Sums of eighths are exact."""
    samples, old = [], []
    for row in rows:
        d = np.array([NAN if v is None else v for v in row], np.float32)
        rollout = np.where(np.isnan(d), d, np.float32(-4.0))
        samples.append(dataclasses.replace(make_sample(len(row)), logprobs=rollout))
        old.append(rollout + d)
    masks = tuple(np.array([v is not None for v in row], bool) for row in rows)
    return TrainBatch(tuple(samples), np.ones(len(rows)), masks, old_logprobs=tuple(old))


def corrected(rows, **settings):
    """(weights, masks as 0/1, flat metrics) with no veto unless asked."""
    batch, metrics = correct(batch_of(*rows), CorrectionConfig(**{"veto": 0.0, **settings}))
    return [w.tolist() for w in batch.weights], [m.astype(int).tolist() for m in batch.masks], flatten(metrics)


A = (0.5, 1.0, -2.0)  # ratios 1.6487, 2.7183, 0.1353; product e^-0.5 = 0.6065; geometric mean e^(-1/6) = 0.8465
B = (0.25, None, 0.75)  # ratios 1.2840, 2.1170; product e^1 = 2.7183; geometric mean e^0.5 = 1.6487
DEAD = (None, None)
ALL = [[1, 1, 1], [1, 0, 1], [0, 0]]


def test_token_tis_cuts_each_ratio_at_the_upper_bound():
    weights, masks, flat = corrected([A, B, DEAD], kind="token_tis")
    assert weights == [[E(0.5), 2.0, E(-2.0)], [E(0.25), 0.0, 2.0], [0.0, 0.0]]
    assert masks == ALL
    assert flat["sampling/frac_modified_importance_sampling_ratio"] == 2 / 5
    assert flat["sampling/raw_importance_sampling_ratio/max"] == E(1.0) == pytest.approx(2.718281828459045)
    assert flat["sampling/importance_sampling_ratio/max"] == 2.0
    assert corrected([A], kind="token_tis", upper=1.5)[0] == [[1.5, 1.5, E(-2.0)]]


def test_sequence_tis_cuts_the_product_and_gives_it_to_every_token():
    weights, masks, flat = corrected([A, B, DEAD], kind="sequence_tis")
    assert weights == [[E(-0.5)] * 3, [2.0, 0.0, 2.0], [0.0, 0.0]]
    assert masks == ALL
    assert flat["sampling/frac_modified_importance_sampling_ratio"] == 2 / 5
    assert flat["sampling/raw_importance_sampling_ratio/mean"] == pytest.approx((3 * 0.60653066 + 2 * 2.71828183) / 5)


def test_token_mis_rejects_tokens_outside():
    weights, masks, flat = corrected([A, B], kind="token_mis")
    assert weights == [[E(0.5), 0.0, 0.0], [E(0.25), 0.0, 0.0]]
    assert masks == [[1, 0, 0], [1, 0, 0]]
    assert flat["sampling/frac_rejected_tokens"] == flat["sampling/frac_modified_importance_sampling_ratio"] == 3 / 5
    assert flat["sampling/frac_rejected_sequences"] == 0.0
    assert corrected([A, B], kind="token_mis", upper=3.0)[1] == [[1, 1, 0], [1, 0, 1]]


def test_sequence_mis_rejects_completions_outside():
    weights, masks, flat = corrected([A, B, DEAD], kind="sequence_mis")
    assert weights == [[E(-0.5)] * 3, [0.0] * 3, [0.0, 0.0]]
    assert masks == [[1, 1, 1], [0, 0, 0], [0, 0]]
    assert flat["sampling/frac_rejected_tokens"] == 2 / 5
    assert flat["sampling/frac_rejected_sequences"] == 1 / 2, "completions without a live token do not count"


def test_sequence_mask_gives_weight_0_and_keeps_the_tokens():
    assert corrected([A, B], kind="sequence_mask")[0] == [[E(-0.5)] * 3, [E(1.0), 0.0, E(1.0)]]
    weights, masks, flat = corrected([A, B], kind="sequence_mask", lower=0.5, upper=2.5)
    assert weights == [[E(-0.5)] * 3, [0.0] * 3]
    assert masks == ALL[:2]
    assert flat["sampling/frac_rejected_tokens"] == 0.0
    assert flat["sampling/frac_modified_importance_sampling_ratio"] == 2 / 5


def test_geometric_mis_rejects_by_the_mean_and_weighs_nothing():
    near = (0.0009765625, 0.0009765625)  # 2^-10: geometric mean 1.00097703
    weights, masks, flat = corrected([A, B, near], kind="geometric_mis")
    assert weights == [[0.0] * 3, [0.0] * 3, [1.0, 1.0]]
    assert masks == [[0, 0, 0], [0, 0, 0], [1, 1]]
    assert flat["sampling/raw_importance_sampling_ratio/min"] == pytest.approx(0.846481725)
    assert corrected([A, B], kind="geometric_mis", lower=0.8, upper=1.2)[1] == [[1, 1, 1], [0, 0, 0]]


def test_icepop_gives_weight_0_outside_and_keeps_the_tokens():
    weights, masks, _ = corrected([A, B, (2.0,)], kind="icepop")
    assert weights == [[E(0.5), E(1.0), 0.0], [E(0.25), 0.0, E(0.75)], [0.0]]
    assert masks == [[1, 1, 1], [1, 0, 1], [1]]


def test_veto_rejects_the_whole_completion_of_one_bad_token():
    rows = [(0.5, -9.25), (0.5, -9.125), (None, 0.5)]  # e^-9.25 = 9.61e-5, e^-9.125 = 1.09e-4
    weights, masks, flat = corrected(rows, kind="token_tis", veto=1e-4)
    assert masks == [[0, 0], [1, 1], [0, 1]]
    assert weights == [[0.0, 0.0], [E(0.5), E(-9.125)], [0.0, E(0.5)]]
    assert flat["sampling/frac_vetoed_sequences"] == flat["sampling/frac_rejected_sequences"] == 1 / 3
    assert corrected(rows, kind="token_tis", veto=0.0)[1] == [[1, 1], [1, 1], [0, 1]]
    assert CorrectionConfig(kind="token_tis").veto == 1e-4
    assert corrected([(-25.0,), (0.0,)], kind="token_tis", veto=1e-9)[1] == [[0], [1]], "before any clamp"


def test_normalised_weights_have_mean_1_over_what_is_left():
    weights, _, flat = corrected([A, B], kind="token_tis", normalise=True)
    mean = (1.6487212707 + 2.0 + 0.1353352832 + 1.2840254167 + 2.0) / 5
    assert weights[0] == pytest.approx([1.6487212707 / mean, 2.0 / mean, 0.1353352832 / mean])
    assert flat["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, rel=1e-15)
    assert flat["sampling/frac_modified_importance_sampling_ratio"] == 2 / 5, "scaling modifies no single weight"
    # Per completion: two weights, 0.6065 and 2, whatever the number of their tokens.
    weights, _, _ = corrected([A, B], kind="sequence_tis", normalise=True)
    assert weights[1][0] == pytest.approx(2.0 / ((0.60653066 + 2.0) / 2))
    # Rejected tokens have no part in the mean; masked ones of weight 0 do.
    assert corrected([A, B], kind="token_mis", normalise=True)[0][0][0] == pytest.approx(
        1.6487212707 / ((1.6487212707 + 1.2840254167) / 2)
    )
    assert corrected([(0.5, 2.0)], kind="icepop", normalise=True)[0] == [[pytest.approx(2.0), 0.0]]
    assert corrected([(2.0, 2.0)], kind="icepop", normalise=True)[0] == [[0.0, 0.0]], "no division by 0"
    assert corrected([(2.0, 2.0)], kind="token_mis", normalise=True)[1] == [[0, 0]]


# Statistics of A: k1 .5, 1, -2; k2 .125, .5, 2; k3 .1487, .7183, 1.1353; of B: k1 .25, .75; k2 .03125, .28125;
# k3 .0340, .3670. Two limits each, one just below and one just above a value.
REJECTED = [
    ("token_k1", [0.2, 2.0], [[1, 0, 0], [1, 0, 0]]),
    ("token_k1", 3.0, [[1, 1, 0], [1, 0, 1]]),
    ("token_k2", 0.49, [[1, 0, 0], [1, 0, 1]]),
    ("token_k2", 0.5, [[1, 1, 0], [1, 0, 1]]),
    ("token_k3", 0.148, [[0, 0, 0], [1, 0, 0]]),
    ("token_k3", 0.149, [[1, 0, 0], [1, 0, 0]]),
    ("sequence_sum_k1", [0.61, 3.0], [[0, 0, 0], [1, 0, 1]]),
    ("sequence_sum_k1", [0.6, 2.7], [[1, 1, 1], [0, 0, 0]]),
    ("sequence_sum_k2", 2.62, [[0, 0, 0], [1, 0, 1]]),
    ("sequence_sum_k2", 2.625, [[1, 1, 1], [1, 0, 1]]),
    ("sequence_sum_k3", 2.002, [[0, 0, 0], [1, 0, 1]]),
    ("sequence_sum_k3", 2.003, [[1, 1, 1], [1, 0, 1]]),
    ("sequence_mean_k1", [0.847, 1.7], [[0, 0, 0], [1, 0, 1]]),
    ("sequence_mean_k1", [0.846, 1.64], [[1, 1, 1], [0, 0, 0]]),
    ("sequence_mean_k2", 0.87, [[0, 0, 0], [1, 0, 1]]),
    ("sequence_mean_k2", 0.875, [[1, 1, 1], [1, 0, 1]]),
    ("sequence_mean_k3", 0.2, [[0, 0, 0], [0, 0, 0]]),
    ("sequence_mean_k3", 0.201, [[0, 0, 0], [1, 0, 1]]),
    ("sequence_max_k2", 0.28, [[0, 0, 0], [0, 0, 0]]),
    ("sequence_max_k2", 1.99, [[0, 0, 0], [1, 0, 1]]),
    ("sequence_max_k2", 2.0, [[1, 1, 1], [1, 0, 1]]),
    ("sequence_max_k3", 1.135, [[0, 0, 0], [1, 0, 1]]),
    ("sequence_max_k3", 1.136, [[1, 1, 1], [1, 0, 1]]),
]


@pytest.mark.parametrize(("name", "limit", "expected"), REJECTED)
def test_rejection_by_an_estimate_of_the_divergence(name, limit, expected):
    weights, masks, flat = corrected([A, B], kind="none", reject={name: limit})
    assert masks == expected
    assert weights == [[float(v) for v in row] for row in expected], "weight 1 where kept"
    assert flat["sampling/frac_rejected_tokens"] == (5 - sum(map(sum, expected))) / 5


def test_every_rejection_is_tested_and_all_must_pass():
    assert {name for name, _, _ in REJECTED} == set(REJECTIONS)
    both = corrected([A, B], kind="token_tis", reject={"token_k2": 0.5, "sequence_sum_k1": [0.61, 3.0]})
    assert both[1] == [[0, 0, 0], [1, 0, 1]]
    assert both[0] == [[0.0] * 3, [E(0.25), 0.0, 2.0]]


def test_log_ratios_are_clamped_before_they_are_exponentiated():
    rows = [(300.0, 0.0), (-300.0, -300.0), (15.0, 15.0)]
    token = corrected(rows, kind="token_tis", upper=1e30)[0]
    assert token == [[E(20.0), 1.0], [E(-20.0)] * 2, [E(15.0)] * 2]
    assert corrected(rows, kind="sequence_tis", upper=1e30)[0] == [[E(20.0)] * 2, [E(-20.0)] * 2, [E(20.0)] * 2]
    # Rejection judges clamped tokens (20 - 20 = 0), the weight the true sum: cut at the bound it was accepted by.
    assert corrected([(300.0, -20.0)], kind="sequence_mis")[0] == [[2.0, 2.0]]


def test_sums_over_a_completion_are_exact():
    gap = LogRatios(np.array([16.0, 2.0**-50, -16.0]), np.zeros(3, np.int64))
    assert gap.statistic("sequence_sum_k1").tolist() == [2.0**-50] * 3
    assert gap.ratios("sequence").tolist() == [1 + 2.0**-50] * 3


def test_effective_sample_size():
    flat = corrected([(0.5, -1.0), (0.25, 3.0)], kind="icepop")[2]
    weights = [1.6487212707, 0.0, 1.2840254167, 0.0]
    assert flat["sampling/effective_sample_size"] == pytest.approx(
        sum(weights) ** 2 / (4 * sum(w * w for w in weights))
    )
    assert corrected([(0.0, 0.0)], kind="token_tis")[2]["sampling/effective_sample_size"] == 1.0
    assert corrected([(3.0, 3.0)], kind="icepop")[2]["sampling/effective_sample_size"] == 0.0
    half = corrected([(0.0, 0.0), (3.0, 3.0)], kind="token_mis")[2]
    assert half["sampling/effective_sample_size"] == 0.5, "rejected tokens say nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_sides_that_agree_need_no_correction(kind):
    weighted = kind not in ("none", "geometric_mis")
    settings = CorrectionConfig(kind=kind, reject={"sequence_max_k3": 1e-9}, normalise=weighted)
    batch, metrics = correct(batch_of((0.0, 0.0, None), (0.0,), DEAD, ()), settings)
    assert [w.tolist() for w in batch.weights] == [[1.0, 1.0, 0.0], [1.0], [0.0, 0.0], []]
    assert not any(r.any() for r in batch.rejected)
    assert flatten(metrics)["sampling/frac_modified_importance_sampling_ratio"] == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_neither_order_nor_neighbours_change_a_bit(kind):
    settings = CorrectionConfig(kind=kind, reject={"sequence_mean_k2": 0.6})
    batch, _ = make_batch((9, 1, 30, 4, 17), seed=5)
    rng = np.random.default_rng(6)
    old = tuple((s.logprobs + rng.standard_normal(len(s.logprobs))).astype(np.float32) for s in batch.samples)
    batch = dataclasses.replace(batch, old_logprobs=old)
    whole, metrics = correct(batch, settings)
    order = [3, 0, 4, 2, 1]
    shuffled = dataclasses.replace(
        batch, **{f.name: None if v is None else type(v)(v[i] for i in order) if isinstance(v, tuple) else v[order]
                  for f in dataclasses.fields(batch) if (v := getattr(batch, f.name)) is not None},
    )  # fmt: skip
    other, other_metrics = correct(shuffled, settings)
    assert other_metrics == metrics
    assert all((other.weights[at] == whole.weights[i]).all() for at, i in enumerate(order))
    alone, _ = correct(TrainBatch(batch.samples[2:3], np.ones(1), batch.masks[2:3], old_logprobs=old[2:3]), settings)
    assert (alone.weights[0] == whole.weights[2]).all() and (alone.masks[0] == whole.masks[2]).all()


def test_a_batch_without_live_tokens_and_one_that_loses_them_all():
    weights, masks, flat = corrected([DEAD, ()], kind="sequence_tis", normalise=True)
    assert (weights, masks) == ([[0.0, 0.0], []], [[0, 0], []])
    assert "sampling/importance_sampling_ratio/mean" not in flat
    assert corrected([(5.0,)], kind="sequence_mis", normalise=True)[1] == [[0]]


def test_inactive_settings_change_nothing():
    batch = batch_of(A)
    assert correct(batch, CorrectionConfig()) == (batch, {})


def test_what_cannot_be_corrected_is_refused():
    batch = batch_of(A, B)
    with pytest.raises(ConfigError, match="old_logprobs"):
        correct(dataclasses.replace(batch, old_logprobs=None), CorrectionConfig(kind="token_tis"))
    batch.old_logprobs[1][2] = np.inf
    with pytest.raises(NonFiniteError, match="trainer log-prob is inf at sample 1, completion position 2"):
        correct(batch, CorrectionConfig(kind="token_tis"))
    batch.samples[0].logprobs[1] = NAN
    batch.old_logprobs[1][2] = -4.0
    with pytest.raises(NonFiniteError, match="rollout log-prob is nan at sample 0, completion position 1"):
        correct(batch, CorrectionConfig(kind="token_tis"))


def test_the_gap_counts_rejected_tokens_and_every_estimator():
    batch, _ = correct(batch_of(A, B, DEAD), CorrectionConfig(kind="sequence_mis"))
    assert batch.rejected[1].tolist() == [True, False, True]
    logp = np.concatenate(batch.old_logprobs)
    rows = batch.rows(range(3), logp, np.zeros_like(logp), version=0)
    flat = flatten(mismatch_metrics(rows))
    assert flat["sampling/kl"] == -(0.5 + 1.0 - 2.0 + 0.25 + 0.75) / 5
    k3 = [0.1487212707, 0.7182818285, 1.1353352832, 0.0340254167, 0.3670000166]
    assert flat["sampling/k3_kl"] == pytest.approx(sum(k3) / 5)
    squares = [2.7182818285, 7.3890560989, 0.0183156389, 1.6487212707, 4.4816890703]
    assert flat["sampling/chi2_token"] == pytest.approx(sum(squares) / 5 - 1)
    assert flat["sampling/chi2_seq"] == pytest.approx((0.3678794412 + 7.3890560989) / 2 - 1)
    assert flat["sampling/sampling_logp_difference/max"] == 2.0
    assert "sampling/importance_sampling_ratio/mean" not in flat, "the correction reports the weights"
    plain = dataclasses.replace(rows, weights=None, rejected=None)
    assert flatten(mismatch_metrics(plain))["sampling/kl"] == -(0.5 + 1.0 - 2.0) / 3


REFUSED = [
    ({"kind": "token_tis", "lower": 0.5}, "correction.lower", "no lower bound"),
    ({"lower": 0.5}, "correction.lower", "kind none"),
    ({"upper": 2.0}, "correction.upper", "kind none"),
    ({"kind": "icepop", "lower": 0.0}, "correction.lower", "above 0"),
    ({"kind": "icepop", "lower": 1.5}, "correction.lower", "an exact token has ratio 1"),
    ({"kind": "token_tis", "upper": 0.9}, "correction.upper", "an exact token has ratio 1"),
    ({"normalise": True}, "correction.normalise", "all 1"),
    ({"kind": "geometric_mis", "normalise": True}, "correction.normalise", "all 1"),
    ({"reject": {"token_k4": 1.0}}, "correction.reject", "unknown statistic token_k4"),
    ({"reject": {"sequence_max_k1": 2.0}}, "correction.reject", "unknown statistic sequence_max_k1"),
    ({"kind": "token_mis", "reject": {"token_k1": 2.0}}, "correction.reject", "kind token_mis rejects by it"),
    ({"reject": {"token_k1": [2.0, 3.0]}}, "correction.reject", "low <= 1 <= high"),
    ({"reject": {"token_k1": -1.0}}, "correction.reject", "low <= 1 <= high"),
    ({"reject": {"token_k3": [0.5, 2.0]}}, "correction.reject", "one limit above 0"),
    ({"reject": {"token_k3": 0.0}}, "correction.reject", "one limit above 0"),
    ({"veto": 1.0}, "correction.veto", "less than 1"),
    ({"kind": "tis"}, "correction.kind", "token_tis"),
    ({"cap": 2.0}, "correction.cap", "unknown key"),
]


@pytest.mark.parametrize(("settings", "key", "mend"), REFUSED)
def test_settings_that_cannot_be_honoured_are_refused(settings, key, mend):
    recipe = {
        "model": "m", "data": {"train": "multiplication"}, "optimizer": {"max_steps": 1},
        "algorithm": {"correction": settings},
    }  # fmt: skip
    with pytest.raises(ConfigError, match=mend) as error:
        load_config(recipe)
    assert error.value.key.startswith(f"algorithm.{key}")


def test_every_kind_has_its_defaults():
    named = typing.get_args(CorrectionConfig.model_fields["kind"].annotation)
    assert named == KINDS
    assert CorrectionConfig(kind="icepop").bounds == (0.5, 5.0)
    assert CorrectionConfig(kind="icepop", upper=4.0).bounds == (0.5, 4.0)
    assert CorrectionConfig(kind="geometric_mis").rejections == {"sequence_mean_k1": (0.999, 1.001)}
    assert not CorrectionConfig(veto=1e-2).active
