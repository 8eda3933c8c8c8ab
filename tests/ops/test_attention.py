"""Attention: the literal contract, accuracy, rows that do not see each other, splits, gradients, repeatability.

Shapes: T rows, Hq query heads, Hk KV heads, D head dimension, S sequences.
"""

import dataclasses

import numpy as np
import pytest
import torch

from tests.bits import assert_different_bits, assert_same_bits, hard_values, unit_values
from tests.ops.attention_cases import DTYPES, NAN, Case, as_heads, chunked, contract_of, gradients, part_context, whole
from tests.ops.other_builds import rerun
from zerogap.errors import ConfigError
from zerogap.numerics import DType
from zerogap.ops.attention import attention
from zerogap.ops.cpu import attention as native
from zerogap.ops.cpu import library
from zerogap.ops.kv import DenseCodec

# ---------------------------------------------------------------------------------------------- literal contract

LITERAL = [
    Case((1,), 1, 1, 16),
    Case((67, 20), 3, 1, 64),
    Case((150,), 4, 2, 80),
    Case((131,), 8, 1, 16, kv_split=64),
    Case((270,), 2, 1, 32, kv_split=128),
    Case((65,), 2, 2, 128),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", LITERAL, ids=str)
def test_literal_forward(case: Case, dtype: str) -> None:
    """Out and log-sum-exp are the contract's bits."""
    case = dataclasses.replace(case, dtype=dtype)
    q, k, v = case.rows(1)
    q, v = q * 3, v + hard_values(v.shape, v.dtype, spread=6)
    out = whole(case, q, k, v)
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
        want, want_lse = contract_of(case).forward(
            *(as_heads(case, x[rows]) for x in (q, k, v)), case.heads, case.kv_heads, case.dim**-0.5
        )
        assert_same_bits(out[rows].float().numpy(), want.reshape(n, -1), "out")
        assert_same_bits(lse[rows].numpy(), want_lse, "log-sum-exp")
        begin += n


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case",
    [
        Case((1,), 1, 1, 16),
        Case((67, 131), 3, 1, 32),
        Case((70,), 4, 2, 80, leaves=4),
        Case((40,), 8, 1, 64, leaves=4),
        Case((33,), 12, 6, 16, leaves=4),
    ],
    ids=str,
)
def test_literal_backward(case: Case, dtype: str) -> None:
    """All three gradients are the contract's bits, given out and log-sum-exp (which the forward test settles)."""
    case = dataclasses.replace(case, dtype=dtype)
    q, k, v = case.rows(2)
    d_out = hard_values(q.shape, q.dtype, seed=3, spread=4)
    _, *grads = gradients(case, q, k, v, d_out)
    begin = 0
    for n in case.lengths:
        rows = slice(begin, begin + n)
        parts = [as_heads(case, x[rows]) for x in (q, k, v)]
        out, lse = contract_of(case).forward(*parts, case.heads, case.kv_heads, case.dim**-0.5)
        want = contract_of(case).backward(*parts, out, lse, as_heads(case, d_out[rows]), case.leaves, case.dim**-0.5)
        for name, got, expected in zip(("dq", "dk", "dv"), grads, want):
            assert_same_bits(got[rows].float().numpy(), expected.reshape(n, -1), name)
        begin += n


def test_controls_of_the_literal_contract_differ() -> None:
    """Another block, another span, or the even product first is another contract: the data shows it."""
    case = Case((150,), 1, 1, 64, kv_split=64)
    q, k, v = case.rows(1)
    v = v + hard_values(v.shape, v.dtype, spread=6)
    parts = [as_heads(case, x) for x in (q, k, v)]
    _, lse = contract_of(case).forward(*parts, 1, 1, 0.125)
    outs = {}
    for change in ({}, {"block": 32}, {"kv_split": 128}, {"odd_first": False}):
        fp32_out = dataclasses.replace(contract_of(case, **change))
        outs[str(change)], other = fp32_out.forward(*parts, 1, 1, 0.125)
        if change:
            assert_different_bits(other, lse, f"log-sum-exp with {change}")
            assert_different_bits(outs[str(change)], outs["{}"], f"out with {change}")


@pytest.mark.slow
@pytest.mark.parametrize("isa", library.ISAS)
def test_literal_on_every_instruction_set(isa: str) -> None:
    """The literal tests hold for each build that this processor runs."""
    rerun(__file__, isa, "literal_forward or literal_backward")


