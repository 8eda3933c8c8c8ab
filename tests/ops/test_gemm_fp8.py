"""FP8 matrix products: contract, accuracy, independence of rows, invariance to splits, gradients, repeatability."""

import pytest
import torch

from tests.bits import assert_different_bits, assert_same_bits, hard_values, unit_values
from tests.ops import gemm_fp8_reference as reference
from tests.ops.gemm_reference import blocks
from tests.ops.other_builds import rerun
from zerogap.ops.cpu import gemm as cpu
from zerogap.ops.cpu import library

BF16, FP32 = torch.bfloat16, torch.float32
FORMATS = ["fp32", "pow2"]
UNIT = 2.0**-24  # FP32 unit roundoff


class Case:
    """x [M, K] and weight [N, K], BF16, as a segment of the kernel and as operands of the reference."""

    def __init__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        leaf_size: int = 0,
        scale_format: str | None = "fp32",
        bias: torch.Tensor | None = None,
    ) -> None:
        if scale_format is None:  # a BF16 segment
            panels = cpu.allocate_panels(*w.shape, BF16)
            cpu.pack(w, panels)
            self.segment = cpu.Segment(x, panels, w.shape[0], leaf_size, bias)
            self.operands = reference.Operands(x, w, leaf_size)
            return
        grid, x_scales = reference.quantise_rows(x, scale_format)
        codes, w_scales = reference.quantise(w, (128, 128), scale_format)
        self.codes = codes
        panels = reference.panels(codes)
        self.segment = cpu.Segment(grid, panels, w.shape[0], leaf_size, bias, x_scales, w_scales)
        self.operands = reference.Operands(grid, reference.grid(codes), leaf_size, x_scales, w_scales)

    def run(self) -> torch.Tensor:
        """FP32 [M, N], unrounded."""
        return cpu.product([self.segment], "concatenate", fp32=True)[0]

    def rows(self, index: torch.Tensor | slice) -> torch.Tensor:
        """The product of some rows alone."""
        s = self.segment
        assert s.x_scales is not None
        some = s._replace(x=s.x[index].contiguous(), x_scales=s.x_scales[index].contiguous())
        return cpu.product([some], "concatenate", fp32=True)[0]


def hard_case(m: int, n: int, k: int, leaf: int = 0, scale_format: str | None = "fp32", seed: int = 1) -> Case:
    return Case(hard_values((m, k), BF16, seed=seed), hard_values((n, k), BF16, seed=seed + 1), leaf, scale_format)


# -------------------------------------------------------------------------------- the contract, literally


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize(
    ("m", "n", "k", "leaf"),
    [
        (1, 1, 1, 0),
        (1, 64, 128, 0),
        (2, 65, 33, 0),
        (3, 1536, 130, 0),
        (5, 200, 130, 0),
        (6, 576, 257, 0),
        (7, 130, 577, 0),
        (13, 192, 512, 128),  # 4 leaves
        (3, 64, 1024, 128),  # 8 leaves
        (16, 70, 700, 128),  # 6 leaves, the last ragged
        (97, 130, 300, 0),  # two blocks of rows
        (200, 66, 1536, 512),
    ],
)
def test_contract_forward(scale_format: str, m: int, n: int, k: int, leaf: int) -> None:
    case = hard_case(m, n, k, leaf, scale_format)
    assert_same_bits(case.run(), reference.product([case.operands], "concatenate"), "product")


@pytest.mark.parametrize("scale_format", FORMATS)
def test_contract_bias_and_rounding(scale_format: str) -> None:
    """The bias is added in FP32 after the tree, and the sum is rounded once."""
    b = hard_values(70, BF16, seed=5)
    case = Case(hard_values((9, 256), BF16, seed=3), hard_values((70, 256), BF16, seed=4), 128, scale_format, b)
    (y,) = cpu.product([case.segment], "concatenate")
    expected = reference.product([case.operands], "concatenate") + b.to(FP32)
    assert_same_bits(y, expected.to(BF16), "rounded output")


