"""RMSNorm and head norm: the contract literally, accuracy, independence of rows, splits, gradients, repeatability."""

import numpy as np
import pytest
import torch

from tests.bits import assert_different_bits, assert_same_bits, hard_values, unit_values
from tests.ops import elementwise_reference as reference
from tests.ops.elementwise_cases import DTYPES, EPS, FP32, UNIT, all_outputs, context, handle
from zerogap.ops import tap
from zerogap.ops.cpu import library
from zerogap.ops.norm import head_norm, rms_norm

SHAPES = [(1, 576), (9, 576), (5, 96), (3, 33), (2, 1), (130, 64)]
both = pytest.mark.parametrize("dtype", DTYPES)


def run(x, delta, weight, packs=None, d_residual=None, d_normed=None):
    """(residual, normed, dx, ddelta) with the given output gradients."""
    x = x.clone().requires_grad_()
    delta = None if delta is None else delta.clone().requires_grad_()
    residual, normed = rms_norm(x, delta, weight, EPS, context(packs=packs or [0, x.shape[0]]))
    pairs = [(o, g) for o, g in ((residual, d_residual), (normed, d_normed)) if g is not None]
    torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    return residual.detach(), normed.detach(), x.grad, None if delta is None else delta.grad


# ------------------------------------------------------------------------------------------------ contract, accuracy


@both
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_delta", [True, False])
def test_forward_is_the_contract(dtype, shape, with_delta) -> None:
    x, delta, w = (hard_values(s, dtype, seed) for seed, s in enumerate([shape, shape, shape[1]]))
    residual, normed = rms_norm(x, delta if with_delta else None, handle(w, False), EPS, context())
    r = reference.rn(reference.array(x) + reference.array(delta), dtype) if with_delta else reference.array(x)
    assert_same_bits(residual, reference.stored(r, dtype), "residual")
    assert_same_bits(normed, reference.stored(reference.norm(r, reference.array(w), EPS), dtype), "normed")
    assert with_delta or residual is x, "without an update the residual stream is not copied"


@both
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_accuracy(dtype, shape) -> None:
    """inv is off by half of the error of a sum of positive terms, and by 4 roundings; normed adds 3 roundings."""
    x, w = hard_values(shape, dtype, 1), hard_values(shape[1], dtype, 2)
    _, normed = rms_norm(x, None, handle(w, False), EPS, context())
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + np.float64(np.float32(EPS)))
    exact = exact * w.double()
    roundings = (shape[1] / 16 + 4) / 2 + 8
    bound = exact.abs() * (roundings * UNIT[FP32] + UNIT[dtype]) * 1.01
    assert ((normed.double() - exact).abs() <= bound).all()


@both
@pytest.mark.parametrize("heads", [1, 3, 4])
@pytest.mark.parametrize("dim", [16, 64, 40])
def test_head_norm_is_the_row_norm_of_each_head(dtype, heads, dim) -> None:
    x, w = hard_values((7, heads * dim), dtype, 1), hard_values(dim, dtype, 2)
    normed = head_norm(x, handle(w, False), heads, EPS, 1, context())
    alone = rms_norm(x.view(7 * heads, dim), None, handle(w, False), EPS, context())[1]
    assert_same_bits(normed, alone.view(7, heads * dim), "heads as rows")


# ------------------------------------------------------------------------------------------------ rows


@both
def test_rows_do_not_see_each_other(dtype) -> None:
    """Batch size, position, neighbours of NaN and infinity: nothing in a row changes, forward or input gradient."""
    x, delta, d_residual, d_normed = (hard_values((23, 100), dtype, s) for s in range(4))
    w = handle(hard_values(100, dtype, 9), False)
    whole = run(x, delta, w, d_residual=d_residual, d_normed=d_normed)
    for rows in (range(1), range(5, 6), range(3, 10), [22, 0, 7, 7]):
        index = torch.tensor(list(rows))
        part = run(x[index], delta[index], w, d_residual=d_residual[index], d_normed=d_normed[index])
        for name, one, all_rows in zip(("residual", "normed", "dx", "ddelta"), part, whole, strict=True):
            assert_same_bits(one, all_rows[index], f"{name} of rows {list(rows)}")
    for poison in (float("nan"), float("inf"), -float("inf")):
        bad = x.clone()
        bad[1::2] = poison
        mixed = run(bad, delta, w, d_residual=d_residual, d_normed=d_normed)
        for name, one, all_rows in zip(("residual", "normed", "dx", "ddelta"), mixed, whole, strict=True):
            assert_same_bits(one[::2], all_rows[::2], f"{name} beside {poison}")
        assert mixed[1][1].isnan().any(), "what is not finite stays visible in its own row"


