"""Rotary embedding: forms of real stacks, and changes of one field. Rows are whole heads, side by side.

primitive   `FP64 angles, fma` (the contract), `FP32 angles, mul+add` (transformers), `FP32 angles, fma`, ...; `...,
            sine's fma` (the cosine's product is rounded, not the sine's)
rounding    `once` (FP32 table), `table` (rounded to the dtype of the output, products in FP32), `every step` (table and
            each product, too), `every step, FP32 table`, `angles` (to BF16; then every step), `frequencies` (to BF16);
            `BF16 table`, `FP16 table` (products in FP32), `BF16 angles`, `FP16 angles` (all else in FP32)
formula     `halves, theta T`, `neighbours, theta T`; `..., first F of each head`, `..., no scaling`, `..., turned
            back`, `..., factor M` (of the table's numbers: YaRN's attention factor)
positions   as given; `one more`, `one less`, `from 0`, `to the end` (0 at a sequence's last row), `times F`; `plus N`;
            `plus N x R, ...` (R rows each)

T, F, M and N are usual ones, and those that the rows show: each pair's turn is an angle, and N may differ from row to
row (a prompt's padding that is counted, packed samples that are not).
"""

import math
from collections.abc import Iterator, Mapping

import torch

from zerogap.diagnose.simulate import shown
from zerogap.diagnose.simulate.arithmetic import FP32, fma, round_to
from zerogap.diagnose.simulate.contract import positions_of, rope_of
from zerogap.diagnose.simulate.variant import Problem, Variant
from zerogap.ops.rope import KINDS, attention_factor, frequencies

NARROW = tuple(f"{dtype} {what}" for what in ("table", "angles") for dtype in ("BF16", "FP16"))
ROUNDINGS = ("once", "table", "every step", "every step, FP32 table", "angles", "frequencies", *NARROW)
PRIMITIVES = (
    *("FP64 angles, fma", "FP32 angles, mul+add", "FP32 angles, fma", "FP64 angles, mul+add"),
    *("FP32 angles, sine's fma", "FP64 angles, sine's fma"),
)
POSITIONS = ("as given", "one more", "one less", "from 0", "to the end", "times 2", "times 0.5", "times 0")
_ONCE = ("once", "table", *NARROW)
PARTIAL, UNSCALED, BACK, FACTOR = " of each head", ", no scaling", ", turned back", ", factor "
REACH, RUNS = 4096, 64  # steps that a row may stand beyond its position; runs of rows that are written out
PARTS = (0.5, 0.25, 0.75)


def _theta(problem: Problem) -> float:
    return rope_of(problem.parameters).theta


def _pairing(problem: Problem) -> str:
    return "neighbours" if problem.parameters.get("interleaved") else "halves"


def bases(problem: Problem) -> list[Variant]:
    """The contract's; transformers' with a table and products in the dtype of the output, which autocast may make wider
    than the input."""
    if not _known(problem):
        return []
    contract = Variant.of(
        "rope",
        {
            "primitive": PRIMITIVES[0],
            "rounding": "once",
            "formula": f"{_pairing(problem)}, theta {_theta(problem):g}",
            "positions": "as given",
        },
    )
    eager = contract.but(primitive=PRIMITIVES[1], rounding="every step" if problem.recorded != "fp32" else "once")
    return [contract, eager, contract.but(primitive=PRIMITIVES[1])]


def changes(variant: Variant, problem: Problem) -> Iterator[Variant]:
    """Variants with one field changed."""
    for positions in POSITIONS:
        yield variant.but(positions=positions)
    for rounding in ROUNDINGS:
        yield variant.but(rounding=rounding)
    for primitive in PRIMITIVES:
        yield variant.but(primitive=primitive)
    theta = _theta(problem)
    for base in dict.fromkeys((theta, 1e4, 1e5, 5e5, 1e6, 1e7, theta * 10, theta / 10)):
        for pairing in ("halves", "neighbours"):
            yield variant.but(formula=f"{pairing}, theta {base:g}")
    for end in (*(f", first {part}{PARTIAL}" for part in PARTS), UNSCALED, BACK):
        yield variant.but(formula=f"{_pairing(problem)}, theta {theta:g}{end}")
    if _known(problem):
        ends, thetas, positions_ = problem.once("shown", lambda: _shown(problem))
        for base in thetas:
            yield variant.but(formula=f"{_pairing(problem)}, theta {shown.name(base)}")
        for end in ends:
            yield variant.but(formula=f"{_pairing(problem)}, theta {theta:g}{end}")
        for positions in positions_:
            yield variant.but(positions=positions)


