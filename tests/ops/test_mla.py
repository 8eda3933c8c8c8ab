"""Latent attention: the literal contract, the ops it is made of, accuracy, rows that do not see each other, splits.

Shapes: T rows, h heads, L latent, R rotated part.
"""

import dataclasses

import numpy as np
import pytest
import torch

from tests.bits import assert_different_bits, assert_same_bits, hard_values, unit_values
from tests.ops.mla_cases import (
    DTYPES,
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
    table,
    whole,
    wide_rows,
)
from tests.ops.mla_reference import LatentContract, bounds, expanded
from tests.ops.other_builds import rerun
from zerogap.errors import ConfigError
from zerogap.numerics import DType
from zerogap.ops.attention import attention
from zerogap.ops.cpu import library
from zerogap.ops.cpu import mla as native
from zerogap.ops.gemm import linear
from zerogap.ops.handle import WeightHandle
from zerogap.ops.kv import DenseCodec
from zerogap.ops.latent import LatentCodec, LatentSizes
from zerogap.ops.norm import rms_norm
from zerogap.ops.rope import rope
from zerogap.types import WeightSpec

dtypes = pytest.mark.parametrize("dtype", DTYPES)


def kernel_rows(case: Case, seed: int) -> tuple[torch.Tensor, ...]:
    """Operands of the attention kernels alone: q_latent, q_rope, latent, rope, d_out, with wide exponents."""
    s, dtype, count = case.sizes, case.torch_dtype, sum(case.lengths)
    widths = (s.num_heads * s.latent, s.num_heads * s.rope, s.latent, s.rope)
    q_latent, q_rope, latent, k_rope = (unit_values((count, w), dtype, seed=seed + i) for i, w in enumerate(widths))
    latent = latent + hard_values(latent.shape, dtype, seed=seed, spread=4)
    return q_latent, q_rope * 2, latent, k_rope, hard_values(q_latent.shape, dtype, seed=seed + 9, spread=4)


def run_kernels(case: Case, q_latent, q_rope, latent, k_rope, d_out) -> dict[str, torch.Tensor]:
    """Forward and backward of the native ops over whole sequences."""
    kv, pages = case.pages(1, NAN)
    context = part_context(case, pages, [(s, 0, n) for s, n in enumerate(case.lengths)])
    native.latent_write(latent, k_rope, kv, context)
    sizes = {"num_heads": case.sizes.num_heads, "scale": case.scale}
    out, lse = native.latent_attention(q_latent, q_rope, kv, context, kv_split=case.kv_split, want_lse=True, **sizes)
    given = kv.key_scales if case.kv == "calibrated" else None
    grads = native.latent_grad(
        q_latent, q_rope, latent, k_rope, out, lse, d_out, context.sample_starts, kv.codec, given,
        leaves=case.leaves, **sizes,
    )  # fmt: skip
    return dict(zip(("out", "lse", "dq_latent", "dq_rope", "d_latent", "d_rope"), (out, lse, *grads), strict=True))


def check_literal(case: Case, seed: int) -> None:
    """Every result of the kernels is the contract's bits."""
    rows = kernel_rows(case, seed)
    got, begin, heads = run_kernels(case, *rows), 0, case.sizes.num_heads
    for n in case.lengths:
        q_latent, q_rope, latent, k_rope, d_out = (x[begin : begin + n].float().numpy() for x in rows)
        q = np.concatenate([x.reshape(n, heads, -1) for x in (q_latent, q_rope)], -1)
        contract = LatentContract.of(case)
        out, lse = contract.forward(q, latent, k_rope, case.scale)
        d_out = d_out.reshape(n, heads, -1)
        dq, d_latent, d_rope = contract.backward(q, latent, k_rope, out, lse, d_out, case.leaves, case.scale)
        size = case.sizes.latent
        want = {"out": out, "lse": lse, "dq_latent": dq[..., :size], "dq_rope": dq[..., size:]}
        for name, expected in (want | {"d_latent": d_latent, "d_rope": d_rope}).items():
            made = got[name][begin : begin + n].float().numpy()
            assert_same_bits(made, np.ascontiguousarray(expected).reshape(n, -1), name)
        begin += n