@pytest.mark.parametrize("mode", ["chain", "trees"])
@pytest.mark.parametrize("formats", [("fp32", "pow2"), ("fp32", None), (None, "fp32"), ("pow2", None, "pow2")])
@pytest.mark.parametrize(("k", "leaves"), [(256, 2), (130, 1), (512, 4)])
@pytest.mark.parametrize("m", [2, 20])
def test_contract_sum_over_weights(mode: str, formats: tuple[str | None, ...], k: int, leaves: int, m: int) -> None:
    """Any mix of FP8 and BF16 segments; a chain's accumulator runs from one to the next."""
    leaf = k // leaves if leaves > 1 else 0
    cases = [hard_case(m, 66, k, leaf, scale_format, seed=10 * i) for i, scale_format in enumerate(formats)]
    (y,) = cpu.product([c.segment for c in cases], mode, fp32=True)
    assert_same_bits(y, reference.product([c.operands for c in cases], mode), mode)


def test_contract_transposed_scales() -> None:
    """The panels of an input gradient read the forward weight's scales across: [K / 128, N / 128] of a [N, K]."""
    dy, w = hard_values((9, 200), BF16, seed=1), hard_values((200, 577), BF16, seed=2)
    codes, scales = reference.quantise(w, (128, 128), "fp32")
    grid, dy_scales = reference.quantise_rows(dy, "fp32")
    panels = reference.panels(codes.T.contiguous())
    segment = cpu.Segment(grid, panels, 577, x_scales=dy_scales, panel_scales=scales, transposed=True)
    operands = reference.Operands(grid, reference.grid(codes).T, 0, dy_scales, scales.T.contiguous())
    (dx,) = cpu.product([segment], "chain", fp32=True)
    assert_same_bits(dx, reference.product([operands], "chain"), "input gradient")


