"""RoPE: the table against float64, the rotation literally, independence of rows, gradients, repeatability."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from tests.bits import assert_different_bits, assert_same_bits, hard_values
from tests.ops import elementwise_reference as reference
from tests.ops.elementwise_cases import DTYPES, FP32, UNIT, context, scaling
from zerogap.errors import ConfigError
from zerogap.models.rope_spec import RopeSpec
from zerogap.ops.cpu import library
from zerogap.ops.cpu.rope import HeadColumns, rotate_heads
from zerogap.ops.rope import attention_factor, frequencies, rope, rope_table

both = pytest.mark.parametrize("dtype", DTYPES)
SHAPES = [(7, 9, 3, 64), (1, 1, 1, 32), (5, 2, 2, 24), (40, 4, 1, 128)]  # rows, query heads, key heads, head dim


def data(dtype, rows, q_heads, k_heads, dim):
    q, k = hard_values((rows, q_heads * dim), dtype, 1), hard_values((rows, k_heads * dim), dtype, 2)
    positions = torch.from_numpy(np.random.default_rng(3).integers(0, 500, rows))
    return q, k, rope_table(scaling(10000.0), dim, 500), context(positions)


# ------------------------------------------------------------------------------------------------ table


@pytest.mark.parametrize("kind", ["default", "llama3", "yarn"])
@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_table_accuracy(kind: str, theta: float) -> None:
    """Angles up to 131,071 radians: half an FP32 ulp, and what an FP64 rounding of the angle moves it by."""
    table = rope_table(scaling(theta, kind), 64, 131072)
    rows = torch.cat([torch.arange(2000), torch.arange(131072 - 500, 131072)])
    angles = rows.double()[:, None] * torch.tensor(frequencies(scaling(theta, kind), 64), dtype=torch.float64)
    factor = attention_factor(scaling(theta, kind))
    exact = torch.cat([angles.cos(), angles.sin()], dim=1) * factor
    bound = exact.abs() * 2.0**-24 * (1 + 2.0**-20) + 2.0**-50
    assert ((table[rows].double() - exact).abs() <= bound).all()
    assert_same_bits(table[0], torch.cat([torch.full((32,), factor), torch.zeros(32)]), "position 0")
    assert_same_bits(rope_table(scaling(theta, kind), 64, 100), table[:100], "a shorter table is a prefix")


def test_llama3_frequencies_are_transformers() -> None:
    """The three bands of the scaling, against the public implementation (FP32 there)."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=1, head_dim=64, rope_parameters=settings, max_position_embeddings=4096
    )
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    ours = torch.tensor(frequencies(scaling(10000.0, "llama3"), 64), dtype=torch.float64)
    assert ((ours - theirs.double()).abs() <= ours * 2.0**-20).all()  # powers and quotients in FP32 there
    plain = torch.tensor(frequencies(scaling(10000.0), 64), dtype=torch.float64)
    ratio = ours / plain
    assert ratio[0] == 1 and ratio[-1] == 1 / 8 and ((ratio > 1 / 8) & (ratio < 1)).any(), "all three bands occur"


YARN = {
    "plain": {},
    "deepseek": {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32.0, "beta_slow": 1.0},
    "stated": {"attention_factor": 1.25, "mscale": 1.0, "mscale_all_dim": 1.0},
    "untruncated": {"truncate": False, "beta_fast": 24.0, "beta_slow": 2.0},
    "one weight": {"mscale": 0.5},
    "one pair": {"beta_fast": 3.0, "beta_slow": 3.0, "truncate": False},
}


@pytest.mark.parametrize("head_dim", [64, 24])
@pytest.mark.parametrize("name", YARN)
def test_yarn_is_transformers(name: str, head_dim: int) -> None:
    """Against the public implementation, which takes powers, quotients and the ramp in FP32: a ramp r is off by at
    most 2^-23 of its terms over its width, which moves a frequency by that share of (1 - 1/factor) * f."""
    from transformers import DeepseekV3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = {"factor": 8.0, "original_max_position_embeddings": 512, **YARN[name]}
    config = DeepseekV3Config(
        hidden_size=64,
        num_attention_heads=1,
        qk_rope_head_dim=head_dim,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, **settings},
    )
    theirs, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    spec = RopeSpec.from_hf({"rope_theta": 10000.0, "rope_scaling": {"type": "yarn", **settings}})
    ours = torch.tensor(frequencies(spec, head_dim), dtype=torch.float64)
    assert attention_factor(spec) == pytest.approx(factor, rel=2.0**-50)
    plain = torch.tensor(frequencies(RopeSpec(10000.0), head_dim), dtype=torch.float64)
    narrow = 0.001 if name == "one pair" else 1.0
    assert ((ours - theirs.double()).abs() <= ours * 2.0**-20 + plain * head_dim * 2.0**-23 / narrow).all()
    ratio = ours / plain
    assert ratio[0] == 1 and abs(ratio[-1] - 1 / 8) < 1e-15
    blended = (ratio > 0.1251) & (ratio < 0.9999)
    assert blended.any() == (name != "one pair"), "all three bands occur"
    wrong = torch.tensor(frequencies(dataclasses.replace(spec, beta_fast=spec.beta_fast * 2), head_dim))
    assert ((wrong - theirs.double()).abs() > ours * 2.0**-10).any() or name == "one pair", "a moved band shows"


