"""Matrix products: contract, accuracy, independence of rows, invariance to every split, gradients, repeatability."""

import pytest
import torch

from tests.bits import assert_different_bits, assert_same_bits, hard_values, unit_values
from tests.ops import gemm_reference as reference
from tests.ops.other_builds import rerun
from zerogap.ops import gemm
from zerogap.ops.cpu import gemm as cpu
from zerogap.ops.cpu import library
from zerogap.ops.handle import WeightHandle
from zerogap.types import ForwardContext, WeightSpec

BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = [BF16, FP32]
UNIT = 2.0**-24  # FP32 unit roundoff


def packed(w: torch.Tensor) -> torch.Tensor:
    panels = cpu.allocate_panels(*w.shape, w.dtype)
    cpu.pack(w, panels)
    return panels


def multiply(x: torch.Tensor, w: torch.Tensor, leaf_size: int = 0, fp32: bool = True) -> torch.Tensor:
    """[M, N] of one weight [N, K], unrounded by default."""
    return cpu.product([cpu.Segment(x, packed(w), w.shape[0], leaf_size)], "concatenate", fp32=fp32)[0]


def summed(pairs: list[tuple[torch.Tensor, torch.Tensor]], leaf_sizes: list[int], mode: str) -> torch.Tensor:
    segments = [cpu.Segment(x, packed(w), w.shape[0], leaf) for (x, w), leaf in zip(pairs, leaf_sizes, strict=True)]
    return cpu.product(segments, mode, fp32=True)[0]


def handle(
    name: str, value: torch.Tensor, in_leaves: int = 1, out_leaves: int = 1, trainable: bool = True
) -> WeightHandle:
    kind = "matrix" if value.dim() == 2 else "vector"
    weight = WeightHandle(WeightSpec(name, tuple(value.shape), kind, in_leaves, out_leaves), value.dtype)
    weight.load(value)
    weight.set_trainable(trainable)
    weight.enable_input_grad()
    if trainable:
        weight.open_grad()
    return weight


def context(pack_starts: list[int]) -> ForwardContext:
    none = torch.zeros(0, dtype=torch.int32)
    return ForwardContext(none, none, none, 16, pack_starts=torch.tensor(pack_starts, dtype=torch.int32))


# -------------------------------------------------------------------------------- the contract, literally


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "n", "k", "leaf"),
    [
        (1, 1, 1, 0),
        (1, 1, 7, 0),
        (2, 65, 33, 0),
        (7, 130, 577, 0),
        (13, 70, 512, 128),  # 4 leaves
        (3, 64, 1024, 128),  # 8 leaves
        (5, 10, 700, 128),  # 6 leaves, the last ragged: an odd one passes up twice
        (4, 3, 4500, 64),  # 71 leaves, more than one visit of a panel
    ],
)
def test_contract_forward(dtype: torch.dtype, m: int, n: int, k: int, leaf: int) -> None:
    x, w = hard_values((m, k), dtype, seed=1), hard_values((n, k), dtype, seed=2)
    assert_same_bits(multiply(x, w, leaf), reference.product([(x, w, leaf)], "concatenate"), "product")


@pytest.mark.parametrize("dtype", DTYPES)
def test_contract_bias_and_rounding(dtype: torch.dtype) -> None:
    """The bias is added in FP32 after the tree, and the sum is rounded once."""
    x, w, b = (
        hard_values((9, 256), dtype, seed=3),
        hard_values((70, 256), dtype, seed=4),
        hard_values(70, dtype, seed=5),
    )
    (y,) = cpu.product([cpu.Segment(x, packed(w), 70, 128, b)], "concatenate")
    expected = reference.product([(x, w, 128)], "concatenate") + b.to(FP32)
    assert_same_bits(y, expected.to(dtype), "rounded output")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["chain", "trees"])
