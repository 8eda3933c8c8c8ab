"""Routed layers, backward: gradients bit for bit against a loop over experts, and against float64 autograd within a
derived bound; packs, micro-batches, the balance loss, frozen parts, FP8."""

import dataclasses

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.bits import assert_different_bits, assert_same_bits, unit_values
from tests.ops import moe_float64 as float64
from tests.ops import moe_reference as reference
from tests.ops.moe_cases import BF16, FP32, ROUTINGS, Case, context
from tests.ops.other_builds import rerun
from tests.ops.test_gemm import Pair, on_both_ranks
from zerogap.ops.cpu import library
from zerogap.ops.cpu import moe as kernels
from zerogap.ops.handle import WeightHandle
from zerogap.ops.moe import MoEWeights, Routing, moe
from zerogap.routing import RoutingRecord
from zerogap.types import FP8Blocks

NUMERICS = {
    "fp32": (FP32, None),
    "bf16": (BF16, None),
    "fp8": (BF16, FP8Blocks("fp32", True)),
    "fp8 pow2": (BF16, FP8Blocks("pow2", True)),
    "fp8, gradients bf16": (BF16, FP8Blocks("fp32", False)),
}
every_numerics = pytest.mark.parametrize(("storage", "fp8"), NUMERICS.values(), ids=NUMERICS.keys())
every_routing = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS.keys())


def gradients(
    weights: MoEWeights,
    routing: Routing,
    x: torch.Tensor,
    dy: torch.Tensor,
    packs: list[int],
    samples: list[int] | None = None,
    balance: float = 0.0,
) -> torch.Tensor:
    """dx; weight gradients go to the handles."""
    leaf = x.clone().requires_grad_()
    moe(leaf, weights, routing, context(packs, samples, balance=balance), 0).backward(dy)
    assert leaf.grad is not None
    return leaf.grad


def assert_same_grads(ours: MoEWeights, theirs: MoEWeights, what: str) -> None:
    for one, two in zip(ours.handles(), theirs.handles(), strict=True):
        assert_same_bits(one.grad, two.grad, f"{what}: gradient of {one.spec.name}")


# ------------------------------------------------------------------------------------------------ the definition


@every_numerics
@pytest.mark.parametrize("balance", [0.0, 0.7])
@pytest.mark.parametrize("name", ["qwen3", "deepseek", "plain"])
def test_gradients_are_those_of_the_experts_one_by_one(storage, fp8, balance, name) -> None:
    """dx and every weight's gradient: packs cut inside an expert's rows, samples cut inside packs."""
    case = Case(storage, fp8, ROUTINGS[name], hidden=136, shared=512 if name == "deepseek" else 0)
    ours, theirs = case.weights(True), case.weights(True)
    x, dy, packs, samples = case.rows(45), case.rows(45, 51), [0, 20, 45], [0, 5, 20, 21, 45]
    dx = gradients(ours, case.routing, x, dy, packs, samples, balance)
    past = reference.Pass(x, theirs, case.routing)
    past.forward()
    assert_same_bits(dx, past.backward(dy, packs, balance, samples), "dx")
    assert_same_grads(ours, theirs, "all")


@pytest.mark.parametrize("name", ["moonlight", "raw sigmoid", "all", "one"])
def test_other_routers(name) -> None:
    case = Case(BF16, None, ROUTINGS[name])
    ours, theirs = case.weights(True), case.weights(True)
    x, dy, packs, samples = case.rows(30), case.rows(30, 51), [0, 30], [0, 11, 30]
    dx = gradients(ours, case.routing, x, dy, packs, samples, 0.3)
    past = reference.Pass(x, theirs, case.routing)
    past.forward()
    assert_same_bits(dx, past.backward(dy, packs, 0.3, samples), "dx")
    assert_same_grads(ours, theirs, name)


def test_a_hot_expert_has_blocks_of_its_own_rows() -> None:
    """Every token takes experts 0 to 3, 300 rows of each: blocks of 128 rows of the expert inside each pack; the other
    experts' gradients stay +0."""
    case = Case(BF16, None, ROUTINGS["qwen3"], shared=0)
    ours, theirs = case.weights(True), case.weights(True)
    for weights in (ours, theirs):
        weights.router.load(weights.router.value().float()[:1].expand(20, -1))
    x, dy, packs = case.rows(300), case.rows(300, 51), [0, 140, 300]
    dx = gradients(ours, case.routing, x, dy, packs)
    past = reference.Pass(x, theirs, case.routing)
    past.forward()
    assert_same_bits(dx, past.backward(dy, packs), "dx")
    assert_same_grads(ours, theirs, "hot")
    assert all(not handle.grad.any() for handle in ours.gate.handles[4:])
    assert all(handle.grad.any() for handle in ours.down.handles[:4])


