"""Grouped products: every row has the bits of its own weight's product alone; strides, recording, gradients."""

import itertools

import pytest
import torch

from tests.bits import assert_different_bits, assert_same_bits, hard_values
from tests.ops.other_builds import rerun
from zerogap.ops import quant
from zerogap.ops.cpu import gemm, grouped, library
from zerogap.ops.cpu import quant as kernels

BF16, FP32 = torch.bfloat16, torch.float32
FORMS = [(FP32, None), (BF16, None), (BF16, "fp32"), (BF16, "pow2")]
COUNTS = [[0, 1, 5, 0, 33, 100, 3], [0, 0, 0, 250, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 2], [6, 0, 0, 2]]


class Weights:
    """G weights [N, K] packed one by one, in both directions, and as a stack."""

    def __init__(self, groups: int, n: int, k: int, dtype: torch.dtype, scale_format: str | None, seed: int = 1):
        self.n, self.k, self.scale_format = n, k, scale_format
        values = [hard_values((n, k), dtype, seed=seed + g) for g in range(groups)]
        self.scales = None
        if scale_format is None:
            self.panels = torch.zeros((groups, *gemm.panels_shape(n, k, dtype)), dtype=dtype)
            self.transposed = torch.zeros((groups, *gemm.panels_shape(k, n, dtype)), dtype=dtype)
            for g, value in enumerate(values):
                gemm.pack(value, self.panels[g], self.transposed[g])
            return
        self.panels = torch.zeros((groups, *kernels.panels_shape(n, k)), dtype=torch.uint8)
        self.transposed = torch.zeros((groups, *kernels.panels_shape(k, n)), dtype=torch.uint8)
        self.scales = torch.zeros((groups, *kernels.scales_shape(n, k)))
        for g, value in enumerate(values):
            kernels.quantise_weight(value, scale_format, self.panels[g], self.transposed[g], self.scales[g])

    def segment(self, x: torch.Tensor, back: bool = False) -> grouped.GroupSegment:
        """x: sorted rows [T, k, K], or [T, k, N] for the input gradient."""
        panels = self.transposed if back else self.panels
        width, reduce = (self.k, self.n) if back else (self.n, self.k)
        if self.scale_format is None:
            return grouped.GroupSegment(x, panels, width, reduce)
        grid, scales = quant.quantise_rows(x.view(-1, reduce), self.scale_format)
        return grouped.GroupSegment(
            grid.view(x.shape), panels, width, reduce, x_scales=scales, panel_scales=self.scales, transposed=back
        )


def alone(s: grouped.GroupSegment, group: int, begin: int, end: int) -> gemm.Segment:
    """One group's rows and weight."""
    x = s.x.view(-1, s.reduce)[begin:end]
    assert s.panels is not None
    if s.panel_scales is None:
        return gemm.Segment(x, s.panels[group], s.width)
    scales = s.x_scales.view(-1, s.x_scales.shape[-1])[begin:end]
    return gemm.Segment(
        x, s.panels[group], s.width, x_scales=scales, panel_scales=s.panel_scales[group], transposed=s.transposed
    )


def starts_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)


def assert_rows_alone(
    segments: list[grouped.GroupSegment], mode: str, counts: list[int], outs: tuple[torch.Tensor, ...], fp32: bool
) -> None:
    begin = 0
    for group, count in enumerate(counts):
        end = begin + count
        if count:
            expected = gemm.product([alone(s, group, begin, end) for s in segments], mode, fp32=fp32)
            for out, one in zip(outs, expected, strict=True):
                rows = out.view(-1, out.shape[-1])[begin:end]
                assert_same_bits(rows.contiguous(), one, f"{mode}: group {group} with {count} rows")
        begin = end


# ------------------------------------------------------------------------------------------------ experts


@pytest.mark.parametrize(("dtype", "scale_format"), FORMS)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("fp32", [False, True])
def test_contract_experts(dtype, scale_format, counts, fp32):
    """Forward (gate and up in one command) and both input gradients (down's, and gate's chained with up's)."""
    rows, groups = sum(counts), len(counts)
    gate, up = (Weights(groups, 130, 301, dtype, scale_format, seed) for seed in (1, 50))
    x, starts = hard_values((rows, 1, 301), dtype, seed=5), starts_of(counts)
    segments = [gate.segment(x), up.segment(x)]
    outs = grouped.grouped_product(segments, "concatenate", starts=starts, fp32=fp32)
    assert [tuple(y.shape) for y in outs] == [(rows, 1, 130)] * 2
    assert_rows_alone(segments, "concatenate", counts, outs, fp32)
    back = [w.segment(hard_values((rows, 1, 130), dtype, seed=s), back=True) for w, s in ((gate, 6), (up, 7))]
    for some in (back[:1], back):
        outs = grouped.grouped_product(some, "chain", starts=starts, fp32=fp32)
        assert_rows_alone(some, "chain", counts, outs, fp32)


