"""Routed layers, forward: the router and the order of rows against the definition, rows that do not see each other,
threads, recorded programs, other builds."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from tests.bits import assert_different_bits, assert_same_bits, hard_values, unit_values
from tests.ops import moe_reference as reference
from tests.ops.moe_cases import BF16, FP32, ROUTINGS, Case, context
from tests.ops.other_builds import rerun
from zerogap.errors import ConfigError
from zerogap.ops import tap
from zerogap.ops.cpu import library
from zerogap.ops.cpu import moe as kernels
from zerogap.ops.moe import MoEWeights, Routing, moe
from zerogap.routing import RoutingRecord
from zerogap.types import FP8Blocks

NUMERICS = {
    "fp32": (FP32, None),
    "bf16": (BF16, None),
    "fp8": (BF16, FP8Blocks("fp32", True)),
    "fp8 pow2": (BF16, FP8Blocks("pow2", False)),
}
every_routing = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS.keys())
every_numerics = pytest.mark.parametrize(("storage", "fp8"), NUMERICS.values(), ids=NUMERICS.keys())
SIGMOID = Routing(16, 3, "sigmoid")


def logits_of(routing: Routing, rows: int = 200, seed: int = 1, scale: float = 3.0) -> torch.Tensor:
    return unit_values((rows, routing.num_experts), FP32, seed) * scale


def bias_of(routing: Routing) -> torch.Tensor | None:
    return unit_values((routing.num_experts,), FP32, 9) / 4 if routing.scoring == "sigmoid" else None


def assert_same_route(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], what: str) -> None:
    for name, ours, theirs in zip(("experts", "weights", "margins"), found, expected, strict=True):
        assert_same_bits(ours, theirs, f"{what}: {name}")


# ------------------------------------------------------------------------------------------------ router


@every_routing
@pytest.mark.parametrize("scale", [0.2, 3.0, 40.0])
def test_the_router_is_the_definition(routing, scale) -> None:
    """Choices, weights and margins, bit for bit; also where most scores underflow to zero and tie."""
    logits, bias = logits_of(routing, scale=scale), bias_of(routing)
    expected = reference.route(logits, bias, routing)
    assert_same_route(kernels.route(logits, bias, routing), expected, "router")


@every_routing
def test_planted_ties_go_to_the_lower_index(routing) -> None:
    """Logits of five levels only: whole runs of equal choices, across lanes and groups."""
    logits = torch.from_numpy(np.random.default_rng(3).integers(-2, 3, (300, routing.num_experts)).astype(np.float32))
    expected = reference.route(logits, None, routing)
    assert_same_route(kernels.route(logits, None, routing), expected, "levels")
    equal = torch.full((3, routing.num_experts), 0.25)
    experts, weights, margins = kernels.route(equal, None, routing)
    assert_same_bits(experts, torch.arange(routing.top_k, dtype=torch.int32).expand(3, -1), "all equal")
    assert (weights == weights[:, :1]).all()
    assert (margins == (math.inf if routing.top_k == routing.num_experts else 0.0)).all()


def test_two_equal_logits_at_the_border() -> None:
    """Experts 5 and 11 compete for the last place with equal logits, wherever the other winners stand."""
    routing = Routing(16, 2)
    for winner in (0, 7, 15):
        logits = torch.zeros(1, 16)
        logits[0, [5, 11]] = 1.0
        logits[0, winner] = 2.0
        experts, _, margins = kernels.route(logits, None, routing)
        assert experts.tolist() == [sorted([5, winner])] and margins.tolist() == [0.0]


def test_equal_groups_go_to_the_lower_one() -> None:
    """Groups 1, 2 and 3 have equal sums of two (at different places); only group 1 is kept beside group 0."""
    routing = Routing(12, 4, "sigmoid", groups=4, top_groups=2)
    logits = torch.tensor([[4.0, 4.0, -8.0, 1.0, -8.0, 0.5, 0.5, 1.0, -8.0, -8.0, 1.0, 0.5]])
    expected = reference.route(logits, None, routing)
    assert expected[0].tolist() == [[0, 1, 3, 5]]
    assert_same_route(kernels.route(logits, None, routing), expected, "groups")


def test_a_group_counts_by_its_two_best() -> None:
    """The best expert of all stands in a group whose second is poor: it is not eligible."""
    routing = Routing(6, 2, "sigmoid", groups=2, top_groups=1)
    logits = torch.tensor([[6.0, -6.0, -6.0, 2.0, 2.0, 2.0]])
    experts, _, margins = kernels.route(logits, None, routing)
    assert experts.tolist() == [[3, 4]] and margins.tolist() == [0.0]


def test_the_bias_chooses_and_does_not_weigh() -> None:
    bias = torch.zeros(16)
    bias[12] = 100.0
    logits = logits_of(SIGMOID)
    experts, weights, _ = kernels.route(logits, bias, SIGMOID)
    assert (experts == 12).any(1).all()
    scores = torch.sigmoid(logits.double()).gather(1, experts.long())
    exact = scores / scores.sum(1, keepdim=True)
    assert ((weights.double() - exact).abs() <= exact * 16 * 2.0**-24).all()


@pytest.mark.parametrize("routing", [ROUTINGS["qwen3"], ROUTINGS["deepseek"]], ids=["qwen3", "deepseek"])
def test_choices_are_those_of_the_model_code(routing) -> None:
    """The families' own code in float64 (softmax or sigmoid, groups, topk, renormalisation): the same experts wherever
    the margins exceed the error of FP32 scores, and weights within a few roundings."""
    logits, bias = logits_of(routing, rows=400), bias_of(routing)
    experts, weights, margins = kernels.route(logits, bias, routing)
    z = logits.double()
    scores = z.softmax(1) if routing.scoring == "softmax" else z.sigmoid()
    choice = scores if bias is None else scores + bias.double()
    close = torch.zeros(len(z), dtype=torch.bool)
    if routing.groups > 1:
        pairs = choice.view(len(z), routing.groups, -1).topk(2, -1)[0].sum(-1)
        ranked = pairs.sort(1, descending=True)[0]
        close = ranked[:, routing.top_groups - 1] - ranked[:, routing.top_groups] < 1e-5
        kept = torch.zeros_like(pairs).scatter(1, pairs.topk(routing.top_groups, 1)[1], 1.0)
        choice = choice.masked_fill(kept.repeat_interleave(choice.shape[1] // routing.groups, 1) == 0, -math.inf)
    chosen = choice.topk(routing.top_k, 1)[1].sort(1)[0]
    clear = (margins > 1e-5) & ~close
    assert clear.sum() > 350
    assert_same_bits(experts[clear].long(), chosen[clear], "experts")
    exact = scores.gather(1, experts.long())
    exact = exact / exact.sum(1, keepdim=True) * routing.scaling
    assert ((weights.double() - exact).abs() <= exact * 32 * 2.0**-24).all()


def test_scores_that_all_underflow() -> None:
    """DeepSeek-V3's epsilon keeps the sum of the chosen scores from being zero."""
    weights = kernels.route(torch.full((2, 16), -100.0), None, SIGMOID)[1]
    assert_same_bits(weights, torch.zeros(2, 3), "weights")


