"""Sketches of weights: small JSON records from which two sides tell how a tensor differs without exchanging it.

A sketch holds digests of the bits and of the values' rows and columns, some samples, and the 8-bit grid that the values
lie on, if any. Row and column digests are linear hashes modulo 2**64, sum_j x_ij c_j and sum_i x_ij c_i with the same
constants c, over the bits rounded to BF16: so a transposed tensor has rows and columns exchanged, re-ordered rows keep
the sorted row hashes, and a tensor that was only stored in another dtype keeps all of them. Digests are integer sums:
the same on any machine and with any number of threads; mean and rms are for people.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from zerogap.diagnose.verdict import SUBJECTS, UNATTRIBUTED, Cause
from zerogap.errors import ConfigError

NUM_SAMPLES = 256
CORNER = 128  # rows and columns of the sampled blocks: the block of FP8 checkpoints
_MOVED = 0.005  # relative; trained norms are much further from one
_CHUNK = 1 << 18  # elements that are hashed at a time, so that they stay in the cache
_ROWS = 16  # rows at either end that are tried for a scale per channel
Sketch = Mapping[str, Any]


def sketch(tensor: torch.Tensor) -> dict[str, Any]:
    """Record a weight or buffer of any shape and dtype (a quantised tensor as it is stored).

    Returns:
        JSON-ready: `dtype`, `shape`; `digest` of the bits; `rows`, `columns`, `sorted_rows`, `sorted_columns` of the
        values rounded to BF16 (a vector counts as one column); `row_sum` of the mixed row hashes modulo 2**64, which
        adds up over tensors; `fp16_rows` of FP32 and FP16 values rounded to FP16; `in_bf16` whether rounding to BF16
        changes nothing; `amax`, `mean`, `rms` of finite values, `nonfinite` their complement's count, `constant`
        whether all elements are equal; `samples` at places that depend on the number of
        elements only (None where not finite); `grid`, e.g. `e4m3/block`, or empty.

    Raises:
        ConfigError: a tensor without values (meta device).
    """
    if tensor.device.type == "meta":
        raise ConfigError("tensor", "meta", "give tensors with values: load the weights first")
    values = tensor.detach().cpu().contiguous()
    if values.is_complex():
        values = torch.view_as_real(values)
    stack = _as_matrices(values)
    hashes = _line_hashes(stack, torch.bfloat16)
    floats = values.dtype in (torch.float32, torch.float16, torch.float64)
    picked = values.reshape(-1)[_places(values.numel())].double()
    return {
        "dtype": str(values.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "digest": _digest(values.reshape(-1).view(torch.uint8).numpy()) if values.numel() else _digest(np.zeros(0)),
        "rows": _digest(hashes[0]),
        "columns": _digest(hashes[1]),
        "sorted_rows": _digest(np.sort(hashes[0])),
        "sorted_columns": _digest(np.sort(hashes[1])),
        "row_sum": f"{int(_mixed(hashes[0].view(np.uint64)).sum(dtype=np.uint64)):016x}",
        "fp16_rows": _digest(_line_hashes(stack, torch.float16)[0]) if floats else "",
        **_statistics(stack),
        "samples": [x if math.isfinite(x) else None for x in picked.tolist()],
        "grid": _grid(values),
    }


def _as_matrices(values: torch.Tensor) -> torch.Tensor:
    """View as [E, rows, columns]; a vector is one column, so that its elements are its rows."""
    if values.ndim < 2:
        return values.reshape(1, -1, 1)
    return values.reshape(-1, *values.shape[-2:]) if values.numel() else values.reshape(1, 0, 1)


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()[:32]


def _constants(count: int) -> torch.Tensor:
    """int64 [count]: the hash's multipliers, odd, from splitmix64 of 1, 2, ..."""
    with np.errstate(over="ignore"):
        x = _mixed(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)
    return torch.from_numpy(x.view(np.int64))


