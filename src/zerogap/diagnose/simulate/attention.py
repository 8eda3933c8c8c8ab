"""Attention over whole sequences: forms of real stacks, and changes of one field.

order       chain (products by zerogap's kernel, sums of P over sixteen lanes); `library: torch.matmul`;
            `library op: scaled_dot_product_attention` (all of it, replayed)
primitive   contract exp, torch exp, exp2 (of scores times log2 e); FLASH (torch's fast exp, one reciprocal at the end)
split       1; `spans of N` (keys from absolute position 0), `N parts` (of each sequence): unnormalised states merged
            ascending; `..., normalised`: each part's output by its log-sum-exp
operands    stored, fp16, tf32; `e4m3 keys and values` (per token and head), `..., one scale`
accumulate  fp32; `bf16 parts` (outputs of parts are rounded); bf16 (the state is rounded after every block)
rounding    what is rounded to the storage dtype on the way: none; P; normalised P; `scores and ...`;
                `scaled scores and ...`
output      bf16, fp16, fp32
formula     softmax; softcap C; key heads interleaved; `sink` (one more key with score 0)
scale       scores; queries (rounded); queries in FP32; 1, 1/D, twice, half (wrong factors)
block       N keys (online softmax); all keys
mask        causal; sees the next; misses itself; none; window of N
"""

import dataclasses
from collections.abc import Callable, Iterator

import torch

from zerogap.diagnose.simulate import arithmetic, dots
from zerogap.diagnose.simulate.arithmetic import FP32, fma, quantise_e4m3, round_to
from zerogap.diagnose.simulate.contract import contract_output
from zerogap.diagnose.simulate.variant import LIBRARY, WHOLE, Problem, Variant

