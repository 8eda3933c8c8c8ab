"""The order of rows: resumable at every position, whole epochs, and data sets mixed in proportion."""

import pytest

from zerogap.errors import ConfigError
from zerogap.rl.data_order import LONGEST_PERIOD, MixedOrder, PromptOrder, prompt_order, whole_shares


def mixed(sizes, weights, seed=0, shuffle=True):
    parts = [i for i, size in enumerate(sizes) for _ in range(size)]
    return prompt_order(parts, weights, seed, shuffle)


@pytest.mark.parametrize("shuffle", [True, False])
def test_order_is_resumable_at_every_position(shuffle):
    order = PromptOrder(7, seed=3, shuffle=shuffle)
    whole = order.take(0, 30)
    for position in range(25):
        assert order.take(position, 5) == whole[position : position + 5]
    for epoch in range(4):
        assert sorted(whole[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert (whole[:7] == whole[7:14]) is not shuffle
    assert (PromptOrder(7, seed=4, shuffle=shuffle).take(0, 30) == whole) is not shuffle


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("weights", [(1, 1, 1), (3, 1, 2), (0.5, 0.25, 0.25)])
def test_a_mixture_is_resumable_at_every_position(shuffle, weights):
    order = mixed((5, 2, 9), weights, 3, shuffle)
    whole = order.take(0, 120)
    assert whole == [row for step in range(24) for row in order.take(5 * step, 5)]
    for position in range(0, 100, 7):
        assert order.take(position, 13) == whole[position : position + 13]
    assert (mixed((5, 2, 9), weights, 4, shuffle).take(0, 120) == whole) is not shuffle


@pytest.mark.parametrize("shuffle", [True, False])
def test_shares_are_exact_and_spread_and_every_row_comes_once_per_epoch(shuffle):
    sizes, weights = (4, 3, 11), (5, 3, 2)
    order = mixed(sizes, weights, 1, shuffle)
    rows = order.take(0, 440)
    sources = [0 if row < 4 else 1 if row < 7 else 2 for row in rows]
    for period in range(44):
        here = sources[10 * period : 10 * period + 10]
        assert [here.count(i) for i in range(3)] == list(weights)
    for length in (4, 7, 23):  # a stretch of any length holds the shares up to one row at either end
        for begin in range(0, 400, 3):
            counts = [sources[begin : begin + length].count(i) for i in range(3)]
            assert all(abs(n - length * w / 10) <= 2 for n, w in zip(counts, weights, strict=True)), (begin, counts)
    for i, (size, offset) in enumerate(zip(sizes, (0, 4, 7), strict=True)):
        own = [row - offset for row, source in zip(rows, sources, strict=True) if source == i]
        epochs = [own[size * e : size * e + size] for e in range(len(own) // size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert (epochs[0] == epochs[1] == epochs[2]) is not shuffle


def test_data_sets_of_one_size_have_orders_of_their_own():
    rows = mixed((20, 20), (1, 1)).take(0, 40)
    first, second = [r for r in rows if r < 20], [r - 20 for r in rows if r >= 20]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def test_one_data_set_is_ordered_as_ever_whatever_its_weight():
    assert mixed((7,), (3.5,), 3) == PromptOrder(7, 3)


def test_orders_are_frozen_for_all_versions():
    assert PromptOrder(10, seed=0).take(0, 10) == [8, 4, 2, 6, 0, 7, 5, 1, 9, 3]
    assert mixed((4, 3), (2, 1)).take(0, 12) == MIXED
    assert mixed((4, 3), (2, 1), shuffle=False).take(0, 6) == [0, 4, 1, 2, 5, 3]


MIXED = [1, 6, 0, 5, 3, 2, 3, 4, 2, 1, 0, 4]


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ((1, 1), (1, 1)),
        ((2.0, 4.0, 6.0), (1, 2, 3)),
        ((0.1, 0.2), (1, 2)),
        ((0.7, 0.3), (7, 3)),
        ((1e-3, 1.0), (1, 1000)),
        ((1.5, 1), (3, 2)),
    ],
)
def test_weights_are_taken_as_they_are_written(weights, shares):
    assert whole_shares(weights) == shares


def test_what_cannot_be_mixed_is_refused():
    with pytest.raises(ConfigError, match=r"choose small whole numbers"):
        whole_shares((1, 1 / 3))
    assert sum(whole_shares((LONGEST_PERIOD - 1, 1))) == LONGEST_PERIOD
    with pytest.raises(ConfigError, match=r"data\.train\[1\] = 0: there is no row"):
        mixed((3, 0), (1, 1))
    with pytest.raises(ConfigError, match=r"no row to train on"):
        PromptOrder(0, 0)
    with pytest.raises(AssertionError, match="stand by data set"):
        prompt_order([1, 0], (1, 1), 0, True)


def test_a_period_is_the_same_wherever_it_is_asked_for():
    order = mixed((4, 3), (2, 1), seed=9)
    assert isinstance(order, MixedOrder)
    assert sorted(order.period(5)) == [0, 0, 1]
    assert order.period(5) == mixed((40, 30), (2, 1), seed=9).period(5)
    assert len({order.period(p) for p in range(20)}) == 3, "all three ways"
