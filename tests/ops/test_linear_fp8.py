"""`linear` over quantised weights: what is quantised where, both gradients, splits over ranks and packs, updates."""

import pytest
import torch

from tests.bits import assert_different_bits, assert_same_bits, hard_values
from tests.ops import gemm_fp8_reference as reference
from tests.ops import gemm_reference
from tests.ops.test_gemm import Pair, context, on_both_ranks
from zerogap.ops import gemm
from zerogap.ops.cpu import library
from zerogap.ops.handle import WeightHandle
from zerogap.types import FP8Blocks, WeightSpec

BF16, FP32 = torch.bfloat16, torch.float32
FORMATS = ["fp32", "pow2"]


def handle(
    value: torch.Tensor, fp8: FP8Blocks | None, in_leaves: int = 1, out_leaves: int = 1, trainable: bool = True
) -> WeightHandle:
    spec = WeightSpec("w", tuple(value.shape), "matrix", in_leaves, out_leaves, fp8=fp8)
    weight = WeightHandle(spec, BF16)
    weight.load(value)
    weight.set_trainable(trainable)
    weight.enable_input_grad()
    if trainable:
        weight.open_grad()
    return weight


def forward_operands(x: torch.Tensor, w: torch.Tensor, fp8: FP8Blocks | None, leaf: int = 0) -> reference.Operands:
    if fp8 is None:
        return reference.Operands(x, w, leaf)
    grid, x_scales = reference.quantise_rows(x, fp8.scale_format)
    codes, w_scales = reference.quantise(w, (128, 128), fp8.scale_format)
    return reference.Operands(grid, reference.grid(codes), leaf, x_scales, w_scales)


def backward_operands(dy: torch.Tensor, w: torch.Tensor, fp8: FP8Blocks | None, leaf: int = 0) -> reference.Operands:
    """The transpose of the weight has the transposed blocks, so its codes are those of the forward product."""
    quantised = fp8 if fp8 is not None and fp8.gradients else None
    return forward_operands(dy, w.T.contiguous(), quantised, leaf)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("gradient", gemm.GRADIENTS)
def test_contract(scale_format: str, gradients: bool, gradient: str) -> None:
    """Two quantised weights and a BF16 one between them: outputs, input gradient and weight gradients, literally.
    Without `gradients` both gradients are BF16 products of the published weight."""
    fp8, starts = FP8Blocks(scale_format, gradients), [0, 30, 170]
    kinds, widths, k = (fp8, None, fp8), (192, 64, 200), 130
    values = [hard_values((n, k), BF16, seed=n) for n in widths]
    weights = [handle(v, kind) for v, kind in zip(values, kinds, strict=True)]
    x, dys = hard_values((170, k), BF16, seed=1), [hard_values((170, n), BF16, seed=n + 1) for n in widths]
    leaf = x.clone().requires_grad_()
    outs = gemm.linear(leaf, weights, [None] * 3, context(starts), gradient=gradient)
    torch.autograd.backward(outs, dys)
    for y, value, kind in zip(outs, values, kinds, strict=True):
        expected = reference.product([forward_operands(x, value, kind)], "concatenate").to(BF16)
        assert_same_bits(y.detach(), expected, "output")
    operands = [backward_operands(dy, v, kind) for dy, v, kind in zip(dys, values, kinds, strict=True)]
    assert leaf.grad is not None
    assert_same_bits(leaf.grad, reference.product(operands, gradient).to(BF16), "input gradient")
    for dy, weight, kind in zip(dys, weights, kinds, strict=True):
        zero = torch.zeros(weight.spec.shape)
        if kind is not None and gradients:
            expected = reference.weight_grad(dy, x, starts, zero, scale_format)
        else:
            expected = gemm_reference.weight_grad(dy, x, starts, zero)
        assert weight.grad is not None
        assert_same_bits(weight.grad, expected, "weight gradient")


def test_formats_are_not_mixed() -> None:
    weights = [handle(hard_values((64, 64), BF16, seed=i), FP8Blocks(f, True)) for i, f in enumerate(FORMATS)]
    with pytest.raises(AssertionError, match="one scale format"):
        gemm.linear(hard_values((2, 64), BF16), weights, [None, None], context([0, 2]), gradient="chain")