MATMUL = f"{LIBRARY} torch.matmul"
SDPA = f"{WHOLE} scaled_dot_product_attention"
EAGER = "scores, scaled scores and normalised P"
LOG2E = 1.4426950408889634
FLASH = "torch flash exp"
BLOCKS = (16, 32, 64, 128, 256, 512)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Heads, the factor of the scores, and the rows of each sequence."""

    heads: int
    kv_heads: int
    dim: int
    scale: float
    lengths: tuple[int, ...]


def sizes(problem: Problem) -> Sizes | None:
    """None where the parameters do not say them."""
    dim, heads, kv_heads = (problem.number(n) for n in ("head_dim", "num_heads", "num_kv_heads"))
    if heads is None or len(problem.inputs) != 3:
        return None
    dim = dim or problem.inputs[0].shape[1] // heads
    kv_heads = kv_heads or problem.inputs[1].shape[1] // dim
    scale = problem.number("scale", float(dim) ** -0.5)
    assert scale is not None
    return Sizes(int(heads), int(kv_heads), int(dim), scale, tuple(problem.lengths))


def bases(problem: Problem) -> list[Variant]:
    """The contract's; transformers' eager (rounded at every step) and SDPA; plain FP32 inside."""
    contract = Variant.of(
        "attention",
        {
            "order": "chain",
            "primitive": "contract exp",
            "split": "spans of 1024" if max(problem.lengths) > 1024 else "1",
            "operands": "stored",
            "accumulate": "fp32",
            "rounding": "P",
            "output": problem.recorded,
            "formula": "softmax",
            "scale": "scores",
            "block": "64 keys",
            "mask": "causal",
        },
    )
    one = contract.but(order=MATMUL, primitive="torch exp", split="1", block="all keys")
    eager = one.but(rounding=EAGER if problem.storage != "fp32" else "normalised P")
    flash = contract.but(primitive=FLASH, split="1", block="512 keys")
    return [contract, eager, one.but(order=SDPA), flash, one.but(rounding="none"), one]


def changes(variant: Variant, problem: Problem) -> Iterator[Variant]:
    """Variants with one field changed."""
    longest = max(problem.lengths)
    for rounding in (
        *("none", "P", "normalised P", "scores and P", "scores and normalised P"),
        *("scaled scores and P", "scaled scores and normalised P", EAGER),
    ):
        yield variant.but(rounding=rounding)
    for size in BLOCKS:
        yield variant.but(block=f"{size} keys")
    yield variant.but(block="all keys")
    yield variant.but(split="1")
    for size in (8, 16, 32, 64, 128, 256, 512, 1024):
        if size < longest:
            yield variant.but(split=f"spans of {size}")
            yield variant.but(split=f"spans of {size}, normalised")
    for count in (2, 3, 4, 8, 16):
        if count <= longest // 2:
            yield variant.but(split=f"{count} parts")
            yield variant.but(split=f"{count} parts, normalised")
    for scale in ("scores", "queries", "queries in FP32", "1", "1/D", "twice", "half", "squared"):
        yield variant.but(scale=scale)
    for mask in (
        "causal",
        "sees the next",
        "misses itself",
        "none",
        *(f"window of {n}" for n in (4, 8, 16, 32, 64, 128)),
    ):
        yield variant.but(mask=mask)
    for formula in ("softmax", "softcap 50", "softcap 30", "softcap 20", "key heads interleaved", "sink"):
        yield variant.but(formula=formula)
    for primitive in ("contract exp", "torch exp", "exp2", FLASH):
        yield variant.but(primitive=primitive)
    for order in ("chain", MATMUL):
        yield variant.but(order=order)
    for accumulate in ("fp32", "bf16", "bf16 parts"):
        yield variant.but(accumulate=accumulate)
    for operands in ("stored", "fp16", "tf32", "bf16", "e4m3 keys and values", "e4m3 keys and values, one scale"):
        yield variant.but(operands=operands)
    for output in ("bf16", "fp16", "fp32"):
        yield variant.but(output=output)


def applies(variant: Variant, problem: Problem) -> bool:
    """True if the problem has what the variant speaks of."""
    found = sizes(problem)
    if found is None:
        return False
    longest, split, block = max(found.lengths), variant["split"], variant["block"]
    whole = bases(problem)[2]
    if variant["order"] == SDPA:
        keep = ("order", "mask", "formula", "scale")
        return variant == whole or all(v == w for (n, v), (_, w) in zip(variant.fields, whole.fields) if n not in keep)
    if problem.storage == "fp32" and variant["rounding"] not in ("P", "normalised P"):
        return False
    if variant["primitive"] == FLASH and (variant["order"] != "chain" or "normalised" in variant["rounding"]):
        return False
    if problem.storage != "fp32" and variant["operands"] in ("bf16", "tf32"):
        return False
    if variant["accumulate"] == "bf16 parts" and (split == "1" or _whole_span(split, longest)):
        return False
    if "normalised P" in variant["rounding"] and not (
        block == "all keys" and (split == "1" or split.endswith("normalised"))
    ):
        return False
    if variant["formula"] == "key heads interleaved" and found.kv_heads in (1, found.heads):
        return False
    wide = block != "all keys" and int(block.split()[0]) >= 2 * longest
    if wide and block != "64 keys" and variant["primitive"] != FLASH:
        return False
    return not _whole_span(split, longest)


def _whole_span(split: str, longest: int) -> bool:
    return split.startswith("spans") and int(split.replace(",", "").split()[2]) >= longest


def cost(variant: Variant) -> int:
    """1: more than one field's worth of work."""
    return int(variant["operands"].startswith("e4m3"))


