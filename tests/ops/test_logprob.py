"""Log-probs of given tokens: the sampler's bits, kept sets recorded and replayed, gradients, independence of layout."""

import gc
import itertools
import math
import weakref

import numpy as np
import pytest
import torch

from tests.bits import assert_different_bits, assert_same_bits
from tests.ops import vocabulary_reference as reference
from tests.ops.test_sampling import MIXED, TEMPERATURES, grid_logits, keys_of, leaf_size
from zerogap.errors import ConfigError
from zerogap.ops import gemm
from zerogap.ops.cpu import library
from zerogap.ops.cpu import logprob as native
from zerogap.ops.handle import WeightHandle
from zerogap.ops.logprob import KeptSets, row_blocks, token_logprobs
from zerogap.ops.sampling import SamplingRows, pack_key, sample
from zerogap.types import ForwardContext, Identity, Sample, SamplingKey, SamplingParams, WeightSpec

DTYPES = [torch.float32, torch.bfloat16]
U32 = 2.0**-24


def packs(*lengths: int, output_rows: list[int] | None = None) -> ForwardContext:
    """A context of which only the packs, and the rows that reach the head, are looked at."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    rows = torch.zeros(int(starts[-1]), dtype=torch.int32)
    output = None if output_rows is None else torch.tensor(output_rows)
    return ForwardContext(rows, rows, torch.zeros((1, 1), dtype=torch.int32), 16, output, None, starts.to(torch.int32))


def head(vocab: int, width: int, dtype: torch.dtype, kind: str = "embedding", seed: int = 0) -> WeightHandle:
    weight = WeightHandle(WeightSpec("head.weight", (vocab, width), kind, out_leaf_size=leaf_size(vocab)), dtype)
    weight.load(torch.from_numpy(np.random.default_rng(seed).standard_normal((vocab, width))).float() / 4)
    weight.enable_input_grad()
    weight.set_trainable(True)
    weight.open_grad()
    return weight


def hidden_rows(rows: int, width: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, width))).to(dtype)


def mixed_rows(rows: int) -> list[SamplingParams]:
    return [MIXED[i % len(MIXED)] for i in range(rows)]


def assert_same_words(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert_same_bits(actual.view(torch.int64), expected.view(torch.int64), what)


@pytest.mark.parametrize("vocab", [50, 64, 1000, 49152, 151936])
def test_a_sampled_token_has_the_samplers_bits(vocab):
    """The same logits, with and without filters, at every temperature: log-prob, entropy and kept set agree in bits."""
    params = mixed_rows(len(MIXED))
    z, rows = grid_logits(len(params), vocab), SamplingRows.of(params)
    drawn = sample(z, rows, keys_of(len(params)), leaf_size(vocab))
    out, _, _ = native.logprob(z, drawn.ids, rows.tensors, leaf_size(vocab))
    assert_same_bits(out.logp, drawn.logp, "log-probs")
    assert_same_bits(out.entropy, drawn.entropy, "entropies")
    assert_same_bits(out.count, drawn.kept_count, "kept counts")
    assert_same_words(out.digest, drawn.kept_digest, "kept digests")


@pytest.mark.parametrize("vocab", [50, 1000])
def test_any_target_and_given_kept_sets_follow_the_contract(vocab):
    """Targets kept or not (-inf), sets by filters and sets given as words, against the definition in integers."""
    params, size = mixed_rows(len(MIXED)), leaf_size(vocab)
    z, targets = grid_logits(len(params), vocab), torch.arange(len(params)) * 7 % vocab
    rows, words = SamplingRows.of(params), torch.zeros((len(params), -(-vocab // 64)), dtype=torch.int64)
    own, _, _ = native.logprob(z, targets, rows.tensors, size, None, words)
    later = grid_logits(len(params), vocab, seed=9)
    replayed, _, _ = native.logprob(later, targets, rows.tensors, size, words)
    excluded = 0
    for i, p in enumerate(params):
        row = reference.Row(z[i].numpy(), p.temperature, p.top_k, p.top_p, p.min_p, size)
        t = int(targets[i])
        assert_same_bits(own.logp[i : i + 1].numpy(), row.logp[t : t + 1], f"own set under {p}")
        if p.filters:
            bits = words[i].numpy().view(np.uint8)
            assert np.unpackbits(bits, bitorder="little").nonzero()[0].tolist() == row.kept, p
            assert_same_words(own.digest[i : i + 1], replayed.digest[i : i + 1], "digest of a replayed set")
        row = reference.Row(later[i].numpy(), p.temperature, leaf_size=size, kept=row.kept if p.filters else None)
        assert_same_bits(replayed.logp[i : i + 1].numpy(), row.logp[t : t + 1], f"given set under {p}")
        assert_same_bits(replayed.entropy[i : i + 1].numpy(), np.array([row.entropy]), f"entropy, given set under {p}")
        excluded += math.isinf(row.logp[t])
    assert excluded > 0


def test_a_replayed_set_on_the_same_logits_changes_no_bit():
    params = mixed_rows(64)
    z, rows, targets = grid_logits(64, 1000), SamplingRows.of(params), torch.arange(64)
    words = torch.zeros((64, 16), dtype=torch.int64)
    first, _, _ = native.logprob(z, targets, rows.tensors, 128, None, words)
    again, _, _ = native.logprob(z, targets, rows.tensors, 128, words)
    for name in ("logp", "entropy", "count"):
        assert_same_bits(getattr(again, name), getattr(first, name), name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_prob_of_what_the_head_sampled(dtype):
    """The op over hidden states, in blocks, equals the sampler over all logits at once."""
    rows, vocab, width = 700, 1000, 64
    weight, x = head(vocab, width, dtype), hidden_rows(rows, width, dtype)
    params = SamplingRows.of(mixed_rows(rows))
    with torch.no_grad():
        drawn = sample(gemm.head_logits(x, weight), params, keys_of(rows), leaf_size(vocab))
        logp, entropy = token_logprobs(x, weight, drawn.ids, params, None, packs(300, 400))
    assert_same_bits(logp, drawn.logp, "log-probs")
    assert_same_bits(entropy, drawn.entropy, "entropies")
    graph = token_logprobs(x.clone().requires_grad_(), weight, drawn.ids, params, None, packs(rows))
    assert_same_bits(graph[0].detach(), logp, "log-probs with a graph")


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_see_each_other_and_threads_do_not_show(dtype):
    rows, vocab, width = 40, 1000, 64
    weight, x, targets = head(vocab, width, dtype), hidden_rows(rows, width, dtype), torch.arange(rows) * 3
    params = SamplingRows.of(mixed_rows(rows))
    with torch.no_grad():
        whole = token_logprobs(x, weight, targets, params, None, packs(rows))
        for i in (0, 1, 17, rows - 1):
            alone = token_logprobs(x[i : i + 1], weight, targets[i : i + 1], params.slice(i, i + 1), None, packs(1))
            for a, b in zip(alone, whole, strict=True):
                assert_same_bits(a, b[i : i + 1], f"row {i} alone")
        for threads in (1, 3):
            with library.use_threads(threads):
                again = token_logprobs(x, weight, targets, params, None, packs(7, 33))
            assert_same_bits(again[0], whole[0], f"{threads} threads, other packs")


def kernel_gradient(vocab: int, dtype: torch.dtype, params: list[SamplingParams], words: torch.Tensor | None = None):
    """One block through the native forward and backward: (z, targets, rows, d_logp, d_entropy, gradient)."""
    count = len(params)
    z, rows = grid_logits(count, vocab, seed=4), SamplingRows.of(params)
    targets = sample(z, rows, keys_of(count), leaf_size(vocab)).ids
    out, maximum, total = native.logprob(z, targets, rows.tensors, leaf_size(vocab), words)
    generator = np.random.default_rng(6)
    d_logp, d_entropy = (torch.from_numpy(generator.standard_normal(count)).float() for _ in range(2))
    gradient = native.logprob_grad(
        z, targets, rows.temperature, out.rules, words, (maximum, total, out.entropy), d_logp, d_entropy,
        leaf_size(vocab), dtype,
    )  # fmt: skip
    return z, targets, rows, d_logp, d_entropy, gradient


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [50, 1000, 4913])
def test_gradient_of_the_logits_against_float64(vocab, dtype):
    """Derived bound, with r the relative error of a probability: a distance carries 3 u (|y| + |max|), exp 1e-7, the
    sum as much again and leaf / 16 + 7 roundings; log-prob and entropy carry r (1 + mean distance); one rn."""
    params = mixed_rows(len(MIXED))
    z, targets, rows, d_logp, d_entropy, gradient = kernel_gradient(vocab, dtype, params)
    storage = 2.0**-8 if dtype == torch.bfloat16 else U32
    for i, p in enumerate(params):
        kept = reference.Row(z[i].numpy(), p.temperature, p.top_k, p.top_p, p.min_p, leaf_size(vocab)).kept
        t, inside = rows.temperature[i].double() if p.temperature else torch.tensor(1.0).double(), torch.zeros(vocab)
        inside[kept] = 1
        logits = z[i].double().requires_grad_()
        y = logits / t
        logp = torch.log_softmax(y.masked_fill(inside == 0, -math.inf), 0)
        probabilities = logp.exp()
        entropy = -(probabilities * logp.masked_fill(inside == 0, 0)).sum()
        (logp[targets[i]] * d_logp[i].double() + entropy * d_entropy[i].double()).backward()
        spread = (probabilities * (y - y.max()).abs()).sum()
        r = 6 * U32 * (y.abs().max() + y.max().abs()) + 2e-7 + (leaf_size(vocab) / 16 + 12) * U32
        hot = torch.nn.functional.one_hot(targets[i], vocab)
        surprise = logp.masked_fill(inside == 0, 0).abs() + entropy
        bound = d_logp[i].abs() * ((r + 4 * U32) * probabilities + 4 * U32 * hot)
        bound = bound + d_entropy[i].abs() * probabilities * (3 * r * (surprise + spread + 1) + 8 * U32 * surprise)
        bound = bound / t + storage * logits.grad.abs() + 1e-37
        assert ((gradient[i].double() - logits.grad).abs() <= bound).all(), p
        assert not gradient[i][inside == 0].any(), "excluded ids get no gradient"


def test_gradient_with_given_sets_is_the_gradient_with_the_filters():
    params = mixed_rows(64)
    z, rows = grid_logits(64, 1000, seed=4), SamplingRows.of(params)
    words = torch.zeros((64, 16), dtype=torch.int64)
    native.logprob(z, torch.zeros(64, dtype=torch.int64), rows.tensors, 128, None, words)
    by_filters = kernel_gradient(1000, torch.float32, params)[-1]
    assert_same_bits(kernel_gradient(1000, torch.float32, params, words)[-1], by_filters, "gradient of the logits")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["embedding", "matrix"])
def test_gradients_of_hidden_states_and_weight_against_float64(dtype, kind):
    """Derived bound: logits carry K u sum |x w|; a gradient of them the error that this causes and one rounding to
    storage (e below); products carry (terms) u sum |.| and the hidden state's gradient one more rounding."""
    rows, vocab, width = 150, 1000, 64
    weight, x = head(vocab, width, dtype, kind), hidden_rows(rows, width, dtype).requires_grad_()
    params = [SamplingParams(temperature=TEMPERATURES[i % 4]) for i in range(rows)]
    targets = torch.arange(rows) * 5 % vocab
    logp, entropy = token_logprobs(x, weight, targets, SamplingRows.of(params), None, packs(140, 10))
    generator = np.random.default_rng(8)
    d_logp, d_entropy = (torch.from_numpy(generator.standard_normal(rows)).float() for _ in range(2))
    torch.autograd.backward((logp, entropy), (d_logp, d_entropy))

    x64, w64 = x.detach().double().requires_grad_(), weight.value().double().requires_grad_()
    t = torch.tensor([p.temperature or 1.0 for p in params], dtype=torch.float32).double()[:, None]
    z64 = x64 @ w64.T
    z64.retain_grad()
    logs = torch.log_softmax(z64 / t, -1)
    p = logs.exp().detach()
    h = -(logs.exp() * logs).sum(-1)
    (logs.gather(1, targets[:, None])[:, 0] * d_logp + h * d_entropy).sum().backward()
    magnitude = x64.detach().abs() @ w64.detach().abs().T
    shift = (width * U32 * magnitude / t).amax(-1, keepdim=True)
    r = 2 * shift + 6 * U32 * 2 * (z64.detach() / t).abs().amax(-1, keepdim=True) + 2e-7 + 20 * U32
    surprise = logs.detach().abs() + h.detach()[:, None]
    hot = torch.nn.functional.one_hot(targets, vocab)
    storage = 2.0**-8 if dtype == torch.bfloat16 else U32
    e = d_logp.abs()[:, None] * (r * p + 4 * U32 * hot)
    e = (e + d_entropy.abs()[:, None] * p * 4 * (r + U32) * (surprise + 10)) / t
    e = e + storage * z64.grad.abs()
    w_abs, x_abs, dz = w64.detach().abs(), x64.detach().abs(), z64.grad.abs() + e
    bound_x = e @ w_abs + vocab * U32 * (dz @ w_abs) + storage * x64.grad.abs() * 1.01
    assert ((x.grad.double() - x64.grad).abs() <= bound_x).all()
    accumulator = weight.head_grad if kind == "embedding" else weight.grad
    bound_w = e.T @ x_abs + rows * U32 * (dz.T @ x_abs)
    assert ((accumulator.double() - w64.grad).abs() <= bound_w).all()
    if kind == "embedding":
        assert not weight.grad.any(), "the embedding's own part is a sum of its own"


