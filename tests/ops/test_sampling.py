"""Sampling: known answers of the generator, kept sets and draws against a full sort in integers, the five op tests."""

import itertools
import math

import numpy as np
import pytest
import torch

from tests.bits import assert_different_bits, assert_same_bits
from tests.ops import vocabulary_reference as reference
from zerogap.errors import ConfigError
from zerogap.numerics import preset
from zerogap.ops.cpu import library
from zerogap.ops.cpu.sampling import philox
from zerogap.ops.sampling import Drawn, SamplingRows, pack_key, sample
from zerogap.types import SamplingKey, SamplingParams

TEMPERATURES = (0.0, 0.5, 1.0, 1.3)
MIXED = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in itertools.product(TEMPERATURES, (0, 5), (1.0, 0.9), (0.0, 0.1))
]


def leaf_size(vocab: int) -> int:
    return preset("bf16").vocab_leaf_size(vocab)


def grid_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    """Normal logits rounded to eighths: many exact ties, also at the boundaries of kept sets."""
    z = np.random.default_rng(seed).standard_normal((rows, vocab)) * scale
    return torch.from_numpy(np.round(z * 8) / 8).to(torch.float32)


def keys_of(rows: int, seed: int = 7, position: int = 3) -> torch.Tensor:
    return torch.tensor([pack_key(SamplingKey(seed=seed, sample=i), position) for i in range(rows)])


def draw_u64(seed: int, row: int, position: int) -> int:
    words = reference.philox((position, 0, 0, row), (seed & 0xFFFFFFFF, seed >> 32))
    return words[1] << 32 | words[0]


def signed(words: list[int]) -> list[int]:
    return [w - (1 << 32) if w >> 31 else w for w in words]


def take(drawn: Drawn, index: slice | list[int]) -> Drawn:
    views = [t.view(torch.int64) if t.dtype == torch.uint64 else t for t in drawn]
    return Drawn(*(v[index] for v in views))


def assert_same_draws(actual: Drawn, expected: Drawn, what: str) -> None:
    for name, a, b in zip(Drawn._fields, actual, expected, strict=True):
        assert_same_bits(a.view(torch.int64) if a.dtype == torch.uint64 else a,
                         b.view(torch.int64) if b.dtype == torch.uint64 else b, f"{what}: {name}")  # fmt: skip


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_generator_gives_the_published_answers(counter, key, answer):
    """Known answers of Philox4x32-10 from the Random123 distribution (kat_vectors)."""
    out = philox(torch.tensor([signed(counter)], dtype=torch.int32), torch.tensor([signed(key)], dtype=torch.int32))
    assert out.tolist() == [signed(answer)]
    assert reference.philox(tuple(counter), tuple(key)) == tuple(answer)


@pytest.mark.parametrize("vocab", [50, 64, 1000, 4913])
def test_rows_follow_the_contract_bit_by_bit(vocab):
    """Ids, log-probs, entropies, counts and digests of every mix of parameters in one batch, on logits full of ties."""
    z = grid_logits(len(MIXED), vocab)
    drawn = sample(z, SamplingRows.of(MIXED), keys_of(len(MIXED)), leaf_size(vocab))
    for i, p in enumerate(MIXED):
        row = reference.Row(z[i].numpy(), p.temperature, p.top_k, p.top_p, p.min_p, leaf_size(vocab))
        token = row.draw(draw_u64(7, i, 3))
        assert int(drawn.ids[i]) == token, p
        assert_same_bits(drawn.logp[i : i + 1].numpy(), row.logp[token : token + 1], f"log-prob under {p}")
        assert_same_bits(drawn.entropy[i].numpy().reshape(1), np.array([row.entropy]), f"entropy under {p}")
        assert int(drawn.kept_count[i]) == len(row.kept), p
        assert int(drawn.kept_digest[i].numpy()) == (reference.digest(row.kept) if p.filters else 0), p


@pytest.mark.parametrize("vocab", [49152, 151936])
def test_large_vocabularies_follow_the_contract(vocab):
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.3, top_p=0.9),
        SamplingParams(temperature=0.5, top_k=50, top_p=0.95, min_p=0.05),
    ]
    z = torch.from_numpy(np.random.default_rng(1).standard_normal((3, vocab)).astype(np.float32) * 2.5)
    drawn = sample(z, SamplingRows.of(params), keys_of(3), leaf_size(vocab))
    for i, p in enumerate(params):
        row = reference.Row(z[i].numpy(), p.temperature, p.top_k, p.top_p, p.min_p, leaf_size(vocab))
        token = row.draw(draw_u64(7, i, 3))
        assert (int(drawn.ids[i]), int(drawn.kept_count[i])) == (token, len(row.kept)), p
        assert_same_bits(drawn.logp[i : i + 1].numpy(), row.logp[token : token + 1], f"log-prob under {p}")