def test_contract_experts_mixed_and_of_other_lengths():
    """FP8 and BF16 segments in one command, other widths, other reduced axes: nobody prefetches another's layout."""
    counts = [7, 0, 12, 40, 1]
    starts, x = starts_of(counts), hard_values((60, 1, 256), BF16, seed=1)
    segments = [
        Weights(5, 70, 256, BF16, "fp32").segment(x),
        Weights(5, 200, 256, BF16, None).segment(x),
        Weights(5, 64, 128, BF16, None).segment(hard_values((60, 1, 128), BF16, seed=2)),
    ]
    outs = grouped.grouped_product(segments, "concatenate", starts=starts)
    assert_rows_alone(segments, "concatenate", counts, outs, False)


@pytest.mark.parametrize(("dtype", "scale_format"), FORMS)
def test_contract_experts_that_nobody_chose_are_never_read(dtype, scale_format):
    """NaN in their panels and scales shows nowhere; NaN in a row stays in that row."""
    counts, weights = [0, 3, 0, 2, 0], Weights(5, 70, 129, dtype, scale_format)
    x, starts = hard_values((5, 1, 129), dtype, seed=1), starts_of(counts)
    (clean,) = grouped.grouped_product([weights.segment(x)], "concatenate", starts=starts)
    for g in (0, 2, 4):
        weights.panels[g].fill_(0x7F if scale_format else float("nan"))
    x[4] = float("nan")
    (y,) = grouped.grouped_product([weights.segment(x)], "concatenate", starts=starts)
    assert_same_bits(y[:4], clean[:4])
    assert y[4].isnan().all()


def test_rows_in_another_group_differ():
    """Control: borders matter."""
    weights, x = Weights(2, 70, 128, BF16, None), hard_values((9, 1, 128), BF16, seed=1)
    outs = [
        grouped.grouped_product([weights.segment(x)], "concatenate", starts=starts_of(c))[0] for c in ([4, 5], [5, 4])
    ]
    assert_different_bits(outs[0][4], outs[1][4])
    assert_same_bits(outs[0][5:], outs[1][5:])


# ------------------------------------------------------------------------------------------------ heads


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("rows", [0, 1, 3, 100, 197])
def test_contract_heads(dtype, rows):
    """Each head reads its columns of wide rows and writes its columns of other wide rows; the rest stays."""
    heads, weights = 3, Weights(3, 70, 41, dtype, None)
    x = hard_values((rows, heads, 41 + 24), dtype, seed=2)
    out = torch.full((rows, heads, 70 + 9), 7.0, dtype=dtype)
    segment = grouped.GroupSegment(
        x, weights.panels, 70, 41, x_offset=24, x_group_stride=65, out_offset=9, out_group_stride=79
    )
    grouped.grouped_product([segment], "concatenate", outs=[out])
    assert (out[:, :, :9] == 7.0).all()
    (packed,) = grouped.grouped_product([segment._replace(out_offset=0, out_group_stride=None)], "concatenate")
    for head in range(heads):
        own = gemm.Segment(x[:, head, 24:].contiguous(), weights.panels[head], 70)
        (expected,) = gemm.product([own], "concatenate")
        assert_same_bits(out[:, head, 9:].contiguous(), expected, f"head {head}, strided output")
        assert_same_bits(packed[:, head * 70 : (head + 1) * 70].contiguous(), expected, f"head {head}")
    assert packed.shape == (rows, heads * 70)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_contract_heads_share_their_rows(dtype):
    """A group stride of 0: every head reads the same columns; transposed panels and unrounded sums as well."""
    weights, x = Weights(4, 41, 70, dtype, None), hard_values((6, 41), dtype, seed=2)
    segment = grouped.GroupSegment(x, weights.transposed, 70, 41, x_group_stride=0)
    (y,) = grouped.grouped_product([segment], "chain", fp32=True)
    for head in range(4):
        (expected,) = gemm.product([gemm.Segment(x, weights.transposed[head], 70)], "chain", fp32=True)
        assert_same_bits(y[:, head * 70 : (head + 1) * 70].contiguous(), expected, f"head {head}")


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("rows", [0, 1, 65])
def test_copied_columns(dtype, rows):
    src, dst = hard_values((rows, 3, 20), dtype, seed=1), torch.full((rows, 4, 50), 7.0, dtype=dtype)
    expected = dst.clone()
    expected[:, 1:4, 5:18] = src[:, :, 7:]
    grouped.copy_columns(
        src, dst, heads=3, width=13, src_head_stride=20, src_offset=7, dst_head_stride=50, dst_offset=55
    )
    assert_same_bits(dst, expected, "heads")
    expected[:, :, 30:] = src.view(rows, 60)[:, None, 20:40]
    grouped.copy_columns(
        src, dst, heads=4, width=20, src_head_stride=0, src_offset=20, dst_head_stride=50, dst_offset=30
    )
    assert_same_bits(dst, expected, "the same columns for every head")