@pytest.mark.parametrize(("reduces", "leaves"), [((256, 256), 2), ((512, 256, 256), 2), ((64,), 1), ((384, 384), 3)])
def test_contract_sum_over_weights(dtype: torch.dtype, mode: str, reduces: tuple[int, ...], leaves: int) -> None:
    pairs = [
        (hard_values((7, k), dtype, seed=k + i), hard_values((66, k), dtype, seed=9 * i)) for i, k in enumerate(reduces)
    ]
    sizes = [k // leaves for k in reduces]
    expected = reference.product([(x, w, size) for (x, w), size in zip(pairs, sizes, strict=True)], mode)
    assert_same_bits(summed(pairs, sizes, mode), expected, mode)


def test_chain_and_trees_differ() -> None:
    """Control: the two input-gradient rules are two orders."""
    pairs = [(hard_values((7, 256), BF16, seed=i), hard_values((66, 256), BF16, seed=9 + i)) for i in range(2)]
    assert_different_bits(summed(pairs, [128, 128], "chain"), summed(pairs, [128, 128], "trees"))


PACKS = [[0, 1], [0, 2, 3], [0, 128, 256], [0, 129, 130, 300], [0, 0, 257]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("starts", PACKS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (17, 65), (40, 130)])
def test_contract_weight_grad(dtype: torch.dtype, starts: list[int], n: int, k: int) -> None:
    rows = starts[-1]
    dy, x = hard_values((rows, n), dtype, seed=6), hard_values((rows, k), dtype, seed=7)
    acc = hard_values((n, k), FP32, seed=8)
    expected = reference.weight_grad(dy, x, starts, acc)
    cpu.weight_grad(dy, x, torch.tensor(starts, dtype=torch.int32), acc)
    assert_same_bits(acc, expected, "weight gradient")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("starts", PACKS, ids=str)
def test_contract_column_grad(dtype: torch.dtype, starts: list[int]) -> None:
    dy, acc = hard_values((starts[-1], 37), dtype, seed=6), hard_values(37, FP32, seed=8)
    expected = reference.column_grad(dy, starts, acc)
    cpu.column_grad(dy, torch.tensor(starts, dtype=torch.int32), acc)
    assert_same_bits(acc, expected, "bias gradient")


@pytest.mark.parametrize("isa", library.ISAS)
def test_contract_on_every_instruction_set(isa: str) -> None:
    """The tests above, in a process that loads another build."""
    rerun(__file__, isa, "contract and not every_instruction_set or bf16_rounding or alone")


# ------------------------------------------------------------------------------------------------ packing


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (64, 64), (65, 33), (130, 577), (3, 4100)])
def test_pack_round_trip(dtype: torch.dtype, n: int, k: int) -> None:
    w = hard_values((n, k), dtype, seed=n)
    forward, transposed = cpu.allocate_panels(n, k, dtype), cpu.allocate_panels(k, n, dtype)
    forward.fill_(float("nan"))  # padding must be written too
    transposed.fill_(float("nan"))
    cpu.pack(w, forward, transposed)
    assert_same_bits(cpu.unpack(forward, n, k, dtype), w, "forward panels")
    assert_same_bits(cpu.unpack(transposed, k, n, dtype), w.T.contiguous(), "transposed panels")
    assert forward.data_ptr() % 64 == 0 and not forward.isnan().any() and not transposed.isnan().any()


def test_pack_bf16_rounding() -> None:
    """FP32 masters are rounded to nearest even; ties, overflow to infinity, infinities and NaN as IEEE says."""
    master = torch.cat([hard_values(4000, FP32, seed=1, spread=60), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38])])
    master = torch.cat([master, torch.tensor([float("inf"), -float("inf"), 0.0, -0.0, 1e-39, -1e-39])]).reshape(1, -1)
    panels = cpu.allocate_panels(1, master.shape[1], BF16)
    cpu.pack(master, panels)
    expected = torch.where(master.abs() < 2.0**-126, master * 0, master).to(BF16)
    assert_same_bits(cpu.unpack(panels, 1, master.shape[1], BF16), expected, "rounded weights")
    master.fill_(float("nan"))
    cpu.pack(master, panels)
    assert cpu.unpack(panels, 1, master.shape[1], BF16).isnan().all()


