"""Latent attention over FP8 pages: codes and scales, the literal contract, accuracy, splits, neighbours, gradients."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch

from tests.bits import assert_different_bits, assert_same_bits, unit_values
from tests.ops.attention_fp8_reference import codes_of, scales_of
from tests.ops.mla_cases import (
    EPS,
    GRADS,
    MOONLIGHT,
    NAN,
    ODD,
    SMALL,
    WIDE,
    Case,
    call,
    chunked,
    gradients,
    part_context,
    whole,
    wide_rows,
)
from tests.ops.mla_reference import LatentContract, bounds, expanded
from tests.ops.other_builds import digests_of, rerun
from tests.ops.test_mla import check_literal, kernel_rows
from tests.tiny import tiny_spec
from zerogap.errors import CheckpointError, ConfigError, ContractError, NonFiniteError
from zerogap.models.cache import codec_of
from zerogap.models.decoder import Decoder
from zerogap.numerics import KV_SCALES, SCALE_FORMATS, DType, preset
from zerogap.ops.cpu import library
from zerogap.ops.cpu import mla as native
from zerogap.ops.cpu import norm as norm_kernels
from zerogap.ops.digest import digest
from zerogap.ops.kv_scales import Calibration, KVScales
from zerogap.ops.latent import LatentCodec, LatentSizes

MODES = [{"kv": kv, "scale_format": form} for kv, form in itertools.product(KV_SCALES, SCALE_FORMATS)]
modes = pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(mode.values()))


# ---------------------------------------------------------------------------------------------- codes and scales


def place_of(latent: int) -> np.ndarray:
    """Where element d of a latent stands: groups of 64 in the decoder's order, the rest as it is (kernels/mla.h)."""
    places = np.arange(latent)
    for begin in range(0, latent // 64 * 64, 64):
        d = np.arange(64)
        places[begin : begin + 64] = begin + d % 32 // 8 * 16 + d // 32 * 8 + d % 8
    return places


@modes
@pytest.mark.parametrize("sizes", [SMALL, ODD, WIDE, MOONLIGHT], ids=str)
def test_codes_and_scales_are_the_quantisers(sizes: LatentSizes, mode: dict) -> None:
    """Every token's codes by tile, and its written scales; the rotated part in BF16; nothing else is touched."""
    case = Case((37,), sizes, page_size=32, **mode)
    _, _, latent, k_rope, _ = kernel_rows(case, 22)
    latent[3] = 0
    latent[5, :16] = 2.0**-120
    kv, pages = case.pages(4, NAN)
    native.latent_write(latent, k_rope, kv, part_context(case, pages, [(0, 0, 37)]))
    want = case.pages(4, NAN)[0]
    x, tiles, places = latent.float().numpy(), case.codec.tiles, place_of(sizes.latent)
    for tile in range(tiles):
        columns = slice(tile * 128, min((tile + 1) * 128, sizes.latent))
        written = scales_of(x[:, columns], case.scale_format == "pow2")
        scales = written if case.given is None else np.full(37, case.given[tile].item(), np.float32)
        codes = torch.from_numpy(codes_of(x[:, columns], scales))
        for t in range(37):
            page, slot = int(pages[0, t // 32]), t % 32
            want.keys[page, 0].view(32, -1)[slot, places[columns]] = codes[t]
            want.values[page, 0].view(32, -1)[slot] = k_rope[t]
            if case.given is None:
                want.key_scales[page, 0].view(32, tiles)[slot, tile] = float(written[t])
    assert_same_bits(kv.keys, want.keys, "codes")
    assert_same_bits(kv.values, want.values, "rotated parts")
    beside = 0
    if case.given is None:
        assert_same_bits(kv.key_scales, want.key_scales, "scales")
        beside = kv.key_scales.nbytes
    assert kv.codec.bytes_per_token() * 32 * len(kv.keys) == kv.keys.nbytes + kv.values.nbytes + beside


def test_what_a_token_of_moonlight_costs() -> None:
    """Bytes per token and layer: 576 BF16 elements; or 512 codes, 64 BF16 elements and four scales."""
    modes = [(DType.BF16, "none"), (DType.FP8, "per_token_head"), (DType.FP8, "calibrated")]
    costs = [LatentCodec(MOONLIGHT.latent, MOONLIGHT.rope, *mode).bytes_per_token() for mode in modes]
    assert costs == [1152, 512 + 128 + 16, 512 + 128]


def test_the_contract_chooses_the_codec() -> None:
    """Of a model with latent attention; FP8 operands are refused before anything is built."""
    spec = tiny_spec("deepseek_v3")
    sizes = spec.mla.sizes
    assert codec_of(spec, preset("fp32")) == LatentCodec(sizes.latent, sizes.rope, DType.FP32)
    for changes in ({}, {"kv_scale": "calibrated", "scale_format": "pow2"}):
        contract = preset("fp8-kv", **changes)
        want = LatentCodec(sizes.latent, sizes.rope, DType.FP8, contract.kv_scale, contract.scale_format)
        assert codec_of(spec, contract) == want
    with pytest.raises(ConfigError, match="attention_math"):
        Decoder(spec, preset("fp8-kv", attention_math="fp8"))


def test_foreign_scale_sets_are_refused() -> None:
    """A set of a model with keys and values, or with other tiles, does not fit latents; one that fits is read."""
    decoder = Decoder(tiny_spec("deepseek_v3"), preset("fp8-kv", kv_scale="calibrated"))
    layers, tiles = len(decoder.blocks), decoder.codec().scale_shape[1]
    for shape in ((layers, 2, tiles), (layers, 1, tiles + 1)):
        with pytest.raises(ConfigError, match="kv_scales"):
            decoder.set_kv_scales(KVScales(torch.ones(shape)))
    pages = decoder.new_kv(2, 16)
    assert all(kv.key_scales.isnan().all() and kv.value_scales is None for kv in pages)
    decoder.set_kv_scales(KVScales(0.5 + torch.arange(layers * tiles).view(layers, 1, tiles)))
    assert [kv.key_scales.tolist() for kv in pages] == (0.5 + torch.arange(layers * tiles).view(layers, tiles)).tolist()


# ---------------------------------------------------------------------------------------------- literal contract


@modes
@pytest.mark.parametrize(
    "case",
    [
        Case((1,), ODD),
        Case((67, 20), dataclasses.replace(SMALL, num_heads=2), leaves=2),
        Case((131,), dataclasses.replace(ODD, num_heads=1), kv_split=64),
        Case((40,), LatentSizes(4, 16, 16, 80, 16), leaves=4),
        Case((66,), LatentSizes(1, 16, 16, 272, 16)),
    ],
    ids=str,
)
def test_literal(case: Case, mode: dict) -> None:
    """Out, log-sum-exp and all gradients of the kernels are the contract's bits."""
    check_literal(dataclasses.replace(case, **mode), 1)


@pytest.mark.slow
@pytest.mark.parametrize("isa", library.ISAS)
def test_literal_on_every_instruction_set(isa: str) -> None:
    """The literal tests hold for each build that this processor runs."""
    rerun(__file__, isa, "test_literal and not instruction and fp32 or quantisers")


@modes
def test_controls_of_the_literal_contract_differ(mode: dict) -> None:
    """Another order of tiles, scales applied elsewhere, or other scales are other bits: the data shows it."""
    case = Case((100,), LatentSizes(1, 16, 16, 272, 16), **mode)  # three tiles: the sum of two has no order
    q_latent, q_rope, latent, k_rope, _ = (x.float().numpy() for x in kernel_rows(case, 1))
    q = np.concatenate([x.reshape(100, 1, -1) for x in (q_latent, q_rope)], -1)

    def results(case: Case, **change: object) -> torch.Tensor:
        out, lse = LatentContract.of(case, **change).forward(q, latent, k_rope, case.scale)
        return torch.cat([torch.from_numpy(x).flatten() for x in (out, lse)])

    plain = results(case)
    changes = [{"tiles_descend": True}, {"block": 32}]
    if mode["scale_format"] == "fp32" or mode["kv"] == "per_token_head":  # one power of two commutes with rounding
        changes.append({"scale_after": True})
    for change in changes:
        assert_different_bits(results(case, **change), plain, f"out and log-sum-exp with {change}")
    for other in MODES:
        if other != mode:
            changed = dataclasses.replace(case, **other)
            assert_different_bits(results(changed), plain, f"out and log-sum-exp with {other}")


# ---------------------------------------------------------------------------------------------- accuracy, gradients


def seen_latents(case: Case, kv_a: torch.Tensor, weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 value of the codes of one sequence's latents, and which elements are clipped."""
    inside = kv_a[:, : case.sizes.latent].contiguous()
    _, latent = norm_kernels.norm(inside, None, weights[0].rows, EPS, 1)
    grid, scales, clipped = LatentContract.of(case).quantise(latent.float().numpy())
    value = grid.astype(np.float64) * np.repeat(scales.astype(np.float64), 128, 1)[:, : grid.shape[1]]
    return torch.from_numpy(value), torch.from_numpy(clipped)


@modes
@pytest.mark.parametrize("case", [Case((130,), SMALL), Case((90,), ODD, interleaved=True)], ids=str)
def test_is_the_expanded_form_over_the_codes(case: Case, mode: dict) -> None:
    """Forward, and gradients straight through the rounding and zero where clipped, within the derived bound."""
    case = dataclasses.replace(case, **mode)
    q, kv_a = case.rows(4)
    d_out = unit_values((len(q), case.sizes.out_width), q.dtype, seed=5)
    weights = case.weights()
    seen = seen_latents(case, kv_a, weights)
    made = expanded(case, q, kv_a, weights, d_out, seen)
    limits = bounds(case, made, seen[1])
    for name, got in zip(GRADS, gradients(case, q, kv_a, d_out), strict=True):
        worst = ((got.double() - made.results[name]).abs() / (1.05 * limits[name] + 1e-30)).max().item()
        assert worst <= 1.0, f"{name}: {worst:.2f} times the bound"
    if case.given is not None:
        assert 0.02 < seen[1].float().mean() < 0.5, "the data clips some elements, not most"


def test_gradient_is_zero_where_a_calibrated_scale_clipped() -> None:
    """Of the kernels' own gradient of the latent: +0 exactly there, straight through elsewhere."""
    case = Case((90,), ODD, kv="calibrated")
    q_latent, q_rope, latent, k_rope, d_out = kernel_rows(case, 5)
    kv, pages = case.pages()
    context = part_context(case, pages, [(0, 0, 90)])
    native.latent_write(latent, k_rope, kv, context)
    sizes = {"num_heads": 3, "scale": case.scale}
    out, lse = native.latent_attention(q_latent, q_rope, kv, context, kv_split=1024, want_lse=True, **sizes)
    *_, d_latent, _ = native.latent_grad(
        q_latent,
        q_rope,
        latent,
        k_rope,
        out,
        lse,
        d_out,
        context.sample_starts,
        kv.codec,
        case.given,
        leaves=1,
        **sizes,
    )
    scales = case.given.repeat_interleave(128)[: ODD.latent]
    clipped = (latent.float() / scales).abs() > 448
    assert 0.02 < clipped.float().mean() < 0.9
    assert_same_bits(d_latent[clipped], torch.zeros(int(clipped.sum()), dtype=torch.bfloat16), "clipped")
    assert (d_latent[~clipped] != 0).float().mean() > 0.99, "the control: others have a gradient"


# ---------------------------------------------------------------------------------------------- splits, neighbours


@modes
def test_chunks_and_decode_equal_one_call(mode: dict) -> None:
    """Chunks around the block size and one token at a time: the bits of the whole prefill. Pages begin as garbage."""
    case = Case((140,), ODD, kv_split=64, **mode)
    q, kv_a, _ = wide_rows(case, 6)
    want = whole(case, q, kv_a)
    for border in (1, 15, 16, 63, 64, 65, 129):
        assert_same_bits(chunked(case, q, kv_a, [border]), want, f"chunks [0, {border}) and the rest")
    assert_same_bits(chunked(case, q, kv_a, list(range(7, 140, 7))), want, "chunks of 7")
    assert_same_bits(chunked(case, q, kv_a, list(range(1, 140))), want, "decode")


@modes
def test_page_size_and_place_of_pages(mode: dict) -> None:
    case = Case((130, 17, 64), WIDE, kv_split=128, **mode)
    q, kv_a = case.rows(8)
    want = whole(case, q, kv_a)
    for page_size in (16, 64, 256):
        for permute, fill in ((None, NAN), (2, 1e30)):
            got = whole(dataclasses.replace(case, page_size=page_size), q, kv_a, None, permute, fill)
            assert_same_bits(got, want, f"pages of {page_size}, order {permute}, filled with {fill}")


@modes
def test_sequences_and_the_future_are_not_seen(mode: dict) -> None:
    """A sequence beside NaN, gradients included; a bad row of position t leaves every earlier token's bits alone."""
    alone = Case((77,), ODD, leaves=3, **mode)
    rows = wide_rows(alone, 9)
    want = gradients(alone, *rows)[:3]
    for lengths in ((77, 5), (64, 77)):
        case = dataclasses.replace(alone, lengths=lengths)
        begin = sum(lengths[: lengths.index(77)])
        full = [torch.full((sum(lengths), x.shape[1]), NAN, dtype=x.dtype) for x in rows]
        for filled, x in zip(full, rows):
            filled[begin : begin + 77] = x
        for name, got, expected in zip(GRADS, gradients(case, *full)[:3], want):
            assert_same_bits(got[begin : begin + 77], expected, f"{name}, lengths {lengths}")
    for t in (1, 16, 63, 64):
        for columns, bad in ((slice(0, 16), NAN), (slice(128, 192), float("inf")), (slice(192, 224), NAN)):
            kv_a = rows[1].clone()
            kv_a[t, columns] = bad
            got = whole(alone, rows[0], kv_a)
            assert_same_bits(got[:t], want[0][:t], f"rows before a bad row at {t}")
            assert not got[t:].isfinite().any(), "the control: rows from t on are not finite"


@modes
def test_threads(mode: dict) -> None:
    case = Case((200, 65), ODD, kv_split=128, leaves=3, **mode)
    rows = wide_rows(case, 18)
    with library.use_threads(1):
        want = gradients(case, *rows)
    for threads in (2, 3):
        with library.use_threads(threads):
            for name, got, expected in zip(GRADS, gradients(case, *rows), want):
                assert_same_bits(got, expected, f"{name} with {threads} threads")


@modes
def test_recorded_program_equals_eager(mode: dict) -> None:
    """Replayed for fewer rows than it was recorded with; live calibrated scales are read anew by each run."""
    case = Case((50,), ODD, **mode)
    q, kv_a = case.rows(21)
    weights = case.weights()
    want = whole(case, q, kv_a, weights)
    kv, pages = case.pages(1, NAN)
    given = case.given
    if given is not None:
        kv.key_scales.fill_(NAN)
    context = part_context(case, pages, [(0, 0, 50)])
    buffers = (q.clone(), kv_a.clone(), context.positions, context.sequences)
    with torch.no_grad(), library.record(rows=buffers) as program:
        out = call(case, *buffers[:2], weights, kv, context)
    if given is not None:
        program.run(rows=50)
        assert out.isnan().all(), "scales that are no numbers show in every row"
        kv.key_scales.copy_(given)
    for begin, end in ((0, 7), (7, 8), (8, 50)):
        for buffer, source in zip(buffers, (q, kv_a, torch.arange(50).int(), torch.zeros(50).int())):
            buffer[: end - begin] = source[begin:end]
        program.run(rows=end - begin)
        assert_same_bits(out[: end - begin], want[begin:end], f"rows {begin} to {end}")


# ---------------------------------------------------------------------------------------------- scale sets


def test_backward_uses_the_scales_of_its_forward() -> None:
    """Scales that change between forward and backward do not change the gradient."""
    case = Case((70,), ODD, kv="calibrated")
    q, kv_a, d_out = wide_rows(case, 11)
    want = gradients(case, q, kv_a, d_out)
    leaves = [x.clone().requires_grad_() for x in (q, kv_a)]
    kv, pages = case.pages()
    out = call(case, *leaves, case.weights(), kv, part_context(case, pages, [(0, 0, 70)]))
    kv.key_scales.mul_(3)
    out.backward(d_out)
    for name, leaf, expected in zip(GRADS[1:], leaves, want[1:]):
        assert_same_bits(leaf.grad, expected, name)


def test_calibration_learns_the_largest_magnitude_of_each_tile() -> None:
    """Of the normed latent, over all calls; a ragged last tile counts its own elements only; then scales by tile."""
    case = Case((90,), ODD)
    kv_a, weights = case.rows(12)[1], case.weights()
    calibration = Calibration(2, case.codec.scale_shape)
    for rows in (slice(0, 50), slice(50, 90)):
        kv, pages = case.pages()
        kv = dataclasses.replace(kv, calibration=calibration.layer(1))
        with torch.no_grad():
            q = case.rows(12)[0][rows]
            call(case, q, kv_a[rows], weights, kv, part_context(case, pages, [(0, 0, len(q))]))
    inside = kv_a[:, : ODD.latent].contiguous()
    _, latent = norm_kernels.norm(inside, None, weights[0].rows, EPS, 1)
    want = [latent[:, :128].float().abs().max(), latent[:, 128:].float().abs().max()]
    assert calibration.amax[1].tolist() == [want] and not calibration.amax[0].any()
    calibration.amax[0].fill_(1.0)
    scales = KVScales.of(calibration.amax, preset("fp8-kv", kv_scale="calibrated", kv_margin=2.0))
    assert scales.values.shape == (2, 1, 2)
    assert torch.equal(scales.values[1, 0], 2.0 * torch.stack(want) / 448)
    again = KVScales.from_list(json.loads(json.dumps(scales.to_list())))
    assert_same_bits(again.values, scales.values, "scales")
    assert again.name == scales.name
    bad = latent.clone()
    bad[7, 130] = NAN
    native.latent_amax(bad, calibration.amax[1, 0])
    with pytest.raises(NonFiniteError, match="latents of layer 1, tile 1"):
        KVScales.of(calibration.amax, preset("fp8-kv", kv_scale="calibrated"))
    with pytest.raises(CheckpointError, match="tiles"):
        KVScales.from_list([[[1.0], [1.0], [1.0]]])


def test_missing_scales_are_refused() -> None:
    """A calibrated cache without scales is refused, forward and training alike, before anything is written."""
    case = Case((4,), ODD, kv="calibrated")
    q, kv_a = case.rows()
    kv, pages = case.pages()
    before = kv.keys.clone()
    kv = dataclasses.replace(kv, key_scales=None)
    for x in (q, q.clone().requires_grad_()):
        with pytest.raises(ContractError, match="no scales"):
            call(case, x, kv_a, case.weights(), kv, part_context(case, pages, [(0, 0, 4)]))
    assert_same_bits(kv.keys, before, "codes")


def all_digests() -> dict[str, str]:
    """Digests of outputs and gradients in every mode, over one and several spans."""
    made = {}
    for mode in MODES:
        for name, sizes in (("small", SMALL), ("odd", ODD), ("wide", WIDE)):
            case = Case((140, 9), sizes, kv_split=64, **mode)
            for result, x in zip(GRADS, gradients(case, *wide_rows(case, 40)), strict=True):
                made[f"{'-'.join(mode.values())}/{name}/{result}"] = digest(x)
    return made


@pytest.mark.skipif(library.backend() != "cpu/avx512bf16", reason="compares AVX2 with AVX512-BF16, which does not run")
def test_avx2_equals_avx512bf16() -> None:
    """All bits are equal on both builds."""
    ours, theirs = all_digests(), digests_of("tests.ops.test_mla_fp8", "avx2")
    assert {n for n in ours if ours[n] != theirs[n]} == set()
    assert len(set(ours.values())) == len(ours), "the control: digests tell modes apart"


if __name__ == "__main__":
    print(json.dumps({"backend": library.backend(), "digests": all_digests()}))