# ---------------------------------------------------------------------------------------------- accuracy

U32, U16 = 2.0**-24, 2.0**-8  # largest relative error of one rounding
EXP = 2.0e-7  # of the exp polynomial


def float64_attention(case: Case, q, k, v, d_out):
    """Everything in float64 for one sequence, per query head, with a first-order error bound of each result.

    Bounds: a chain of n roundings adds n u times the sum of magnitudes; s errs by delta, so p = exp(s - m) by a factor
    1 +- (2 delta + exp + its storage rounding); the softmax weights sum to one, so numerator and denominator err alike.
    """
    rn = U16 if case.dtype == "bf16" else 0.0
    q, k, v, g = (x.double().reshape(len(x), -1, case.dim).transpose(0, 1) for x in (q, k, v, d_out))
    group, scale, count = case.heads // case.kv_heads, case.dim**-0.5, q.shape[1]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    hidden = torch.ones(count, count).triu(1).bool()
    s = (q @ k.mT) * scale
    delta_s = ((case.dim + 2) * U32 * (q.abs() @ k.abs().mT) * scale).masked_fill(hidden, 0).amax(-1, keepdim=True)
    s = s.masked_fill(hidden, -torch.inf)
    p = s.softmax(-1)
    out = p @ v
    blocks = count // 64 + 1
    wiggle = 2 * (2 * delta_s + EXP * (blocks + 1)) + (count + 3 * blocks + 4) * U32  # p and l, FP32 part
    out_bound = (p @ v.abs()) * (wiggle + rn) + out.abs() * (wiggle + rn)
    size = s.masked_fill(hidden, 0).abs().amax(-1, keepdim=True) + np.log(count) + 1
    p_error = 2 * delta_s + wiggle + EXP + 3 * size * U32  # of exp(s - lse), relative
    delta = (g * out).sum(-1, keepdim=True)
    delta_error = (g.abs() * out_bound).sum(-1, keepdim=True) + (case.dim + 1) * U32 * (g * out).abs().sum(-1, True)
    dp = g @ v.mT
    dp_error = (case.dim + 1) * U32 * (g.abs() @ v.abs().mT)
    ds = p * (dp - delta) * scale
    ds_error = p * scale * ((dp - delta).abs() * (p_error + 3 * U32) + dp_error + delta_error) + ds.abs() * rn
    chain = (count * group + 4) * U32
    results = {"out": (out, out_bound)}
    results["dq"] = (ds @ k, ds_error @ k.abs() + chain * (ds.abs() @ k.abs()))
    results["dk"] = (ds.mT @ q, ds_error.mT @ q.abs() + chain * (ds.abs().mT @ q.abs()))
    results["dv"] = (p.mT @ g, (p * (p_error + rn)).mT @ g.abs() + chain * (p.mT @ g.abs()))
    for name, (value, bound) in results.items():
        if name in ("dk", "dv"):
            value, bound = (x.reshape(case.kv_heads, group, count, case.dim).sum(1) for x in (value, bound))
        results[name] = tuple(x.transpose(0, 1).reshape(count, -1) for x in (value, bound + value.abs() * rn))
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case",
    [Case((200,), 9, 3, 64), Case((90,), 8, 1, 128), Case((300,), 2, 2, 16, kv_split=128), Case((1,), 4, 1, 80)],
    ids=str,
)
@pytest.mark.parametrize("peaked", [1.0, 6.0])
def test_accuracy_against_float64(case: Case, dtype: str, peaked: float) -> None:
    """Forward and gradients stay inside a first-order bound derived from the number of roundings."""
    case = dataclasses.replace(case, dtype=dtype)
    q, k, v = case.rows(4)
    q = (q.float() * peaked).to(q.dtype)
    d_out = unit_values(q.shape, q.dtype, seed=5)
    reference = float64_attention(case, q, k, v, d_out)
    for name, got in zip(("out", "dq", "dk", "dv"), gradients(case, q, k, v, d_out)):
        want, bound = reference[name]
        error = (got.double() - want).abs()
        worst = (error / (1.05 * bound + 1e-30)).max().item()
        assert worst <= 1.0, f"{name}: {worst:.2f} times the bound"