# ------------------------------------------------------------------------------------------------ accuracy


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "leaves"), [(192, 576, 1), (70, 1536, 4), (64, 4096, 8), (33, 577, 1)])
def test_accuracy(dtype: torch.dtype, n: int, k: int, leaves: int) -> None:
    """|y - y64| <= g * sum |x w|, with g of a chain of k / leaves fused terms and a tree (Higham, 3.1)."""
    x, w = unit_values((40, k), dtype, seed=1), unit_values((n, k), dtype, seed=2)
    y = multiply(x, w, k // leaves if leaves > 1 else 0).double()
    terms = 2 * (k // leaves) + leaves  # two roundings per term on the portable build
    bound = terms * UNIT / (1 - terms * UNIT) * (x.double().abs() @ w.double().abs().T)
    assert ((y - x.double() @ w.double().T).abs() <= bound).all()
    assert_same_bits(multiply(x, w, k // leaves if leaves > 1 else 0, fp32=False), y.to(FP32).to(dtype), "one rounding")


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_grad_accuracy(dtype: torch.dtype) -> None:
    starts = [0, 300, 641]
    dy, x, acc = unit_values((641, 65), dtype, seed=1), unit_values((641, 70), dtype, seed=2), torch.zeros(65, 70)
    cpu.weight_grad(dy, x, torch.tensor(starts, dtype=torch.int32), acc)
    terms = 2 * 128 + len(reference.blocks(starts))
    bound = terms * UNIT / (1 - terms * UNIT) * (dy.double().abs().T @ x.double().abs())
    assert ((acc.double() - dy.double().T @ x.double()).abs() <= bound).all()


# -------------------------------------------------------------------------------- rows do not see each other


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "leaf"), [(100, 577, 0), (64, 512, 128)])
def test_row_equals_row_alone(dtype: torch.dtype, n: int, k: int, leaf: int) -> None:
    """Every row of every batch size 1..33, and of one batch of several blocks, equals the row alone."""
    x, w = hard_values((33, k), dtype, seed=1), hard_values((n, k), dtype, seed=2)
    alone = torch.cat([multiply(x[r : r + 1], w, leaf) for r in range(33)])
    for m in range(1, 34):
        assert_same_bits(multiply(x[:m].contiguous(), w, leaf), alone[:m], f"{m} rows")
    order = torch.arange(250) % 33
    assert_same_bits(multiply(x[order].contiguous(), w, leaf), alone[order], "250 rows")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [float("inf"), float("nan"), -0.0])
def test_row_does_not_see_neighbours_alone(dtype: torch.dtype, poison: float) -> None:
    """Rows of infinities or NaN next to a row change nothing in it, with an odd K too (its tail is padded)."""
    x, w = hard_values((20, 577), dtype, seed=1), hard_values((70, 577), dtype, seed=2)
    clean = multiply(x, w)
    x[1::2] = poison
    assert_same_bits(multiply(x, w)[0::2].contiguous(), clean[0::2].contiguous(), "rows between poisoned ones")


# ------------------------------------------------------------------------------------------------ splits


@pytest.mark.parametrize("dtype", DTYPES)
def test_concatenation_changes_nothing(dtype: torch.dtype) -> None:
    """q, k, v in one command, apart, and as one stacked weight: the same bits."""
    x = hard_values((19, 576), dtype, seed=1)
    parts = [hard_values((n, 576), dtype, seed=n) for n in (576, 192, 100)]
    apart = [multiply(x, w) for w in parts]
    fused = cpu.product([cpu.Segment(x, packed(w), w.shape[0]) for w in parts], "concatenate", fp32=True)
    for one, two in zip(fused, apart, strict=True):
        assert_same_bits(one, two, "fused")
    assert_same_bits(multiply(x, torch.cat(parts)), torch.cat(apart, dim=1), "stacked")


def test_controls_differ() -> None:
    """A permuted reduced axis and other leaves are other orders, and the data shows it."""
    x, w = hard_values((19, 512), BF16, seed=1), hard_values((70, 512), BF16, seed=2)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(1))
    whole = multiply(x, w)
    assert_different_bits(multiply(x[:, order].contiguous(), w[:, order].contiguous()), whole, "permuted K")
    assert_different_bits(multiply(x, w, 128), whole, "4 leaves against 1")
    assert_different_bits(multiply(x, w, 256), multiply(x, w, 128), "2 leaves against 4")


class Pair:
    """An exchange over two simulated ranks: the other rank's subtree sums were collected before."""

    size = 2

    def __init__(self, rank: int, others: list[torch.Tensor]) -> None:
        self.rank, self.others, self.seen = rank, others, []

    def combine(self, subtree: torch.Tensor) -> torch.Tensor:
        self.seen.append(subtree)
        if not self.others:  # the collecting pass
            return subtree
        other = self.others.pop(0)
        return subtree + other if self.rank == 0 else other + subtree