@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize(
    "params", [SamplingParams(top_p=0.7), SamplingParams(top_k=40), SamplingParams(top_k=300, top_p=0.999, min_p=1e-6)]
)
def test_threshold_search_equals_a_full_sort_at_every_spread(scale, params):
    """From nearly flat rows (all in the first bucket of the search) to rows whose tail is in its last one."""
    z = torch.from_numpy(np.random.default_rng(2).standard_normal((4, 2000)).astype(np.float32) * np.float32(scale))
    drawn = sample(z, SamplingRows.of([params] * 4), keys_of(4), leaf_size(2000))
    for i in range(4):
        row = reference.Row(z[i].numpy(), 1.0, params.top_k, params.top_p, params.min_p, leaf_size(2000))
        assert int(drawn.kept_count[i]) == len(row.kept)
        assert int(drawn.kept_digest[i].numpy()) == reference.digest(row.kept)


@pytest.mark.parametrize(
    ("logits", "params", "kept"),
    [
        ([0, 2, 1, 1, 1, 1], SamplingParams(top_k=3), [1, 2, 3]),
        ([1, 1, 1, 1, 1, 1], SamplingParams(top_k=2), [0, 1]),
        ([0.0, -0.0, 0.0, -0.0], SamplingParams(top_k=2), [0, 1]),
        ([-0.0, 0.0, -1.0, 0.0], SamplingParams(top_k=2), [0, 1]),
        ([1] * 10, SamplingParams(top_p=0.5), [0, 1, 2, 3, 4]),
        ([0, 1, 1, 0, 1, 1], SamplingParams(top_p=0.6), [1, 2, 4]),
        ([3, 3, 3, 0, 3], SamplingParams(top_p=0.75, top_k=4), [0, 1, 2]),
        ([2, 1, 2, 0], SamplingParams(min_p=1.0), [0, 2]),
        ([0, 1, 1, 1], SamplingParams(top_k=3, top_p=0.5, min_p=0.5), [1, 2]),
        ([1e-42, 0.0, -1e-42, 0.0], SamplingParams(top_k=1), [0]),
    ],
)
def test_ties_at_the_boundary_go_to_the_lower_ids(logits, params, kept):
    """Exact ties at top-k, top-p and min-p; signed zeros and subnormals tie. Probabilities are over the kept ids."""
    z = torch.tensor([logits], dtype=torch.float32).repeat(64, 1)
    keys = torch.tensor([pack_key(SamplingKey(), i) for i in range(64)])
    words = torch.zeros((64, 1), dtype=torch.int64)
    drawn = sample(z, SamplingRows.of([params] * 64), keys, 64, words)
    assert drawn.kept_count.tolist() == [len(kept)] * 64
    assert words[:, 0].tolist() == [sum(1 << i for i in kept)] * 64
    assert set(drawn.ids.tolist()) <= set(kept)
    exact = torch.log_softmax(z[0, kept].double(), 0)
    for token, logp in zip(drawn.ids.tolist(), drawn.logp.tolist(), strict=True):
        assert abs(logp - float(exact[kept.index(token)])) < 1e-6


def distance_with_mass(mass: int) -> float:
    """An FP32 d < 0 whose mass round(2^40 exp(d)) is exactly `mass` (steps are below 1 up to 2^18)."""
    center = np.float32(math.log(mass / 2**40))
    grid = (center.view(np.uint32) + np.arange(-64, 65)).astype(np.uint32).view(np.float32)
    masses = np.rint(reference.exp(grid).astype(np.float64) * 2.0**40)
    return float(grid[np.flatnonzero(masses == mass)[0]])


def test_top_p_is_reached_by_the_mass_rounded_up():
    """p = 1 - 2^-24 of masses 2^40 and m = 2^16 + 1: p * total lies between 2^40 and 2^40 + 1, so one id is not enough;
    with m = 2^16 it lies below 2^40, and one is."""
    p = float(np.nextafter(np.float32(1), np.float32(0)))
    for mass, kept in ((2**16 + 1, 2), (2**16, 1)):
        z = torch.tensor([[0.0, distance_with_mass(mass), -90.0]])
        assert int(sample(z, SamplingRows.of([SamplingParams(top_p=p)]), keys_of(1), 64).kept_count) == kept