def test_the_accuracy_bound_is_not_loose() -> None:
    """A masked-out diagonal, a wrong scale by 1 %, or a dropped last key breaks the bound."""
    case = Case((200,), 2, 1, 64)
    q, k, v = case.rows(4)
    want, bound = float64_attention(case, q, k, v, q)["out"]
    kv, table = case.pages()
    context = part_context(case, table, [(0, 0, 200)])
    wrong_scale = attention(q, k, v, kv, context, **{**case.sizes, "scale": case.sizes["scale"] * 1.05})
    assert ((wrong_scale.double() - want).abs() > 1.05 * bound).any()
    shifted = attention(q, k, torch.cat([v[1:], v[:1]]), kv, context, **case.sizes)
    assert ((shifted.double() - want).abs() > 1.05 * bound).any()


# ---------------------------------------------------------------------------------------------- splits

BORDERS = [1, 2, 15, 16, 17, 62, 63, 64, 65, 66, 127, 128, 129, 191, 192, 193]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_split", [64, 128, 1024])
def test_chunks_and_decode_equal_one_call(dtype: str, kv_split: int) -> None:
    """Every chunk border around the block size, many chunks, and one token at a time: the bits of the whole prefill.

    Pages hold NaN wherever no key was written yet.
    """
    case = Case((200,), 3, 1, 64, dtype, kv_split)
    q, k, v = case.rows(6)
    v = v + hard_values(v.shape, v.dtype, spread=8)
    want = whole(case, q, k, v)
    for border in BORDERS:
        assert_same_bits(chunked(case, q, k, v, [border]), want, f"chunks [0, {border}) and the rest")
    for step in (7, 64, 65):
        assert_same_bits(chunked(case, q, k, v, list(range(step, 200, step))), want, f"chunks of {step}")
    assert_same_bits(chunked(case, q, k, v, list(range(1, 200))), want, "decode")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (4, 1), (8, 1), (7, 1), (24, 2)])
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
def test_a_row_alone_equals_the_row_in_its_batch(dtype: str, heads: tuple[int, int], dim: int) -> None:
    """T = 1 at a few positions against the whole sequence, for every kind of row tile."""
    case = Case((75,), *heads, dim, dtype)
    q, k, v = case.rows(7)
    want = whole(case, q, k, v)
    kv, table = case.pages(1, NAN)
    native.kv_write(k, v, kv, part_context(case, table, [(0, 0, 75)]))
    for t in (0, 1, 15, 16, 63, 64, 74):
        context = part_context(case, table, [(0, t, t + 1)])
        row = attention(q[t : t + 1], k[t : t + 1], v[t : t + 1], kv, context, **case.sizes)
        assert_same_bits(row, want[t : t + 1], f"row {t}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_page_size_and_place_of_pages(dtype: str) -> None:
    """Page sizes 16, 32, 64, 256; physical pages in any order; whatever unwritten slots hold."""
    case = Case((130, 17, 64), 3, 1, 64, dtype, kv_split=128)
    q, k, v = case.rows(8)
    want = whole(case, q, k, v)
    for page_size in (16, 32, 64, 256):
        for permute in (None, 1, 2):
            for fill in (NAN, float("inf"), 1e30):
                got = whole(dataclasses.replace(case, page_size=page_size), q, k, v, permute, fill)
                assert_same_bits(got, want, f"pages of {page_size}, order {permute}, filled with {fill}")


# ---------------------------------------------------------------------------------------------- neighbours


@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_do_not_see_each_other(dtype: str) -> None:
    """A sequence alone, first, last, and next to sequences of NaN and infinity: equal bits."""
    alone = Case((77,), 6, 2, 64, dtype)
    q, k, v = alone.rows(9)
    want = whole(alone, q, k, v)
    for lengths in ((77, 5), (64, 77), (3, 77, 130), (1, 1, 77)):
        case = dataclasses.replace(alone, lengths=lengths)
        begin = sum(lengths[: lengths.index(77)])
        for value in (NAN, float("inf")):
            rows = [torch.full((sum(lengths), x.shape[1]), value, dtype=x.dtype) for x in (q, k, v)]
            for full, x in zip(rows, (q, k, v)):
                full[begin : begin + 77] = x
            got = whole(case, *rows, permute=3, fill=NAN)
            assert_same_bits(got[begin : begin + 77], want, f"lengths {lengths}, neighbours of {value}")
            assert got[:begin].isnan().all() and got[begin + 77 :].isnan().all(), "the control: neighbours are NaN"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_future_is_not_read(dtype: str) -> None:
    """NaN in key and value of position t leaves every earlier row's bits alone, and reaches every later one."""
    case = Case((90,), 3, 1, 64, dtype)
    q, k, v = case.rows(10)
    want = whole(case, q, k, v)
    for t in (1, 2, 15, 16, 33, 63, 64, 65, 88):
        for poisoned in ("k", "v", "both"):
            bad_k, bad_v = k.clone(), v.clone()
            if poisoned != "v":
                bad_k[t] = NAN
            if poisoned != "k":
                bad_v[t] = float("inf")
            got = whole(case, q, bad_k, bad_v)
            assert_same_bits(got[:t], want[:t], f"rows before a bad {poisoned} at {t}")
            assert not got[t:].isfinite().any(), "the control: rows from t on are not finite"


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_step_equals_its_parts(dtype: str) -> None:
    """One call with decode rows of some sequences and a prefill chunk of another, as an engine step has them."""
    case = Case((100, 40, 70), 6, 2, 64, dtype)
    q, k, v = case.rows(11)
    want = whole(case, q, k, v)
    first = [0, 100, 140]
    kv, table = case.pages(2, NAN)
    before = [(0, 0, 99), (1, 0, 39), (2, 0, 13)]
    for spans in (before, [(0, 99, 100), (1, 39, 40), (2, 13, 70)]):
        rows = torch.cat([torch.arange(first[s] + a, first[s] + b) for s, a, b in spans])
        got = attention(q[rows], k[rows], v[rows], kv, part_context(case, table, spans), **case.sizes)
        assert_same_bits(got, want[rows], f"rows {spans}")


# ---------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [5, 131])
def test_gradients_do_not_depend_on_the_pack(dtype: str, length: int) -> None:
    """A sample's gradients alone, in any place of a pack, and next to samples of NaN: equal bits.

    One thread too: then a short sample's tile is worked on where a whole tile of NaN was before it.
    """
    alone = Case((length,), 6, 2, 64, dtype, leaves=2)
    q, k, v = alone.rows(12)
    d_out = hard_values(q.shape, q.dtype, seed=13, spread=4)
    want = gradients(alone, q, k, v, d_out)
    for lengths in ((length, 64, 7), (64, length, 65), (1, 63, length)):
        case = dataclasses.replace(alone, lengths=lengths)
        begin = sum(lengths[: lengths.index(length)])
        for value, threads in ((0.5, 2), (NAN, 1), (NAN, 2)):
            rows = [torch.full((sum(lengths), x.shape[1]), value, dtype=x.dtype) for x in (q, k, v, d_out)]
            for full, x in zip(rows, (q, k, v, d_out)):
                full[begin : begin + length] = x
            with library.use_threads(threads):
                results = gradients(case, *rows)
            for name, got, expected in zip(("out", "dq", "dk", "dv"), results, want):
                assert_same_bits(got[begin : begin + length], expected, f"{name}, lengths {lengths}, {value}")


def test_leaves_cut_the_sum_over_heads() -> None:
    """More leaves inside a KV group are another order for dk and dv (the control), and none for dq."""
    one = Case((70,), 8, 1, 64, "fp32")
    q, k, v = one.rows(14)
    d_out = hard_values(q.shape, q.dtype, seed=15, spread=4)
    _, dq1, dk1, dv1 = gradients(one, q, k, v, d_out)
    _, dq4, dk4, dv4 = gradients(dataclasses.replace(one, leaves=4), q, k, v, d_out)
    assert_same_bits(dq1, dq4, "dq")
    assert_different_bits(dk1, dk4, "dk")
    assert_different_bits(dv1, dv4, "dv")
    grouped = Case((70,), 4, 4, 64, "fp32")  # one head per KV head: nothing to cut
    q, k, v = grouped.rows(16)
    d_out = unit_values(q.shape, q.dtype, seed=17)
    for a, b in zip(
        gradients(grouped, q, k, v, d_out), gradients(dataclasses.replace(grouped, leaves=4), q, k, v, d_out)
    ):
        assert_same_bits(a, b, "leaves beside the groups")


# ---------------------------------------------------------------------------------------------- repeatability


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_runs(dtype: str) -> None:
    """1, 2, 3 and 5 threads, twice each: equal bits forward and backward."""
    case = Case((300, 65), 6, 2, 64, dtype, kv_split=128)
    q, k, v = case.rows(18)
    d_out = hard_values(q.shape, q.dtype, seed=19, spread=4)
    with library.use_threads(1):
        want = gradients(case, q, k, v, d_out)
    for threads in (1, 2, 3, 5):
        for _ in range(2):
            with library.use_threads(threads):
                for name, got, expected in zip(("out", "dq", "dk", "dv"), gradients(case, q, k, v, d_out), want):
                    assert_same_bits(got, expected, f"{name} with {threads} threads")


def test_training_forward_is_the_inference_forward() -> None:
    """Under autograd and without: the same bits, and no graph where nothing requires grad."""
    case = Case((70, 33), 6, 2, 64)
    q, k, v = case.rows(20)
    with_graph = whole(case, q.clone().requires_grad_(), k, v)
    assert with_graph.requires_grad
    assert not whole(case, q, k, v).requires_grad
    assert_same_bits(with_graph.detach(), whole(case, q, k, v), "out")


def test_recorded_program_equals_eager() -> None:
    """Replayed for fewer rows than it was recorded with."""
    case = Case((50,), 6, 2, 64)
    q, k, v = case.rows(21)
    want = whole(case, q, k, v)
    kv, table = case.pages(1, NAN)
    context = part_context(case, table, [(0, 0, 50)])
    buffers = (q.clone(), k.clone(), v.clone(), context.positions, context.sequences)
    with torch.no_grad(), library.record(rows=buffers) as program:
        out = attention(*buffers[:3], kv, context, **case.sizes)
    for begin, end in ((0, 7), (7, 8), (8, 50)):
        for buffer, source in zip(buffers, (q, k, v, torch.arange(50).int(), torch.zeros(50).int())):
            buffer[: end - begin] = source[begin:end]
        program.run(rows=end - begin)
        assert_same_bits(out[: end - begin], want[begin:end], f"rows {begin} to {end}")


# ---------------------------------------------------------------------------------------------- codec and errors


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_hold_what_the_layout_says(dtype: str) -> None:
    """Keys [tile][D / W][16][W], values [tile][16 / W][D][W]; nothing else in the pages is touched."""
    case = Case((37,), 2, 2, 32, dtype, page_size=32)
    _, k, v = case.rows(22)
    kv, table = case.pages(4, NAN)
    native.kv_write(k, v, kv, part_context(case, table, [(0, 0, 37)]))
    width = 2 if dtype == "bf16" else 1
    want = case.pages(4, NAN)[0]
    for t in range(37):
        page, tile, lane = int(table[0, t // 32]), t % 32 // 16, t % 16
        for g in range(2):
            keys = want.keys[page, g].view(2, 16, 32, 1) if width == 1 else want.keys[page, g].view(2, 16, 16, 2)
            keys = keys if width == 2 else want.keys[page, g].view(2, 32, 16, 1)
            keys[tile, :, lane, :] = k[t, g * 32 : g * 32 + 32].view(-1, width)
            values = want.values[page, g].view(2, 16 // width, 32, width)
            values[tile, lane // width, :, lane % width] = v[t, g * 32 : g * 32 + 32]
    assert_same_bits(kv.keys, want.keys, "keys")
    assert_same_bits(kv.values, want.values, "values")
    assert kv.codec.bytes_per_token() * 32 * len(kv.keys) == kv.keys.nbytes + kv.values.nbytes


def test_refusals_name_the_key() -> None:
    case = Case((4,), 2, 1, 16)
    q, k, v = case.rows()
    for page_size in (0, 8, 24):
        with pytest.raises(ConfigError, match="page_size"):
            DenseCodec(1, 16, DType.BF16).allocate(2, page_size)
    with pytest.raises(ConfigError, match="head_dim"):
        DenseCodec(1, 24, DType.BF16)
    for bad, key in (({"kv_split": 96}, "kv_split"), ({"num_heads": 3, "num_kv_heads": 2}, "num_kv_heads")):
        kv, table = case.pages()
        with pytest.raises(ConfigError, match=key):
            attention(q, k, v, kv, part_context(case, table, [(0, 0, 4)]), **{**case.sizes, **bad})


def test_training_takes_whole_samples_only() -> None:
    """A chunk that starts inside its sample has no gradient here: asserted, not computed wrongly."""
    case = Case((20,), 2, 1, 16)
    q, k, v = (x.requires_grad_() for x in case.rows())
    kv, table = case.pages()
    for spans, message in (([(0, 4, 20)], "position 0"), ([(0, 0, 16)], "16")):
        context = part_context(case, table, spans)
        rows = 16 if message == "position 0" else 20
        with pytest.raises(AssertionError, match=message):
            attention(q[:rows], k[:rows], v[:rows], kv, context, **case.sizes)