def accumulate(weight: WeightHandle, x: torch.Tensor, targets, calls: list[tuple[slice, ForwardContext]], ratio=None):
    """Weight gradient and hidden-state gradients of several micro-batches, one after the other."""
    weight.open_grad()
    params, gradients = SamplingRows.of(mixed_rows(len(x))), []
    for part, context in calls:
        rows = x[part].clone().requires_grad_()
        logp, entropy = token_logprobs(rows, weight, targets[part], params.slice(part.start, part.stop), None, context)
        live = ~logp.isinf()
        torch.autograd.backward((logp, entropy), (live.float(), torch.full_like(entropy, 0.25)))
        gradients.append(rows.grad)
    return weight.head_grad.clone(), torch.cat(gradients)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_gradient_does_not_depend_on_micro_batches(dtype):
    """Packs of 130, 5, 300 and 128 rows in one, two and four micro-batches; the control cuts the packs elsewhere."""
    lengths, vocab, width = (130, 5, 300, 128), 200, 64
    weight, x = head(vocab, width, dtype), hidden_rows(sum(lengths), width, dtype)
    targets = torch.arange(len(x)) % vocab
    borders = np.cumsum((0, *lengths)).tolist()

    def calls(*groups: int) -> list[tuple[slice, ForwardContext]]:
        cuts = np.cumsum((0, *groups)).tolist()
        return [(slice(borders[a], borders[b]), packs(*lengths[a:b])) for a, b in itertools.pairwise(cuts)]

    whole = accumulate(weight, x, targets, calls(4))
    for groups in ((1, 1, 1, 1), (2, 2), (3, 1)):
        split = accumulate(weight, x, targets, calls(*groups))
        assert_same_bits(split[0], whole[0], f"weight gradient, packs grouped {groups}")
        assert_same_bits(split[1], whole[1], f"hidden-state gradient, packs grouped {groups}")
    with library.use_threads(1):
        assert_same_bits(accumulate(weight, x, targets, calls(4))[0], whole[0], "one thread")
    other = accumulate(weight, x, targets, [(slice(0, len(x)), packs(*reversed(lengths)))])
    assert_different_bits(other[0], whole[0], "packs cut elsewhere")