@every_routing
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(routing, bad) -> None:
    """Weights and margins are NaN, experts exist and ascend; other tokens keep their bits."""
    logits, bias = logits_of(routing, rows=40), bias_of(routing)
    clean = kernels.route(logits, bias, routing)
    spoiled = logits.clone()
    for row in range(0, 40, 2):
        spoiled[row, row % routing.num_experts] = bad
    experts, weights, margins = kernels.route(spoiled, bias, routing)
    assert weights[::2].isnan().all() and margins[::2].isnan().all()
    assert_same_bits(experts[::2], torch.arange(routing.top_k, dtype=torch.int32).expand(20, -1), "experts")
    odd = [t[1::2].contiguous() for t in (experts, weights, margins)]
    assert_same_route(tuple(odd), tuple(t[1::2].contiguous() for t in clean), "beside")
    broken = torch.full((routing.num_experts,), bad)
    assert kernels.route(logits, broken, routing)[1].isnan().all()


def test_settings_that_cannot_be_honoured() -> None:
    good = {"num_experts": 8, "top_k": 2}
    for change in (
        {"num_experts": 0},
        {"top_k": 0},
        {"top_k": 9},
        {"scoring": "relu"},
        {"scaling": 0.0},
        {"scaling": math.inf},
        {"groups": 3},
        {"groups": 8},
        {"groups": 0},
        {"groups": 2, "top_groups": 3},
        {"groups": 4, "top_groups": 1, "top_k": 3},
    ):
        with pytest.raises(ConfigError, match=f"routing.{list(change)[-1]}"):
            Routing(**(good | change))


# ------------------------------------------------------------------------------------------------ order of rows