def _mixed(x: np.ndarray) -> np.ndarray:
    """uint64 through the finaliser of splitmix64."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _row_chunks(stack: torch.Tensor) -> list[tuple[int, int, int]]:
    """(matrix, first row, end row) of the pieces that are read at once."""
    matrices, rows, columns = stack.shape
    step = max(1, _CHUNK // max(columns, 1))
    return [(e, i, min(rows, i + step)) for e in range(matrices) for i in range(0, rows, step)]


def _line_hashes(stack: torch.Tensor, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Row hashes int64 [E * rows] and column hashes [E * columns] of the values rounded to a 16-bit dtype."""
    matrices, rows, columns = stack.shape
    constants = _constants(max(rows, columns))
    by_row = torch.zeros(matrices, rows, dtype=torch.int64)
    by_column = torch.zeros(matrices, columns, dtype=torch.int64)
    for e, start, end in _row_chunks(stack):
        bits = stack[e, start:end].to(dtype).view(torch.int16).to(torch.int64)
        by_row[e, start:end] = (bits * constants[:columns]).sum(1)
        by_column[e] += bits.mul_(constants[start:end, None]).sum(0)
    return by_row.reshape(-1).numpy(), by_column.reshape(-1).numpy()


def _statistics(stack: torch.Tensor) -> dict[str, Any]:
    low, high, total, squares, nonfinite, exact = math.inf, -math.inf, 0.0, 0.0, 0, True
    for e, start, end in _row_chunks(stack):
        part = stack[e, start:end]
        wide = part.float()
        if part.dtype != torch.bfloat16:
            exact = exact and bool(torch.equal(wide.bfloat16().float(), wide))
        smallest, largest = (float(x) for x in wide.aminmax())
        if not math.isfinite(largest - smallest):
            bad = ~wide.isfinite()
            nonfinite += int(bad.sum())
            wide = wide.masked_fill(bad, 0.0)
            smallest, largest = (float(x) for x in wide.aminmax())
        low, high = min(low, smallest), max(high, largest)
        total += float(wide.sum())
        squares += float(wide.square().sum())
    finite = max(stack.numel() - nonfinite, 1)
    amax = max(abs(low), abs(high)) if stack.numel() else 0.0
    facts = {"amax": amax, "mean": total / finite, "rms": math.sqrt(squares / finite), "nonfinite": nonfinite}
    return {"in_bf16": exact, "constant": low >= high and not nonfinite, **facts}


def _places(count: int) -> torch.Tensor:
    """int64 [at most NUM_SAMPLES]: one element out of each stretch of equal length, at a fixed pseudo-random place."""
    if count <= NUM_SAMPLES:
        return torch.arange(count)
    shares = (_constants(NUM_SAMPLES).numpy().view(np.uint64) >> np.uint64(11)).astype(np.float64) / 2.0**53
    return torch.from_numpy(((np.arange(NUM_SAMPLES) + shares) * (count / NUM_SAMPLES)).astype(np.int64))


def _grid(values: torch.Tensor) -> str:
    """The 8-bit grid of a matrix as `format/scope`, or empty: whether its values are a few codes times a scale.

    Floating-point codes with m mantissa bits times one scale have at most 2**m different mantissas, whatever the scale;
    integer codes are whole multiples of the group's amax over 127 or 128. Seen in two corner blocks, and for a scale
    per channel in some rows at either end.
    """
    if values.ndim < 2 or values.numel() < 1024 or not values.is_floating_point():
        return ""
    matrix = values.reshape(-1, *values.shape[-2:])[0]
    rows, columns = matrix.shape
    low = (rows - 1) // CORNER * CORNER, (columns - 1) // CORNER * CORNER
    corners = [matrix[i : i + CORNER, j : j + CORNER].float() for i, j in {(0, 0), low}]
    corners = [block for block in corners if block.numel() >= 256]
    lines = torch.cat([matrix[:_ROWS], matrix[_ROWS:][-_ROWS:]]).float()
    if not corners or not all(bool(part.isfinite().all()) for part in (*corners, lines)):
        return ""
    joined = torch.cat([block.reshape(-1) for block in corners])
    for scope, groups in (("tensor", [joined]), ("block", corners), ("channel", list(lines))):
        counts = [found for found in map(_mantissas, groups) if found]
        if counts and max(counts) <= 8 and 2 * len(counts) >= len(groups):
            return {1: "pow2", 2: "e2m1", 4: "e5m2", 8: "e4m3"}[1 << (max(counts) - 1).bit_length()] + f"/{scope}"
    peak = matrix.abs().amax().float()
    blocks = [(block, block.abs().amax()) for block in corners]
    channels = [(lines, lines.abs().amax(1, keepdim=True))]  # a channel's amax is that of its whole row
    for scope, pairs in (("tensor", [(joined, peak)]), ("block", blocks), ("channel", channels)):
        if any(_on_integers([(group, top / divisor) for group, top in pairs]) for divisor in (127.0, 128.0)):
            return f"int8/{scope}"
    return ""