def test_blocks_lie_on_the_output_rows_of_each_pack():
    """Prompt rows do not reach the head: a pack's blocks count its output rows only, whatever other packs hold."""
    output = [*range(10, 150), *range(160, 170), *range(500, 900)]  # of packs 0..159, 160..399, 400..399, 400..999
    blocks = list(row_blocks(packs(160, 240, 0, 600, output_rows=output), len(output)))
    borders = [(0, 128), (128, 150), (150, 278), (278, 406), (406, 534), (534, 550)]
    assert [(start, stop) for start, stop, _ in blocks] == borders
    assert blocks[1][2] == [0, 12, 22], "two ragged tails share a block of logits, not a block of the sum"
    assert list(row_blocks(packs(0), 0)) == []
    assert max(stop - start for start, stop, _ in row_blocks(packs(1000, 3, 700), 1703)) <= 128


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_sets_are_verified_materialised_and_replayed(dtype):
    """First pass: filters on own logits, verified. A later pass at other weights keeps the ids of the first."""
    rows, vocab, width = 60, 1000, 64
    weight, x = head(vocab, width, dtype), hidden_rows(rows, width, dtype)
    params = SamplingRows.of(
        [SamplingParams(top_p=0.9, temperature=0.5), SamplingParams(top_k=7), SamplingParams()] * 20
    )
    drawn = sample(gemm.head_logits(x, weight), params, keys_of(rows), leaf_size(vocab))
    identity, third = Identity("c", "b", "k"), rows // 3
    samples = [
        Sample(
            np.zeros(1, np.int32), drawn.ids.numpy()[i : i + third].astype(np.int32), drawn.logp.numpy()[i : i + third],
            np.zeros(third, np.int64), identity, SamplingKey(), SamplingParams(), "length",
            drawn.kept_count.numpy()[i : i + third], drawn.kept_digest.numpy()[i : i + third],
        )
        for i in range(0, rows, third)
    ]  # fmt: skip
    kept = KeptSets.of(samples, vocab, materialise=True)
    first = token_logprobs(x, weight, drawn.ids, params, kept, packs(rows))
    assert not kept.mismatched.any() and kept.words is not None
    assert_same_bits(first[0].detach(), drawn.logp, "verified pass")

    kept.digests.view(torch.int64)[4] ^= 1
    kept.counts[8] += 1
    other = head(vocab, width, dtype, seed=5)
    replayed, _ = token_logprobs(x, other, drawn.ids, params, kept, packs(rows))
    assert kept.mismatched.nonzero()[:, 0].tolist() == [4, 8]
    assert torch.isfinite(replayed).all(), "a token stays in the set it was drawn from"
    z = gemm.head_logits(x, other)
    row = reference.Row(z[1].numpy(), 1.0, leaf_size=leaf_size(vocab), kept=np.unpackbits(
        kept.words[1].numpy().view(np.uint8), bitorder="little").nonzero()[0])  # fmt: skip
    assert_same_bits(replayed[1:2].detach().numpy(), row.logp[drawn.ids[1] : drawn.ids[1] + 1], "set of the first pass")
    kept.words = None
    token_logprobs(x, other, drawn.ids, params, kept, packs(rows))
    assert kept.mismatched.sum() > 20, "sets evaluated at other weights differ and are reported"


