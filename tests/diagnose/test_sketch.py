"""Sketches tell how a weight differs, each relation with a look-alike that must not be called so."""

import json

import pytest
import torch

from zerogap.diagnose.sketch import NUM_SAMPLES, compare_sketch, compare_sketches, sketch
from zerogap.errors import ConfigError

NAME = "model.layers.1.self_attn.q_proj.weight"
BF16 = torch.bfloat16


def weight(*shape, seed=0, dtype=BF16, std=0.02):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std).to(dtype)


def called(a, b, name=NAME, more_a=None, more_b=None):
    """The field that is called for tensors a and b, or None; the same whichever side is which."""
    given = {name: a, **(more_a or {})}, {name: b, **(more_b or {})}
    sides = [{n: sketch(t) for n, t in side.items()} for side in given]
    causes = [compare_sketch(name, x[name], y[name], x, y) for x, y in (sides, sides[::-1])]
    fields = {cause and cause.field for cause in causes}
    assert len(fields) == 1, causes
    assert all(cause is None or cause.detail.startswith(name) for cause in causes)
    return fields.pop()


def updated(w, lr=1e-5, seed=1):
    """One Adam-like step: every element by about the learning rate."""
    step = torch.randn(w.shape, generator=torch.Generator().manual_seed(seed)).sign() * lr
    return (w.float() + step).to(w.dtype)


def on_int8(w, scope):
    groups = {"tensor": w.float().abs().amax(), "channel": w.float().abs().amax(-1, keepdim=True)}
    step = groups[scope] / 127
    return ((w.float() / step).round() * step).to(w.dtype)


def on_e4m3(w, scope="block", peak=448.0):
    """Rounded to E4M3 under one scale per 128x128 block, row or tensor, and back."""
    out = w.float().clone()
    if scope == "tensor":
        tiles = [(slice(None), slice(None))]
    elif scope == "channel":
        tiles = [(slice(i, i + 1), slice(None)) for i in range(len(w))]
    else:
        starts = [(i, j) for i in range(0, w.shape[0], 128) for j in range(0, w.shape[1], 128)]
        tiles = [(slice(i, i + 128), slice(j, j + 128)) for i, j in starts]
    for tile in tiles:
        scale = out[tile].abs().amax() / peak
        out[tile] = (out[tile] / scale).to(torch.float8_e4m3fn).float() * scale
    return out.to(w.dtype)


def interleaved(w, heads=4):
    """Rows of each head from half-split to pairwise order, as rotary embeddings of the other kind want them."""
    return w.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float16, torch.int8, torch.bool, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (300,), (0,), (5, 3), (40, 40), (3, 8, 5), (0, 4), (2, 0, 3)])
def test_a_copy_is_the_same_and_the_sketch_is_json(shape, dtype):
    w = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 20).to(dtype)
    one = sketch(w)
    assert json.loads(json.dumps(one)) == one
    assert len(one["samples"]) == min(w.numel(), NUM_SAMPLES)
    assert one["shape"] == list(shape)
    assert called(w, w.clone()) is None


def test_a_view_is_sketched_by_its_values_and_threads_change_nothing():
    w = weight(640, 512)
    threads = torch.get_num_threads()
    one = sketch(w)
    torch.set_num_threads(2)
    again = sketch(w.t().contiguous().t())
    torch.set_num_threads(threads)
    assert all(again[key] == one[key] for key in one if key not in ("mean", "rms"))
    assert called(w.t().contiguous().t(), w) is None


@pytest.mark.parametrize("shape", [(96, 96), (96, 160), (3, 40, 40)])
def test_transposed(shape):
    w = weight(*shape)
    assert called(w, w.mT.contiguous()) == "transposed"
    assert called(w.float(), w.mT.contiguous()) == "transposed", "across dtypes"
    assert called(w, w.reshape(w.mT.shape)) == ("transposed" if w.shape != w.mT.shape else None)


def test_another_square_tensor_is_not_transposed():
    assert called(weight(96, 96), weight(96, 96, seed=5).t().contiguous()) == "missing"


@pytest.mark.parametrize("shape", [(64, 48), (64,)])
def test_permuted(shape):
    w = weight(*shape)
    assert called(w, interleaved(w)) == "permuted"
    assert called(w, w.roll(5, -1)) == "permuted"
    assert called(w, torch.cat([w[32:], w[:32]])) == "permuted", "gate and up exchanged"
    moved = interleaved(w)
    moved[3] = moved[3] * 2
    assert called(w, moved) != "permuted"