@both
def test_threads_and_runs(dtype) -> None:
    x, delta, d_residual, d_normed = (hard_values((300, 96), dtype, s) for s in range(4))
    results = []
    for threads in (1, 2, 3, 2):
        w = handle(hard_values(96, dtype, 9))
        with library.use_threads(threads):
            results.append((*run(x, delta, w, [0, 140, 300], d_residual, d_normed), w.grad))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert_same_bits(one, two, "threads")


def test_order_shows() -> None:
    """Control: the data distinguishes orders of the sum of squares (permuted columns)."""
    x, w = hard_values((64, 96), seed=1), handle(torch.ones(96), False)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    normed = rms_norm(x, None, w, EPS, context())[1]
    permuted = rms_norm(x[:, order].contiguous(), None, w, EPS, context())[1]
    assert_different_bits(permuted, normed[:, order], "permuted columns")


def test_zeros_and_subnormals() -> None:
    """-0 keeps its sign, subnormals count as zero, and a row of zeros stays zero."""
    x = torch.tensor([[0.0, -0.0, 2.0**-130, -(2.0**-140)] * 4])
    residual, normed = rms_norm(x, torch.full_like(x, -0.0), handle(torch.ones(16), False), EPS, context())
    assert_same_bits(residual, torch.tensor([[0.0, -0.0, 0.0, -0.0] * 4]), "residual")
    assert_same_bits(normed, residual, "normed")


@both
def test_recorded_program(dtype) -> None:
    """A recorded pair of norms runs for any number of rows up to its capacity with the eager bits."""
    w, per_head = handle(hard_values(64, dtype, 1), False), handle(hard_values(16, dtype, 2), False)
    x, delta = torch.zeros(9, 64, dtype=dtype), torch.zeros(9, 64, dtype=dtype)
    with torch.no_grad(), library.record(rows=(x, delta)) as program:
        residual, normed = rms_norm(x, delta, w, EPS, context())
        heads = head_norm(normed, per_head, 4, EPS, 1, context())
    for rows in (1, 5, 9):
        x.copy_(hard_values((9, 64), dtype, rows))
        delta.copy_(hard_values((9, 64), dtype, 10 + rows))
        program.run(rows=rows)
        eager = rms_norm(x[:rows], delta[:rows], w, EPS, context())
        assert_same_bits(residual[:rows], eager[0], "residual")
        assert_same_bits(normed[:rows], eager[1], "normed")
        assert_same_bits(heads[:rows], head_norm(eager[1], per_head, 4, EPS, 1, context()), "heads")


# ------------------------------------------------------------------------------------------------ gradients


