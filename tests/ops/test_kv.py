"""FP8 pages: codes and scales against an independent definition, their place, amax, sizes, refusals."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from tests.bits import assert_different_bits, assert_same_bits, hard_values, unit_values
from tests.ops.attention_cases import NAN, part_context
from tests.ops.attention_fp8_cases import FP8Case
from tests.ops.attention_fp8_reference import codes_of, scales_of
from zerogap.errors import ConfigError
from zerogap.numerics import DType
from zerogap.ops.cpu import attention as native
from zerogap.ops.cpu import library
from zerogap.ops.kv import DenseCodec, FP8Codec, kv_amax

formats = pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
kv_scales = pytest.mark.parametrize("kv_scale", ["per_token_head", "calibrated"])


def extreme_rows(width: int) -> torch.Tensor:
    """BF16 rows: zeros of both signs, a denormal, borders of the zero rule, huge, tiny beside huge, ties, bad ones."""
    rows = [torch.zeros(width), -torch.zeros(width)]
    for magnitude in (2.0**-130, 2.0**-101, 2.0**-100, 1.5 * 2.0**-100, 2.0**-95, 448.0, 449.0, 2.0**-20, 3.38e38):
        for fill in (0.0, magnitude / 3, -magnitude / 448, magnitude * 2.0**-17):
            row = torch.full((width,), fill)
            row[width // 3] = -magnitude
            rows.append(row)
    ties = torch.arange(width).float() * 0.5 - 8.25  # with 448 in the row the scale is 1: midpoints of the grid
    ties[0] = 448.0
    steps = torch.arange(width).float() * 2.0**-10  # half steps of the subnormals
    steps[0] = 448.0
    rows += [ties, -ties, steps, -steps]
    for bad in (NAN, float("inf"), -float("inf")):
        row = torch.linspace(-2, 2, width)
        row[5] = bad
        rows.append(row)
    return torch.stack(rows).bfloat16()


@kv_scales
@formats
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
def test_pages_hold_the_codes_of_the_definition(kv_scale: str, scale_format: str, dim: int) -> None:
    """Codes and scales, element by element and bit for bit, in their places; every other slot keeps what it held."""
    extreme = extreme_rows(2 * dim).view(-1, 2, dim)
    k = torch.cat([extreme.view(-1, 2 * dim), unit_values((20, 2 * dim), torch.bfloat16, 1)])
    v = torch.cat([hard_values((20, 2 * dim), torch.bfloat16, 2), extreme.flip(1).reshape(-1, 2 * dim)])
    case = FP8Case((len(k),), 2, 2, dim, page_size=32, kv_scale=kv_scale, scale_format=scale_format)
    kv, table = case.pages(4, NAN)
    native.kv_write(k, v, kv, part_context(case, table, [(0, 0, len(k))]))
    want = case.pages(4, NAN)[0]
    for which, rows, pages, scales in (("k", k, want.keys, want.key_scales), ("v", v, want.values, want.value_scales)):
        x = rows.float().numpy().reshape(-1, 2, dim)
        if kv_scale == "calibrated":
            scale = np.broadcast_to(scales.numpy(), x.shape[:2])
        else:
            scale = scales_of(x, scale_format == "pow2")
        codes = torch.from_numpy(codes_of(x, scale))
        for t in range(len(k)):
            page, slot = int(table[0, t // 32]), t % 32
            if kv_scale != "calibrated":
                scales[page, :, slot] = torch.from_numpy(scale[t])
            tile, lane = slot // 16, slot % 16
            for g in range(2):
                if which == "k":  # [tile][pairs of steps][key / 4][step % 2][key % 4][dim % 2]
                    cells = pages[page, g].view(2, dim // 4, 4, 2, 4, 2)[tile, :, lane // 4, :, lane % 4, :]
                    cells.copy_(codes[t, g].view(dim // 4, 2, 2))
                else:  # [tile][key / 4][dim / 16][dim % 16 / 4][key / 2 % 2][dim % 4][key % 2]
                    cells = pages[page, g].view(2, 4, dim // 16, 4, 2, 4, 2)[tile, lane // 4, :, :, lane // 2 % 2]
                    cells[..., lane % 2].copy_(codes[t, g].view(dim // 16, 4, 4))
    assert_same_bits(kv.keys, want.keys, "key codes")
    assert_same_bits(kv.values, want.values, "value codes")
    if kv_scale != "calibrated":
        nan = want.key_scales.isnan()
        assert_same_bits(kv.key_scales[~nan], want.key_scales[~nan], "key scales")
        assert kv.key_scales[nan].isnan().all()
        nan = want.value_scales.isnan()
        assert_same_bits(kv.value_scales[~nan], want.value_scales[~nan], "value scales")
        assert kv.value_scales[nan].isnan().all()


def test_the_modes_differ() -> None:
    """The control: scale modes and formats make different codes of the same rows."""
    written = []
    for kv_scale, scale_format in (("per_token_head", "fp32"), ("per_token_head", "pow2"), ("calibrated", "fp32")):
        case = FP8Case((20,), 2, 2, 64, kv_scale=kv_scale, scale_format=scale_format)
        _, k, v = case.rows(3)
        kv, table = case.pages()
        native.kv_write(k, v, kv, part_context(case, table, [(0, 0, 20)]))
        written.append(kv.keys)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert_different_bits(written[i], written[j], "codes")


@pytest.mark.parametrize("bad", [0.0, -1.0, NAN, float("inf")])
def test_a_given_scale_that_is_no_scale_makes_nan_codes(bad: float) -> None:
    case = FP8Case((20,), 2, 2, 64, kv_scale="calibrated")
    _, k, v = case.rows(3)
    kv, table = case.pages()
    kv = dataclasses.replace(kv, key_scales=torch.tensor([bad, 0.01]))
    native.kv_write(k, v, kv, part_context(case, table, [(0, 0, 20)]))
    page = kv.keys[int(table[0, 0])]
    assert ((page[0] & 0x7F) == 0x7F).all() and not ((page[1] & 0x7F) == 0x7F).any()


# ---------------------------------------------------------------------------------------------- amax


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(0, 1, 16), (1, 1, 16), (700, 3, 80), (2000, 8, 128)])
def test_amax_is_the_largest_magnitude(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Any split of the rows and any number of threads; an amax already there stays where it is larger."""
    rows, heads, dim = shape
    k = hard_values((rows, heads * dim), dtype, 7)
    before = torch.linspace(0, 3.0, heads) * 2.0**12
    want = before.clone()
    if rows:
        want = torch.maximum(before, k.float().view(rows, heads, dim).abs().amax((0, 2)))
    for threads in (1, 3):
        for cuts in ((0, rows), (0, rows // 3, rows // 2, rows)):
            amax = before.clone()
            with library.use_threads(threads):
                for begin, end in itertools.pairwise(cuts):
                    kv_amax(k[begin:end], amax)
            assert_same_bits(amax, want, f"{threads} threads, cuts {cuts}")


def test_amax_sees_every_row() -> None:
    """One large element, at any row and column, is the answer of its head and of no other."""
    heads, dim = 8, 128
    for row in (*range(20), 63, 64, 65, 127, 128, 498, 499):
        k = torch.full((500, heads * dim), 0.5).bfloat16()
        head, column = row % heads, (row * 37) % dim
        k[row, head * dim + column] = -3.0
        amax = torch.zeros(heads)
        kv_amax(k, amax)
        assert amax.tolist() == [3.0 if h == head else 0.5 for h in range(heads)], f"row {row}"


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_amax_hides_nothing(bad: float) -> None:
    k = unit_values((300, 2 * 64), torch.bfloat16, 8)
    k[137, 70] = bad  # of head 1
    amax = torch.zeros(2)
    kv_amax(k, amax)
    kv_amax(k[:100], amax)
    assert amax[0].isfinite() and amax[1].isnan() == np.isnan(bad) and not amax[1].isfinite()


def test_amax_in_a_recorded_program() -> None:
    k, amax = unit_values((40, 64), torch.bfloat16, 9), torch.zeros(2)
    with library.record(rows=(k,)) as program:
        kv_amax(k, amax)
    program.run(rows=7)
    assert_same_bits(amax, k[:7].float().view(7, 2, 32).abs().amax((0, 2)), "amax")


# ---------------------------------------------------------------------------------------------- sizes and refusals


def test_bytes_per_token_are_the_bytes_of_pages() -> None:
    for kv_scale in ("per_token_head", "calibrated"):
        codec = FP8Codec(3, 64, kv_scale)
        kv = codec.allocate(5, 32, (torch.ones(3), torch.ones(3)) if codec.calibrated else None)
        tensors = (kv.keys, kv.values) if codec.calibrated else (kv.keys, kv.values, kv.key_scales, kv.value_scales)
        assert codec.bytes_per_token() * 5 * 32 == sum(x.nbytes for x in tensors)
        assert codec.bytes_per_token() < 0.54 * DenseCodec(3, 64, DType.BF16).bytes_per_token()


def test_what_a_head_has_in_a_page_stands_together() -> None:
    """Decoding jumps once per page and KV head, so a reader finds keys, values and scales side by side."""
    kv = FP8Codec(3, 64, "per_token_head").allocate(5, 32)
    starts = [x.data_ptr() - kv.keys.data_ptr() for x in (kv.key_scales, kv.values, kv.value_scales)]
    assert starts == [32 * 64, 32 * 68, 32 * 68 + 32 * 64]
    assert kv.keys[0, 1].data_ptr() - kv.keys.data_ptr() == 2 * 32 * 68


def test_given_scales_stay_live() -> None:
    live = torch.ones(2, 3)
    kv = FP8Codec(3, 64, "calibrated").allocate(2, 16, (live[0], live[1]))
    live.fill_(7.0)
    assert kv.key_scales is not None and kv.key_scales.tolist() == [7.0] * 3


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"kv_scale": "none"}, "kv_scale"),
        ({"scale_format": "e8m0"}, "scale_format"),
        ({"attention_math": DType.FP32}, "attention_math"),
        ({"head_dim": 24}, "head_dim"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
    ],
)
def test_refusals_name_the_key(change: dict, key: str) -> None:
    sizes = {"num_kv_heads": 2, "head_dim": 64, "kv_scale": "calibrated"}
    with pytest.raises(ConfigError, match=key):
        FP8Codec(**{**sizes, **change})
    with pytest.raises(ConfigError, match="page_size"):
        FP8Codec(**sizes).allocate(2, 24)