def test_yarn_factors() -> None:
    """What scales cosines and sines, and the softmax: 0.1 m log(factor) + 1, by hand."""
    spec = RopeSpec(10000.0, "yarn", 40.0, original_max_position=4096, mscale=1.0, mscale_all_dim=1.0)
    assert attention_factor(spec) == 1.0
    assert spec.score_factor == pytest.approx((0.1 * math.log(40.0) + 1.0) ** 2, rel=2.0**-51)
    plain = RopeSpec(10000.0, "yarn", 40.0, original_max_position=4096)
    assert attention_factor(plain) == pytest.approx(0.1 * math.log(40.0) + 1.0) and plain.score_factor == 1.0
    assert attention_factor(RopeSpec(10000.0)) == 1.0 and attention_factor(scaling(1e4, "llama3")) == 1.0


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"rope\.kind = 'longrope'"):
        rope_table(scaling(10000.0, "longrope"), 64, 10)
    with pytest.raises(ConfigError, match="head_dim = 63"):
        rope_table(scaling(10000.0), 63, 10)
    with pytest.raises(ConfigError, match="num_positions"):
        rope_table(scaling(10000.0), 64, 1 << 21)
    q, k, table, _ = data(FP32, 2, 1, 1, 32)
    with pytest.raises(AssertionError, match="outside a table of 500"):
        rope(q, k, table, 32, context(torch.tensor([0, 500])))


# ------------------------------------------------------------------------------------------------ rotation


@both
@pytest.mark.parametrize("shape", SHAPES)
def test_rotation_is_the_contract(dtype, shape) -> None:
    q, k, table, here = data(dtype, *shape)
    dim, positions = shape[3], here.positions.numpy()
    leaves = [q.clone().requires_grad_(), k.clone().requires_grad_()]
    outs = rope(*leaves, table, dim, here)
    grads = [hard_values(t.shape, dtype, 5) for t in outs]
    torch.autograd.backward(outs, grads)
    for x, out, d, leaf in zip((q, k), outs, grads, leaves, strict=True):
        turned = reference.rotate(reference.array(x), table.numpy(), positions, dim)
        assert_same_bits(out.detach(), reference.stored(turned, dtype), "rotated")
        back = reference.rotate(reference.array(d), table.numpy(), positions, dim, -1)
        assert_same_bits(leaf.grad, reference.stored(back, dtype), "gradient")
    with torch.no_grad():
        assert_same_bits(rope(q, k, table, dim, here)[0], outs[0].detach(), "without a graph")