def test_swapped():
    other = NAME.replace("q_proj", "o_proj")
    q, o = weight(64, 64), weight(64, 64, seed=2)
    assert called(q, o, more_a={other: o}, more_b={other: q}) == "swapped"
    assert called(q, o.float(), more_a={other: o}, more_b={other: o}) == "swapped", "one tensor read twice"
    assert called(q, weight(64, 64, seed=3), more_a={other: o}, more_b={other: o}) == "missing"


def test_norms_of_ones_are_not_swapped():
    ones, more = torch.ones(64, dtype=BF16), {"model.norm.weight": torch.ones(64, dtype=BF16)}
    trained = (1 + weight(64)).to(BF16)
    assert called(ones, trained, name="model.layers.0.input_layernorm.weight", more_a=more, more_b=more) == "missing"
    assert called(trained, updated(trained, 0.02), more_a=more, more_b=more) == "stale"


def test_tied():
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    e, h = weight(200, 32), weight(200, 32, seed=4)
    assert called(e, h, name=head, more_a={embedding: e}, more_b={embedding: e}) == "tied"
    assert called(e, updated(e, 1e-3), name=head, more_a={embedding: e}, more_b={embedding: e}) == "tied"
    assert called(h, updated(h, 1e-3), name=head, more_a={embedding: e}, more_b={embedding: e}) == "stale"
    new = updated(e, 1e-3)
    assert called(e, new, name=head, more_a={embedding: e}, more_b={embedding: new}) == "stale", "tied on both sides"


def test_a_head_that_one_side_does_not_list():
    e, h = sketch(weight(200, 32)), sketch(weight(200, 32, seed=4))
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    assert compare_sketches({embedding: e, head: e}, {embedding: e}) == []
    [cause] = compare_sketches({embedding: e, head: h}, {embedding: e})
    assert cause.name == "weights/tied"
    [cause] = compare_sketches({embedding: e}, {embedding: e, NAME: h})
    assert cause.name == "weights/missing"
    assert "A has no" in cause.detail