@pytest.mark.parametrize("m", [1, 20])
def test_contract_every_code(m: int) -> None:
    """Each code stands for its value, both elements of a pair, decoded in registers or unpacked; NaN codes give NaN."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(2, 1).T.contiguous()  # [256, 2]
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=BF16).repeat(10, 1)[:m].contiguous()
    ones = torch.ones(m, 1), torch.ones(2, 1)
    number = (torch.arange(256) & 0x7F) != 0x7F
    segment = cpu.Segment(x, reference.panels(codes), 256, x_scales=ones[0], panel_scales=ones[1])
    (y,) = cpu.product([segment], "concatenate", fp32=True)
    values = reference.grid(codes[:, 0].contiguous()).to(FP32) + 0.0  # sums start at +0
    assert_same_bits(y[:, number].contiguous(), values[number].repeat(m, 1), "values of codes")
    assert y[:, ~number].isnan().all()


PACKS = [[0, 1], [0, 2, 3], [0, 128, 256], [0, 129, 130, 300], [0, 0, 257]]


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("starts", PACKS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (17, 65), (40, 130)])
def test_contract_weight_grad(scale_format: str, starts: list[int], n: int, k: int) -> None:
    rows = starts[-1]
    dy, x = hard_values((rows, n), BF16, seed=6), hard_values((rows, k), BF16, seed=7)
    acc = hard_values((n, k), FP32, seed=8)
    expected = reference.weight_grad(dy, x, starts, acc, scale_format)
    cpu.weight_grad(dy, x, torch.tensor(starts, dtype=torch.int32), acc, scale_format)
    assert_same_bits(acc, expected, "weight gradient")


def test_contract_weight_grad_zero_blocks() -> None:
    """Columns of zeros, and of magnitudes that count as zero, have scale 1 and add nothing."""
    dy, x = hard_values((150, 20), BF16, seed=1), hard_values((150, 70), BF16, seed=2)
    dy[:128, 3], x[:, 5], x[128:, 6] = 0.0, 2.0**-101, -0.0
    acc = hard_values((20, 70), FP32, seed=3)
    expected = reference.weight_grad(dy, x, [0, 150], acc, "fp32")
    before = acc.clone()
    cpu.weight_grad(dy, x, torch.tensor([0, 150], dtype=torch.int32), acc, "fp32")
    assert_same_bits(acc, expected, "weight gradient")
    assert_same_bits(acc[:, 5], before[:, 5], "a column that counts as zero")


@pytest.mark.parametrize("isa", library.ISAS)
def test_contract_on_every_instruction_set(isa: str) -> None:
    """The tests above, and those of single rows, in a process that loads another build."""
    rerun(__file__, isa, "contract and not every_instruction_set or alone")


# ------------------------------------------------------------------------------------------------ accuracy


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize(("n", "k", "leaves"), [(192, 1536, 4), (200, 577, 1)])
def test_accuracy(scale_format: str, n: int, k: int, leaves: int) -> None:
    """Against float64 of the same codes and scales. A term passes through at most two roundings per element of its
    block (the portable build's), that of the product of scales, two per block of its leaf, and the tree."""
    x, w = unit_values((40, k), BF16, seed=1), unit_values((n, k), BF16, seed=2)
    case = Case(x, w, k // leaves if leaves > 1 else 0, scale_format)
    s = case.segment
    assert s.x_scales is not None and s.panel_scales is not None
    left = s.x.double() * s.x_scales.double().repeat_interleave(128, dim=1)[:, :k]
    scales = s.panel_scales.double().repeat_interleave(128, dim=0)[:n].repeat_interleave(128, dim=1)[:, :k]
    right = reference.grid(case.codes).double() * scales
    terms = 2 * 128 + 1 + 2 * -(-k // leaves // 128) + leaves
    bound = terms * UNIT / (1 - terms * UNIT) * (left.abs() @ right.abs().T)
    y = case.run()
    assert ((y.double() - left @ right.T).abs() <= bound).all()
    assert_same_bits(cpu.product([s], "concatenate")[0], y.to(BF16), "one rounding")


@pytest.mark.parametrize("scale_format", FORMATS)
def test_accuracy_of_quantised_operands(scale_format: str) -> None:
    """Against the BF16 operands: rounding to E4M3 moves a value by at most 2^-4 of itself, or by half of the smallest
    step, 2^-10 scales, and a scale is at most 2 / 448 of the largest magnitude of its block."""
    x, w = unit_values((20, 576), BF16, seed=1), unit_values((192, 576), BF16, seed=2)
    case = Case(x, w, 0, scale_format)
    left, right = (t.double().abs() for t in (x, w))
    step = 2.0**-10 * 2 / 448
    dx, dw = left * 2.0**-4 + step * left.max(), right * 2.0**-4 + step * right.max()
    bound = (dx @ (right + dw).T + left @ dw.T) * 1.001
    error = (case.run().double() - x.double() @ w.double().T).abs()
    assert (error <= bound).all()
    assert error.max() > 1e-3  # and quantised they were


@pytest.mark.parametrize("scale_format", FORMATS)
def test_weight_grad_accuracy(scale_format: str) -> None:
    starts = [0, 300, 641]
    dy, x, acc = unit_values((641, 65), BF16, seed=1), unit_values((641, 70), BF16, seed=2), torch.zeros(65, 70)
    cpu.weight_grad(dy, x, torch.tensor(starts, dtype=torch.int32), acc, scale_format)
    exact, size = torch.zeros(65, 70, dtype=torch.float64), torch.zeros(65, 70, dtype=torch.float64)
    for rows in blocks(starts):
        (a, sa), (b, sb) = (reference.quantise(t[rows], (128, 1), scale_format) for t in (dy, x))
        left, right = reference.grid(a).double() * sa.double(), reference.grid(b).double() * sb.double()
        exact, size = exact + left.T @ right, size + left.abs().T @ right.abs()
    terms = 2 * 128 + 1 + 2 * len(blocks(starts))
    assert ((acc.double() - exact).abs() <= terms * UNIT / (1 - terms * UNIT) * size).all()


# -------------------------------------------------------------------------------- rows do not see each other


@pytest.mark.parametrize(("n", "k", "leaf"), [(100, 577, 0), (192, 512, 128), (576, 130, 0)])
def test_row_equals_row_alone(n: int, k: int, leaf: int) -> None:
    """Each row of batches of every height of tile, and of batches of several blocks, equals the row alone."""
    case = hard_case(33, n, k, leaf)
    alone = torch.cat([case.rows(slice(r, r + 1)) for r in range(33)])
    for m in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 16, 33):
        assert_same_bits(case.rows(slice(m)), alone[:m], f"{m} rows")
    for m in (97, 200):
        order = (torch.arange(m) * 5 + 2) % 33
        assert_same_bits(case.rows(order), alone[order], f"{m} rows in another order")


@pytest.mark.parametrize("poison", [float("inf"), float("nan"), -0.0])
def test_row_does_not_see_neighbours_alone(poison: float) -> None:
    """Rows of infinities or NaN next to a row, in values and scales, change nothing in it."""
    case = hard_case(20, 70, 577)
    clean = case.run()
    assert case.segment.x_scales is not None
    case.segment.x[1::2] = poison
    case.segment.x_scales[1::2] = poison
    assert_same_bits(case.run()[0::2].contiguous(), clean[0::2].contiguous(), "rows between poisoned ones")


def test_weight_grad_columns_alone() -> None:
    """A column's scale is its own: a NaN in one column of dy and of x makes that row and column of the gradient NaN,
    and changes no other."""
    dy, x = hard_values((200, 33), BF16, seed=1), hard_values((200, 70), BF16, seed=2)
    starts, clean, acc = torch.tensor([0, 200], dtype=torch.int32), torch.zeros(33, 70), torch.zeros(33, 70)
    cpu.weight_grad(dy, x, starts, clean, "fp32")
    dy[150, 3], x[7, 66] = float("nan"), float("inf")
    cpu.weight_grad(dy, x, starts, acc, "fp32")
    assert acc[3].isnan().all() and acc[:, 66].isnan().all()
    clean[3], clean[:, 66], acc[3], acc[:, 66] = 0.0, 0.0, 0.0, 0.0
    assert_same_bits(acc, clean, "the other columns")


# ------------------------------------------------------------------------------------------------ splits


@pytest.mark.parametrize("m", [3, 19])
def test_concatenation_changes_nothing(m: int) -> None:
    """Projections in one command, FP8 and BF16 ones, equal those apart; stacked weights too, where blocks allow it."""
    x = hard_values((m, 576), BF16, seed=1)
    cases = [
        Case(x, hard_values((n, 576), BF16, seed=n), 0, scale_format)
        for n, scale_format in [(576, "fp32"), (192, None), (200, "fp32"), (64, "fp32")]
    ]
    fused = cpu.product([c.segment for c in cases], "concatenate", fp32=True)
    for one, case in zip(fused, cases, strict=True):
        assert_same_bits(one, case.run(), "fused")
    parts = [hard_values((n, 576), BF16, seed=n) for n in (256, 128, 70)]
    apart = torch.cat([Case(x, w).run() for w in parts], dim=1)
    assert_same_bits(Case(x, torch.cat(parts)).run(), apart, "stacked")


def test_two_halves_of_the_leaves() -> None:
    """Each rank's own leaves of x, codes and scales: the tree over both subtrees is the whole."""
    case = hard_case(9, 70, 1024, 128)
    s = case.segment
    assert s.x_scales is not None and s.panel_scales is not None
    halves = []
    for rank in (0, 1):
        part, scale_part = slice(512 * rank, 512 * (rank + 1)), slice(4 * rank, 4 * (rank + 1))
        half = s._replace(
            x=s.x[:, part].contiguous(),
            panels=reference.panels(case.codes[:, part].contiguous()),
            x_scales=s.x_scales[:, scale_part].contiguous(),
            panel_scales=s.panel_scales[:, scale_part].contiguous(),
        )
        halves.append(cpu.product([half], "concatenate", fp32=True)[0])
    assert_same_bits(halves[0] + halves[1], case.run(), "sum over ranks")


def test_controls_differ() -> None:
    """Other blocks, other scales and other leaves are other functions, and the data shows it."""
    x, w = hard_values((19, 512), BF16, seed=1), hard_values((200, 512), BF16, seed=2)
    case = Case(x, w)
    whole = case.run()
    s = case.segment
    assert s.x_scales is not None and s.panel_scales is not None
    shifted = Case(*(torch.cat([t[:, 64:], t[:, :64]], dim=1) for t in (x, w)))
    assert_different_bits(shifted.run(), whole, "block borders shifted by 64")
    swapped = s._replace(panel_scales=s.panel_scales.flip(0).contiguous())
    assert_different_bits(cpu.product([swapped], "concatenate", fp32=True)[0], whole, "scales of rows swapped")
    swapped = s._replace(x_scales=s.x_scales.flip(1).contiguous())
    assert_different_bits(cpu.product([swapped], "concatenate", fp32=True)[0], whole, "scales of blocks swapped")
    assert_different_bits(Case(x, w, 128).run(), whole, "4 leaves against 1")
    assert_different_bits(Case(x, w, 0, "pow2").run(), whole, "powers of two")
    assert_different_bits(Case(x, w, 0, None).run(), whole, "BF16")
    order = torch.arange(512).view(4, 2, 64).flip(1).flatten()
    assert_different_bits(Case(x[:, order], w[:, order]).run(), whole, "halves of each block swapped")
    pair = [Case(x, w, 128).segment, hard_case(19, 200, 512, 128, seed=7).segment]
    chain, trees = (cpu.product(pair, mode, fp32=True)[0] for mode in ("chain", "trees"))
    assert_different_bits(chain, trees, "chain against trees")


def test_misuse_is_refused() -> None:
    """Leaves between scale blocks, missing scales, and scales of another shape are our own bugs."""
    s = hard_case(2, 70, 256).segment
    for wrong in (
        s._replace(leaf_size=64),
        s._replace(x_scales=None),
        s._replace(panel_scales=None),
        s._replace(transposed=True),
    ):
        with pytest.raises(AssertionError):
            cpu.product([wrong], "concatenate")


@pytest.mark.parametrize("scale_format", FORMATS)
def test_weight_grad_under_micro_batches(scale_format: str) -> None:
    """One, two or four packs at a time: the same accumulator bits. Other pack borders are other blocks."""
    starts = [0, 200, 257, 400, 777]
    dy, x = hard_values((777, 30), BF16, seed=1), hard_values((777, 70), BF16, seed=2)

    def run(groups: list[list[int]]) -> torch.Tensor:
        acc = torch.zeros(30, 70)
        for packs in groups:
            first, last = starts[packs[0]], starts[packs[-1] + 1]
            local = torch.tensor([starts[p] - first for p in packs] + [last - first], dtype=torch.int32)
            cpu.weight_grad(dy[first:last].contiguous(), x[first:last].contiguous(), local, acc, scale_format)
        return acc

    whole = run([[0, 1, 2, 3]])
    for groups in ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0], [1, 2, 3]]):
        assert_same_bits(run(groups), whole, f"micro-batches {groups}")
    acc = torch.zeros(30, 70)
    cpu.weight_grad(dy, x, torch.tensor([0, 777], dtype=torch.int32), acc, scale_format)
    assert_different_bits(acc, whole, "one pack against four")


# ------------------------------------------------------------------------------------------------ repeatability


def test_repeatable_over_runs_and_threads() -> None:
    cases = [hard_case(200, 200, 512, 128), hard_case(200, 200, 512, 128, None, seed=5), hard_case(4, 1000, 576)]
    dy, x = hard_values((200, 200), BF16, seed=3), hard_values((200, 512), BF16, seed=4)
    starts = torch.tensor([0, 130, 200], dtype=torch.int32)

    def run() -> list[torch.Tensor]:
        acc = torch.zeros(200, 512)
        cpu.weight_grad(dy, x, starts, acc, "fp32")
        mixed = [c.segment for c in cases[:2]]
        return [acc, cases[2].run(), *(cpu.product(mixed, m, fp32=True)[0] for m in ("concatenate", "chain", "trees"))]

    with library.use_threads(1):
        first = run()
    for threads in (3, 2, 1, 3):
        with library.use_threads(threads):
            for one, two in zip(run(), first, strict=True):
                assert_same_bits(one, two, f"{threads} threads")