def sample(problem: Problem, differs: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole sequences up to about `rows` rows and whole heads up to `columns`, those that differ most first."""
    found = sizes(problem)
    if found is None:
        return torch.arange(min(rows, len(differs))), torch.arange(min(columns, problem.out.shape[1]))
    per_sequence = [int(part.sum()) for part in differs.split(list(found.lengths))]
    starts = [sum(found.lengths[:i]) for i in range(len(found.lengths))]
    taken: list[int] = []
    for i in sorted(range(len(starts)), key=lambda i: (-per_sequence[i], found.lengths[i] < 2)):
        if len(taken) < rows:
            taken += range(starts[i], starts[i] + found.lengths[i])
    per_head = differs.expand(-1, problem.out.shape[1]).unflatten(1, (-1, found.dim)).sum((0, 2))
    heads = sorted(torch.argsort(per_head, descending=True, stable=True)[: max(1, columns // found.dim)].tolist())
    picked = [h * found.dim + i for h in heads for i in range(found.dim)]
    return torch.tensor(sorted(taken)), torch.tensor(picked)


def simulate(variant: Variant, problem: Problem) -> torch.Tensor:
    """The sample [rows, columns], FP32: whole sequences and heads that it touches are computed."""
    found = sizes(problem)
    assert found is not None
    if variant == bases(problem)[0] and variant["output"] == problem.recorded:
        exact = problem.whole(("attention", "contract"), lambda: _contract(problem, found))
        return round_to(exact, variant["output"])
    if variant["order"] == SDPA and variant == bases(problem)[2]:
        return problem.whole(("attention", SDPA), lambda: _sdpa(problem, found))
    heads = (problem.columns // found.dim).unique().tolist()
    out = torch.full((len(problem.out), found.heads * found.dim), float("nan"))
    first = 0
    touched = set(problem.rows.tolist())
    for length in found.lengths:
        rows = range(first, first + length)
        if touched & set(rows):
            q, k, v = problem.once(("heads", first), lambda: _heads(problem, found, heads, first, length))  # noqa: B023
            if variant["formula"] == "key heads interleaved":
                k, v = problem.once(("odd", first), lambda: _heads(problem, found, heads, first, length, True)[1:])  # noqa: B023
            done = _sequence(q, k, v, variant, problem.storage, found.scale)
            for i, head in enumerate(heads):
                out[first : first + length, head * found.dim : (head + 1) * found.dim] = done[i]
        first += length
    return problem.cut(out)


def _heads(
    problem: Problem, found: Sizes, heads: list[int], first: int, length: int, interleaved: bool = False
) -> tuple[torch.Tensor, ...]:
    """q, k, v of one sequence as [heads, T, D] in the stored dtype."""
    group = found.heads // found.kv_heads
    picked = [h % found.kv_heads if interleaved else h // group for h in heads]
    parts = [t[first : first + length].unflatten(1, (-1, found.dim)).transpose(0, 1) for t in problem.inputs]
    return parts[0][heads], parts[1][picked], parts[2][picked]


def _contract(problem: Problem, found: Sizes) -> torch.Tensor:
    sizes = {"num_heads": found.heads, "num_kv_heads": found.kv_heads, "head_dim": found.dim, "scale": found.scale}
    numerics = "bf16" if problem.storage == "bf16" else "fp32"
    return contract_output("attention", problem.inputs, {}, {**sizes, "lengths": list(found.lengths)}, numerics)


def _sdpa(problem: Problem, found: Sizes) -> torch.Tensor:
    """torch's op, each sequence alone, causal."""
    done, first = [], 0
    for length in found.lengths:
        q, k, v = _heads(problem, found, list(range(found.heads)), first, length)
        out = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None].contiguous(), v[None].contiguous(), is_causal=True, scale=found.scale
        )
        done.append(out[0].transpose(0, 1).flatten(1))
        first += length
    return torch.cat(done)


# ---------------------------------------------------------------------------------------------------- one sequence


def _product(x: torch.Tensor, w: torch.Tensor, order: str, storage: str, rounded: bool) -> torch.Tensor:
    """[H, M, K] times [H, N, K]: FP32 [H, M, N]; `rounded`: to the storage dtype, as a library's narrow product is."""
    if order == "chain":
        dtype = torch.bfloat16 if storage == "bf16" and _is_bf16(x) and _is_bf16(w) else FP32
        found = torch.stack([dots.native(a.to(dtype), b.to(dtype)) for a, b in zip(x, w)])
        return round_to(found, storage) if rounded else found
    if rounded and storage != "fp32":
        narrow = arithmetic.DTYPES[storage]
        return torch.matmul(x.to(narrow)[None], w.to(narrow)[None].transpose(-1, -2))[0].to(FP32)
    return torch.matmul(x.to(FP32), w.to(FP32).transpose(-1, -2))