# ---------------------------------------------------------------------------------------------- literal contract

LITERAL = [
    Case((1,), ODD),
    Case((67, 20), dataclasses.replace(SMALL, num_heads=2), leaves=2),
    Case((131,), dataclasses.replace(ODD, num_heads=1), kv_split=64),
    Case((40,), LatentSizes(8, 16, 16, 80, 16), leaves=4),
]


@dtypes
@pytest.mark.parametrize("case", LITERAL, ids=str)
def test_literal(case: Case, dtype: str) -> None:
    """Out, log-sum-exp and all gradients of the kernels are the contract's bits."""
    check_literal(dataclasses.replace(case, dtype=dtype), 1)


@pytest.mark.slow
@pytest.mark.parametrize("isa", library.ISAS)
def test_literal_on_every_instruction_set(isa: str) -> None:
    """The literal tests hold for each build that this processor runs."""
    rerun(__file__, isa, "test_literal and not instruction")


def test_controls_of_the_literal_contract_differ() -> None:
    """The rotated part first, another block or span, the even product first: other bits, the data shows it."""
    case = Case((150,), SMALL, kv_split=64)
    q_latent, q_rope, latent, k_rope, _ = (x.float().numpy() for x in kernel_rows(case, 1))
    q = np.concatenate([x.reshape(150, case.sizes.num_heads, -1)[:, :1] for x in (q_latent, q_rope)], -1)

    def results(case: Case, **change: object) -> torch.Tensor:
        out, lse = LatentContract.of(case, **change).forward(q, latent, k_rope, case.scale)
        return torch.cat([torch.from_numpy(x).flatten() for x in (out, lse)])

    plain = results(case)
    for change in ({"rope_first": True}, {"block": 32}, {"odd_first": False}):
        assert_different_bits(results(case, **change), plain, f"out and log-sum-exp with {change}")
    assert_different_bits(results(dataclasses.replace(case, kv_split=128)), plain, "another span")


def matrix(name: str, value: torch.Tensor) -> WeightHandle:
    """A trainable handle of a matrix, with an open gradient bin."""
    handle = WeightHandle(WeightSpec(name, tuple(value.shape), "matrix"), value.dtype)
    handle.load(value.contiguous())
    handle.set_trainable(True)
    handle.enable_input_grad()
    handle.open_grad()
    return handle