@pytest.mark.parametrize("kind", ["random", "hot", "empty", "none"])
def test_sorted_rows(kind) -> None:
    """By expert, then token: random choices, one expert for every token, experts without one, no token at all."""
    routing = Routing(9, 2)
    experts = kernels.route(logits_of(routing, rows=70), None, routing)[0]
    if kind == "hot":
        experts[:] = torch.tensor([3, 8])
    if kind == "empty":
        experts[:, 0], experts[:, 1] = torch.arange(70) % 2 * 4, 6
    if kind == "none":
        experts = experts[:0]
    order = kernels.dispatch(experts, 9, experts)
    starts, tokens, slots = reference.order(experts, 9)
    assert order.starts.tolist() == starts
    assert order.tokens.flatten().tolist() == tokens
    assert order.slots.tolist() == slots


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_spread_and_combine(dtype) -> None:
    """Rows reach every place that a token has, and come back as the fused sum of the definition."""
    routing = ROUTINGS["qwen3"]
    experts, weights, _ = kernels.route(logits_of(routing, rows=60), None, routing)
    order = kernels.dispatch(experts, routing.num_experts, experts)
    x, shared = (hard_values((60, 77), dtype, seed, spread=8) for seed in (1, 2))
    rows = kernels.spread(x, order.slots)
    assert_same_bits(rows.view(-1, 77), x[order.tokens.flatten().long()], "sorted rows")
    rows = hard_values((60, 4, 77), dtype, 3, spread=8)
    rows.view(-1, 77)[order.slots[7].long()] = -0.0
    flat = reference.array(rows).reshape(-1, 77)
    for name, extra in (("alone", None), ("shared", shared)):
        total = np.zeros((60, 77), np.float32)
        for j in range(4):
            total = reference.fma(weights[:, j, None].numpy(), flat[order.slots[:, j]], total)
        if extra is not None:
            total = reference.flush(total + reference.array(extra))
        found = kernels.combine(rows, order.slots, weights, extra)
        assert_same_bits(found, reference.stored(total, dtype), name)
    backwards = np.zeros((60, 77), np.float32)
    for j in reversed(range(4)):
        backwards = reference.fma(weights[:, j, None].numpy(), flat[order.slots[:, j]], backwards)
    assert_different_bits(kernels.combine(rows, order.slots, weights, None).float(), torch.from_numpy(backwards))


# ------------------------------------------------------------------------------------------------ the layer


def run(x: torch.Tensor, weights: MoEWeights, routing: Routing) -> torch.Tensor:
    with torch.no_grad():
        return moe(x, weights, routing, context(), 0)


def steer(case: Case, kind: str) -> MoEWeights:
    """Weights whose router sends every token to the same experts (`hot`), or sends none to most (`empty`)."""
    weights = case.weights()
    if kind != "random":
        value = weights.router.value().float()
        value[:] = value[:1] if kind == "hot" else value[torch.arange(len(value)) % 2]
        weights.router.load(value)
    return weights


@every_numerics
@pytest.mark.parametrize("kind", ["random", "hot", "empty"])
@pytest.mark.parametrize("name", ["qwen3", "deepseek", "all", "one"])
def test_the_layer_is_its_experts_one_by_one(storage, fp8, kind, name) -> None:
    """Bits of a loop over experts with single products; also where all tokens take the same experts (equal logits)."""
    case = Case(storage, fp8, ROUTINGS[name], hidden=136, shared=512 if name == "deepseek" else 0)
    weights, x = steer(case, kind), case.rows(33)
    assert_same_bits(run(x, weights, case.routing), reference.Pass(x, weights, case.routing).forward(), kind)


@every_numerics
def test_rows_do_not_see_each_other(storage, fp8) -> None:
    """Any number of rows, any place, any neighbours, NaN ones included."""
    case = Case(storage, fp8, ROUTINGS["deepseek"], hidden=136, shared=256)
    weights, x = case.weights(), case.rows(70)
    alone = torch.cat([run(x[t : t + 1], weights, case.routing) for t in range(70)])
    for count in (2, 3, 17, 70):
        assert_same_bits(run(x[:count], weights, case.routing), alone[:count], f"{count} rows")
    for chunk in (1, 9, 64):
        parts = [run(part.contiguous(), weights, case.routing) for part in x.split(chunk)]
        assert_same_bits(torch.cat(parts), alone, f"chunks of {chunk}")
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
    assert_same_bits(run(x[order], weights, case.routing), alone[order], "other places")
    hot = x[5].expand(70, -1).clone()
    hot[33] = x[33]
    assert_same_bits(run(hot, weights, case.routing)[33], alone[33], "beside a hot expert")
    spoiled = x.clone()
    spoiled[::2] = math.nan
    out = run(spoiled, weights, case.routing)
    assert_same_bits(out[1::2].contiguous(), alone[1::2].contiguous(), "beside NaN")
    assert out[::2].isnan().all()