def test_rows_do_not_see_each_other() -> None:
    """Also through the quantisation of the activations: a row's output is that of the row alone."""
    weight = handle(hard_values((200, 577), BF16, seed=1), FP8Blocks("fp32", True), trainable=False)
    x = hard_values((200, 577), BF16, seed=2)

    def run(rows: torch.Tensor) -> torch.Tensor:
        return gemm.linear(rows.contiguous(), [weight], [None], context([0, len(rows)]), gradient="chain")[0]

    alone = torch.cat([run(x[r : r + 1]) for r in range(200)])
    for m in (2, 3, 5, 6, 7, 16, 33, 97, 200):
        assert_same_bits(run(x[:m]), alone[:m], f"{m} rows")
    order = torch.arange(199, -1, -1)
    assert_same_bits(run(x[order]), alone[order], "rows in reverse")
    x[::2] = float("nan")
    assert_same_bits(run(x)[1::2].contiguous(), alone[1::2].contiguous(), "rows between NaN")
    assert run(x)[::2].isnan().all()


@pytest.mark.parametrize("scale_format", FORMATS)
def test_recorded_equals_eager(scale_format: str) -> None:
    """A recorded program quantises what stands in its input when it runs, for any number of rows."""
    weights = [handle(hard_values((n, 300), BF16, seed=n), FP8Blocks(scale_format, True)) for n in (192, 64)]
    x = hard_values((33, 300), BF16, seed=1)
    buffer = torch.zeros_like(x)
    with torch.no_grad(), library.record(rows=(buffer,)) as program:
        outs = gemm.linear(buffer, weights, [None, None], context([0, 33]), gradient="chain")
    buffer.copy_(x)
    for m in (33, 5, 1):
        program.run(rows=m)
        with torch.no_grad():
            eager = gemm.linear(x[:m].contiguous(), weights, [None, None], context([0, m]), gradient="chain")
        for one, two in zip(outs, eager, strict=True):
            assert_same_bits(one[:m].contiguous(), two, f"{m} rows")


# ------------------------------------------------------------------------------------------------ splits