def composed(case: Case, q, kv_a, d_out) -> tuple[torch.Tensor, ...]:
    """`GRADS` by the public ops: norm, rotation, a projection per head, attention over rows stored as key and value."""
    s, count, heads = case.sizes, len(q), case.sizes.num_heads
    per_sequence = -(-max(case.lengths) // case.page_size)
    pages = torch.arange(per_sequence * len(case.lengths)).int().view(len(case.lengths), per_sequence)
    context = part_context(case, pages, [(i, 0, n) for i, n in enumerate(case.lengths)])
    kv = DenseCodec(1, s.row, DTYPES[case.dtype][1]).allocate(pages.numel(), case.page_size)
    norm, kv_b = case.weights()
    up = kv_b.value().view(heads, s.nope + s.value, s.latent)
    down_k = [matrix(f"k{h}", up[h, : s.nope].T) for h in range(heads)]
    up_v = [matrix(f"v{h}", up[h, s.nope :]) for h in range(heads)]
    q, kv_a = (x.clone().requires_grad_() for x in (q, kv_a))
    q_heads = q.view(count, heads, -1)
    _, latent = rms_norm(kv_a[:, : s.latent].contiguous(), None, norm, EPS, context)
    q_rope = q_heads[..., s.nope :].reshape(count, -1)
    q_rope, k_rope = rope(
        q_rope, kv_a[:, s.latent :].contiguous(), table(s.rope), s.rope, context, interleaved=case.interleaved
    )
    q_rope = q_rope.view(count, heads, -1)
    q_abs = [linear(q_heads[:, h, : s.nope].contiguous(), [w], [None], context, gradient="chain")[0]
             for h, w in enumerate(down_k)]  # fmt: skip
    q_full = torch.cat([torch.cat([q_abs[h], q_rope[:, h]], -1) for h in range(heads)], -1)
    row = torch.cat([latent, k_rope], -1)
    o = attention(
        q_full, row, row, kv, context,
        num_heads=heads, num_kv_heads=1, head_dim=s.row, scale=case.scale, kv_split=case.kv_split, leaves=case.leaves,
    ).view(count, heads, -1)  # fmt: skip
    out = torch.cat([linear(o[:, h, : s.latent].contiguous(), [w], [None], context, gradient="chain")[0]
                     for h, w in enumerate(up_v)], -1)  # fmt: skip
    out.backward(d_out)
    dkv_b = torch.cat([torch.cat([k.grad.T, v.grad]) for k, v in zip(down_k, up_v)])
    return out.detach(), q.grad, kv_a.grad, norm.grad, dkv_b


@dtypes
@pytest.mark.parametrize(
    "case",
    [
        Case((150,), SMALL, kv_split=64, leaves=2),
        Case((67, 20, 64), ODD, interleaved=True),
        Case((70, 3), WIDE, leaves=4),
        Case((90,), MOONLIGHT, leaves=8),
    ],
    ids=str,
)
def test_is_composed_of_the_public_ops(case: Case, dtype: str) -> None:
    """The bits of norm, rotation, products per head, and attention over rows that are stored as key and as value.

    BF16: attention rounds dK and dV before they are added, so the latent's gradient is compared in FP32 only.
    """
    case = dataclasses.replace(case, dtype=dtype)
    rows = wide_rows(case, 3)
    for name, got, want in zip(GRADS, gradients(case, *rows), composed(case, *rows), strict=True):
        if name == "dkv_a" and dtype == "bf16":
            got, want = got[:, case.sizes.latent :].contiguous(), want[:, case.sizes.latent :].contiguous()
        if name != "dnorm" or dtype == "fp32":
            assert_same_bits(got, want, name)


# ---------------------------------------------------------------------------------------------- accuracy


@dtypes
@pytest.mark.parametrize(
    "case",
    [Case((200,), SMALL), Case((130,), ODD, kv_split=64, interleaved=True), Case((40,), MOONLIGHT), Case((1,), WIDE)],
    ids=str,
)
@pytest.mark.parametrize("peaked", [1.0, 4.0])
def test_is_the_expanded_form(case: Case, dtype: str, peaked: float) -> None:
    """Forward and all gradients of the expanded form in float64, within the bound of the latent form's roundings."""
    case = dataclasses.replace(case, dtype=dtype)
    q, kv_a = case.rows(4)
    q = (q.float() * peaked).to(q.dtype)
    d_out = unit_values((len(q), case.sizes.out_width), q.dtype, seed=5)
    made = expanded(case, q, kv_a, case.weights(), d_out)
    limits = bounds(case, made)
    for name, got in zip(GRADS, gradients(case, q, kv_a, d_out), strict=True):
        worst = ((got.double() - made.results[name]).abs() / (1.05 * limits[name] + 1e-30)).max().item()
        assert worst <= 1.0, f"{name}: {worst:.2f} times the bound"


def test_the_accuracy_bound_is_not_loose() -> None:
    """The other pairing of the rotation, or twice the epsilon in the norm, is outside the bound in FP32.

    In BF16 worst cases of the scores' own roundings add up to more; there the literal contract says what is computed.
    """
    case = Case((60,), SMALL, "fp32")
    q, kv_a = case.rows(4)
    kv_a[:, : case.sizes.latent] *= 0.004
    d_out = unit_values((len(q), case.sizes.out_width), q.dtype, seed=5)
    results = gradients(case, q, kv_a, d_out)

    def outside(changed: Case, eps: float) -> list[bool]:
        made = expanded(changed, q, kv_a, case.weights(), d_out, eps=eps)
        limits = bounds(changed, made)
        pairs = zip(GRADS, results, strict=True)
        return [((got.double() - made.results[name]).abs() > 1.05 * limits[name]).any().item() for name, got in pairs]

    assert not any(outside(case, EPS)), "the control"
    assert all(outside(dataclasses.replace(case, interleaved=True), EPS))
    assert all(outside(case, 2 * EPS))


# ---------------------------------------------------------------------------------------------- splits

BORDERS = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129]