def in_halves(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Heads whose pairs (2i, 2i + 1) are moved to (i, i + D/2)."""
    return x.view(len(x), -1, dim // 2, 2).transpose(2, 3).reshape(x.shape)


@both
@pytest.mark.parametrize("shape", SHAPES)
def test_interleaved_pairs(dtype, shape) -> None:
    """The same arithmetic on elements 2i and 2i + 1, forward and backward, in place too; halves differ."""
    q, k, table, here = data(dtype, *shape)
    dim = shape[3]
    leaves = [q.clone().requires_grad_(), k.clone().requires_grad_()]
    outs = rope(*leaves, table, dim, here, interleaved=True)
    grads = [hard_values(t.shape, dtype, 5) for t in outs]
    torch.autograd.backward(outs, grads)
    halves = [in_halves(x, dim).requires_grad_() for x in (q, k)]
    expected = rope(*halves, table, dim, here)
    torch.autograd.backward(expected, [in_halves(d, dim) for d in grads])
    for out, leaf, half, moved in zip(outs, leaves, expected, halves, strict=True):
        assert_same_bits(in_halves(out.detach(), dim), half.detach(), "rotated")
        assert_same_bits(in_halves(leaf.grad, dim), moved.grad, "gradient")
    assert_different_bits(rope(q, k, table, dim, here)[0], outs[0].detach(), "the other pairing")
    again = q.clone()
    part = HeadColumns(again, 0, dim)
    rotate_heads([(part, part, shape[1])], table, here.positions, dim, inverse=False, interleaved=True)
    assert_same_bits(again, outs[0].detach(), "in place")


@both
@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_among_other_columns(dtype, interleaved) -> None:
    """Latent attention's rows: only the rotary part of each query head and of the one key head turns, and moves."""
    rows, heads, dim, nope, latent = 11, 5, 24, 16, 40
    q, k = hard_values((rows, heads * (nope + dim)), dtype, 1), hard_values((rows, latent + dim), dtype, 2)
    table, here = rope_table(scaling(10000.0, "yarn"), dim, 500), context(torch.arange(rows) * 31)
    alone = q.view(rows, heads, -1)[:, :, nope:].reshape(rows, -1).contiguous()
    expected = rope(alone, k[:, latent:].contiguous(), table, dim, here, interleaved=interleaved)
    out_q, out_k = torch.full((rows, heads, 64), 7.0, dtype=dtype), torch.full((rows, 30), 7.0, dtype=dtype)
    parts = [
        (HeadColumns(q, nope, nope + dim), HeadColumns(out_q, 40, 64), heads),
        (HeadColumns(k, latent, dim), HeadColumns(out_k, 6, dim), 1),
    ]
    rotate_heads(parts, table, here.positions, dim, inverse=False, interleaved=interleaved)
    assert_same_bits(out_q[:, :, 40:].reshape(rows, -1), expected[0], "query heads")
    assert_same_bits(out_k[:, 6:], expected[1], "the key head")
    assert (out_q[:, :, :40] == 7).all() and (out_k[:, :6] == 7).all(), "other columns"
    with pytest.raises(AssertionError, match="heads reach column"):
        rotate_heads([(parts[0][0], parts[1][1], heads)], table, here.positions, dim, inverse=False)


@both
def test_rotation_and_gradient_accuracy(dtype) -> None:
    """Against complex multiplication in float64 with exact angles: table, product and sum round once each."""
    q, k, table, here = data(dtype, 60, 3, 1, 64)
    leaf = q.clone().requires_grad_()
    out, d = rope(leaf, k, table, 64, here)[0], hard_values(q.shape, dtype, 5)
    out.backward(d)
    turns = torch.tensor(frequencies(scaling(10000.0), 64), dtype=torch.float64)
    angles = here.positions.double()[:, None, None] * turns
    turn = torch.polar(torch.ones_like(angles), angles)
    for x, mine, factor in ((q, out.detach(), turn), (d, leaf.grad, turn.conj())):
        pairs = x.double().view(60, 3, 2, 32)
        exact = torch.complex(pairs[:, :, 0], pairs[:, :, 1]) * factor
        exact = torch.stack([exact.real, exact.imag], dim=2)
        size = pairs.abs().sum(2, keepdim=True)
        bound = size * 3 * UNIT[FP32] + exact.abs() * UNIT[dtype] * 1.01
        assert ((mine.double().view(60, 3, 2, 32) - exact).abs() <= bound).all()


@both
def test_rows_threads_and_position(dtype) -> None:
    """A row alone, in any batch, beside NaN, on any number of threads: the same bits; another position: others."""
    q, k, table, here = data(dtype, 70, 3, 1, 64)
    whole = rope(q, k, table, 64, here)
    for threads in (1, 2, 3):
        with library.use_threads(threads):
            assert_same_bits(rope(q, k, table, 64, here)[0], whole[0], f"{threads} threads")
    for t in (0, 33, 69):
        alone = rope(q[t : t + 1], k[t : t + 1], table, 64, context(here.positions[t : t + 1]))
        assert_same_bits(alone[0][0], whole[0][t], f"query row {t}")
        assert_same_bits(alone[1][0], whole[1][t], f"key row {t}")
    bad = q.clone()
    bad[1::2] = math.nan
    assert_same_bits(rope(bad, k, table, 64, here)[0][::2], whole[0][::2], "beside NaN")
    moved = rope(q, k, table, 64, context((here.positions + 1) % 500))
    assert_different_bits(moved[0], whole[0], "other positions")
    zero = context(torch.zeros(70))
    assert_same_bits(rope(q, k, table, 64, zero)[0], q, "position 0 turns nothing")


@both
def test_recorded_program(dtype) -> None:
    q, k, table, _ = data(dtype, 9, 3, 1, 64)
    positions = torch.zeros(9, dtype=torch.int32)
    with torch.no_grad(), library.record(rows=(q, k, positions)) as program:
        turned = rope(q, k, table, 64, context_of(positions))
    for rows in (1, 4, 9):
        positions[:rows] = torch.arange(rows, dtype=torch.int32) + 11 * rows
        program.run(rows=rows)
        eager = rope(q[:rows], k[:rows], table, 64, context(positions[:rows]))
        assert_same_bits(turned[0][:rows], eager[0], "queries")
        assert_same_bits(turned[1][:rows], eager[1], "keys")


def context_of(positions: torch.Tensor):
    """A context over this very buffer."""
    here = context(positions)
    assert here.positions.data_ptr() == positions.data_ptr()
    return here
