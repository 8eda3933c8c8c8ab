"""E4M3 codes and the block quantiser against an independent definition, bit for bit."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.bits import assert_different_bits, assert_same_bits, hard_values, unit_values
from tests.ops import quant_reference as reference
from tests.ops.other_builds import digests_of, skip_unless_supported
from tests.ops.quant_cases import FORMATS, SHAPES, all_digests, inputs, outputs
from tests.ops.quant_reference import ALL_CODES, code_values, nearest_codes
from zerogap.errors import NonFiniteError
from zerogap.ops import quant
from zerogap.ops.cpu import library
from zerogap.ops.cpu import quant as kernels

ROOT = Path(__file__).parents[2]
OURS = library.backend().removeprefix("cpu/")
BF16 = torch.bfloat16

# ------------------------------------------------------------------------------------------------ single numbers


def grid_neighbours() -> np.ndarray:
    """float32: grid values, midpoints (exact ties) and the floats next to each; both signs, zeros, extremes."""
    grid = code_values()[:127].astype(np.float32)
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, [464.0, 480.0, 3.4e38, 2.0**-126, 2.0**-100]])
    points = points.astype(np.float32)
    near = [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points[1:], np.float32(0))]
    positive = np.concatenate(near)
    return np.concatenate([positive, -positive])


def test_encode_rounds_to_nearest_even() -> None:
    generator = np.random.default_rng(0)
    wide = np.exp2(generator.uniform(-14, 10, 20000)) * generator.choice([-1.0, 1.0], 20000)
    y = reference.flushed(np.concatenate([grid_neighbours(), wide])).astype(np.float32)
    codes, grid = kernels.encode(torch.from_numpy(y))
    assert_same_bits(codes, nearest_codes(y), "codes")
    assert_same_bits(grid, reference.grid_values(codes), "grid values")


def test_decode_knows_every_code() -> None:
    codes = torch.from_numpy(np.concatenate([ALL_CODES, ALL_CODES[::-1], ALL_CODES[:5]]))  # bulk and tail
    expected = reference.grid_values(codes)
    number = ~expected.isnan()
    decoded = kernels.decode(codes)
    assert_same_bits(decoded[number], expected[number], "grid values")
    assert decoded[~number].isnan().all()
    codes_again, _ = kernels.encode(decoded.to(torch.float32))
    assert_same_bits(codes_again, codes, "codes of decoded codes")


def test_codes_agree_with_torch() -> None:
    """torch's float8_e4m3fn is the same format, and torch's conversion rounds the same way inside the range."""
    codes = torch.from_numpy(ALL_CODES.copy())
    number = (codes & 0x7F) != 0x7F
    theirs = codes.view(torch.float8_e4m3fn).to(BF16)
    assert_same_bits(kernels.decode(codes)[number], theirs[number], "grid values")
    y = torch.from_numpy(grid_neighbours())
    y = y[(y.abs() <= 448) & ((y.abs() >= 2.0**-126) | (y == 0))]
    assert_same_bits(kernels.encode(y)[0], y.to(torch.float8_e4m3fn).view(torch.uint8), "codes")


def test_nan_stays_nan() -> None:
    codes, grid = kernels.encode(torch.tensor([float("nan"), -float("nan")] * 9))
    assert ((codes & 0x7F) == 0x7F).all() and grid.isnan().all()


# ------------------------------------------------------------------------------------------------ blocks


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale_format", FORMATS)
def test_codes_and_scales_equal_the_definition(shape, scale_format) -> None:
    for what, x in inputs(shape).items():
        codes, scales = reference.quantise(x, scale_format, 128)
        row_codes, row_scales = reference.quantise(x, scale_format, 1)
        for threads in (1, 3):
            with library.use_threads(threads):
                got = outputs(x, scale_format)
            assert_same_bits(got["codes"], codes, f"{what}: codes")
            assert_same_bits(got["scales"], scales, f"{what}: scales")
            assert_same_bits(got["grid"], reference.grid_values(row_codes), f"{what}: grid values")
            assert_same_bits(got["row scales"], row_scales, f"{what}: row scales")


def test_blocks_of_zeros_of_one_subnormal_and_of_one_infinity() -> None:
    for scale_format in FORMATS:
        codes, scales = quant.quantise_weight(torch.zeros(128, 128, dtype=BF16), scale_format)
        assert not codes.any() and scales.tolist() == [[1.0]]
        x = torch.zeros(128, 128, dtype=BF16)
        x[77, 3] = -(2.0**-133)
        codes, scales = quant.quantise_weight(x, scale_format)
        assert scales.tolist() == [[1.0]] and codes[77, 3] == 0x80 and int(codes.sum()) == 0x80
        x[77, 3] = float("inf")
        with pytest.raises(NonFiniteError, match=r"up_proj: .* row 0, column 0"):
            quant.quantise_weight(x, scale_format, "up_proj")


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (2, 129), (1, 255), (4, 299)])
def test_a_bad_number_makes_its_block_of_a_row_nan_and_no_other(bad, place) -> None:
    x = unit_values((5, 300), BF16)
    _, clean = quant.quantise_rows(x)
    x[place] = bad
    _, scales = quant.quantise_rows(x)
    expected = torch.zeros(5, 3, dtype=torch.bool)
    expected[place[0], place[1] // 128] = True
    assert torch.equal(scales.isnan(), expected)
    assert_same_bits(scales[~expected], clean[~expected])


def test_every_quotient_of_two_mantissas() -> None:
    """The kernels may correct a product by the reciprocal instead of dividing. A power of two changes neither quotient
    nor remainder, so 128 mantissas of x times 128 of amax, up to 19 exponents apart, are all there is where
    |x / scale| >= 2^-10; below, every code is a zero."""
    mantissa = 1.0 + torch.arange(128, dtype=torch.float64) / 128
    for gap in range(20):
        for some in (mantissa[:127], mantissa[1:]):  # a block holds amax and 127 others
            x = torch.cat([(some * 2.0**-gap).expand(128, 127), mantissa[:, None]], dim=1)
            rows = torch.minimum(x, mantissa[:, None]).to(BF16)
            rows[:, ::2] *= -1
            codes, scales = reference.quantise(rows, "fp32", 1)
            grid, row_scales = quant.quantise_rows(rows)
            assert_same_bits(row_scales, scales, "scales")
            assert_same_bits(grid, reference.grid_values(codes), f"exponents {gap} apart")


def test_the_reference_can_tell_a_reciprocal_from_a_division() -> None:
    """The control of the test above: x * (1 / scale) gives other codes somewhere."""
    mantissa = 1.0 + torch.arange(128, dtype=torch.float32) / 128
    scale = (mantissa / 448).unsqueeze(1)
    wrong = right = torch.zeros(0, dtype=torch.uint8)
    for gap in range(20):
        x = (mantissa * 2.0**-gap).unsqueeze(0)
        wrong = torch.cat([wrong, kernels.encode(x * (1 / scale))[0].flatten()])
        right = torch.cat([right, kernels.encode(x / scale)[0].flatten()])
    assert_different_bits(wrong, right)


def test_rows_and_blocks_do_not_see_each_other() -> None:
    x = hard_values((40, 300), BF16, seed=7)
    grid, scales = quant.quantise_rows(x)
    for rows in ([3], [39, 3, 3], list(range(10, 30))):
        some = quant.quantise_rows(x[rows].contiguous())
        assert_same_bits(some[0], grid[rows])
        assert_same_bits(some[1], scales[rows])
    w = hard_values((300, 300), BF16, seed=8)
    codes, scales = quant.quantise_weight(w)
    alone = quant.quantise_weight(w[128:256, 256:].contiguous())
    assert_same_bits(alone[0], codes[128:256, 256:])
    assert_same_bits(alone[1], scales[1:2, 2:])


def test_rows_of_several_lines() -> None:
    """[M, lines, K] has the grid values and scales of its M * lines lines."""
    x = hard_values((7, 3, 200), BF16, seed=1)
    for found, alone in zip(
        kernels.quantise_rows(x, "fp32"), kernels.quantise_rows(x.view(21, 200), "fp32"), strict=True
    ):
        assert_same_bits(found.view(21, -1), alone, "lines")


def test_a_recorded_program_quantises_rows() -> None:
    x = torch.zeros(40, 300, dtype=BF16)
    with library.record(rows=(x,)) as program:
        grid, scales = quant.quantise_rows(x)
    for rows in (40, 1, 0, 13):
        x.copy_(hard_values((40, 300), BF16, seed=rows))
        grid.fill_(7.0), scales.fill_(7.0)
        program.run(rows=rows)
        expected = quant.quantise_rows(x[:rows].contiguous())
        assert_same_bits(grid[:rows], expected[0])
        assert_same_bits(scales[:rows], expected[1])
        assert (grid[rows:] == 7.0).all() and (scales[rows:] == 7.0).all()


# ------------------------------------------------------------------------------------------------ panels


def test_panels_have_the_agreed_layout() -> None:
    """Element by element, as kernels/quant.h says it."""
    for n, k in SHAPES:
        codes = torch.from_numpy(np.random.default_rng(n).integers(0, 256, (n, k), dtype=np.uint8))
        expected = np.zeros(kernels.panels_shape(n, k), np.uint8)
        for column in range(n):
            v, c = column % 64 // 16, column % 16
            for element in range(k):
                at = v // 2 * 64 + c // 4 * 16 + v % 2 * 8 + c % 4 * 2 + element % 2
                expected[column // 64, element // 2, at] = codes[column, element]
        panels, transposed = kernels.allocate_panels(n, k), kernels.allocate_panels(n, k)
        kernels.load_codes(codes, panels)
        kernels.load_codes(codes.T.contiguous(), None, transposed)
        assert_same_bits(panels, expected, f"{(n, k)}: panels")
        assert_same_bits(transposed, expected, f"{(n, k)}: panels of the transpose of the transpose")
        assert_same_bits(kernels.unpack_codes(panels, n, k), codes, f"{(n, k)}: unpacked")


def test_both_kinds_of_panels_hold_the_same_codes_and_reused_memory_leaves_nothing_behind() -> None:
    for n, k in SHAPES:
        panels, transposed = kernels.allocate_panels(n, k), kernels.allocate_panels(k, n)
        scales = torch.empty(kernels.scales_shape(n, k))
        for seed in (1, 2):
            source = hard_values((n, k), torch.float32, seed=seed)
            kernels.quantise_weight(source, "fp32", panels, transposed, scales)
            codes, expected = quant.quantise_weight(source.to(BF16))
            assert_same_bits(kernels.unpack_codes(panels, n, k), codes)
            assert_same_bits(kernels.unpack_codes(transposed, k, n).T, codes)
            assert_same_bits(scales, expected)


# ------------------------------------------------------------------------------------------------ instruction sets


@functools.cache
def our_digests() -> dict[str, str]:
    return all_digests(3)


@pytest.mark.parametrize("isa", [isa for isa in library.ISAS if isa != OURS])
def test_every_instruction_set_makes_the_same_bits(isa) -> None:
    skip_unless_supported(isa)
    ours, theirs = our_digests(), digests_of("tests.ops.quant_cases", isa)
    assert {n for n in ours if ours[n] != theirs[n]} == set()


# ------------------------------------------------------------------------------------------------ torchao


@pytest.mark.parametrize("shape", [(128, 128), (256, 384)], ids=str)
@pytest.mark.parametrize("block_rows", [128, 1])
def test_codes_and_scales_equal_torchao(shape, block_rows) -> None:
    """Its float8 primitives, on whole blocks that are not zero (theirs divides by zero there), FP32 scales."""
    primitives = pytest.importorskip("torchao.quantization.quant_primitives", reason="torchao is not installed")
    for what in ("random", "wide", "cancelling", "extreme", "ties"):
        x = inputs(shape)[what]
        scales = primitives._choose_scale_float8(x.float(), [block_rows, 128])
        codes = primitives._quantize_affine_float8(x.float(), scales).view(torch.uint8)
        got = outputs(x, "fp32")
        assert_same_bits(got["scales" if block_rows == 128 else "row scales"], scales, f"{what}: scales")
        if block_rows == 128:
            assert_same_bits(got["codes"], codes, f"{what}: codes")
            value = primitives._dequantize_affine_float8(codes.view(torch.float8_e4m3fn), scales, BF16)
            assert_same_bits(got["value"], value, f"{what}: values")
        else:
            assert_same_bits(got["grid"], kernels.decode(codes), f"{what}: grid values")
