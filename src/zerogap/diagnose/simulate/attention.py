"""Attention over whole sequences: forms of real stacks, and changes of one field.

order       chain (products by zerogap's kernel, sums of P over sixteen lanes); `library: torch.matmul`; either with
            `..., backwards` (blocks of keys from the last to the first);
            `library op: scaled_dot_product_attention` (all of it, replayed); `..., each row alone` (as it decodes)
primitive   contract exp, torch exp, exp2 (of scores times log2 e); `..., reciprocal` (the output times 1 / sum); FLASH
            (torch's fast exp, one reciprocal at the end)
split       1; `N parts of each row's keys` (decode kernels);
            `spans of N` (keys from absolute position 0), `N parts` (of each sequence): unnormalised states merged
            ascending; `..., normalised`: each part's output by its log-sum-exp
operands    stored, fp16, tf32; `e4m3 keys and values`
accumulate  fp32; `bf16 parts` (outputs of parts are rounded); bf16 (the state is rounded after every block)
rounding    what is rounded to the storage dtype on the way: none; P; normalised P; `scores and ...`;
                `scaled scores and ...`
output      bf16, fp16, fp32
formula     softmax; softcap C (usual ones, and what the rows show); key heads interleaved; `sink` (one more key with
            score 0); `sinks S` (its score, the same for all heads, as the rows show it)
scale       scores; queries (rounded); queries in FP32; 1, 1/D, twice, half, 1/sqrt(N), times F (wrong factors; N and F
            as the rows show them); of E4M3 keys and values, by token and head if nothing is said:
            `..., cache scale N`,
            `..., cache scale of all`, `..., cache scales pow2`
block       N keys (online softmax); all keys
mask        causal; sees the next; misses itself; none; window of N; chunks of N; prefix of N (sees all of itself)
"""

from collections.abc import Iterator

import torch

from zerogap.diagnose.simulate import shown
from zerogap.diagnose.simulate.arithmetic import FP32, quantise_e4m3, round_to
from zerogap.diagnose.simulate.attention_ops import by_contract, heads_of, sdpa, sdpa_rows, sizes
from zerogap.diagnose.simulate.softmax import (
    BACKWARDS,
    FLASH,
    RECIPROCAL,
    by_logsumexp,
    merge,
    product,
    sinks,
    span,
    spans,
)
from zerogap.diagnose.simulate.variant import LIBRARY, WHOLE, Problem, Variant

MATMUL = f"{LIBRARY} torch.matmul"
SDPA = f"{WHOLE} scaled_dot_product_attention"
SDPA_ROWS = f"{SDPA}, each row alone"
OF_ROWS = " of each row's keys"
EAGER = "scores, scaled scores and normalised P"
CAPS = (50.0, 30.0, 20.0)
BLOCKS = (8, 16, 32, 64, 128, 256, 512)


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
    return [contract, eager, one.but(order=SDPA), one.but(order=SDPA_ROWS), flash, one.but(rounding="none"), one]


def changes(variant: Variant, problem: Problem) -> Iterator[Variant]:
    """Variants with one field changed."""
    longest = max(problem.lengths)
    factors, caps, sunk = problem.once("shown", lambda: _shown(problem))
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
        if count <= longest and count in (2, 4, 8):
            yield variant.but(split=f"{count} parts{OF_ROWS}")
        if count <= longest // 2:
            yield variant.but(split=f"{count} parts")
            yield variant.but(split=f"{count} parts, normalised")
    for scale in ("scores", "queries", "queries in FP32", "1", "1/D", "twice", "half", "squared", *factors):
        yield variant.but(scale=scale)
    for cached in (*(f"scale {n}" for n in (1, 0.5, 2)), "scale of all", "scales pow2"):
        yield variant.but(
            operands="e4m3 keys and values", scale=f"{variant['scale'].split(', cache')[0]}, cache {cached}"
        )
    for mask in _masks(variant, problem):
        yield variant.but(mask=mask)
    for mask in (
        "causal",
        "sees the next",
        "misses itself",
        "none",
        *(f"window of {n}" for n in (4, 8, 16, 32, 64, 128)),
    ):
        yield variant.but(mask=mask)
    for formula in (
        "softmax",
        *(f"softcap {shown.name(cap)}" for cap in dict.fromkeys((*CAPS, *caps))),
        "key heads interleaved",
        "sink",
        *sunk,
    ):
        yield variant.but(formula=formula)
    exact = ("contract exp", "torch exp", "exp2")
    for primitive in (*exact, *(name + RECIPROCAL for name in exact), FLASH):
        yield variant.but(primitive=primitive)
    for order in ("chain", MATMUL, f"chain{BACKWARDS}", f"{MATMUL}{BACKWARDS}"):
        yield variant.but(order=order)
    for accumulate in ("fp32", "bf16", "bf16 parts"):
        yield variant.but(accumulate=accumulate)
    for operands in ("stored", "fp16", "tf32", "bf16", "e4m3 keys and values"):
        yield variant.but(operands=operands)
    for output in ("bf16", "fp16", "fp32"):
        yield variant.but(output=output)