@dtypes
@pytest.mark.parametrize("kv_split", [64, 128])
def test_chunks_and_decode_equal_one_call(dtype: str, kv_split: int) -> None:
    """Every chunk border around the block size, many chunks, and one token at a time: the bits of the whole prefill.

    Pages hold NaN wherever no row was written yet.
    """
    case = Case((140,), SMALL, dtype, kv_split)
    q, kv_a, _ = wide_rows(case, 6)
    want = whole(case, q, kv_a)
    for border in BORDERS:
        assert_same_bits(chunked(case, q, kv_a, [border]), want, f"chunks [0, {border}) and the rest")
    for step in (7, 64, 65):
        assert_same_bits(chunked(case, q, kv_a, list(range(step, 140, step))), want, f"chunks of {step}")
    assert_same_bits(chunked(case, q, kv_a, list(range(1, 140))), want, "decode")


@dtypes
@pytest.mark.parametrize("sizes", [SMALL, ODD, WIDE, MOONLIGHT, LatentSizes(1, 16, 16, 16, 16),
                                   LatentSizes(72, 16, 16, 32, 16)], ids=str)  # fmt: skip
def test_a_row_alone_equals_the_row_in_its_batch(dtype: str, sizes: LatentSizes) -> None:
    """T = 1 at a few positions against the whole sequence, for few heads, more than lanes, and more than a part."""
    case = Case((75,), sizes, dtype)
    q, kv_a = case.rows(7)
    weights = case.weights()
    want = whole(case, q, kv_a, weights)
    kv, pages = case.pages(1, NAN)
    with torch.no_grad():
        call(case, q, kv_a, weights, kv, part_context(case, pages, [(0, 0, 75)]))
        for t in (0, 1, 15, 16, 63, 64, 74):
            context = part_context(case, pages, [(0, t, t + 1)])
            row = call(case, q[t : t + 1], kv_a[t : t + 1], weights, kv, context)
            assert_same_bits(row, want[t : t + 1], f"row {t}")


@dtypes
def test_page_size_and_place_of_pages(dtype: str) -> None:
    """Page sizes 16, 32, 64, 256; physical pages in any order; whatever unwritten slots hold."""
    case = Case((130, 17, 64), ODD, dtype, kv_split=128)
    q, kv_a = case.rows(8)
    want = whole(case, q, kv_a)
    for page_size in (16, 32, 64, 256):
        for permute, fill in ((None, NAN), (1, float("inf")), (2, 1e30)):
            got = whole(dataclasses.replace(case, page_size=page_size), q, kv_a, None, permute, fill)
            assert_same_bits(got, want, f"pages of {page_size}, order {permute}, filled with {fill}")


# ---------------------------------------------------------------------------------------------- neighbours


@dtypes
def test_sequences_do_not_see_each_other(dtype: str) -> None:
    """A sequence alone, first, last, and next to sequences of NaN and infinity: equal bits, gradients included."""
    alone = Case((77,), SMALL, dtype, leaves=2)
    rows = wide_rows(alone, 9)
    want = gradients(alone, *rows)[:3]
    for lengths in ((77, 5), (64, 77), (3, 77, 130)):
        case = dataclasses.replace(alone, lengths=lengths)
        begin = sum(lengths[: lengths.index(77)])
        for value, threads in ((NAN, 1), (float("inf"), 2)):
            full = [torch.full((sum(lengths), x.shape[1]), value, dtype=x.dtype) for x in rows]
            for filled, x in zip(full, rows):
                filled[begin : begin + 77] = x
            with library.use_threads(threads):
                got = gradients(case, *full)[:3]
            for name, made, expected in zip(GRADS, got, want):
                assert_same_bits(made[begin : begin + 77], expected, f"{name}, lengths {lengths}, beside {value}")
                assert made[:begin].isnan().all(), "the control: neighbours are NaN"