# ------------------------------------------------------------------------------------------------ programs, threads


@pytest.mark.parametrize(("dtype", "scale_format"), FORMS)
def test_recorded_for_any_number_of_rows_and_any_routing(dtype, scale_format):
    """One program at capacity 40 with three lines per row: `starts` and rows are read when it runs."""
    lines, groups, weights = 3, 5, Weights(5, 70, 129, dtype, scale_format)
    x, scales = torch.zeros((40, lines, 129), dtype=dtype), torch.zeros((40, lines, 2))
    starts, wide = torch.zeros(groups + 1, dtype=torch.int32), torch.zeros((40, 300), dtype=dtype)
    segment = weights.segment(torch.zeros((40, lines, 129), dtype=dtype))
    segment = segment._replace(x=x, x_scales=scales if scale_format else None)
    with library.record(tokens=(x, scales, wide)) as program:
        (y,) = grouped.grouped_product([segment], "concatenate", starts=starts, lines=lines)
        grouped.copy_columns(y, wide, heads=lines, width=70, src_head_stride=70, dst_head_stride=100, dst_offset=9)
    for seed, counts in enumerate([[0, 3, 0, 0, 0], [7, 0, 20, 30, 63], [0, 0, 0, 0, 0], [1, 1, 1, 2, 1]]):
        tokens = sum(counts) // lines
        fresh = weights.segment(hard_values((tokens, lines, 129), dtype, seed=seed))
        x[:tokens] = fresh.x
        if scale_format:
            scales[:tokens] = fresh.x_scales.view(tokens, lines, 2)
        starts.copy_(starts_of(counts))
        y.fill_(7.0)
        wide.fill_(7.0)
        program.run(tokens=tokens)
        (expected,) = grouped.grouped_product([fresh], "concatenate", starts=starts, lines=lines)
        assert_same_bits(y[:tokens], expected, f"{counts}")
        assert (y[tokens:] == 7.0).all() and (wide[tokens:] == 7.0).all()
        for line in range(lines):
            column = 9 + 100 * line
            assert_same_bits(wide[:tokens, column : column + 70].contiguous(), expected[:, line].contiguous())


@pytest.mark.parametrize(("dtype", "scale_format"), FORMS)
def test_repeatable_over_runs_and_threads(dtype, scale_format):
    counts = [0, 1, 50, 0, 130, 300, 3]
    weights = Weights(7, 200, 256, dtype, scale_format)
    segments = [weights.segment(hard_values((484, 1, 256), dtype, seed=1))]
    starts = starts_of(counts)
    with library.use_threads(1):
        (first,) = grouped.grouped_product(segments, "concatenate", starts=starts)
    for threads in (2, 3, 1, 2):
        with library.use_threads(threads):
            (again,) = grouped.grouped_product(segments, "concatenate", starts=starts)
        assert_same_bits(again, first, f"{threads} threads")


@pytest.mark.parametrize("isa", library.ISAS)
def test_contract_on_every_instruction_set(isa):
    """The tests of equal bits, in a process that loads another build."""
    rerun(__file__, isa, "contract and not every_instruction_set")


# ------------------------------------------------------------------------------------------------ gradients