def _mantissas(group: torch.Tensor) -> int:
    """Different 7-bit mantissas among the group's nonzero values, or 0 if it has too few values to tell."""
    bits = group.reshape(-1).bfloat16().view(torch.int16).numpy() & 0x7FFF
    bits = bits[bits != 0]
    count = int((np.bincount(bits & 0x7F, minlength=128) > 0).sum())
    if count <= 8 and (len(bits) < 24 or len(np.unique(bits)) < 12):
        return 0
    return count


def _on_integers(groups: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether small values are whole multiples of their group's step, up to BF16 rounding of value and step."""
    seen = fits = 0
    for values, step in groups:
        codes = values / step.clamp(min=1e-30)
        codes = codes[(codes != 0) & (codes.abs() < 16)]
        seen += len(codes)
        fits += int(((codes - codes.round()).abs() <= codes.abs() / 256 + 1e-3).sum())
    return seen >= 64 and fits >= 0.99 * seen


_HEADS = ("lm_head.weight", "output.weight", "embed_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "token_embd.weight")


def compare_sketches(all_a: Mapping[str, Sketch], all_b: Mapping[str, Sketch], subject: str = "weights") -> list[Cause]:
    """One cause per name that differs, in the order of side A's names, then those that only B has.

    Args:
        subject: `weights`, or `buffers`, whose causes are only `missing`, `dtype` and `stale`.
    """
    names = [*all_a, *(name for name in all_b if name not in all_a)]
    found = [compare_sketch(name, all_a.get(name), all_b.get(name), all_a, all_b) for name in names]
    causes = [cause for cause in found if cause]
    if subject == "weights":
        return causes
    fields = SUBJECTS["buffers"]
    return [Cause(subject, c.field if c.field in fields else "stale", f"{c.field}: {c.detail}") for c in causes]


def compare_sketch(
    name: str, a: Sketch | None, b: Sketch | None, all_a: Mapping[str, Sketch], all_b: Mapping[str, Sketch]
) -> Cause | None:
    """How one weight differs between the sides; None if both hold the same values (in whatever dtype).

    Relations that digests prove (`swapped`, `transposed`, `permuted`, `tied`, `dtype`) come before those that rest on
    samples (`scaled`, `quantised`, `stale`, `missing`). Two unlike shapes that no relation explains stay unattributed.

    Args:
        a, b: the sketches under this name, or None where a side has none.
        all_a, all_b: all sketches of the sides, to find where else the values are.
    """
    if a is None or b is None:
        return _one_sided(name, a, all_a, all_b)
    if _same_values(a, b):
        return None
    if _moved(a, b):
        return Cause(
            "weights", "stale", f"{name}: {'A' if a['constant'] else 'B'} holds the value from before training"
        )
    if (a["constant"], a["nonfinite"] > 0) != (b["constant"], b["nonfinite"] > 0):
        side = "A" if a["constant"] or a["nonfinite"] else "B"
        return Cause("weights", "missing", f"{name}: {side} holds {_what(a if side == 'A' else b)}; it was not loaded")
    # by name before by place: a tensor that a side holds twice is not swapped because its twin was stored apart
    return (
        _tied(name, a, b, all_a, all_b)
        or _by_digests(name, a, b)
        or _swapped(name, a, b, all_a, all_b)
        or _exchanged(name, a, b, all_a, all_b)
        or _by_samples(name, a, b)
    )


def _same_values(a: Sketch, b: Sketch) -> bool:
    if a["dtype"] == b["dtype"] and a["digest"] == b["digest"]:
        return [n for n in a["shape"] if n != 1] == [n for n in b["shape"] if n != 1]
    return bool(a["rows"] == b["rows"] and a["in_bf16"] and b["in_bf16"])


def _moved(a: Sketch, b: Sketch) -> bool:
    """One side constant, the other by a few small updates away from it (norms begin as ones)."""
    if a["constant"] == b["constant"] or a["shape"] != b["shape"] or a["nonfinite"] or b["nonfinite"]:
        return False
    x, y = _pairs(a, b)
    return bool((np.abs(y - x) <= _MOVED * np.minimum(np.abs(x), np.abs(y))).all()) and len(x) > 0


def _what(one: Sketch) -> str:
    if one["nonfinite"]:
        return f"{one['nonfinite']} values that are not finite"
    return f"the same value {one['samples'][0] if one['samples'] else 0.0:g} everywhere"


def _partner(name: str, side: Mapping[str, Sketch]) -> str | None:
    """The embedding that a head may be tied to, or the head for the embedding."""
    ends = _EMBEDDINGS if name.endswith(_HEADS) else _HEADS if name.endswith(_EMBEDDINGS) else ()
    return next((other for other in side if other != name and other.endswith(ends)), None) if ends else None


def _one_sided(name: str, a: Sketch | None, all_a: Mapping[str, Sketch], all_b: Mapping[str, Sketch]) -> Cause | None:
    """A weight that one side does not list: implied by a tied embedding, or missing."""
    has, lacks, side = (all_a, all_b, "B") if a is not None else (all_b, all_a, "A")
    partner = _partner(name, lacks)
    if partner and has[name]["rows"] == lacks[partner]["rows"]:
        return None
    if partner and partner in has and name.endswith(_HEADS):
        return Cause("weights", "tied", f"{name}: {side} uses {partner} in its place, whose values differ")
    return Cause("weights", "missing", f"{name}: {side} has no such tensor")


def _tied(name: str, a: Sketch, b: Sketch, all_a: Mapping[str, Sketch], all_b: Mapping[str, Sketch]) -> Cause | None:
    mine, theirs = _partner(name, all_a), _partner(name, all_b)
    if mine is None or theirs is None or a["shape"] != b["shape"]:
        return None
    tied_a, tied_b = a["rows"] == all_a[mine]["rows"], b["rows"] == all_b[theirs]["rows"]
    if tied_a == tied_b:
        return None
    return Cause("weights", "tied", f"{name}: equal to {mine} on side {'A' if tied_a else 'B'} only")


def _swapped(name: str, a: Sketch, b: Sketch, all_a: Mapping[str, Sketch], all_b: Mapping[str, Sketch]) -> Cause | None:
    if a["constant"] or b["constant"]:
        return None
    for mine, others, whose in ((a, all_b, "B"), (b, all_a, "A")):
        for other, one in others.items():
            if other != name and one["rows"] == mine["rows"] and one["shape"] == mine["shape"]:
                return Cause("weights", "swapped", f"{name}: its values are {other} on side {whose}")
    return None


def _exchanged(
    name: str, a: Sketch, b: Sketch, all_a: Mapping[str, Sketch], all_b: Mapping[str, Sketch]
) -> Cause | None:
    """Rows that lie in another tensor of the same module (gate and up interleaved, say): the rows of all of the
    module's tensors that differ are the same ones on both sides. `row_sum` adds up over tensors, in any order."""
    module = name.removesuffix(".weight").rpartition(".")[0]
    names = [n for n in all_a if n in all_b and n.removesuffix(".weight").rpartition(".")[0] == module]
    names = [n for n in names if all_a[n]["rows"] != all_b[n]["rows"] and len(all_a[n]["shape"]) == len(a["shape"])]
    names = [n for n in names if all_a[n]["shape"][1:] == a["shape"][1:] == all_b[n]["shape"][1:]]
    if len(names) < 2 or name not in names or len(a["shape"]) < 2:
        return None
    sums = []
    for side in (all_a, all_b):
        if not all(side[n].get("row_sum") for n in names):  # traces written before there was one
            return None
        sums.append(sum(int(side[n]["row_sum"], 16) for n in names) % 2**64)
    if sums[0] != sums[1] or a["row_sum"] == b["row_sum"]:
        return None
    others = ", ".join(n.removesuffix(".weight").rpartition(".")[2] for n in names)
    return Cause("weights", "permuted", f"{name}: the rows of {others} are the same, but dealt out otherwise")


def _by_digests(name: str, a: Sketch, b: Sketch) -> Cause | None:
    """Relations that hold for all elements, up to the dtype."""
    shape = list(a["shape"])
    turned = shape[:-2] + shape[:-3:-1]
    if len(shape) > 1 and b["shape"] == turned and (a["rows"], a["columns"]) == (b["columns"], b["rows"]):
        return Cause("weights", "transposed", f"{name}: B holds the transpose of A, {b['shape']}")
    if a["digest"] == b["digest"] and a["dtype"] == b["dtype"]:
        return Cause("weights", "transposed", f"{name}: the same bytes are read as {a['shape']} and {b['shape']}")
    if a["shape"] != b["shape"]:
        return None
    if a["sorted_rows"] == b["sorted_rows"] and a["rows"] != b["rows"]:
        return Cause("weights", "permuted", f"{name}: the same rows in another order")
    if len(shape) > 1 and a["sorted_columns"] == b["sorted_columns"] and a["columns"] != b["columns"]:
        return Cause("weights", "permuted", f"{name}: the same columns in another order")
    relations = {
        "BF16": a["rows"] == b["rows"] and a["in_bf16"] != b["in_bf16"],
        "FP16": a["fp16_rows"] and a["fp16_rows"] == b["fp16_rows"],
    }
    for grid, holds in relations.items():
        # in one dtype, a tiny update vanishes by rounding too
        if holds and (a["dtype"] != b["dtype"] or _looks_rounded(*_pairs(a, b), *_FINE[grid])):
            return Cause("weights", "dtype", f"{name}: equal after rounding to {grid} ({a['dtype']} and {b['dtype']})")
    return None


def _by_samples(name: str, a: Sketch, b: Sketch) -> Cause:
    """Relations seen on the samples: both sides took the same places."""
    if a["shape"] != b["shape"]:
        return Cause("weights", UNATTRIBUTED, f"{name}: shapes {a['shape']} and {b['shape']}")
    x, y = _pairs(a, b)
    size = math.sqrt(float((x * x).sum()) * float((y * y).sum()))
    cosine = float((x * y).sum()) / size if size else 0.0
    apart = x != y
    if relation := _affine(x, y, 1e-5):
        return Cause("weights", "scaled", f"{name}: {relation}")
    if cast := _cast(x[apart], y[apart]):
        return Cause("weights", "dtype", f"{name}: {cast} ({a['dtype']} and {b['dtype']})")
    if relation := _affine(x, y, 2.0**-7 if a["in_bf16"] or b["in_bf16"] else 2.0**-10):
        return Cause("weights", "scaled", f"{name}: {relation}")
    if grid := _quantised(x, y, a, b, cosine):
        return Cause("weights", "quantised", f"{name}: {grid}")
    seen = f"{int(apart.sum())} of {len(x)} samples differ, correlation {cosine:.4f}"
    if apart.any() and abs(cosine) < 0.5:
        return Cause("weights", "missing", f"{name}: another tensor altogether, as if never loaded; {seen}")
    if apart.any() and not apart.all():
        rest = math.sqrt(float((x[apart] ** 2).sum()) * float((y[apart] ** 2).sum()))
        if rest and len(x[apart]) >= 8 and abs(float((x[apart] * y[apart]).sum())) < 0.3 * rest:
            return Cause("weights", "missing", f"{name}: part of the tensor is another, as if never loaded; {seen}")
    change = math.sqrt(float(((y - x) ** 2).sum()) / max(float((x * x).sum()), 1e-300))
    return Cause("weights", "stale", f"{name}: an older or newer version, {change:.1e} of its size apart; {seen}")


def _pairs(a: Sketch, b: Sketch) -> tuple[np.ndarray, np.ndarray]:
    """The samples at the places where both are finite."""
    pairs = [(x, y) for x, y in zip(a["samples"], b["samples"]) if x is not None and y is not None]
    return np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])