@pytest.mark.parametrize(("largest", "leaf"), [(1, 64), (70, 128), (64, 64)])
def test_a_draw_on_the_boundary_takes_the_next_id(largest, leaf):
    """r = m exactly, m being the mass of id 0: its running mass does not exceed r. With mass m + 1 it does. The next id
    stands in the same chunk, the next chunk, or the next leaf. (A position whose draw is near zero makes m small.)"""
    position = 17169035
    draw = draw_u64(0, 0, position)
    mass = draw * (2**40 + (draw >> 24)) >> 64
    assert mass < 2**17 and draw * (2**40 + mass) >> 64 == mass
    for m, token in ((mass, largest), (mass + 1, 0)):
        z = torch.full((1, 128), -90.0)
        z[0, 0], z[0, largest] = distance_with_mass(m), 0.0
        key = torch.tensor([pack_key(SamplingKey(), position)])
        assert int(sample(z, SamplingRows.allocate(1), key, leaf).ids) == token


def test_greedy_takes_the_first_largest_and_records_the_untempered_log_prob():
    z = grid_logits(6, 1000)
    z[:, 700] = z[:, 300] = z.amax() + 1
    greedy = sample(z, SamplingRows.of([SamplingParams(temperature=0, top_k=3, top_p=0.5)] * 6), keys_of(6), 128)
    assert greedy.ids.tolist() == [300] * 6
    assert greedy.kept_count.tolist() == [1000] * 6, "a greedy row has no kept set"
    exact = torch.log_softmax(z.double(), -1)[:, 300]
    assert (greedy.logp - exact).abs().max() < 2e-6


def test_log_prob_and_entropy_against_float64():
    """Derived bound, u = 2^-24: a distance d carries 3 u (|y| + |max|) (two roundings of y, one of d); a summand has
    that error, relative, and 1e-7 of exp; a sum has leaf / 16 + 4 + 3 additions; log adds 2 u |log sum| + 1e-7."""
    vocab, u = 4913, 2.0**-24
    z = torch.from_numpy(np.random.default_rng(5).standard_normal((40, vocab)).astype(np.float32) * 4)
    params = [SamplingParams(temperature=TEMPERATURES[i % 4]) for i in range(40)]
    drawn = sample(z, SamplingRows.of(params), keys_of(40), leaf_size(vocab))
    t = torch.tensor([p.temperature or 1.0 for p in params], dtype=torch.float32).double()
    y = z.double() / t[:, None]
    exact = torch.log_softmax(y, -1)
    distance = 3 * u * (y.abs().amax(-1) + y.amax(-1).abs())
    total = torch.logsumexp(y, -1) - y.amax(-1)
    bound = 2 * distance + 2e-7 + (leaf_size(vocab) / 16 + 7) * u + 2 * u * total
    chosen = exact.gather(1, drawn.ids[:, None])[:, 0]
    assert ((drawn.logp - chosen).abs() <= bound + u * chosen.abs()).all()
    entropy = -(exact.exp() * exact).sum(-1)
    spread = (exact.exp() * (y - y.amax(-1, keepdim=True)).abs()).sum(-1)
    assert ((drawn.entropy - entropy).abs() <= bound * (2 + spread)).all()


