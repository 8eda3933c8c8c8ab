"""Attention over FP8 pages: the literal contract, accuracy, rows that do not see each other, splits, gradients."""

import dataclasses
import json

import pytest
import torch

from tests.bits import assert_different_bits, assert_same_bits, hard_values, unit_values
from tests.ops.attention_cases import NAN, as_heads, chunked, gradients, part_context, whole
from tests.ops.attention_fp8_cases import MODES, FP8Case, mode_name
from tests.ops.attention_fp8_reference import float64_fp8_attention
from tests.ops.other_builds import digests_of
from zerogap.errors import ContractError
from zerogap.numerics import DType
from zerogap.ops.attention import attention
from zerogap.ops.cpu import attention as native
from zerogap.ops.cpu import library
from zerogap.ops.digest import digest

modes = pytest.mark.parametrize("mode", MODES, ids=mode_name)
GRADS = ("out", "dq", "dk", "dv")


def wide_rows(case: FP8Case, seed: int) -> tuple[torch.Tensor, ...]:
    """q, k, v, d_out with wide exponents in v and d_out, so that an order of summation shows."""
    q, k, v = case.rows(seed)
    v = v + hard_values(v.shape, v.dtype, seed=seed, spread=3)
    return q * 2, k, v, hard_values(q.shape, q.dtype, seed=seed + 1, spread=4)


# ---------------------------------------------------------------------------------------------- literal contract

LITERAL = [
    FP8Case((1,), 1, 1, 64),
    FP8Case((67, 20), 3, 1, 64),
    FP8Case((150,), 4, 2, 80, kv_split=64),
    FP8Case((131,), 8, 1, 16, leaves=4, kv_split=128),
    FP8Case((66,), 2, 2, 128),
]


@modes
@pytest.mark.parametrize("case", LITERAL, ids=str)
def test_literal(case: FP8Case, mode: dict) -> None:
    """Out, log-sum-exp and all gradients are the contract's bits."""
    case = dataclasses.replace(case, **mode)
    q, k, v, d_out = wide_rows(case, 1)
    out, *grads = gradients(case, q, k, v, d_out)
    kv, table = case.pages()
    context = part_context(case, table, [(s, 0, n) for s, n in enumerate(case.lengths)])
    native.kv_write(k, v, kv, context)
    again, lse = native.attention(
        q, kv, context, num_heads=case.heads, scale=case.dim**-0.5, kv_split=case.kv_split, want_lse=True
    )
    assert_same_bits(again, out, "with and without log-sum-exp")
    begin = 0
    for n in case.lengths:
        rows = slice(begin, begin + n)
        parts = [as_heads(case, x[rows]) for x in (q, k, v)]
        contract, scale = case.contract(), case.dim**-0.5
        want, want_lse = contract.forward(*parts, case.heads, case.kv_heads, scale)
        assert_same_bits(lse[rows].numpy(), want_lse, "log-sum-exp")
        assert_same_bits(out[rows].float().numpy(), want.reshape(n, -1), "out")
        wants = contract.backward(*parts, want, want_lse, as_heads(case, d_out[rows]), case.leaves, scale)
        for name, got, expected in zip(("dq", "dk", "dv"), grads, wants):
            assert_same_bits(got[rows].float().numpy(), expected.reshape(n, -1), name)
        begin += n


@modes
def test_controls_of_the_literal_contract_differ(mode: dict) -> None:
    """Another order, other scales, other operands, or scales applied elsewhere are other bits: the data shows it."""
    case = FP8Case((150,), 1, 1, 80, **mode)
    q, k, v, _ = wide_rows(case, 1)
    q = q + hard_values(q.shape, q.dtype, seed=2, spread=8)
    k = k * 2 ** torch.linspace(-9, 0, 80).bfloat16().expand_as(k)
    parts = [as_heads(case, x) for x in (q, k, v)]

    def results(**change: object) -> torch.Tensor:
        out, lse = case.contract(**change).forward(*parts, 1, 1, 80**-0.5)
        return torch.cat([torch.from_numpy(x).flatten() for x in (out, lse)])

    changes = [{"unscaled_p": True}, {"math": mode["math"] is DType.BF16}, {"block": 32}]
    if case.math is DType.BF16:  # sums of products of two codes are exact in most orders
        changes += [{"odd_first": False}]
    if case.kv_scale == "per_token_head":
        changes += [{"pow2": case.scale_format == "fp32"}, {"given": tuple(x.numpy() for x in calibrated(case).scales)}]
    if case.scale_format == "fp32":  # a power of two commutes with every rounding
        changes += [{"scale_first": True}]
    plain = results()
    for change in changes:
        assert_different_bits(results(**change), plain, f"out and log-sum-exp with {change}")