@pytest.mark.parametrize("leaves", [2, 4])
def test_tensor_parallel_forward(leaves: int) -> None:
    """Two ranks with half of the leaves each quantise their own columns: the whole product's bits, on both ranks."""
    fp8, x, w = FP8Blocks("fp32", True), hard_values((9, 1024), BF16, seed=1), hard_values((200, 1024), BF16, seed=2)
    weight = handle(w, fp8, in_leaves=leaves, trainable=False)
    (whole,) = gemm.linear(x, [weight], [None], context([0, 9]), gradient="chain")
    expected = reference.product([forward_operands(x, w, fp8, 1024 // leaves)], "concatenate").to(BF16)
    assert_same_bits(whole, expected, "whole")

    def run(rank: int, exchange: Pair) -> torch.Tensor:
        half = slice(512 * rank, 512 * (rank + 1))
        part = handle(w[:, half].contiguous(), fp8, in_leaves=leaves // 2, trainable=False)
        mine = x[:, half].contiguous()
        return gemm.linear(mine, [part], [None], context([0, 9]), gradient="chain", exchange=exchange)[0]

    for y in on_both_ranks(run):
        assert_same_bits(y, whole, "row-parallel output")


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("gradient", gemm.GRADIENTS)
def test_tensor_parallel_input_grad(gradients: bool, gradient: str) -> None:
    """Two ranks with half of the outputs of two projections each: the whole input gradient's bits."""
    fp8 = FP8Blocks("fp32", gradients)
    x, dys = hard_values((9, 130), BF16, seed=1), [hard_values((9, 512), BF16, seed=i) for i in (2, 3)]
    values = [hard_values((512, 130), BF16, seed=i) for i in (4, 5)]

    def input_grad(weights: list[WeightHandle], parts: list[torch.Tensor], **exchange: Pair) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        outs = gemm.linear(leaf, weights, [None, None], context([0, 9]), gradient=gradient, **exchange)
        torch.autograd.backward(outs, parts)
        assert leaf.grad is not None
        return leaf.grad

    def run(rank: int, exchange: Pair) -> torch.Tensor:
        half = slice(256 * rank, 256 * (rank + 1))
        weights = [handle(v[half].contiguous(), fp8, out_leaves=2, trainable=False) for v in values]
        return input_grad(weights, [dy[:, half].contiguous() for dy in dys], grad_exchange=exchange)

    whole = input_grad([handle(v, fp8, out_leaves=4, trainable=False) for v in values], dys)
    operands = [backward_operands(dy, v, fp8, 128) for dy, v in zip(dys, values, strict=True)]
    assert_same_bits(whole, reference.product(operands, gradient).to(BF16), "whole")
    for dx in on_both_ranks(run):
        assert_same_bits(dx, whole, f"column-parallel input gradient, {gradient}")


@pytest.mark.parametrize("gradients", [True, False])
def test_weight_grad_under_micro_batches(gradients: bool) -> None:
    """Packs in one micro-batch or in several, and a second time: the same gradient bits."""
    starts, fp8 = [0, 200, 257, 400], FP8Blocks("fp32", gradients)
    value = hard_values((192, 130), BF16, seed=1)
    x, dy = hard_values((400, 130), BF16, seed=2), hard_values((400, 192), BF16, seed=3)

    def run(groups: list[list[int]]) -> torch.Tensor:
        weight = handle(value, fp8)
        for packs in groups:
            first, last = starts[packs[0]], starts[packs[-1] + 1]
            local = context([starts[p] - first for p in packs] + [last - first])
            (y,) = gemm.linear(x[first:last].contiguous(), [weight], [None], local, gradient="chain")
            y.backward(dy[first:last])
        assert weight.grad is not None
        return weight.grad

    whole = run([[0, 1, 2]])
    for groups in ([[0, 1, 2]], [[0], [1], [2]], [[0, 1], [2]]):
        assert_same_bits(run(groups), whole, f"micro-batches {groups}")


# ------------------------------------------------------------------------------------------------ updates


@pytest.mark.parametrize("gradients", [True, False])
def test_two_updates(gradients: bool) -> None:
    """After each publish, outputs and input gradients are those of a new handle with the published value."""
    fp8 = FP8Blocks("fp32", gradients)
    weight = handle(hard_values((200, 130), BF16, seed=1), fp8)
    x, dy = hard_values((7, 130), BF16, seed=2), hard_values((7, 200), BF16, seed=3)

    def both(of: WeightHandle) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        (y,) = gemm.linear(leaf, [of], [None], context([0, 7]), gradient="chain")
        y.backward(dy)
        assert leaf.grad is not None
        return y.detach(), leaf.grad

    before = both(weight)
    for update in (4, 5):
        assert weight.master is not None
        weight.master.add_(hard_values((200, 130), FP32, seed=update))
        weight.publish()
        after = both(weight)
        for ours, fresh, old in zip(after, both(handle(weight.value(), fp8)), before, strict=True):
            assert_same_bits(ours, fresh, f"update {update}")
            assert_different_bits(ours, old, "an update shows")
        before = after


def test_repeatable_over_threads() -> None:
    fp8, x, dy = FP8Blocks("pow2", True), hard_values((150, 577), BF16, seed=1), hard_values((150, 200), BF16, seed=2)
    results = []
    for threads in (1, 3, 2, 3):
        weight, leaf = handle(hard_values((200, 577), BF16, seed=3), fp8), x.clone().requires_grad_()
        with library.use_threads(threads):
            (y,) = gemm.linear(leaf, [weight], [None], context([0, 100, 150]), gradient="chain")
            y.backward(dy)
        assert weight.grad is not None and leaf.grad is not None
        results.append((y.detach(), leaf.grad, weight.grad))
        for one, two in zip(results[-1], results[0], strict=True):
            assert_same_bits(one, two, f"{threads} threads")