def _shown(problem: Problem) -> tuple[list[str], list[float], list[str]]:
    """Factors of the scores, caps and sinks that the rows show where the usual form does not give them; beginnings of
    a few sequences are read."""
    found = sizes(problem)
    if found is None:
        return [], [], []
    parts: list[shown.Rows] = []
    first = 0
    for length in found.lengths:
        count = min(length, 48)
        if length > 1 and len(parts) < 6:
            q, k, v = (t.double() for t in heads_of(problem, found, list(range(min(found.heads, 8))), first, count))
            out = problem.out[first : first + count].double().unflatten(1, (-1, found.dim)).transpose(0, 1)[: len(q)]
            if not out.isnan().any():
                parts.append(shown.Rows(q @ k.transpose(1, 2) * found.scale, v, out))
        first += length
    factor = shown.attention_factor(parts)
    factors = [f"times {shown.name(n)}" for n in _numbers(factor, 0.02)]
    if factor is not None:
        width = (factor * found.scale) ** -2
        near = [n for n in range(1, 8193) if abs(n / width - 1) < 0.06 and (n % 8 == 0 or n < 8)]
        factors += [f"1/sqrt({n})" for n in sorted(near, key=lambda n: abs(n - width))[:6]]
    return factors, _numbers(shown.attention_cap(parts), 0.04), _sinks(shown.attention_sinks(parts))