_FINE = {"BF16": (7, -126), "FP16": (10, -14)}  # bits of the mantissa, smallest exponent


def _looks_rounded(x: np.ndarray, y: np.ndarray, bits: int, smallest: int, slack: float = 0.0) -> bool:
    """Whether the gaps lie as rounding leaves them: evenly within half a unit of the last place.

    Quartiles within four standard errors, and within `slack` more for values that were rounded before.
    """
    apart = x != y
    large = np.maximum(np.abs(x), np.abs(y))[apart]
    if len(large) == 0:
        return False
    units = np.exp2(np.maximum(np.floor(np.log2(large)), smallest) - bits)
    quartiles = np.quantile(np.abs(y - x)[apart] / units, [0.25, 0.5, 0.75])
    error = 1 / math.sqrt(len(large)) + slack
    return bool((np.abs(quartiles - [0.125, 0.25, 0.375]) <= error).all())


def _round(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(values).float().to(dtype).double().numpy()


def _truncate(values: np.ndarray) -> np.ndarray:
    bits = torch.from_numpy(values).float().view(torch.int32) & -65536
    return bits.view(torch.float32).double().numpy()


def _cast(x: np.ndarray, y: np.ndarray) -> str:
    """Which rounding of one side's values gives the other's, in nearly all places (both may come from a third)."""
    if len(x) == 0:
        return ""
    for grid, cast in (
        ("BF16", lambda v: _round(v, torch.bfloat16)),
        ("FP16", lambda v: _round(v, torch.float16)),
        ("BF16", _truncate),
    ):
        verb, bits = ("truncated", _FINE[grid][0] - 1) if cast is _truncate else ("rounded", _FINE[grid][0])
        if not _looks_rounded(x, y, bits, _FINE[grid][1], slack=0.07):
            continue
        for text, found, wanted in (("B is A", cast(x), y), ("A is B", cast(y), x)):
            if np.mean(found == wanted) >= 0.9:
                return f"{text} {verb} to {grid}"
    return ""


def _affine(x: np.ndarray, y: np.ndarray, rounding: float) -> str:
    """A constant ratio or a constant offset that explains all samples up to a relative rounding."""
    large = x != 0
    if large.sum() < 8:
        return ""
    ratio = float(np.median(y[large] / x[large]))
    if abs(ratio - 1) > 2 * rounding and np.mean(np.abs(y - ratio * x) <= rounding * np.abs(ratio * x)) >= 0.99:
        return f"B is A times {ratio:.6g}"
    offset = float(np.median(y - x))
    close = np.abs(y - x - offset) <= rounding * (np.abs(x) + abs(offset))
    if abs(offset) > 4 * rounding * float(np.abs(x).max() + np.abs(y).max()) and close.mean() >= 0.99:
        return f"B is A plus {offset:.6g}"
    return ""


_EIGHT_BITS = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


def _quantised(x: np.ndarray, y: np.ndarray, a: Sketch, b: Sketch, cosine: float) -> str:
    """An 8-bit grid on one side whose rounding explains the difference, or two grids of unlike scopes."""
    stored = a["dtype"] in _EIGHT_BITS, b["dtype"] in _EIGHT_BITS
    if stored[0] != stored[1] and abs(cosine) > 0.5:
        return f"stored as {a['dtype'] if stored[0] else b['dtype']} on side {'A' if stored[0] else 'B'} only"
    if not (a["grid"] or b["grid"]) or cosine < 0.9:
        return ""
    if a["grid"] and b["grid"]:
        if a["grid"] != b["grid"]:
            return f"A lies on the grid {a['grid']}, B on {b['grid']}"
        whole, coarse, words = x, y, f"both lie on the grid {a['grid']}, quantised from unlike sources or scales"
        reach = 2.0  # one step instead of half a step
    else:
        side = "A" if a["grid"] else "B"
        whole, coarse = (y, x) if side == "A" else (x, y)
        words, reach = f"{side} lies on the grid {a['grid'] or b['grid']}, the other side does not", 1.0
    gap, peak = np.abs(whole - coarse), max(a["amax"], b["amax"])
    half = peak / 254 if "int8" in words else np.abs(coarse) / 16 + peak / 2.0**18
    bound = reach * half * 1.01 + np.abs(coarse) / 256  # and how the values were stored
    scale = math.sqrt(float((coarse**2).mean()))
    typical = float(np.median(gap[gap > 0])) if (gap > 0).any() else 0.0
    fits = np.mean(gap <= bound) >= 0.98 and typical >= 0.001 * scale
    return words if fits else ""