@dtypes
def test_the_future_is_not_read(dtype: str) -> None:
    """NaN in the row of position t leaves every earlier token's bits alone, and reaches every later one."""
    case = Case((90,), SMALL, dtype)
    q, kv_a = case.rows(10)
    want = whole(case, q, kv_a)
    for t in (1, 2, 15, 16, 33, 63, 64, 65, 88):
        for columns in (slice(0, 64), slice(64, 80)):
            bad = kv_a.clone()
            bad[t, columns] = NAN
            got = whole(case, q, bad)
            assert_same_bits(got[:t], want[:t], f"rows before a bad row at {t}")
            assert not got[t:].isfinite().any(), "the control: rows from t on are not finite"


@dtypes
def test_mixed_step_equals_its_parts(dtype: str) -> None:
    """One call with decode rows of some sequences and a prefill chunk of another, as an engine step has them."""
    case = Case((100, 40, 70), SMALL, dtype)
    q, kv_a = case.rows(11)
    weights = case.weights()
    want = whole(case, q, kv_a, weights)
    first = [0, 100, 140]
    kv, pages = case.pages(2, NAN)
    for spans in ([(0, 0, 99), (1, 0, 39), (2, 0, 13)], [(0, 99, 100), (1, 39, 40), (2, 13, 70)]):
        rows = torch.cat([torch.arange(first[s] + a, first[s] + b) for s, a, b in spans])
        with torch.no_grad():
            got = call(case, q[rows], kv_a[rows], weights, kv, part_context(case, pages, spans))
        assert_same_bits(got, want[rows], f"rows {spans}")


# ---------------------------------------------------------------------------------------------- gradients, threads


def test_leaves_cut_the_sum_over_heads() -> None:
    """More leaves are another order for the rows' gradient (the control), and none for the queries'."""
    one = Case((70,), dataclasses.replace(SMALL, num_heads=8), "fp32")
    rows = wide_rows(one, 14)
    first, second = gradients(one, *rows), gradients(dataclasses.replace(one, leaves=4), *rows)
    assert_same_bits(first[1], second[1], "dq")
    assert_same_bits(first[4], second[4], "dkv_b")
    assert_different_bits(first[2], second[2], "dkv_a")


@dtypes
def test_threads_and_runs(dtype: str) -> None:
    """1, 2, 3 and 5 threads, twice each: equal bits forward and backward."""
    case = Case((300, 65), SMALL, dtype, kv_split=128, leaves=2)
    rows = wide_rows(case, 18)
    with library.use_threads(1):
        want = gradients(case, *rows)
    for threads in (1, 2, 3, 5):
        with library.use_threads(threads):
            for name, got, expected in zip(GRADS, gradients(case, *rows), want):
                assert_same_bits(got, expected, f"{name} with {threads} threads")


def test_frozen_weights_get_no_gradient_and_change_none() -> None:
    """Gradients of q and kv_a do not depend on which weights are trained; without any, no graph is needed."""
    case = Case((70,), SMALL)
    q, kv_a, d_out = wide_rows(case, 19)
    want = gradients(case, q, kv_a, d_out)
    weights = case.weights()
    for handle in weights:
        handle.set_trainable(False)
    leaves = [x.clone().requires_grad_() for x in (q, kv_a)]
    out = whole(case, *leaves, weights)
    out.backward(d_out)
    for name, got, expected in zip(GRADS, (out.detach(), *(x.grad for x in leaves)), want):
        assert_same_bits(got, expected, name)
    assert not call_without_graph(case, q, kv_a).requires_grad