def calibrated(case: FP8Case) -> FP8Case:
    return dataclasses.replace(case, kv_scale="calibrated")


# ---------------------------------------------------------------------------------------------- accuracy


@modes
@pytest.mark.parametrize(
    "case", [FP8Case((200,), 9, 3, 64), FP8Case((90,), 8, 1, 128), FP8Case((140,), 2, 2, 80)], ids=str
)
def test_accuracy_against_float64(case: FP8Case, mode: dict) -> None:
    """Forward and straight-through gradients, clipped elements included, stay inside a derived first-order bound."""
    case = dataclasses.replace(case, **mode)
    q, k, v = case.rows(4)
    d_out = unit_values(q.shape, q.dtype, seed=5)
    reference = float64_fp8_attention(case.contract(), q, k, v, d_out, case.heads, case.kv_heads)
    for name, got in zip(GRADS, gradients(case, q, k, v, d_out)):
        want, bound = reference[name]
        worst = ((got.double() - want).abs() / (1.05 * bound + 1e-30)).max().item()
        assert worst <= 1.0, f"{name}: {worst:.2f} times the bound"
    if case.kv_scale == "calibrated":
        for x, grad, scale in zip((k, v), gradients(case, q, k, v, d_out)[2:], case.scales):
            clipped = (x.float().view(-1, case.kv_heads, case.dim) / scale[:, None]).abs() > 448
            assert 0.02 < clipped.float().mean() < 0.3, "the data clips some elements, not most"
            assert_same_bits(grad.view_as(clipped)[clipped], torch.zeros(int(clipped.sum())).bfloat16(), "clipped")
            assert (grad.view_as(clipped)[~clipped] != 0).float().mean() > 0.99, "and nothing else is zero"


@modes
def test_the_accuracy_bound_is_not_loose(mode: dict) -> None:
    """Values of the neighbouring token, or the other codec's codes, break the bound."""
    case = FP8Case((200,), 2, 1, 64, **mode)
    q, k, v = case.rows(4)
    want, bound = float64_fp8_attention(case.contract(), q, k, v, q, 2, 1)["out"]
    shifted = whole(case, q, k, torch.cat([v[1:], v[:1]]))
    assert ((shifted.double() - want).abs() > 1.05 * bound).any()
    swapped = {"per_token_head": "calibrated", "calibrated": "per_token_head"}[case.kv_scale]
    other = whole(dataclasses.replace(case, kv_scale=swapped), q, k, v)
    assert ((other.double() - want).abs() > 1.05 * bound).any()


# ---------------------------------------------------------------------------------------------- splits


@modes
@pytest.mark.parametrize("kv_split", [64, 1024])
def test_chunks_and_decode_equal_one_call(mode: dict, kv_split: int) -> None:
    """Chunk borders around the block size and one token at a time, over pages of garbage: the trainer's whole pass."""
    case = FP8Case((200,), 3, 1, 64, kv_split=kv_split, **mode)
    q, k, v, d_out = wide_rows(case, 6)
    want = gradients(case, q, k, v, d_out)[0]
    for border in (1, 15, 16, 17, 63, 64, 65, 66, 127, 129, 193):
        assert_same_bits(chunked(case, q, k, v, [border]), want, f"chunks [0, {border}) and the rest")
    assert_same_bits(chunked(case, q, k, v, list(range(7, 200, 7))), want, "chunks of 7")
    assert_same_bits(chunked(case, q, k, v, list(range(1, 200))), want, "decode")


@modes
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (8, 1), (7, 1), (24, 2)])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_a_row_alone_equals_the_row_in_its_batch(mode: dict, heads: tuple[int, int], dim: int) -> None:
    """T = 1 at a few positions against the whole sequence, for every kind of row tile."""
    case = FP8Case((75,), *heads, dim, **mode)
    q, k, v = case.rows(7)
    want = whole(case, q, k, v)
    kv, table = case.pages(1, NAN)
    native.kv_write(k, v, kv, part_context(case, table, [(0, 0, 75)]))
    for t in (0, 1, 2, 15, 16, 63, 64, 74):
        row = attention(
            *(x[t : t + 1] for x in (q, k, v)), kv, part_context(case, table, [(0, t, t + 1)]), **case.sizes
        )
        assert_same_bits(row, want[t : t + 1], f"row {t}")