def test_unfiltered_samples_have_nothing_to_verify():
    params = SamplingParams()
    plain = Sample(np.zeros(1, np.int32), np.arange(3, dtype=np.int32), np.zeros(3, np.float32), np.zeros(3, np.int64),
                   Identity("c", "b", "k"), SamplingKey(), params, "length")  # fmt: skip
    kept = KeptSets.of([plain, plain], 50)
    weight, x = head(50, 64, torch.bfloat16), hidden_rows(6, 64, torch.bfloat16)
    token_logprobs(x, weight, torch.zeros(6, dtype=torch.int64), SamplingRows.of([params] * 6), kept, packs(6))
    assert len(kept) == 6 and not kept.mismatched.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_masked_row_passes_no_gradient_even_when_its_logits_are_nan(dtype):
    z, rows = grid_logits(3, 200), SamplingRows.allocate(3)
    z[1, 60] = math.nan
    targets = torch.tensor([1, 2, 3])
    out, maximum, total = native.logprob(z, targets, rows.tensors, 64)
    assert out.logp.isnan().tolist() == [False, True, False]
    live = torch.tensor([1.0, 0.0, 1.0])
    gradient = native.logprob_grad(
        z, targets, rows.temperature, out.rules, None, (maximum, total, out.entropy), live, torch.zeros(3), 64, dtype
    )
    assert_same_bits(gradient[1], torch.zeros(200, dtype=dtype), "masked row")
    assert torch.isfinite(gradient).all() and gradient[0].any()