@both
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_residual", [True, False])
def test_gradients_are_the_contract(dtype, shape, with_residual) -> None:
    x, delta, d_residual, d_normed = (hard_values(shape, dtype, s) for s in range(4))
    weight, starts = handle(hard_values(shape[1], dtype, 9)), [0, shape[0] // 3, shape[0]]
    residual, _, dx, ddelta = run(x, delta, weight, starts, d_residual if with_residual else None, d_normed)
    r, dy, w = (reference.array(t) for t in (residual, d_normed, weight.rows))
    total = reference.norm_input_grad(r, w, dy, EPS)
    total = reference.array(d_residual) + total if with_residual else total
    assert_same_bits(dx, reference.stored(total, dtype), "dx")
    assert_same_bits(ddelta, dx, "ddelta")
    expected = reference.norm_weight_grad(r, dy, EPS, 1, 1, starts)[0]
    assert_same_bits(weight.grad, torch.from_numpy(expected), "weight gradient")


@both
def test_gradient_accuracy(dtype) -> None:
    """Against float64 autograd of the same rounded residual. With g = d_normed * w, n = r * inv, c = mean(g n): inv, n,
    g and c are off by at most k = D/16 + 12 roundings of |g| or |n| mean|g n|; then the roundings of the sum."""
    rows, width = 300, 96
    x, d_residual, d_normed = (unit_values((rows, width), dtype, s) for s in range(3))
    weight = handle(unit_values(width, dtype, 9))
    _, _, dx, _ = run(x, None, weight, [0, 140, rows], d_residual, d_normed)
    x64, w64 = x.double().requires_grad_(), weight.rows.double().requires_grad_()
    inverse = torch.rsqrt(x64.square().mean(-1, keepdim=True) + np.float64(np.float32(EPS)))
    (x64 * inverse * w64).backward(d_normed.double())
    exact = x64.grad + d_residual.double()
    g, n = (d_normed.double() * w64).abs().detach(), (x64 * inverse).abs().detach()
    k = width / 16 + 12
    moved = inverse.detach() * (g + n * (g * n).mean(-1, keepdim=True)) * 2 * k * UNIT[FP32]
    bound = moved + (exact.abs() + x64.grad.abs()) * UNIT[FP32] + exact.abs() * UNIT[dtype] * 1.01
    assert ((dx.double() - exact).abs() <= bound).all()
    terms = (d_normed.double() * x64 * inverse).abs().sum(0).detach()
    assert ((weight.grad.double() - w64.grad).abs() <= terms * (128 + 3 + k) * UNIT[FP32]).all()


@both
@pytest.mark.parametrize("leaves", [1, 2, 4])
def test_head_norm_gradients(dtype, leaves) -> None:
    heads, dim, rows, starts = 4, 24, 150, [0, 140, 150]
    x, dy = (hard_values((rows, heads * dim), dtype, s) for s in range(2))
    weight = handle(hard_values(dim, dtype, 9), head_leaves=leaves)
    leaf = x.clone().requires_grad_()
    head_norm(leaf, weight, heads, EPS, leaves, context(packs=starts)).backward(dy)
    r, d = (reference.array(t).reshape(rows * heads, dim) for t in (x, dy))
    dx = reference.norm_input_grad(r, reference.array(weight.rows), d, EPS).reshape(x.shape)
    assert_same_bits(leaf.grad, reference.stored(dx, dtype), "dx")
    expected = reference.norm_weight_grad(r, d, EPS, heads, leaves, starts)
    assert_same_bits(weight.grad, torch.from_numpy(expected), "weight gradient per leaf")


@both
def test_weight_gradient_under_micro_batches(dtype) -> None:
    """1, 2 and 4 packs per micro-batch: the same accumulator bits; other pack borders are another sum."""
    starts = [0, 100, 350, 351, 600]
    x, dy = hard_values((600, 64), dtype, 1), hard_values((600, 64), dtype, 2)

    def accumulated(groups: list[list[int]]) -> torch.Tensor:
        w, h = handle(hard_values(64, dtype, 9)), handle(hard_values(16, dtype, 8), head_leaves=2)
        for borders in groups:
            part = slice(borders[0], borders[-1])
            here = context(packs=[b - borders[0] for b in borders])
            rms_norm(x[part].clone().requires_grad_(), None, w, EPS, here)[1].backward(dy[part])
            head_norm(x[part].clone().requires_grad_(), h, 4, EPS, 2, here).backward(dy[part])
        return torch.cat([w.grad, h.grad.flatten()])

    whole = accumulated([starts])
    assert_same_bits(accumulated([starts[:3], starts[2:]]), whole, "2 packs each")
    assert_same_bits(accumulated([starts[i : i + 2] for i in range(4)]), whole, "1 pack each")
    assert_different_bits(accumulated([[0, 300, 600]]), whole, "other borders")


@both
def test_absent_gradients(dtype) -> None:
    """Without d_normed the residual's gradient passes through and the weight's stays as it was; a frozen weight and an
    input without gradient are left alone."""
    x, d = hard_values((5, 32), dtype, 1), hard_values((5, 32), dtype, 2)
    w = handle(hard_values(32, dtype, 9))
    assert_same_bits(run(x, None, w, d_residual=d)[2], d, "passed through")
    assert_same_bits(w.grad, torch.zeros(32), "weight gradient")
    rms_norm(x, None, w, EPS, context(packs=[0, 5]))[1].backward(d)
    trained = w.grad.clone()
    frozen = handle(w.rows, False)
    assert_same_bits(run(x, None, frozen, d_normed=d)[2], run(x, None, w, d_normed=d)[2], "frozen weight")
    assert frozen.grad is None
    assert_same_bits(w.grad, trained + trained, "a second backward adds to the bin")


def test_tap_sees_every_op() -> None:
    """Each op of this family reports its outputs once, with and without a graph."""
    seen: list[str] = []
    with tap.listen(lambda name, outputs, info: seen.append(f"{name}: {', '.join(outputs)}")):
        all_outputs(FP32)
    assert seen == [
        "rms_norm: residual, normed",
        "head_norm: normed",
        *["rope: q, k"] * 2,
        "silu_mul: out",
        "embedding: out",
    ]