@modes
def test_page_size_and_place_of_pages(mode: dict) -> None:
    """Page sizes 16, 32, 48, 256; physical pages in any order; whatever unwritten slots hold."""
    case = FP8Case((130, 17, 64), 3, 1, 64, kv_split=128, **mode)
    q, k, v, _ = wide_rows(case, 8)
    want = whole(case, q, k, v)
    for page_size in (16, 32, 48, 256):
        for permute in (None, 1):
            for fill in (NAN, float("inf"), 1e30):
                got = whole(dataclasses.replace(case, page_size=page_size), q, k, v, permute, fill)
                assert_same_bits(got, want, f"pages of {page_size}, order {permute}, scales filled with {fill}")


# ---------------------------------------------------------------------------------------------- neighbours


@modes
def test_sequences_do_not_see_each_other(mode: dict) -> None:
    """A sequence alone, first, last, and next to sequences of NaN and infinity: equal bits. Those are not hidden."""
    alone = FP8Case((77,), 6, 2, 64, **mode)
    q, k, v = alone.rows(9)
    want = whole(alone, q, k, v)
    for lengths in ((77, 5), (3, 77, 130), (1, 1, 77)):
        case = dataclasses.replace(alone, lengths=lengths)
        begin = sum(lengths[: lengths.index(77)])
        for value in (NAN, float("inf")):
            rows = [torch.full((sum(lengths), x.shape[1]), value, dtype=x.dtype) for x in (q, k, v)]
            for full, x in zip(rows, (q, k, v)):
                full[begin : begin + 77] = x
            got = whole(case, *rows, permute=3, fill=NAN)
            assert_same_bits(got[begin : begin + 77], want, f"lengths {lengths}, neighbours of {value}")
            assert got[:begin].isnan().all() and got[begin + 77 :].isnan().all(), "the control: neighbours are NaN"


@modes
@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_the_future_is_not_read_and_what_is_not_finite_shows(mode: dict, value: float) -> None:
    """A bad element of key or value at position t leaves earlier rows' bits alone, and no later row is finite."""
    case = FP8Case((90,), 3, 1, 64, **mode)
    q, k, v = case.rows(10)
    want = whole(case, q, k, v)
    for t in (1, 15, 33, 63, 64, 88):
        for poisoned in ("k", "v"):
            bad = {"k": k.clone(), "v": v.clone()}
            bad[poisoned][t, 5] = value
            got = whole(case, q, bad["k"], bad["v"])
            assert_same_bits(got[:t], want[:t], f"rows before a bad {poisoned} at {t}")
            assert not got[t:].isfinite().all(1).any(), "the control: no row from t on is finite"
    bad_q = q.clone()
    bad_q[40, 70] = value  # of query head 1
    got = whole(case, bad_q, k, v)
    assert got[40, 64:128].isnan().all()
    assert_same_bits(got[:, :64], want[:, :64], "other heads")


# ---------------------------------------------------------------------------------------------- gradients


@modes
@pytest.mark.parametrize("length", [5, 131])
def test_gradients_do_not_depend_on_the_pack(mode: dict, length: int) -> None:
    """A sample's gradients alone, in any place of a pack, next to samples of NaN, with 1 and 3 threads: equal bits."""
    alone = FP8Case((length,), 6, 2, 64, leaves=2, **mode)
    q, k, v, d_out = wide_rows(alone, 12)
    with library.use_threads(1):
        want = gradients(alone, q, k, v, d_out)
    for lengths in ((length, 64, 7), (1, 63, length)):
        case = dataclasses.replace(alone, lengths=lengths)
        begin = sum(lengths[: lengths.index(length)])
        for value, threads in ((0.5, 3), (NAN, 1)):
            rows = [torch.full((sum(lengths), x.shape[1]), value, dtype=x.dtype) for x in (q, k, v, d_out)]
            for full, x in zip(rows, (q, k, v, d_out)):
                full[begin : begin + length] = x
            with library.use_threads(threads):
                results = gradients(case, *rows)
            for name, got, expected in zip(GRADS, results, want):
                assert_same_bits(got[begin : begin + length], expected, f"{name}, lengths {lengths}, {value}")


