"""Embedding and row gathering: copies bit for bit, gradients literally and against float64, splits, repeatability."""

import pytest
import torch

from tests.bits import assert_different_bits, assert_same_bits, hard_values
from tests.ops import elementwise_reference as reference
from tests.ops.elementwise_cases import DTYPES, FP32, UNIT, context, handle
from zerogap.errors import ConfigError
from zerogap.ops.cpu import library
from zerogap.ops.embedding import embedding, gather_rows

both = pytest.mark.parametrize("dtype", DTYPES)
STARTS = [0, 100, 350, 351, 600]


def ids_of(rows: int, vocab: int) -> torch.Tensor:
    return torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(rows))


def table_grad(ids, dy, starts, vocab, dtype, weight=None):
    weight = weight or handle(hard_values((vocab, dy.shape[1]), dtype, 1))
    embedding(ids, weight, context(packs=starts)).backward(dy)
    return weight.grad


@both
@pytest.mark.parametrize("width", [576, 33, 1])
def test_look_up_copies_rows(dtype, width) -> None:
    """Any number of rows, on any number of threads, with a graph or without: the table's bits, -0 and NaN included."""
    table = hard_values((50, width), dtype, 1)
    table[3], table[4] = -0.0, float("nan")
    ids = torch.cat([torch.tensor([3, 4, 49, 0]), ids_of(300, 50)])
    for weight in (handle(table, True), handle(table, False)):
        for threads in (1, 2, 3):
            with library.use_threads(threads):
                assert_same_bits(embedding(ids, weight, context()).detach(), weight.rows[ids], f"{threads} threads")
        assert_same_bits(embedding(ids[2:3], weight, context()).detach(), weight.rows[49:50], "one row")


@both
@pytest.mark.parametrize("vocab", [3, 50, 5000])
def test_gradient_is_the_contract(dtype, vocab) -> None:
    ids, dy = ids_of(600, vocab), hard_values((600, 70), dtype, 2)
    expected = reference.embedding_grad(reference.array(dy), ids.tolist(), STARTS, vocab)
    for threads in (1, 2, 3):
        with library.use_threads(threads):
            grad = table_grad(ids, dy, STARTS, vocab, dtype)
        assert_same_bits(grad, torch.from_numpy(expected), f"{threads} threads")


@both
def test_gradient_accuracy(dtype) -> None:
    """Sums of at most n terms in any order are off by n roundings of the sum of magnitudes."""
    ids, dy = ids_of(600, 7), hard_values((600, 70), dtype, 2)
    exact = torch.zeros(7, 70, dtype=torch.float64).index_add(0, ids, dy.double())
    size = torch.zeros(7, 70, dtype=torch.float64).index_add(0, ids, dy.double().abs())
    grad = table_grad(ids, dy, STARTS, 7, dtype)
    assert ((grad.double() - exact).abs() <= size * 600 * UNIT[FP32]).all()


@both
def test_gradient_under_micro_batches(dtype) -> None:
    """1, 2 and 4 packs per micro-batch: the same accumulator bits; other pack borders are another sum."""
    ids, dy = ids_of(600, 7), hard_values((600, 70), dtype, 2)
    whole = table_grad(ids, dy, STARTS, 7, dtype)
    for size in (1, 2):
        weight = handle(hard_values((7, 70), dtype, 1))
        for i in range(0, 4, size):
            borders = STARTS[i : i + size + 1]
            part = slice(borders[0], borders[-1])
            table_grad(ids[part], dy[part], [b - borders[0] for b in borders], 7, dtype, weight)
        assert_same_bits(weight.grad, whole, f"{size} packs each")
    assert_different_bits(table_grad(ids, dy, [0, 300, 600], 7, dtype), whole, "other borders")


@both
def test_gather_rows(dtype) -> None:
    """Copies rows; the gradient goes back to them, +0 elsewhere."""
    x, rows = hard_values((40, 33), dtype, 1).requires_grad_(), torch.tensor([39, 0, 7, 20])
    out, d = gather_rows(x, rows), hard_values((4, 33), dtype, 2)
    assert_same_bits(out.detach(), x.detach()[rows], "rows")
    out.backward(d)
    expected = torch.zeros(40, 33, dtype=dtype)
    expected[rows] = d
    assert_same_bits(x.grad, expected, "gradient")


def test_refusals() -> None:
    weight = handle(torch.ones(10, 16), False)
    for bad in (10, -1):
        with pytest.raises(ConfigError, match=f"token id = {bad}"):
            embedding(torch.tensor([0, bad]), weight, context())
        with pytest.raises(ConfigError, match=f"output row = {bad}"):
            gather_rows(torch.ones(10, 16), torch.tensor([0, bad]))


@both
def test_recorded_program(dtype) -> None:
    """Look-up and gather in one program, each with its own number of rows."""
    weight = handle(hard_values((50, 33), dtype, 1), False)
    ids, rows = torch.zeros(9, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    with torch.no_grad(), library.record(tokens=(ids,), outputs=(rows,)) as program:
        out = gather_rows(embedding(ids, weight, context()), rows)
    for tokens, outputs in ((9, 4), (3, 1), (5, 2)):
        ids[:tokens], rows[:outputs] = ids_of(tokens, 50), torch.arange(outputs) * 2
        program.run(tokens=tokens, outputs=outputs)
        assert_same_bits(out[:outputs], weight.rows[ids[rows[:outputs]]], "gathered")