def test_draws_follow_the_distribution():
    """Chi-square of 40,000 draws over 12 ids (11 degrees, or 7 when filtered): below the 1 - 1e-6 quantile of 11."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -2.0, 0.25, 1.75, 0.75, -0.5, 1.25])
    for params, kept in ((SamplingParams(temperature=1.3), 12), (SamplingParams(top_k=8), 8)):
        n = 40_000
        keys = torch.tensor([pack_key(SamplingKey(seed=11, sample=i % 8), i // 8) for i in range(n)])
        drawn = sample(logits.repeat(n, 1), SamplingRows.of([params], [n]), keys, 64)
        p = torch.softmax(logits.double() / params.temperature, 0)
        p[p.argsort(descending=True)[kept:]] = 0
        expected = n * p / p.sum()
        observed = torch.bincount(drawn.ids, minlength=12).double()
        live = expected > 0
        assert observed[~live].sum() == 0
        assert float(((observed - expected)[live] ** 2 / expected[live]).sum()) < 48.9


def test_rows_do_not_see_each_other():
    """A row alone, first, last, and among other rows with other parameters: the same bits."""
    z, keys = grid_logits(len(MIXED), 1000, scale=1.0), keys_of(len(MIXED))
    whole = sample(z, SamplingRows.of(MIXED), keys, 128)
    for i in range(len(MIXED)):
        alone = sample(z[i : i + 1], SamplingRows.of(MIXED[i : i + 1]), keys[i : i + 1], 128)
        assert_same_draws(take(alone, slice(None)), take(whole, slice(i, i + 1)), f"row {i} alone")
    order = list(reversed(range(len(MIXED))))
    turned = sample(z[order], SamplingRows.of([MIXED[i] for i in order]), keys[order], 128)
    assert_same_draws(take(turned, slice(None)), take(whole, order), "rows reversed")


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_threads_and_repetition_change_no_bit(rows):
    vocab = 9000
    z, params, keys = grid_logits(rows, vocab), SamplingRows.of(MIXED[-rows:]), keys_of(rows)
    with library.use_threads(1):
        first = sample(z, params, keys, leaf_size(vocab))
    for threads in (1, 2, 3):
        with library.use_threads(threads):
            assert_same_draws(sample(z, params, keys, leaf_size(vocab)), first, f"{threads} threads")


def test_order_of_the_sum_shows():
    """The control: other leaves give other bits of the log-prob, so the equalities above could have failed."""
    z = torch.from_numpy(np.random.default_rng(3).standard_normal((32, 4096)).astype(np.float32))
    rows, keys = SamplingRows.allocate(32), keys_of(32)
    eight, one = (sample(z, rows, keys, size) for size in (512, 4096))
    assert_same_bits(eight.ids, one.ids, "draws are over integer masses")
    assert_different_bits(eight.logp, one.logp, "log-probs over other leaves")


def test_a_recorded_program_samples_any_number_of_rows():
    capacity, vocab = 8, 1000
    logits, keys, rows = torch.zeros(capacity, vocab), keys_of(capacity), SamplingRows.allocate(capacity)
    with library.record(rows=(logits, keys, *rows.tensors)) as program:
        drawn = sample(logits, rows, keys, 128)
    for count, shift in ((8, 0), (3, 1), (1, 2)):
        logits.copy_(grid_logits(capacity, vocab, seed=shift))
        for i in range(capacity):
            rows.set(i, MIXED[-1 - i - shift])
        program.run(rows=count)
        direct = sample(logits[:count], rows.slice(0, count), keys[:count], 128)
        assert_same_draws(take(drawn, slice(0, count)), take(direct, slice(None)), f"{count} rows replayed")


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.9, top_k=5)]
)
def test_a_row_that_is_not_finite_is_refused_by_a_nan_of_its_own(poison, params):
    z = grid_logits(3, 1000)
    clean = sample(z, SamplingRows.of([params] * 3), keys_of(3), 128)
    z[1, 517] = poison
    drawn = sample(z, SamplingRows.of([params] * 3), keys_of(3), 128)
    assert math.isnan(drawn.logp[1]) and math.isnan(drawn.entropy[1]) and int(drawn.ids[1]) == 0
    assert_same_draws(take(drawn, [0, 2]), take(clean, [0, 2]), "the rows beside it")


def test_every_part_of_a_key_selects_another_draw():
    flat = torch.zeros(1, 49152)
    base = {"seed": 1, "step": 2, "prompt": 3, "attempt": 4, "sample": 5}
    keys = [SamplingKey(**base), *(SamplingKey(**{**base, name: base[name] + 1}) for name in base)]
    keys += [SamplingKey(seed=2**63 + 1), SamplingKey(step=2**32 - 1), SamplingKey(prompt=2**32 - 1)]
    keys += [SamplingKey(attempt=1), SamplingKey(sample=2**20 - 1), SamplingKey(prompt=1), SamplingKey(step=1)]
    words = [pack_key(k, p) for k in keys for p in (0, 1, 2**32 - 1)]
    assert len(set(words)) == len(words)
    rows = len(words)
    drawn = sample(flat.repeat(rows, 1), SamplingRows.allocate(rows), torch.tensor(words), 6144)
    assert len(set(drawn.ids.tolist())) >= rows - 1, "39 draws of 49,152 equal ids: one collision at most"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ({"attempt": 4096}, "attempt"),
        ({"sample": 2**20}, "sample"),
        ({"step": 2**32}, "step"),
        ({"prompt": -1}, "prompt"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_a_key_outside_its_range_is_refused(key, name):
    with pytest.raises(ConfigError, match=name):
        pack_key(SamplingKey(**key))


def test_parameters_by_request_and_in_place_are_the_same():
    rows = SamplingRows.allocate(len(MIXED))
    for i, p in enumerate(MIXED):
        rows.set(i, p)
    for a, b in zip(rows.tensors, SamplingRows.of(MIXED).tensors, strict=True):
        assert_same_bits(a, b, "parameters")
    assert len(SamplingRows.of(MIXED[:2], [3, 0])) == 3