@modes
def test_threads_and_runs(mode: dict) -> None:
    """1 and 3 threads, twice each: equal bits forward and backward."""
    case = FP8Case((300, 65), 6, 2, 64, kv_split=128, **mode)
    rows = wide_rows(case, 18)
    with library.use_threads(1):
        want = gradients(case, *rows)
    for threads in (1, 3):
        for _ in range(2):
            with library.use_threads(threads):
                for name, got, expected in zip(GRADS, gradients(case, *rows), want):
                    assert_same_bits(got, expected, f"{name} with {threads} threads")


def test_gradients_use_the_scales_of_their_forward() -> None:
    """Calibrated scales that move between forward and backward, as a recalibration moves them, change no gradient."""
    case = FP8Case((70,), 2, 1, 64, kv_scale="calibrated")
    q, k, v = case.rows(30)
    _, *want = gradients(case, q, k, v, q)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    kv, table = case.pages()
    out = attention(*leaves, kv, part_context(case, table, [(0, 0, 70)]), **case.sizes)
    kv.key_scales.mul_(2)
    kv.value_scales.mul_(3)
    out.backward(q)
    for name, leaf, expected in zip(GRADS[1:], leaves, want):
        assert_same_bits(leaf.grad, expected, name)


# ---------------------------------------------------------------------------------------------- programs and errors


@modes
def test_recorded_program_equals_eager(mode: dict) -> None:
    """Replayed for fewer rows than it was recorded with; live calibrated scales are read anew by each run."""
    case = FP8Case((50,), 6, 2, 64, **mode)
    q, k, v = case.rows(21)
    want = whole(case, q, k, v)
    kv, table = case.pages(1, NAN)
    if case.scales is not None:
        kv.key_scales.fill_(NAN)
        kv.value_scales.fill_(NAN)
    context = part_context(case, table, [(0, 0, 50)])
    buffers = (q.clone(), k.clone(), v.clone(), context.positions, context.sequences)
    with torch.no_grad(), library.record(rows=buffers) as program:
        out = attention(*buffers[:3], kv, context, **case.sizes)
    if case.scales is not None:
        program.run(rows=50)
        assert out.isnan().all(), "scales that are no numbers show in every row"
        kv.key_scales.copy_(case.scales[0])
        kv.value_scales.copy_(case.scales[1])
    for begin, end in ((0, 7), (7, 8), (8, 50)):
        for buffer, source in zip(buffers, (q, k, v, torch.arange(50).int(), torch.zeros(50).int())):
            buffer[: end - begin] = source[begin:end]
        program.run(rows=end - begin)
        assert_same_bits(out[: end - begin], want[begin:end], f"rows {begin} to {end}")


def all_digests() -> dict[str, str]:
    """Digests of outputs and gradients in every mode, over one and several spans."""
    made = {}
    for mode in MODES:
        for dim, heads in ((64, (3, 1)), (80, (8, 1)), (128, (2, 2))):
            case = FP8Case((140, 9), *heads, dim, kv_split=64, **mode)
            for name, x in zip(GRADS, gradients(case, *wide_rows(case, 40))):
                made[f"{mode_name(mode)}/{dim}/{name}"] = digest(x)
    return made


@pytest.mark.skipif(library.backend() != "cpu/avx512bf16", reason="compares AVX2 with AVX512-BF16, which does not run")
def test_avx2_equals_avx512bf16() -> None:
    """All bits are equal on both builds."""
    ours, theirs = all_digests(), digests_of("tests.ops.test_attention_fp8", "avx2")
    assert {n for n in ours if ours[n] != theirs[n]} == set()
    assert len(set(ours.values())) == len(ours), "the control: digests tell modes apart"


@pytest.mark.parametrize("missing", ["key_scales", "value_scales"])
def test_missing_scales_are_refused(missing: str) -> None:
    """A calibrated cache without scales is refused, forward and training alike, before anything is written."""
    case = FP8Case((4,), 2, 1, 64, kv_scale="calibrated")
    q, k, v = case.rows()
    kv, table = case.pages()
    before = kv.keys.clone()
    kv = dataclasses.replace(kv, **{missing: None})
    for x in (q, q.clone().requires_grad_()):
        with pytest.raises(ContractError, match="no scales"):
            attention(x, k, v, kv, part_context(case, table, [(0, 0, 4)]), **case.sizes)
    assert_same_bits(kv.keys, before, "keys")


if __name__ == "__main__":
    print(json.dumps({"backend": library.backend(), "digests": all_digests()}))