@pytest.mark.parametrize("scope", ["block", "channel", "tensor"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_quantised_to_e4m3(scope, dtype):
    w = weight(256, 384, dtype=dtype)
    coarse = on_e4m3(w, scope)
    assert sketch(coarse)["grid"] == f"e4m3/{scope}"
    assert called(w, coarse) == "quantised"
    assert called(w, on_e4m3(w, scope, peak=240.0)) == "quantised"
    if scope != "tensor":
        assert called(coarse, on_e4m3(w, "tensor")) == "quantised"


@pytest.mark.parametrize("scope", ["channel", "tensor"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("shape", [(256, 384), (64, 64)])
def test_quantised_to_int8(scope, dtype, shape):
    w = weight(*shape, dtype=dtype)
    coarse = on_int8(w, scope)
    assert sketch(coarse)["grid"] == f"int8/{scope}"
    assert called(w, coarse) == "quantised"


def test_quantised_tensors_as_stored_and_from_another_source():
    w = weight(256, 256, dtype=torch.float32)
    scale = w.abs().amax() / 448
    assert called(w.to(BF16), (w / scale).to(torch.float8_e4m3fn)) == "quantised"
    assert called(on_e4m3(w), on_e4m3(w, peak=240.0)) == "quantised", "from the same weights by another scale"


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("shape", [(256, 384), (64, 64), (40, 640)])
def test_plain_weights_lie_on_no_grid(dtype, shape):
    for w in (weight(*shape, dtype=dtype), weight(*shape, dtype=dtype).clamp(-0.02, 0.02), weight(*shape, std=1.0)):
        assert sketch(w)["grid"] == ""
    uniform = torch.rand(*shape, generator=torch.Generator().manual_seed(0)).sub(0.5).to(dtype)
    assert sketch(uniform)["grid"] == ""
    assert sketch(torch.ones(*shape, dtype=dtype))["grid"] == ""


def test_weights_of_a_quantised_checkpoint_that_were_trained_on_are_stale():
    native = on_e4m3(weight(256, 256, dtype=torch.float32))
    assert called(native, updated(native, 1e-5)) == "stale"


@pytest.mark.parametrize("to", [BF16, torch.float16])
def test_dtype(to):
    w = weight(128, 96, dtype=torch.float32)
    assert called(w, w.to(to)) == "dtype"
    assert called(w, w.to(to).float()) == "dtype", "stored wide again"
    assert called(updated(w, 1e-3), w.to(to)) == "stale"


def test_dtype_of_two_halves_and_truncation():
    w = weight(128, 96, dtype=torch.float32)
    assert called(w.to(BF16), w.to(torch.float16)) == "dtype"
    cut = (w.view(torch.int32) & -65536).view(torch.float32)
    assert called(w, cut) == "dtype"
    assert called(w.to(BF16), cut) != "dtype", "two BF16 tensors differ by more than storage"


def test_values_that_fit_a_narrower_dtype_are_the_same_in_a_wider_one():
    w = weight(128, 96)
    assert called(w, w.float()) is None
    assert called(w, w.double()) is None
    assert called(w.float(), updated(w.float(), 1e-6)) == "stale"


def test_scaled():
    w = weight(96, 64)
    assert called(w, w * 2) == "scaled"
    assert called(w, w * 1.37) == "scaled"
    assert called(w.float(), w.float() * 1.01) == "scaled"
    norm = weight(64)
    assert called(norm, (norm.float() + 1).to(BF16)) == "scaled", "stored as 1 + w"
    assert called(w, updated(w * 2, 1e-2)) in ("stale", "missing")


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("shape", [(128, 96), (96,)])
@pytest.mark.parametrize("lr", [1e-6, 1e-5, 1e-4, 1e-3])
def test_stale(shape, lr, dtype):
    w = weight(*shape, dtype=dtype)
    new = updated(w, lr)
    assert called(w, new) == (None if torch.equal(w, new) else "stale")


def test_one_changed_element_is_stale():
    w = weight(640, 640)
    new = w.clone()
    new[333, 77] = 1.0
    assert called(w, new) == "stale"


def test_missing():
    w = weight(128, 96)
    assert called(w, torch.zeros_like(w)) == "missing"
    assert called(w, torch.full_like(w, torch.nan)) == "missing"
    assert called(w, weight(128, 96, seed=9)) == "missing"
    assert called(torch.ones(96, dtype=BF16), (1 + weight(96)).to(BF16)) == "missing"
    half = torch.cat([w[:64], weight(64, 96, seed=9)])
    assert called(w, half) == "missing", "a shard that was not loaded"


def test_a_norm_after_its_first_updates_is_not_a_missing_one():
    ones = torch.ones(96)
    assert called(ones, updated(ones, 1e-3)) == "stale"
    assert called(torch.zeros(96), updated(torch.zeros(96), 1e-3)) == "missing"


def test_unlike_shapes_stay_unattributed():
    assert called(weight(100, 32), weight(128, 32)) == "unattributed"


def test_a_twin_that_keeps_its_dtype_does_not_make_a_cast_buffer_swapped():
    freq = 1.0 / 10000 ** (torch.arange(0, 64, 2) / 64)
    sides = [{"inv_freq": sketch(one), "original_inv_freq": sketch(freq)} for one in (freq, freq.bfloat16())]
    [cause] = compare_sketches(*sides, "buffers")
    assert cause.name == "buffers/dtype"


def test_buffers_are_missing_or_stale_or_cast():
    freq = 1.0 / 10000 ** (torch.arange(0, 64, 2) / 64)
    half = {"inv_freq": sketch(freq)}
    [cause] = compare_sketches(half, {"inv_freq": sketch(freq / 8)}, "buffers")
    assert cause.name == "buffers/stale"
    [cause] = compare_sketches(half, {"inv_freq": sketch(torch.zeros_like(freq))}, "buffers")
    assert cause.name == "buffers/missing"
    assert compare_sketches(half, half, "buffers") == []


def test_a_tensor_without_values_is_refused():
    with pytest.raises(ConfigError, match="meta"):
        sketch(torch.zeros(3, device="meta"))


@pytest.mark.parametrize("lr", [1e-6, 1e-5, 1e-4, 1e-3])
def test_a_norm_that_moved_within_bf16_rounding_is_stale(lr):
    """FP32 weights that began as BF16 numbers: rounding gives the old ones back, yet nothing was rounded."""
    norm = (0.3 + weight(576).float() * 5).to(BF16).float()
    assert called(norm, updated(norm, lr)) == "stale"


@pytest.mark.parametrize("count", [2, 3])
def test_rows_that_lie_in_another_tensor_of_the_module_are_permuted(count: int):
    generator = torch.Generator().manual_seed(3)
    names = [f"model.layers.0.mlp.experts.1.{part}_proj.weight" for part in ("gate", "up", "side")[:count]]
    whole = [torch.randn(24, 16, generator=generator).bfloat16() for _ in names]
    dealt = torch.stack(whole, 1).flatten(0, 1).chunk(count)
    stacked = {n: sketch(t) for n, t in zip(names, whole)}
    interleaved = {n: sketch(t) for n, t in zip(names, dealt)}
    found = compare_sketches(stacked, interleaved)
    assert [c.field for c in found] == ["permuted"] * count
    changed = dealt[0].clone()
    changed[3, 5] += 1.0
    found = compare_sketches(stacked, interleaved | {names[0]: sketch(changed)})
    assert "permuted" not in [c.field for c in found], "one element of another value is no order of rows"