def _is_bf16(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16 or bool((x == x.to(torch.bfloat16).to(x.dtype)).all())


def _operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> tuple[torch.Tensor, ...]:
    name = variant["operands"]
    if name == "stored":
        return q, k, v
    if name.startswith("e4m3"):
        one = name.endswith("one scale")

        def coded(t: torch.Tensor) -> torch.Tensor:
            value = t.to(FP32)
            amax = (
                value.abs().amax().expand(value.shape)
                if one
                else value.abs().amax(-1, keepdim=True).expand(value.shape)
            )
            grid, scales = quantise_e4m3(value, amax, 448.0, False)
            return (grid * scales).to(t.dtype)

        return q, coded(k), coded(v)
    return tuple(round_to(t.to(FP32), name) for t in (q, k, v))


def _scores(q: torch.Tensor, k: torch.Tensor, variant: Variant, storage: str, scale: float) -> torch.Tensor:
    """Scaled scores [H, T, S], FP32, not masked."""
    dim = q.shape[-1]
    where, rounding = variant["scale"], variant["rounding"]
    factors = {"1": 1.0, "1/D": 1 / dim, "twice": 2 * scale, "half": scale / 2, "squared": scale * scale}
    factor = factors.get(where, scale)
    if where.startswith("queries"):
        scaled = q.to(FP32) * factor
        q = scaled if where.endswith("FP32") else round_to(scaled, storage).to(q.dtype)
        factor = 1.0
    scores = _product(q, k, variant["order"], storage, rounding.startswith("scores"))
    if factor != 1.0:
        scores = scores * torch.tensor(factor, dtype=FP32)
    if "scaled scores" in rounding:
        scores = round_to(scores, storage)
    if variant["formula"].startswith("softcap"):
        cap = float(variant["formula"].split()[1])
        scores = cap * torch.tanh(scores / cap)
    return scores


def _visible(count: int, mask: str) -> torch.Tensor:
    """bool [T, T]: query row, key column."""
    query, key = torch.arange(count)[:, None], torch.arange(count)[None, :]
    if mask == "none":
        return torch.ones(count, count, dtype=torch.bool)
    if mask == "sees the next":
        return key <= query + 1
    if mask == "misses itself":
        return (key < query) | ((key == 0) & (query == 0))
    if mask.startswith("window"):
        return (key <= query) & (key > query - int(mask.split()[-1]))
    return key <= query


def _exp(x: torch.Tensor, primitive: str) -> torch.Tensor:
    if primitive == "contract exp":
        return arithmetic.exp(x.clamp_max(0))
    if primitive == FLASH:
        return torch.exp(x)
    if primitive == "exp2":
        return torch.exp2(x * torch.tensor(LOG2E, dtype=FP32))
    return torch.exp(x)


@dataclasses.dataclass
class _State:
    """Maximum [H, T], sum [H, T] and unnormalised output [H, T, D] so far."""

    m: torch.Tensor
    l: torch.Tensor
    o: torch.Tensor


def _sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, storage: str, scale: float
) -> torch.Tensor:
    """[H, T, D] FP32 of one sequence, rounded to the output."""
    q, k, v = _operands(q, k, v, variant)
    count = q.shape[1]
    scores = _scores(q, k, variant, storage, scale)
    visible = _visible(count, variant["mask"])
    scores = torch.where(visible, scores, float("-inf"))
    if "normalised P" in variant["rounding"] and variant["split"] == "1":
        p = torch.softmax(scores, -1)
        out = _product(round_to(p, storage), v.transpose(-1, -2), variant["order"], storage, True)
        return round_to(out, variant["output"])
    states = [_span(scores, v, visible, begin, end, variant, storage) for begin, end in _spans(variant["split"], count)]
    if variant["split"].endswith("normalised"):
        out = _by_logsumexp(states, variant)
    else:
        merged = states[0]
        for state in states[1:]:
            merged = _merge(merged, state, variant)
        out = merged.o / merged.l[..., None]
        if variant["primitive"] == FLASH:
            out = merged.o * (1 / merged.l)[..., None]
    return round_to(out, variant["output"])