def on_both_ranks(run) -> list:
    """run(rank, exchange) on two ranks, each with the other's sums."""
    collected = []
    for rank in (0, 1):
        collect = Pair(rank, [])
        run(rank, collect)
        collected.append(collect.seen)
    return [run(rank, Pair(rank, list(collected[1 - rank]))) for rank in (0, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leaves", [2, 4, 8])
def test_tensor_parallel_forward(dtype: torch.dtype, leaves: int) -> None:
    """Two ranks with half of the leaves each: the whole product's bits, on both ranks."""
    x, w, b = (
        hard_values((9, 1024), dtype, seed=1),
        hard_values((70, 1024), dtype, seed=2),
        hard_values(70, dtype, seed=3),
    )
    bias = handle("b", b, trainable=False)
    whole = gemm.linear(
        x, [handle("w", w, in_leaves=leaves, trainable=False)], [bias], context([0, 9]), gradient="chain"
    )

    def run(rank: int, exchange: Pair) -> torch.Tensor:
        half = slice(512 * rank, 512 * (rank + 1))
        weight = handle("w", w[:, half].contiguous(), in_leaves=leaves // 2, trainable=False)
        return gemm.linear(
            x[:, half].contiguous(), [weight], [bias], context([0, 9]), gradient="chain", exchange=exchange
        )[0]

    for y in on_both_ranks(run):
        assert_same_bits(y, whole[0], "row-parallel output")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gradient", gemm.GRADIENTS)
def test_tensor_parallel_input_grad(dtype: torch.dtype, gradient: str) -> None:
    """Two ranks with half of the outputs of two projections each: the whole input gradient's bits."""
    x, dy = hard_values((9, 130), dtype, seed=1), [hard_values((9, 512), dtype, seed=i) for i in (2, 3)]
    w = [hard_values((512, 130), dtype, seed=i) for i in (4, 5)]

    def input_grad(weights: list[WeightHandle], dys: list[torch.Tensor], **exchange: Pair) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        outs = gemm.linear(leaf, weights, [None, None], context([0, 9]), gradient=gradient, **exchange)
        torch.autograd.backward(outs, dys)
        return leaf.grad

    def run(rank: int, exchange: Pair) -> torch.Tensor:
        half = slice(256 * rank, 256 * (rank + 1))
        weights = [handle("w", t[half].contiguous(), out_leaves=2, trainable=False) for t in w]
        return input_grad(weights, [t[:, half].contiguous() for t in dy], grad_exchange=exchange)

    whole = input_grad([handle("w", t, out_leaves=4, trainable=False) for t in w], dy)
    for dx in on_both_ranks(run):
        assert_same_bits(dx, whole, f"column-parallel input gradient, {gradient}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_grad_under_micro_batches(dtype: torch.dtype) -> None:
    """One, two or four packs at a time: the same accumulator bits. Other pack borders are another order."""
    starts = [0, 200, 257, 400, 777]
    dy, x = hard_values((777, 30), dtype, seed=1), hard_values((777, 70), dtype, seed=2)

    def run(groups: list[list[int]]) -> torch.Tensor:
        acc = torch.zeros(30, 70)
        for packs in groups:
            first, last = starts[packs[0]], starts[packs[-1] + 1]
            local = torch.tensor([starts[p] - first for p in packs] + [last - first], dtype=torch.int32)
            cpu.weight_grad(dy[first:last].contiguous(), x[first:last].contiguous(), local, acc)
        return acc

    whole = run([[0, 1, 2, 3]])
    for groups in ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0], [1, 2, 3]]):
        assert_same_bits(run(groups), whole, f"micro-batches {groups}")
    acc = torch.zeros(30, 70)
    cpu.weight_grad(dy, x, torch.tensor([0, 777], dtype=torch.int32), acc)
    assert_different_bits(acc, whole, "one pack against four")


# ------------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gradient", gemm.GRADIENTS)
def test_gradients(dtype: torch.dtype, gradient: str) -> None:
    """Autograd through `linear` against float64: dx within its bound plus one rounding, dW and db within theirs."""
    starts, widths, k, rows = [0, 150, 200], (128, 64), 96, 200
    values = [unit_values((n, k), dtype, seed=n) for n in widths]
    weights = [handle(f"w{i}", w, out_leaves=1) for i, w in enumerate(values)]
    biases = [handle("b", unit_values(widths[0], dtype, seed=9)), None]
    x, dys = unit_values((rows, k), dtype, seed=1), [unit_values((rows, n), dtype, seed=n + 1) for n in widths]
    leaf = x.clone().requires_grad_()
    outs = gemm.linear(leaf, weights, biases, context(starts), gradient=gradient)
    torch.autograd.backward(outs, dys)

    wide = [v.double() for v in values]
    terms = 2 * sum(widths) + 2
    exact = sum(dy.double() @ w for dy, w in zip(dys, wide, strict=True))
    size = sum(dy.double().abs() @ w.abs() for dy, w in zip(dys, wide, strict=True))
    rounding = 2.0**-8 if dtype == BF16 else UNIT
    bound = 2 * terms * UNIT * size
    assert ((leaf.grad.double() - exact).abs() <= bound + rounding * (exact.abs() + bound)).all()
    terms = 2 * 128 + 4
    for dy, weight in zip(dys, weights, strict=True):
        error = (weight.grad.double() - dy.double().T @ x.double()).abs()
        assert (error <= 2 * terms * UNIT * (dy.double().abs().T @ x.double().abs())).all()
    assert (
        (biases[0].grad.double() - dys[0].double().sum(0)).abs() <= 2 * terms * UNIT * dys[0].double().abs().sum(0)
    ).all()


def test_gradients_are_off_without_grad() -> None:
    """Frozen weights and an input that needs no gradient record nothing; frozen weights get no accumulator."""
    weight = handle("w", unit_values((64, 64), BF16), trainable=False)
    x = unit_values((3, 64), BF16)
    assert not gemm.linear(x, [weight], [None], context([0, 3]), gradient="chain")[0].requires_grad
    leaf = x.clone().requires_grad_()
    (y,) = gemm.linear(leaf, [weight], [None], context([0, 3]), gradient="chain")
    y.sum().backward()
    assert weight.grad is None and leaf.grad is not None
    with torch.no_grad():
        assert not gemm.linear(leaf, [weight], [None], context([0, 3]), gradient="chain")[0].requires_grad


@pytest.mark.parametrize("dtype", DTYPES)
def test_head(dtype: torch.dtype) -> None:
    """Logits are unrounded FP32; the input gradient has the vocabulary's leaves, the last one ragged."""
    w, x = hard_values((1000, 64), dtype, seed=1), hard_values((5, 64), dtype, seed=2)
    weight = WeightHandle(WeightSpec("embed", (1000, 64), "embedding", out_leaf_size=192), dtype)
    weight.load(w)
    weight.enable_input_grad()
    assert_same_bits(gemm.head_logits(x, weight), reference.product([(x, w, 0)], "concatenate"), "logits")
    dlogits = hard_values((5, 1000), dtype, seed=3)
    expected = reference.product([(dlogits, w.T.contiguous(), 192)], "chain").to(dtype)
    assert_same_bits(gemm.head_input_grad(dlogits, weight), expected, "head input gradient")


# ------------------------------------------------------------------------------------------------ repeatability


@pytest.mark.parametrize("dtype", DTYPES)
def test_repeatable_over_runs_and_threads(dtype: torch.dtype) -> None:
    x, w, dy = (
        hard_values((200, 512), dtype, seed=1),
        hard_values((200, 512), dtype, seed=2),
        hard_values((200, 200), dtype, seed=3),
    )
    starts = torch.tensor([0, 130, 200], dtype=torch.int32)

    def run() -> list[torch.Tensor]:
        acc, bias = torch.zeros(200, 512), torch.zeros(200)
        cpu.weight_grad(dy, x, starts, acc)
        cpu.column_grad(dy, starts, bias)
        return [multiply(x, w, 128), summed([(x, w), (x, w)], [128, 256], "trees"), acc, bias]

    with library.use_threads(1):
        first = run()
    for threads in (1, 2, 3, 2):
        with library.use_threads(threads):
            for one, two in zip(run(), first, strict=True):
                assert_same_bits(one, two, f"{threads} threads")


def test_weight_grad_packs_before_it_reads() -> None:
    """Many runs on more threads than cores: no thread reads a workspace that another one still fills."""
    dy, x = hard_values((256, 1500), BF16, seed=1), hard_values((256, 200), BF16, seed=2)
    starts = torch.tensor([0, 256], dtype=torch.int32)
    results = []
    for threads in [1, *[2, 3, 4] * 12]:
        acc = torch.zeros(1500, 200)
        with library.use_threads(threads):
            cpu.weight_grad(dy, x, starts, acc)
        results.append(acc)
        assert_same_bits(acc, results[0], f"{threads} threads")