# ------------------------------------------------------------------------------------------------ float64


def exact_case(storage: torch.dtype, routing: Routing) -> tuple[Case, torch.Tensor, torch.Tensor]:
    case = Case(storage, None, routing, hidden=48, inner=24, shared=40)
    return case, unit_values((26, 48), storage, 3), unit_values((26, 48), storage, 4)


@pytest.mark.parametrize("storage", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("balance", [0.0, 5.0])
@every_routing
def test_gradients_are_autograd(storage, balance, routing) -> None:
    """The formulas of the papers in float64, through the router and everything else; each number within a bound derived
    from the roundings on its way."""
    case, x, dy = exact_case(storage, routing)
    weights, samples = case.weights(True), [0, 9, 26]
    leaf = x.clone().requires_grad_()
    record = RoutingRecord.allocate((0,), 26, routing.top_k)
    out = moe(leaf, weights, routing, context([0, 26], samples, record, balance), 0)
    out.backward(dy)
    experts = record.experts[0]
    exact_out, exact = float64.autograd(x, weights, routing, experts, dy, balance, samples)
    analysis = float64.Analysis(x, weights, routing, experts)
    bounds = {"out": analysis.forward()} | analysis.backward(dy, balance, samples)
    found = {"out": out.detach(), "x": leaf.grad, "router": weights.router.grad}
    for name, stack in (("gate", weights.gate), ("up", weights.up), ("down", weights.down)):
        found |= {f"{name} {e}": handle.grad for e, handle in enumerate(stack.handles)}
    found |= {f"shared {n}": h.grad for n, h in zip(("gate", "up", "down"), weights.shared, strict=True)}
    assert set(found) == set(bounds) == {"out", *exact}
    for name, ours in found.items():
        want = exact_out if name == "out" else exact[name]
        slip = (bounds[name].value - want).abs().max()
        assert slip <= 1e-9 * (1 + want.abs().max()), f"{name}: the analysis is of another formula, {slip}"
        worst = ((ours.double() - want).abs() / (1.01 * bounds[name].error + 1e-30)).max()
        assert worst <= 1.0, f"{name}: {worst:.2f} times the bound"


def test_the_bound_is_not_loose() -> None:
    """In FP32, one part in a hundred of any gradient breaks it, and so does forgetting the normalisation."""
    case, x, dy = exact_case(FP32, ROUTINGS["moonlight"])
    weights = case.weights(True)
    dx = gradients(weights, case.routing, x, dy, [0, 26])
    past = reference.Pass(x, case.weights(True), case.routing)
    past.forward()
    analysis = float64.Analysis(x, weights, case.routing, past.experts)
    analysis.forward()
    bounds = analysis.backward(dy, 0.0, [])
    for name, ours in (("x", dx), ("router", weights.router.grad), ("gate 0", weights.gate.handles[0].grad)):
        wrong = (ours.double() * 1.01 - bounds[name].value).abs()
        assert (wrong > 1.01 * bounds[name].error).any(), name
    other = dataclasses.replace(case.routing, normalise=False)
    forgetful = case.weights(True)
    gradients(forgetful, other, x, dy, [0, 26])
    assert ((forgetful.router.grad.double() - bounds["router"].value).abs() > bounds["router"].error).any()


# ------------------------------------------------------------------------------------------------ splits


@every_numerics
def test_micro_batches(storage, fp8) -> None:
    """Packs in one pass or in several: the same dx and the same weight gradients, with a balance loss too."""
    case = Case(storage, fp8, ROUTINGS["deepseek"])
    x, dy, packs, samples = case.rows(90), case.rows(90, 51), [0, 33, 40, 90], [0, 20, 33, 40, 64, 90]
    whole = case.weights(True)
    dx = gradients(whole, case.routing, x, dy, packs, samples, 0.2)
    for groups in ([[0], [1], [2]], [[0, 1], [2]]):
        parts, weights = [], case.weights(True)
        for group in groups:
            first, last = packs[group[0]], packs[group[-1] + 1]
            cut = [[s - first for s in starts if first <= s <= last] for starts in (packs, samples)]
            parts.append(gradients(weights, case.routing, x[first:last], dy[first:last], *cut, 0.2))
        assert_same_bits(torch.cat(parts), dx, f"dx, {groups}")
        assert_same_grads(weights, whole, str(groups))


@every_numerics
def test_threads_runs_and_recomputation(storage, fp8) -> None:
    case = Case(storage, fp8, ROUTINGS["moonlight"], hidden=136)
    x, dy = case.rows(150), case.rows(150, 51)
    whole = case.weights(True)
    cuts = ([0, 70, 150], [0, 70, 100, 150])
    dx = gradients(whole, case.routing, x, dy, *cuts, 0.4)
    for threads in (1, 2, 3):
        with library.use_threads(threads):
            weights = case.weights(True)
            assert_same_bits(gradients(weights, case.routing, x, dy, *cuts, 0.4), dx, f"{threads} threads")
            assert_same_grads(weights, whole, f"{threads} threads")
    weights, leaf = case.weights(True), x.clone().requires_grad_()
    record = RoutingRecord.allocate((0,), 150, case.routing.top_k)
    out = checkpoint(moe, leaf, weights, case.routing, context(*cuts, record, 0.4), 0, use_reentrant=False)
    record.experts.fill_(0)
    out.backward(dy)
    assert_same_bits(leaf.grad, dx, "recomputed")
    assert_same_grads(weights, whole, "recomputed")


def test_a_record_that_is_used_again() -> None:
    """The buffers of a record belong to its next pass: the backward of the first must not read them."""
    case = Case(BF16, None, ROUTINGS["deepseek"])
    x, dy = case.rows(30), case.rows(30, 51)
    plain, weights = case.weights(True), case.weights(True)
    dx = gradients(plain, case.routing, x, dy, [0, 30])
    record = RoutingRecord.allocate((0,), 30, case.routing.top_k)
    here, leaf = context([0, 30], record=record), x.clone().requires_grad_()
    out = moe(leaf, weights, case.routing, here, 0)
    with torch.no_grad():
        moe(case.rows(30, 52), weights, case.routing, here, 0)
    out.backward(dy)
    assert_same_bits(leaf.grad, dx, "dx")
    assert_same_grads(weights, plain, "weights")


@every_numerics
def test_two_ranks_split_the_shared_mlp(storage, fp8) -> None:
    """Half of the shared MLP's inner axis on each rank, one or two leaves each: output and dx of the whole, on both."""
    case = Case(storage, fp8, ROUTINGS["moonlight"], shared=512)
    whole, x, dy = case.weights(), case.rows(9), case.rows(9, 51)
    dx = gradients(whole, case.routing, x, dy, [0, 9])
    out = moe(x, whole, case.routing, context(), 0)

    def half(handle: WeightHandle, rank: int, axis: int) -> WeightHandle:
        value = handle.value().chunk(2, axis)[rank].contiguous()
        leaves = {"in_leaves": handle.spec.in_leaves // 2 or 1, "out_leaves": handle.spec.out_leaves // 2 or 1}
        part = WeightHandle(dataclasses.replace(handle.spec, shape=tuple(value.shape), **leaves), storage)
        part.load(value)
        part.enable_input_grad()
        return part

    def on_rank(rank: int, exchange: Pair) -> tuple[torch.Tensor, torch.Tensor]:
        assert whole.shared is not None
        parts = tuple(half(handle, rank, axis) for handle, axis in zip(whole.shared, (0, 0, 1), strict=True))
        weights, leaf = dataclasses.replace(whole, shared=parts), x.clone().requires_grad_()
        y = moe(leaf, weights, case.routing, context([0, 9]), 0, exchange)
        y.backward(dy)
        return y.detach(), leaf.grad

    for found, gradient in on_both_ranks(on_rank):
        assert_same_bits(found, out, "output")
        assert_same_bits(gradient, dx, "dx")


# ------------------------------------------------------------------------------------------------ balance loss


@pytest.mark.parametrize("name", ["qwen3", "moonlight"])
def test_the_balance_loss_sees_one_sequence(name) -> None:
    """A sequence's gradients do not depend on its neighbours; another cut into sequences shows; 0 changes no bit."""
    case = Case(BF16, None, ROUTINGS[name], shared=0)
    x, dy = case.rows(60), case.rows(60, 51)

    def dx(rows: slice, samples: list[int], balance: float = 2.0) -> torch.Tensor:
        return gradients(case.weights(True), case.routing, x[rows], dy[rows], [0, samples[-1]], samples, balance)

    both = dx(slice(0, 60), [0, 25, 60])
    assert_same_bits(both[:25], dx(slice(0, 25), [0, 25]), "first alone")
    assert_same_bits(both[25:], dx(slice(25, 60), [0, 35]), "second alone")
    assert_different_bits(both, dx(slice(0, 60), [0, 30, 60]))
    plain = gradients(case.weights(True), case.routing, x, dy, [0, 60])
    assert_same_bits(dx(slice(0, 60), [0, 25, 60], 0.0), plain, "no balance loss")
    assert_different_bits(both, plain)


def test_counts_are_complete_before_they_are_used() -> None:
    """One sequence so long that counting its choices takes a while, on two threads; a race shows in every other try."""
    routing = Routing(16, 8)
    logits = unit_values((40000, 16), FP32, 1)
    experts, weights, _ = kernels.route(logits, None, routing)
    starts = torch.tensor([0, 40000], dtype=torch.int32)

    def run(threads: int) -> torch.Tensor:
        with library.use_threads(threads):
            return kernels.route_grad(logits, experts, weights, routing, FP32, 1e4, starts)

    alone = run(1)
    for attempt in range(8):
        assert_same_bits(run(2), alone, f"attempt {attempt}")


def test_the_balance_loss_balances() -> None:
    """Descending it alone spreads tokens over experts."""
    case = Case(FP32, None, Routing(8, 2), shared=0)
    weights, x = case.weights(True), unit_values((200, case.hidden), FP32, 5)
    value = weights.router.master
    assert value is not None
    x[:, 0] = 1.0
    value[:2, 0] += 3.0
    weights.router.publish()
    record = RoutingRecord.allocate((0,), 200, 2)

    def spread() -> float:
        leaf = x.clone().requires_grad_()
        weights.router.open_grad()
        moe(leaf, weights, case.routing, context([0, 200], [0, 200], record, 1.0), 0).backward(torch.zeros_like(x))
        return float(torch.bincount(record.experts.flatten().long(), minlength=8).max())

    before = spread()
    for _ in range(30):
        value -= 2.0 * weights.router.grad
        weights.router.publish()
        after = spread()
    assert before > 180 and after < 80, (before, after)


# ------------------------------------------------------------------------------------------------ frozen parts


@pytest.mark.parametrize("trained", ["router", "gate", "down", "one expert", "shared", "nothing"])
@pytest.mark.parametrize("wants_dx", [True, False])
def test_frozen_parts(trained, wants_dx) -> None:
    """What is trained, and x, get the gradients of the whole layer; the rest gets none."""
    case = Case(BF16, None, ROUTINGS["moonlight"])
    x, dy, whole = case.rows(40), case.rows(40, 51), case.weights(True)
    dx = gradients(whole, case.routing, x, dy, [0, 40])
    part = case.weights(True)
    groups = {
        "router": [part.router],
        "gate": part.gate.handles,
        "down": part.down.handles,
        "one expert": [part.up.handles[3]],
        "shared": [*part.shared][1:],
        "nothing": [],
    }
    for handle in part.handles():
        if handle not in groups[trained]:
            handle.set_trainable(False)
    leaf = x.clone().requires_grad_(wants_dx)
    out = moe(leaf, part, case.routing, context([0, 40]), 0)
    assert out.requires_grad == (wants_dx or trained != "nothing")
    if not out.requires_grad:
        return
    out.backward(dy)
    if wants_dx:
        assert_same_bits(leaf.grad, dx, "dx")
    for ours, theirs in zip(part.handles(), whole.handles(), strict=True):
        if ours.trainable:
            assert_same_bits(ours.grad, theirs.grad, ours.spec.name)
        else:
            assert ours.grad is None


def test_what_the_backward_needs() -> None:
    case = Case(BF16, None, ROUTINGS["qwen3"])
    x = case.rows(4).requires_grad_()
    for missing, message in (({"packs": None}, "no packs"), ({"packs": [0, 4], "balance": 1.0}, "sequences begin")):
        out = moe(x, case.weights(True), case.routing, context(**missing), 0)
        with pytest.raises(AssertionError, match=message):
            out.backward(torch.ones_like(out))


@pytest.mark.parametrize("isa", library.ISAS)
def test_other_builds(isa) -> None:
    """The definition holds on every instruction set."""
    rerun("tests/ops/test_moe_grad.py", isa, "deepseek and one_by_one and bf16 or autograd and qwen3")