def routed(tokens: int, top_k: int, groups: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(starts, token of each sorted row) of a random choice in which group 1 is hot and group 2 is empty."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand((tokens, groups), generator=generator)
    chosen[:, 1], chosen[:, 2] = 2.0, -1.0
    pairs = sorted((g, t) for t, row in enumerate(chosen.topk(top_k).indices.tolist()) for g in row)
    counts = [sum(g == group for g, _ in pairs) for group in range(groups)]
    return starts_of(counts), torch.tensor([t for _, t in pairs], dtype=torch.int32)


@pytest.mark.parametrize("packs", [[0, 300], [0, 1, 130, 130, 290, 300], [0, 0, 300]], ids=str)
def test_packs_of_routed_rows(packs):
    starts, tokens = routed(300, 2, 6, seed=1)
    found = grouped.routed_packs(starts, tokens.view(300, 2), torch.tensor(packs, dtype=torch.int32))
    assert found.dtype == torch.int32 and found.shape == (6, len(packs))
    for group in range(6):
        begin, end = starts[group : group + 2].tolist()
        own = tokens[begin:end].tolist()
        assert found[group].tolist() == [begin + sum(t < first for t in own) for first in packs], f"group {group}"
    assert found[:, -1].tolist() == starts[1:].tolist()


@pytest.mark.parametrize(("dtype", "scale_format"), FORMS)
@pytest.mark.parametrize("packs", [[0, 300], [0, 130, 131, 300]], ids=str)
def test_weight_gradients_are_those_of_each_group_alone(dtype, scale_format, packs):
    """Blocks are of the group's own rows inside each pack; the hot group has more than one block per pack."""
    starts, tokens = routed(300, 2, 6, seed=1)
    borders = torch.tensor(packs, dtype=torch.int32)
    dy, x = hard_values((300, 2, 40), dtype, seed=2), hard_values((300, 2, 70), dtype, seed=3)
    sums = [None if g == 3 else hard_values((40, 70), seed=10 + g) for g in range(6)]
    expected = [None if s is None else s.clone() for s in sums]
    grouped.grouped_weight_grad(dy, x, grouped.routed_packs(starts, tokens, borders), sums, scale_format)
    for group, (total, before) in enumerate(zip(sums, expected, strict=True)):
        if total is None or before is None:
            continue
        rows = torch.arange(*starts[group : group + 2].tolist())
        own = [int((tokens[rows] < first).sum()) for first in packs]
        untouched = before.clone()
        gemm.weight_grad(
            dy.view(600, 40)[rows], x.view(600, 70)[rows], torch.tensor(own, dtype=torch.int32), before, scale_format
        )
        assert_same_bits(total, before, f"group {group} with {len(rows)} rows")
        if len(rows):
            assert_different_bits(total, untouched, f"group {group}")
        else:
            assert_same_bits(total, untouched, f"group {group} has no rows")
    assert len(packs) == 2 or int(starts[2] - starts[1]) > 128


# ------------------------------------------------------------------------------------------------ misuse


def test_misuse_is_refused():
    """Shapes that do not fit, columns that leave their rows, and heads in FP8 are our own bugs."""
    fp8, weights = Weights(3, 200, 128, BF16, "fp32"), Weights(3, 70, 128, BF16, None)
    s, q = weights.segment(hard_values((4, 2, 128), BF16)), fp8.segment(hard_values((4, 2, 128), BF16))
    starts = starts_of([3, 0, 5])
    for wrong, options in (
        ([s], {"starts": starts}),  # two lines
        ([s], {"starts": starts.long(), "lines": 2}),
        ([s], {"starts": starts[:3], "lines": 2}),
        ([s._replace(panels=None)], {"starts": starts, "lines": 2}),
        ([s._replace(panels=weights.panels[:2])], {"starts": starts, "lines": 2}),
        ([s, s._replace(panels=weights.panels[:2])], {"starts": starts, "lines": 2}),
        ([s._replace(panels=fp8.panels)], {"starts": starts, "lines": 2}),
        ([s], {"starts": starts, "lines": 2, "outs": [torch.zeros((4, 2, 70))]}),
        ([q._replace(x_scales=None)], {"starts": starts, "lines": 2}),
        ([q._replace(panel_scales=None)], {"starts": starts, "lines": 2}),
        ([q._replace(transposed=True)], {"starts": starts, "lines": 2}),
        ([q._replace(x_scales=q.x_scales[:4])], {"starts": starts, "lines": 2}),
        ([q], {}),
        ([s], {}),  # three groups of 128 columns in rows of 256
        ([s._replace(x_group_stride=64, x_offset=1)], {}),
        ([s._replace(x_group_stride=64)], {"outs": [torch.zeros((4, 209), dtype=BF16)]}),
    ):
        with pytest.raises(AssertionError):
            grouped.grouped_product(wrong, "concatenate", **options)
    grouped.grouped_product([s._replace(x_group_stride=64)], "concatenate")
    grouped.grouped_product([q], "concatenate", starts=starts, lines=2)