@pytest.mark.parametrize("target", [-1, 50])
def test_a_target_outside_the_vocabulary_is_refused(target):
    weight, x = head(50, 64, torch.float32), hidden_rows(2, 64, torch.float32)
    with pytest.raises(ConfigError, match=r"targets\[1\].*0 to 49"):
        token_logprobs(x, weight, torch.tensor([0, target]), SamplingRows.allocate(2), None, packs(2))


def test_no_rows_are_no_log_probs():
    weight, x = head(50, 64, torch.float32), hidden_rows(0, 64, torch.float32).requires_grad_()
    logp, entropy = token_logprobs(
        x, weight, torch.zeros(0, dtype=torch.int64), SamplingRows.allocate(0), None, packs(0)
    )
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == entropy.shape == (0,) and not weight.head_grad.any()


@pytest.mark.parametrize("backward", [True, False])
def test_a_graph_that_nobody_holds_is_freed(backward):
    """Else every pass of a run leaves its rows and, with filters, its kept sets behind."""
    weight, x = head(50, 64, torch.float32), hidden_rows(3, 64, torch.float32).requires_grad_()
    context = packs(3)
    held = weakref.ref(context)
    logp, entropy = token_logprobs(
        x, weight, torch.zeros(3, dtype=torch.int64), SamplingRows.allocate(3), None, context
    )
    if backward:
        (logp.sum() + entropy.sum()).backward()
    del context, logp, entropy
    gc.collect()
    assert held() is None


def test_temperature_is_applied_on_both_sides_alike():
    """At every temperature the trainer's log-prob of the greedy and of the sampled token is the engine's."""
    weight, x = head(1000, 64, torch.bfloat16), hidden_rows(1, 64, torch.bfloat16)
    for temperature in (0.0, 0.5, 0.6, 1.3):
        rows = SamplingRows.of([SamplingParams(temperature=temperature)])
        key = torch.tensor([pack_key(SamplingKey(seed=5), 9)])
        drawn = sample(gemm.head_logits(x, weight), rows, key, leaf_size(1000))
        logp, _ = token_logprobs(x, weight, drawn.ids, rows, None, packs(1))
        assert_same_bits(logp.detach(), drawn.logp, f"temperature {temperature}")
        exact = torch.log_softmax(x.double() @ weight.value().double().T / (temperature or 1.0), -1)[0, drawn.ids]
        assert (logp.detach() - exact).abs().max() < 2e-5