def _spans(split: str, count: int) -> list[tuple[int, int]]:
    words = split.replace(",", "").split()
    if split == "1":
        return [(0, count)]
    size = int(words[2]) if words[0] == "spans" else -(-count // int(words[0]))
    return [(i, min(i + size, count)) for i in range(0, count, size)]


def _span(
    scores: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, begin: int, end: int, variant: Variant, storage: str
) -> _State:
    """The state after keys begin .. end - 1; rows that see none of them have maximum -inf, sum and output 0."""
    block = end - begin if variant["block"] == "all keys" else int(variant["block"].split()[0])
    rows = scores.shape[:2]
    state = _State(torch.full(rows, float("-inf")), torch.zeros(rows), torch.zeros(*rows, v.shape[-1]))
    if variant["formula"] == "sink" and begin == 0:
        state.m, state.l = torch.zeros(rows), torch.ones(rows)
    exact = variant["order"] == "chain"
    for first in range(begin, end, block):
        keys = slice(first, min(first + block, end))
        s, seen = scores[..., keys], visible[:, keys]
        m = torch.maximum(state.m, s.amax(-1))
        safe = torch.where(m.isfinite(), m, 0.0)
        p = torch.where(seen, _exp(torch.where(seen, s - safe[..., None], 0.0), variant["primitive"]), 0.0)
        if variant["primitive"] == FLASH:
            shifted = torch.where(seen, s - safe[..., None], float("-inf"))
            p, total = _flash(shifted, keys.start, arithmetic.fast_exp if storage == "fp32" else arithmetic.faster_exp)
        elif exact:
            total = arithmetic.halving(arithmetic.lanes(p, torch.ones_like(p), 16, False))
        else:
            total = p.sum(-1)
        if "normalised P" in variant["rounding"]:
            p = p / torch.where(total > 0, total, 1.0)[..., None]
        kept = round_to(p, storage) if variant["rounding"].endswith("P") else p
        product = _product(kept, v[:, keys].transpose(-1, -2), variant["order"], storage, False)
        alpha = torch.where(state.m.isfinite(), _exp((state.m - safe).clamp_max(0), variant["primitive"]), 0.0)
        live = seen.any(-1)[None].expand(rows)
        if exact:
            l, o = fma(state.l, alpha, total), fma(state.o, alpha[..., None].expand_as(product), product)
        else:
            l, o = state.l * alpha + total, state.o * alpha[..., None] + product
        if variant["accumulate"] == "bf16":
            o = round_to(o, "bf16")
        state = _State(
            torch.where(live, m, state.m), torch.where(live, l, state.l), torch.where(live[..., None], o, state.o)
        )
    if variant["accumulate"] == "bf16 parts" and not variant["split"].endswith("normalised"):
        state.o = round_to(state.o, "bf16")
    return state


def _flash(
    x: torch.Tensor, begin: int, exp: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """exp and its sum over one block of keys from `begin`, as torch's CPU flash kernel has them.

    Query rows stand in blocks of 32, 64 (from 192 rows on) or 256 (from 768); a block reads keys up to its last row's.
    Whole vectors of 16 take the fast exp and are summed in lanes, then by halves; the rest takes exp, one by one.
    """
    count, width = x.shape[1:]
    size = 256 if count >= 768 else 64 if count >= 192 else 32
    p, total = torch.zeros_like(x), torch.zeros(x.shape[:2])
    for first in range(0, count, size):
        rows = slice(first, min(first + size, count))
        keys = max(0, min(width, min(first + size, count) - begin))
        vectors = keys // 16 * 16
        p[:, rows, :vectors] = exp(x[:, rows, :vectors])
        p[:, rows, vectors:keys] = torch.exp(x[:, rows, vectors:keys].double()).to(FP32)  # the C library's
        if vectors:
            head = p[:, rows, :vectors]
            total[:, rows] = arithmetic.halving(arithmetic.lanes(head, torch.ones_like(head), 16, False))
        for i in range(vectors, keys):
            total[:, rows] = total[:, rows] + p[:, rows, i]
    return p, total


def _merge(left: _State, right: _State, variant: Variant) -> _State:
    """`o = fma(o1, a1, o2 * a2)`, and the same for the sums; a side that saw no key changes nothing."""
    m = torch.maximum(left.m, right.m)
    one, two = (
        torch.where(s.m.isfinite(), _exp(torch.where(m.isfinite(), s.m - m, 0.0), variant["primitive"]), 0.0)
        for s in (left, right)
    )
    far = right.o * two[..., None]
    l = fma(left.l, one, right.l * two)
    o = fma(left.o, one[..., None].expand_as(far), far)
    unseen = ~right.m.isfinite()
    return _State(m, torch.where(unseen, left.l, l), torch.where(unseen[..., None], left.o, o))


def _by_logsumexp(states: list[_State], variant: Variant) -> torch.Tensor:
    """Outputs of parts, each normalised, weighted by exp(lse - largest lse) (flash decoding's second kernel)."""
    sums = torch.stack([torch.where(s.l > 0, s.m + torch.log(s.l.clamp_min(1e-38)), float("-inf")) for s in states])
    divided = "normalised P" in variant["rounding"]
    outs = torch.stack([torch.where(s.l[..., None] > 0, s.o if divided else s.o / s.l[..., None], 0.0) for s in states])
    if variant["accumulate"] == "bf16 parts":
        outs = round_to(outs, "bf16")
    weights = torch.exp(sums - sums.amax(0))
    return (weights[..., None] * outs).sum(0) / weights.sum(0)[..., None]