def _shown(problem: Problem) -> tuple[list[str], list[float], list[str]]:
    """(ends of the formula, bases, positions) that the rows show and the parameters do not say."""
    dim = int(problem.number("head_dim") or 0)
    before, after = (t.double().unflatten(1, (-1, dim)) for t in (problem.inputs[0], problem.out))
    if before.shape != after.shape:
        return [], [], []
    known = ~after.isnan().flatten(1).any(1)
    before, after = before[known], after[known]
    ends = []
    changed = (before != after).any(0).any(0).nonzero()
    size = int(changed.max()) + 1 if len(changed) else dim
    size += size % 2
    if size < dim:
        ends.append(f", first {shown.name(size / dim)}{PARTIAL}")
    before, after = before[..., :size], after[..., :size]
    if _pairing(problem) == "halves":
        pairs = [torch.complex(t[..., : size // 2], t[..., size // 2 :]) for t in (before, after)]
    else:
        pairs = [torch.complex(t[..., 0::2], t[..., 1::2]) for t in (before, after)]
    spec = rope_of(problem.parameters)
    plain = spec.kind == "default" or size < dim
    usual = spec.theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    wave = usual if plain else torch.tensor(frequencies(spec, size), dtype=torch.float64)
    turned = shown.phasors(*pairs)
    length = float(turned.abs().sum() / pairs[0].abs().square().sum().clamp_min(1e-30))
    if abs(length - (1.0 if plain else attention_factor(spec))) > 2e-3:
        ends += [f"{FACTOR}{shown.name(m)}" for m in shown.near(length, 2e-3, 6)]
    positions = positions_of(problem.parameters, len(problem.out))[known]
    seen = shown.waves(turned, positions)
    thetas = [n for base in shown.bases_of(seen, size) for n in shown.near(base, 0.02, 6)]
    moved = [f"times {shown.name(n)}" for f in shown.ratio(seen, wave) for n in shown.near(f, 0.005, 6)]
    beyond = torch.zeros(len(problem.out), dtype=torch.int64)
    beyond[known] = shown.offsets(turned, positions, wave, REACH)
    steps, counts = torch.unique_consecutive(beyond, return_counts=True)
    if len(steps) == 1 and int(steps[0]):
        moved.append(f"plus {int(steps[0])}")
    elif 1 < len(steps) <= RUNS:
        moved.append("plus " + ", ".join(f"{n} x {rows}" for n, rows in zip(steps.tolist(), counts.tolist())))
    return ends, thetas, moved


def _known(problem: Problem) -> bool:
    given = problem.parameters
    scaling = given.get("scaling")
    kind = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, Mapping) else "default"
    has_base = isinstance(given.get("theta"), int | float) or given.get("rope") is not None
    return has_base and kind in KINDS and problem.number("head_dim") is not None and len(problem.inputs) == 1


def applies(variant: Variant, problem: Problem) -> bool:
    """True if base and head size are known, and the variant says something of its own."""
    if not _known(problem):
        return False
    if problem.recorded == "fp32" and variant["rounding"] in ("every step", "every step, FP32 table", "table"):
        return False
    if problem.recorded == "bf16" and variant["rounding"] == "BF16 table":
        return False
    if variant["rounding"] not in _ONCE and variant["primitive"].endswith("sine's fma"):
        return False
    if variant["rounding"] == "frequencies" and variant["primitive"].startswith("FP64"):
        return False
    return UNSCALED not in variant["formula"] or rope_of(problem.parameters).kind != "default"


def simulate(variant: Variant, problem: Problem) -> torch.Tensor:
    """The sample [rows, columns], FP32."""
    dim = int(problem.number("head_dim") or 0)
    heads = problem.inputs[0][problem.rows].to(FP32).unflatten(1, (-1, dim))
    formula = variant["formula"]
    size = round(float(formula.removesuffix(PARTIAL).split()[-1]) * dim) if formula.endswith(PARTIAL) else dim
    cos, sin = problem.once(("table", variant), lambda: _table(variant, problem, size))
    if BACK in formula:
        sin = -sin
    part = heads[..., :size]
    if formula.startswith("halves"):
        x, y = part[..., : size // 2], part[..., size // 2 :]
    else:
        x, y = part[..., 0::2], part[..., 1::2]
    first, second = _turned(x, y, cos[:, None], sin[:, None], variant, problem.recorded)
    turned = torch.cat([first, second], -1)
    if formula.startswith("neighbours"):
        turned = torch.stack([first, second], -1).flatten(-2)
    out = torch.cat([turned, heads[..., size:]], -1)
    return round_to(out.flatten(1), problem.recorded)[:, problem.columns]


def _turned(
    x: torch.Tensor, y: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, variant: Variant, storage: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """x cos - y sin, y cos + x sin, not yet rounded at the end."""
    cos, sin = cos.expand_as(x), sin.expand_as(x)
    if variant["rounding"] not in _ONCE:
        xc, ys, yc, xs = (round_to(t, storage) for t in (x * cos, -y * sin, y * cos, x * sin))
        return xc + ys, yc + xs
    if variant["primitive"].endswith("sine's fma"):
        return fma(-y, sin, x * cos), fma(x, sin, y * cos)
    if variant["primitive"].endswith("fma"):
        return fma(x, cos, -(y * sin)), fma(y, cos, x * sin)
    return x * cos - y * sin, y * cos + x * sin


def _table(variant: Variant, problem: Problem, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [rows, size / 2], FP32."""
    positions = _positions(variant["positions"], problem)[problem.rows].double()
    spec = rope_of(problem.parameters)
    words = variant["formula"].split(", ")
    theta, plain = float(words[1].split()[1]), UNSCALED in variant["formula"] or spec.kind == "default"
    if plain:
        exponent = torch.arange(0, size, 2, dtype=torch.float64) / size
        wide = theta**-exponent
        narrow = 1.0 / (theta ** exponent.to(FP32))
    else:
        wide = torch.tensor(frequencies(spec, size), dtype=torch.float64)
        narrow = wide.to(FP32)
    factor = 1.0 if plain else attention_factor(spec)
    if FACTOR in variant["formula"]:
        factor = float(variant["formula"].split()[-1])
    if variant["primitive"].startswith("FP64"):
        angles = positions[:, None] * wide
    else:
        if variant["rounding"] == "frequencies":
            narrow = round_to(narrow, "bf16")
        angles = positions[:, None].to(FP32) * narrow
    rounding = variant["rounding"]
    if rounding.endswith("angles"):
        angles = round_to(angles, "fp16" if rounding.startswith("FP16") else "bf16")
    cos, sin = ((t * factor).to(FP32) for t in (angles.cos(), angles.sin()))
    if rounding in ("once", "every step, FP32 table", *NARROW[2:]):
        return cos, sin
    if rounding in NARROW:
        return round_to(cos, rounding[:4].lower()), round_to(sin, rounding[:4].lower())
    return round_to(cos, problem.recorded), round_to(sin, problem.recorded)


def _positions(name: str, problem: Problem) -> torch.Tensor:
    """[R] positions; FP64, because a scaled one need not be whole."""
    given = positions_of(problem.parameters, len(problem.out)).double()
    if name in ("one more", "one less"):
        return given + (1 if name == "one more" else -1)
    if name == "from 0":
        return torch.cat([torch.arange(n, dtype=torch.float64) for n in problem.lengths])
    if name == "to the end":
        return torch.cat([torch.arange(n, dtype=torch.float64) - (n - 1) for n in problem.lengths])
    if name.startswith("plus"):
        words = name.removeprefix("plus ")
        if " x " not in words:
            return given + int(words)
        steps, counts = zip(*((int(n) for n in run.split(" x ")) for run in words.split(", ")))
        return given + torch.tensor(steps).repeat_interleave(torch.tensor(counts))
    return given if name == "as given" else given * float(name.split()[1])


def sample(problem: Problem, differs: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows and heads that differ most; heads are whole, so that both elements of a pair are seen."""
    dim = int(problem.number("head_dim") or problem.out.shape[1])
    counts = differs.expand(-1, problem.out.shape[1])
    best = torch.argsort(counts.sum(1), descending=True, stable=True)[: rows - rows // 4]
    even = torch.linspace(0, len(counts) - 1, max(1, rows // 4)).long()
    per_head = counts.unflatten(1, (-1, dim)).sum((0, 2))
    heads = torch.argsort(per_head, descending=True, stable=True)[: math.ceil(columns / dim)]
    return torch.cat([best, even]).unique(), (heads.sort().values[:, None] * dim + torch.arange(dim)).flatten()