def _sinks(found: list[float]) -> list[str]:
    """One score of all heads, if they show the same."""
    if not found:
        return []
    middle = sorted(found)[len(found) // 2]
    if max(abs(s - middle) for s in found) < 0.02 * max(1.0, abs(middle)):
        if abs(middle) < 0.02:
            return ["sink"]
        return [f"sinks {shown.name(n)}" for n in shown.near(middle, 0.02, 8)]
    return []


def _numbers(value: float | None, relative: float) -> list[float]:
    return [] if value is None else shown.near(value, relative, 20)


def _masks(variant: Variant, problem: Problem) -> list[str]:
    """Masks that the rows show, by the rows that a causal one does not give: windows and chunks end where a sequence's
    rows begin to be wrong, a prefix that sees itself where its first rows are right again."""
    found = sizes(problem)
    if found is None or variant["mask"] != "causal" or not applies(variant, problem):
        return []
    wrong = (simulate(variant, problem) != problem.cut(problem.out)).any(1)
    starts, ends, first = [], [], 0
    for length in found.lengths:
        rows = wrong[first : first + length]
        if rows.any():
            starts.append(int(rows.float().argmax()))
            ends.append(int(rows.to(torch.int64).cumprod(0).sum()) + 1)
        first += length
    longest = max(found.lengths)
    sizes_ = [n for n in sorted(set(starts))[:2] if 0 < n < longest]
    prefixes = [n for n in sorted(set(ends))[:2] if 1 < n <= longest]
    return [*(f"{kind} of {n}" for n in sizes_ for kind in ("window", "chunks")), *(f"prefix of {n}" for n in prefixes)]


def applies(variant: Variant, problem: Problem) -> bool:
    """True if the problem has what the variant speaks of."""
    found = sizes(problem)
    if found is None:
        return False
    longest, split, block = max(found.lengths), variant["split"], variant["block"]
    whole = bases(problem)[2]
    if variant["order"] == SDPA_ROWS:
        return variant == bases(problem)[3]
    if variant["order"] == SDPA:
        keep = ("order", "mask", "formula", "scale")
        return variant == whole or all(v == w for (n, v), (_, w) in zip(variant.fields, whole.fields) if n not in keep)
    if BACKWARDS in variant["order"] and (
        split != "1" or block == "all keys" or int(block.split()[0]) >= longest or variant["primitive"] == FLASH
    ):
        return False
    if RECIPROCAL in variant["primitive"] and ("normalised" in variant["rounding"] or split.endswith("normalised")):
        return False
    if ", cache" in variant["scale"] and not variant["operands"].startswith("e4m3"):
        return False
    if problem.storage == "fp32" and variant["rounding"] not in ("P", "normalised P"):
        return False
    if variant["primitive"] == FLASH and (variant["order"] != "chain" or "normalised" in variant["rounding"]):
        return False
    if problem.storage != "fp32" and variant["operands"] in ("bf16", "tf32"):
        return False
    if split.endswith(OF_ROWS) and (variant["primitive"] == FLASH or "normalised" in variant["rounding"]):
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
    """1: more than one field's worth of work; 2: row by row."""
    return 2 if variant["split"].endswith(OF_ROWS) else int(variant["operands"].startswith("e4m3"))


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
        exact = problem.whole(("attention", "contract"), lambda: by_contract(problem, found))
        return round_to(exact, variant["output"])
    contract = bases(problem)[0].but(operands="e4m3 keys and values", scale=variant["scale"])
    if (
        variant == contract
        and variant["scale"] in ("scores", "scores, cache scales pow2")
        and problem.storage == "bf16"
    ):
        power = variant["scale"].endswith("pow2")
        return problem.whole(("attention", "fp8", power), lambda: by_contract(problem, found, True, power))
    if variant["order"] == SDPA and variant == bases(problem)[2]:
        return problem.whole(("attention", SDPA), lambda: sdpa(problem, found))
    if variant["order"] == SDPA_ROWS:
        return problem.whole(("attention", SDPA_ROWS), lambda: sdpa_rows(problem, found))
    heads = (problem.columns // found.dim).unique().tolist()
    out = torch.full((len(problem.out), found.heads * found.dim), float("nan"))
    first = 0
    touched = set(problem.rows.tolist())
    for length in found.lengths:
        rows = range(first, first + length)
        if touched & set(rows):
            q, k, v = problem.once(("heads", first), lambda: heads_of(problem, found, heads, first, length))  # noqa: B023
            if variant["formula"] == "key heads interleaved":
                k, v = problem.once(("odd", first), lambda: heads_of(problem, found, heads, first, length, True)[1:])  # noqa: B023
            done = _sequence(q, k, v, variant, problem.storage, found.scale, heads)
            for i, head in enumerate(heads):
                out[first : first + length, head * found.dim : (head + 1) * found.dim] = done[i]
        first += length
    return problem.cut(out)


# ---------------------------------------------------------------------------------------------------- one sequence


def _operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> tuple[torch.Tensor, ...]:
    name = variant["operands"]
    if name == "stored":
        return q, k, v
    if name.startswith("e4m3"):
        how = variant["scale"].partition(", cache ")[2]

        def coded(t: torch.Tensor) -> torch.Tensor:
            value = t.to(FP32)
            amax = value.abs().amax(-1, keepdim=True).expand(value.shape)
            if how == "scale of all":
                amax = value.abs().amax().expand(value.shape)
            elif how.startswith("scale "):
                amax = torch.full_like(value, 448.0 * float(how.split()[1]))
            grid, scales = quantise_e4m3(value, amax, 448.0, how.endswith("pow2"))
            return (grid * scales).to(t.dtype)

        return q, coded(k), coded(v)
    return tuple(round_to(t.to(FP32), name) for t in (q, k, v))


def _scores(q: torch.Tensor, k: torch.Tensor, variant: Variant, storage: str, scale: float) -> torch.Tensor:
    """Scaled scores [H, T, S], FP32, not masked."""
    dim = q.shape[-1]
    where, rounding = variant["scale"].split(", cache")[0], variant["rounding"]
    factors = {"1": 1.0, "1/D": 1 / dim, "twice": 2 * scale, "half": scale / 2, "squared": scale * scale}
    factor = factors.get(where, scale)
    if where.startswith("times"):
        factor = scale * float(where.split()[1])
    elif where.startswith("1/sqrt"):
        factor = float(where[7:-1]) ** -0.5
    if where.startswith("queries"):
        scaled = q.to(FP32) * factor
        q = scaled if where.endswith("FP32") else round_to(scaled, storage).to(q.dtype)
        factor = 1.0
    scores = product(q, k, variant["order"], storage, rounding.startswith("scores"))
    if factor != 1.0:
        scores = scores * torch.tensor(factor, dtype=FP32)
    if "scaled scores" in rounding:
        scores = round_to(scores, storage)
    if variant["formula"].startswith("softcap"):
        cap = float(variant["formula"].split()[1])
        step = storage if "scaled scores" in rounding else "fp32"  # an eager stack rounds here, too
        scores = round_to(torch.tanh(round_to(scores / cap, step)), step) * cap
        scores = round_to(scores, step)
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
    if mask.startswith("chunks"):
        return (key <= query) & (key // int(mask.split()[-1]) == query // int(mask.split()[-1]))
    if mask.startswith("prefix"):
        return (key <= query) | ((key < int(mask.split()[-1])) & (query < int(mask.split()[-1])))
    if mask.startswith("window"):
        return (key <= query) & (key > query - int(mask.split()[-1]))
    return key <= query


def _sequence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    storage: str,
    scale: float,
    heads: list[int],
) -> torch.Tensor:
    """[H, T, D] FP32 of one sequence, rounded to the output."""
    q, k, v = _operands(q, k, v, variant)
    count = q.shape[1]
    scores = _scores(q, k, variant, storage, scale)
    visible = _visible(count, variant["mask"])
    scores = torch.where(visible, scores, float("-inf"))
    if "normalised P" in variant["rounding"] and variant["split"] == "1":
        sink = sinks(variant, heads)
        if sink is None:
            p = torch.softmax(scores, -1)
        else:  # one more column, that no value belongs to
            p = torch.softmax(torch.cat([scores, sink[:, None, None].expand(-1, count, 1)], -1), -1)[..., :-1]
        out = product(round_to(p, storage), v.transpose(-1, -2), variant["order"], storage, True)
        return round_to(out, variant["output"])
    if variant["split"].endswith(OF_ROWS):
        rows = [_row(scores[:, t : t + 1], v, visible[t : t + 1], variant, storage, heads) for t in range(count)]
        return round_to(torch.cat(rows, 1), variant["output"])
    parts = spans(variant["split"], count)
    states = [span(scores, v, visible, begin, end, variant, storage, heads) for begin, end in parts]
    if variant["split"].endswith("normalised"):
        out = by_logsumexp(states, variant)
    else:
        merged = states[0]
        for state in states[1:]:
            merged = merge(merged, state, variant)
        out = merged.o / merged.l[..., None]
        if variant["primitive"] == FLASH or variant["primitive"].endswith(RECIPROCAL):
            out = merged.o * (1 / merged.l)[..., None]
    return round_to(out, variant["output"])


def _row(
    scores: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, variant: Variant, storage: str, heads: list[int]
) -> torch.Tensor:
    """[H, 1, D] of one row, whose keys alone are split."""
    keys = int(visible.nonzero()[:, 1].max()) + 1
    size = -(-keys // int(variant["split"].split()[0]))
    parts = [(i, min(i + size, keys)) for i in range(0, keys, size)]
    states = [span(scores, v, visible, begin, end, variant, storage, heads) for begin, end in parts]
    merged = states[0]
    for state in states[1:]:
        merged = merge(merged, state, variant)
    if variant["primitive"].endswith(RECIPROCAL):
        return merged.o * (1 / merged.l)[..., None]
    return merged.o / merged.l[..., None]