def call_without_graph(case: Case, q, kv_a) -> torch.Tensor:
    weights = case.weights()
    for handle in weights:
        handle.set_trainable(False)
    kv, pages = case.pages()
    return call(case, q, kv_a, weights, kv, part_context(case, pages, [(0, 0, len(q))]))


@dtypes
def test_recorded_program_equals_eager(dtype: str) -> None:
    """Replayed for fewer rows than it was recorded with."""
    case = Case((50,), SMALL, dtype)
    q, kv_a = case.rows(21)
    weights = case.weights()
    want = whole(case, q, kv_a, weights)
    kv, pages = case.pages(1, NAN)
    context = part_context(case, pages, [(0, 0, 50)])
    buffers = (q.clone(), kv_a.clone(), context.positions, context.sequences)
    with torch.no_grad(), library.record(rows=buffers) as program:
        out = call(case, *buffers[:2], weights, kv, context)
    for begin, end in ((0, 7), (7, 8), (8, 50)):
        for buffer, source in zip(buffers, (q, kv_a, torch.arange(50).int(), torch.zeros(50).int())):
            buffer[: end - begin] = source[begin:end]
        program.run(rows=end - begin)
        assert_same_bits(out[: end - begin], want[begin:end], f"rows {begin} to {end}")


# ---------------------------------------------------------------------------------------------- codec and errors


@dtypes
def test_pages_hold_every_row_once(dtype: str) -> None:
    """Latents, then rotated parts, token by token; nothing else in the pages is touched."""
    case = Case((37,), ODD, dtype, page_size=32)
    _, _, latent, k_rope, _ = kernel_rows(case, 22)
    kv, pages = case.pages(4, NAN)
    native.latent_write(latent, k_rope, kv, part_context(case, pages, [(0, 0, 37)]))
    want = case.pages(4, NAN)[0]
    for t in range(37):
        page, slot = int(pages[0, t // 32]), t % 32
        want.keys[page, 0].view(32, -1)[slot] = latent[t]
        want.values[page, 0].view(32, -1)[slot] = k_rope[t]
    assert_same_bits(kv.keys, want.keys, "latents")
    assert_same_bits(kv.values, want.values, "rotated parts")
    assert kv.codec.bytes_per_token() * 32 * len(kv.keys) == kv.keys.nbytes + kv.values.nbytes


def test_refusals_name_the_key() -> None:
    for name in ("nope", "rope", "latent", "value"):
        with pytest.raises(ConfigError, match=name):
            dataclasses.replace(SMALL, **{name: 24})
    with pytest.raises(ConfigError, match="num_heads"):
        dataclasses.replace(SMALL, num_heads=0)
    for latent, rope_size, key in ((24, 16, "latent"), (64, 8, "rope")):
        with pytest.raises(ConfigError, match=key):
            LatentCodec(latent, rope_size, DType.BF16)
    with pytest.raises(ConfigError, match="kv_scale"):
        LatentCodec(64, 16, DType.BF16, "calibrated")
    for page_size in (0, 8, 24):
        with pytest.raises(ConfigError, match="page_size"):
            LatentCodec(64, 16, DType.BF16).allocate(2, page_size)
    case = Case((4,), SMALL, kv_split=96)
    with pytest.raises(ConfigError, match="kv_split"):
        whole(case, *case.rows())


def test_training_takes_whole_samples_only() -> None:
    """A chunk that starts inside its sample has no gradient here: asserted, not computed wrongly."""
    case = Case((20,), SMALL)
    q, kv_a = (x.requires_grad_() for x in case.rows())
    kv, pages = case.pages()
    for spans, rows, message in (([(0, 4, 20)], 16, "position 0"), ([(0, 0, 16)], 20, "16")):
        with pytest.raises(AssertionError, match=message):
            call(case, q[:rows], kv_a[:rows], case.weights(), kv, part_context(case, pages, spans))