@every_numerics
def test_threads_and_runs(storage, fp8) -> None:
    case = Case(storage, fp8, ROUTINGS["moonlight"], hidden=136)
    weights, x = case.weights(), case.rows(150)
    whole = run(x, weights, case.routing)
    for threads in (1, 2, 3, 2):
        with library.use_threads(threads):
            assert_same_bits(run(x, weights, case.routing), whole, f"{threads} threads")


@every_numerics
def test_a_recorded_program(storage, fp8) -> None:
    """Recorded once, run for any number of rows and other choices each time; no row beyond is written."""
    case = Case(storage, fp8, ROUTINGS["moonlight"])
    weights, buffer = case.weights(), torch.zeros(40, case.hidden, dtype=storage)
    record = RoutingRecord.allocate((3, 7), 40, case.routing.top_k)
    with torch.no_grad(), library.record(rows=(buffer,)) as program:
        out = moe(buffer, weights, case.routing, context(record=record), 7)
    for count, seed in ((40, 1), (1, 2), (23, 3), (0, 4)):
        out.zero_()
        record.experts.fill_(-1)
        buffer.copy_(case.rows(40, seed))
        program.run(rows=count)
        rows = buffer[:count].contiguous()
        if count:
            assert_same_bits(out[:count], run(rows, weights, case.routing), f"{count} rows")
            past = reference.Pass(rows, weights, case.routing)
            past.forward()
            assert_same_bits(record.experts[1, :count], past.experts, "recorded experts")
            assert_same_bits(record.margins[1, :count], past.margins, "recorded margins")
        assert not out[count:].any() and (record.experts[1, count:] == -1).all() and (record.experts[0] == -1).all()


def test_the_record_of_an_eager_pass() -> None:
    """The record gets what the router chose, with and without a graph, and changes no bit."""
    case = Case(routing=ROUTINGS["deepseek"])
    x, plain = case.rows(12), run(case.rows(12), case.weights(), case.routing)
    for trainable in (False, True):
        record = RoutingRecord.allocate((2,), 20, case.routing.top_k)
        out = moe(x, case.weights(trainable), case.routing, context(record=record), 2)
        assert_same_bits(out.detach(), plain, "output")
        past = reference.Pass(x, case.weights(), case.routing)
        past.forward()
        assert_same_bits(record.experts[0, :12], past.experts, "experts")
        assert (record.experts[0, 12:] == -1).all()


def test_the_tap_sees_and_may_change_the_choice() -> None:
    """A fault planted into the router's choice reaches the output, with and without a graph."""
    case = Case(routing=ROUTINGS["qwen3"])
    x = case.rows(6)
    seen: list[str] = []

    def swap(name: str, outputs, info) -> None:
        seen.append(name)
        if name == "router":
            outputs["experts"][2] = torch.tensor([0, 1, 2, 3], dtype=torch.int32)

    for trainable in (False, True):
        weights = case.weights(trainable)
        plain = moe(x, weights, case.routing, context(), 0).detach()
        with tap.listen(swap):
            changed = moe(x, weights, case.routing, context(), 0).detach()
        assert_same_bits(changed[[0, 1, 3, 4, 5]], plain[[0, 1, 3, 4, 5]], "other tokens")
        assert_different_bits(changed[2], plain[2])
    assert {"router", "experts", "moe"} <= set(seen)


def test_one_quantised_projection_among_others() -> None:
    """A contract may leave named tensors as they are: gate FP8, up BF16, down FP8."""
    fp8 = FP8Blocks("fp32", True)
    case = Case(BF16, fp8, ROUTINGS["qwen3"], hidden=136)
    weights = case.weights()
    mixed = dataclasses.replace(weights, up=dataclasses.replace(case, fp8=None).weights().up)
    x = case.rows(20)
    assert_same_bits(run(x, mixed, case.routing), reference.Pass(x, mixed, case.routing).forward(), "mixed")
    assert_different_bits(run(x, mixed, case.routing), run(x, weights, case.routing))


@pytest.mark.parametrize("isa", library.ISAS)
def test_other_builds(isa) -> None:
    """The definition holds on every instruction set."""
    rerun("tests/ops/test_moe.py", isa, "definition or lower or spread or one_by_one and hot and deepseek")
