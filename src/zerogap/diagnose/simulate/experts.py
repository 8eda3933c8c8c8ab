"""A routed layer from its router's logits on: choice, weights, expert MLPs and their sum.

router/formula   `softmax, normalised`, `softmax`, `softmax of the chosen` (after top-k), `sigmoid, normalised`,
                 `sigmoid`; `..., bias in weights`, `..., bias ignored`, `..., top K` (another number of experts),
                 `..., groups ignored`, `..., groups by largest` (of their scores, not by the sum of two)
router/tie_rule  lower index, higher index
router/scale     the factor of all weights: as stated, usual ones, and what the rows show
router/rounding  weights: `FP32 weights`, `weights` (rounded to the storage dtype)
router/output    `stored`, `bf16` (logits are rounded before they are read)
order            of the sum: ascending, descending, by weight; `shared first`
primitive        products: `chain` (zerogap's kernel), `library: torch.nn.functional.linear`
split            of the sum over experts: 1; `N ranks` of neighbouring experts, `N ranks, in turns` (expert e on e % N),
                 summed apart; `N ranks of inner columns` (each computes part of every expert)
operands         stored; `e4m3`, `e4m3 weights`; `..., rounded` (products read the codes' values in the storage dtype)
block            of the codes: `RxC` of weights, with 1xC of rows (`all`: no border)
scale            of the codes: `fp32`, `pow2`; `..., gate and up together`
accumulate       fma, `fp32` (multiply, then add), `storage` (the sum is rounded after every expert)
rounding         `inner once` (SiLU times up), `activation first`; `..., weighted outputs` (each is rounded);
                 `..., wide products` (the down product is not rounded before its weight)
output           bf16, fp16, fp32
formula          plain (SiLU); `activation F`, F a formula of `activation`; weight on input; no shared experts; shared
                 experts alone; `shared experts times F`; `first of the chosen only`;
                 `capacity F` (an expert takes F times its even share of a sequence's rows, the first ones)
"""

import dataclasses
import re
from collections.abc import Iterator

import torch

from zerogap.diagnose.simulate import activation, dots, shown
from zerogap.diagnose.simulate.arithmetic import FP32, fma, quantise_e4m3, round_to
from zerogap.diagnose.simulate.variant import LIBRARY, Problem, Variant

TORCH = f"{LIBRARY} torch.nn.functional.linear"
SCORINGS = ("softmax, normalised", "softmax", "softmax of the chosen", "sigmoid, normalised", "sigmoid")
IN_WEIGHTS, IGNORED, WEIGHTED = ", bias in weights", ", bias ignored", ", weighted outputs"
ACTIVATION, UNGROUPED, BY_LARGEST = "activation ", ", groups ignored", ", groups by largest"
FUSED, ROUNDED, CAPACITIES = ", gate and up together", ", rounded", (1.0, 1.25, 1.5, 2.0)
WIDE, SHARED_TIMES, INNER, IN_TURNS = ", wide products", "shared experts times ", " of inner columns", ", in turns"
BLOCK = "128x128"
BLOCKS = tuple(f"{r}x{c}" for r in ("all", "1", "32", "64", "128") for c in ("all", "128", "64", "32"))
SPLITS = tuple(f"{n} ranks{end}" for n in (2, 4, 8) for end in ("", IN_TURNS, INNER))


@dataclasses.dataclass(frozen=True, eq=False)
class _Layer:
    """Weights by expert: gate, up, down; the shared MLP's, or none; the correction bias, or none."""

    experts: dict[int, dict[str, torch.Tensor]]
    shared: dict[str, torch.Tensor]
    bias: torch.Tensor | None


def _layer(problem: Problem) -> _Layer:
    def read() -> _Layer:
        experts: dict[int, dict[str, torch.Tensor]] = {}
        shared: dict[str, torch.Tensor] = {}
        for name, tensor in problem.weights.items():
            part = next((p for p in ("gate", "up", "down") if f"{p}_proj" in name), "")
            if found := re.search(r"experts\.(\d+)\.", name):
                experts.setdefault(int(found[1]), {})[part] = tensor
            elif "shared_expert" in name and part:
                shared[part] = tensor
        return _Layer(experts, shared, problem.weight("correction_bias"))

    shared = problem.once("whole", dict)
    if "layer" not in shared:
        shared["layer"] = read()
    return shared["layer"]


def bases(problem: Problem) -> list[Variant]:
    """The contract's; transformers' eager loop (everything rounded, the sum too); its grouped form (FP32 sum)."""
    scoring = str(problem.parameters.get("scoring", "softmax"))
    normalise = bool(problem.parameters.get("normalise", True))
    named = str(problem.parameters.get("activation", "silu"))
    named = activation.NAMES.get(named, named)
    formula = f"{ACTIVATION}{named}" if named in activation.ACTIVATIONS and named != "silu" else "plain"
    scale = problem.number("scaling", problem.number("routed_scaling_factor", 1.0))
    contract = Variant.of(
        "experts",
        {
            "router/formula": f"{scoring}{', normalised' if normalise else ''}",
            "router/tie_rule": "lower index",
            "router/scale": f"{scale:g}",
            "router/rounding": "FP32 weights",
            "router/output": "stored",
            "order": "ascending",
            "split": "1",
            "primitive": "chain",
            "operands": "stored",
            "block": "none",
            "scale": "none",
            "accumulate": "fma",
            "rounding": "inner once",
            "output": problem.recorded,
            "formula": formula,
        },
    )
    eager = contract.but(rounding=f"activation first{WEIGHTED}", accumulate="storage", router__rounding="weights")
    wide = eager.but(router__rounding="FP32 weights")
    grouped = eager.but(accumulate="fp32", order="by weight")
    found = [contract, eager, wide, grouped, grouped.but(router__rounding="FP32 weights")]
    return found + [v.but(primitive=TORCH) for v in (eager, wide, grouped)]


def changes(variant: Variant, problem: Problem) -> Iterator[Variant]:
    """Variants with one field changed."""
    for formula in SCORINGS:
        yield variant.but(router__formula=formula)
    if _layer(problem).bias is not None:
        for end in (IN_WEIGHTS, IGNORED):
            yield variant.but(router__formula=re.sub(r", bias.*", "", variant["router/formula"]) + end)
    bare = re.sub(r", (bias|top|groups).*", "", variant["router/formula"])
    k, count = int(problem.number("top_k") or 1), problem.inputs[1].shape[1]
    for other in dict.fromkeys((k + 1, k - 1, 1, 2 * k, k // 2, k + 2)):
        if 0 < other <= count and other != k:
            yield variant.but(router__formula=f"{bare}, top {other}")
    if int(problem.number("groups") or 1) > 1:
        for end in (UNGROUPED, BY_LARGEST):
            yield variant.but(router__formula=bare + end)
    for rule in ("lower index", "higher index"):
        yield variant.but(router__tie_rule=rule)
    given = [problem.number(n) for n in ("scaling", "routed_scaling_factor")]
    for scale in dict.fromkeys([g for g in given if g] + [1.0, 2.5, 2.446, 2.0, 0.5, 16.0]):
        yield variant.but(router__scale=f"{scale:g}")
    if applies(variant, problem):
        for scale in problem.once("scales", lambda: _scales(variant, problem)):
            yield variant.but(router__scale=shown.name(scale))
    for formula in (*activation.ACTIVATIONS, f"{activation.QUICK}, up plus 1, limit 7"):
        if formula != "silu" and formula not in activation.ALONE:
            yield variant.but(formula=f"{ACTIVATION}{formula}")
    for rounding in ("FP32 weights", "weights"):
        yield variant.but(router__rounding=rounding)
    for output in ("stored", "bf16"):
        yield variant.but(router__output=output)
    for order in ("ascending", "descending", "by weight", "by weight, smallest first"):
        yield variant.but(order=order)
    for accumulate in ("fma", "fp32", "storage"):
        yield variant.but(accumulate=accumulate)
    for inner in ("inner once", "activation first"):
        for end in ("", WEIGHTED, WIDE, f"{WEIGHTED}{WIDE}"):
            yield variant.but(rounding=f"{inner}{end}")
    for split in ("1", *SPLITS):
        yield variant.but(split=split)
    for formula in (
        "plain",
        "weight on input",
        "no shared experts",
        "shared experts alone",
        "first of the chosen only",
    ):
        yield variant.but(formula=formula)
    for formula in (
        "one weight for all",
        "gate and up swapped",
        "shared first",
        *(f"capacity {c:g}" for c in CAPACITIES),
    ):
        yield variant.but(formula=formula)
    yield from _coded_changes(variant)
    for primitive in ("chain", TORCH):
        yield variant.but(primitive=primitive)
    if applies(variant.but(formula="no shared experts"), problem):
        for factor in problem.once("shared factors", lambda: _shared_factors(variant, problem)):
            yield variant.but(formula=f"{SHARED_TIMES}{shown.name(factor)}")


def _coded_changes(variant: Variant) -> Iterator[Variant]:
    """Other formats of the products' operands, with their blocks and scales."""
    yield variant.but(operands="stored", block="none", scale="none")
    held = variant["block"] if variant["operands"] != "stored" else BLOCK
    how = variant["scale"] if variant["operands"] != "stored" else "fp32"
    for operands in (f"{name}{end}" for name in ("e4m3", "e4m3 weights") for end in ("", ROUNDED)):
        for scale in (f"{kind}{fused}" for kind in ("fp32", "pow2") for fused in ("", FUSED)):
            yield variant.but(operands=operands, block=held, scale=scale)
        for block in BLOCKS:
            yield variant.but(operands=operands, block=block, scale=how)


def _scales(variant: Variant, problem: Problem) -> list[float]:
    """Factors of the routed sum that the rows show: it is what another factor changes."""
    few = torch.arange(0, len(problem.out), max(1, len(problem.out) // 12))
    part = problem.narrowed(few, torch.arange(problem.out.shape[1]))
    one, two = (simulate(variant.but(router__scale=scale), part) for scale in ("1", "2"))
    found = shown.factor(two - one, part.expected - (2 * one - two), 0.05)
    return [] if found is None else shown.near(found, 2e-3, 10)


def _shared_factors(variant: Variant, problem: Problem) -> list[float]:
    """Factors of the shared experts that the rows show: what is left of them without the routed sum."""
    few = torch.arange(0, len(problem.out), max(1, len(problem.out) // 12))
    part = problem.narrowed(few, torch.arange(problem.out.shape[1]))
    routed, both = (simulate(variant.but(formula=f), part) for f in ("no shared experts", "plain"))
    found = shown.factor(both - routed, part.expected - routed, 0.05)
    return [] if found is None else shown.near(found, 2e-3, 10)


def applies(variant: Variant, problem: Problem) -> bool:
    """True if logits and all experts' weights are known."""
    if len(problem.inputs) != 2 or problem.number("top_k") is None:
        return False
    layer = _layer(problem)
    whole = len(layer.experts) == problem.inputs[1].shape[1] and all(len(e) == 3 for e in layer.experts.values())
    of_shared = ("no shared experts", "shared experts alone", "shared first")
    if variant["formula"].startswith((*of_shared, SHARED_TIMES)) and not layer.shared:
        return False
    if variant["split"] != "1" and (variant["formula"] == "shared first" or not _divides(variant["split"], layer)):
        return False
    if problem.storage == "fp32":
        narrow = (variant["router/rounding"] == "weights", "activation" in variant["rounding"])
        ends = any(end in variant["rounding"] for end in (WEIGHTED, WIDE))
        if any(narrow) or ends or variant["accumulate"] == "storage":
            return False
    return whole


def _divides(split: str, layer: _Layer) -> bool:
    """True if experts, or their inner columns, can be dealt out evenly, more than one to each."""
    inner = next((e["down"].shape[1] for e in layer.experts.values() if "down" in e), 0)
    count, ranks = inner if split.endswith(INNER) else len(layer.experts), int(split.split()[0])
    return count % ranks == 0 and count >= 2 * ranks


def cost(variant: Variant) -> int:
    """1: weights are quantised first; 2: in other blocks than usual ones."""
    return 0 if variant["operands"] == "stored" else 1 if variant["block"] == BLOCK else 2


def simulate(variant: Variant, problem: Problem) -> torch.Tensor:
    """The sample [rows, columns], FP32; whole rows of the sample are computed."""
    layer, storage = _layer(problem), problem.storage
    x = problem.inputs[0][problem.rows]
    key = tuple(variant[n] for n in variant_names("router", variant))
    chosen, weights = problem.once(("choice", *key), lambda: _choice(variant, problem, layer))
    if variant["formula"].startswith("capacity"):
        weights = weights * _kept(variant, problem, layer)[problem.rows]
    on_input = variant["formula"] == "weight on input"
    coding = (variant["operands"], variant["block"], variant["scale"])
    inner = variant["rounding"].replace(WEIGHTED, "")
    how = (coding, variant["primitive"], inner, _activation(variant["formula"]), storage)
    parts = int(variant["split"].split()[0]) if variant["split"].endswith(INNER) else 1
    if on_input:
        rows = [
            _mlp((x.to(FP32) * weights[:, i, None]).to(x.dtype), layer, chosen[:, i], how, parts)
            for i in range(chosen.shape[1])
        ]
        outs, weights = torch.stack(rows, 1), torch.ones_like(weights)
    else:
        outs = problem.once(
            ("outs", *key[:2], how, variant["router/output"], parts),
            lambda: torch.stack([_mlp(x, layer, chosen[:, i], how, parts) for i in range(chosen.shape[1])], 1),
        )
    shared = _shared(x, layer, how, problem) if layer.shared and variant["formula"] != "no shared experts" else None
    if shared is not None and variant["formula"].startswith(SHARED_TIMES):
        shared = round_to(shared * float(variant["formula"].removeprefix(SHARED_TIMES)), storage)
    if variant["formula"] == "first of the chosen only":
        outs, weights = outs[:, :1], weights[:, :1]
    if variant["formula"] == "one weight for all":
        weights = torch.full_like(weights, 1.0 / weights.shape[1])
    if variant["formula"] == "shared experts alone":
        outs, weights = outs[:, :0], weights[:, :0]
    total = _over_ranks(outs, weights, chosen, shared, variant, storage, len(layer.experts))
    return round_to(total, variant["output"])[:, problem.columns]


def _activation(formula: str) -> str:
    """The formula of `activation` that a formula of experts stands for."""
    if formula == "gate and up swapped":
        return f"silu{activation.SWAPPED}"
    return formula.removeprefix(ACTIVATION) if formula.startswith(ACTIVATION) else "silu"


def variant_names(subject: str, variant: Variant) -> list[str]:
    """Names of the fields that belong to another subject."""
    return [name for name, _ in variant.fields if name.startswith(subject + "/")]


def _kept(variant: Variant, problem: Problem, layer: _Layer) -> torch.Tensor:
    """[R, k]: 0 where an expert has had its share of the sequence's rows already, else 1."""
    chosen = _choice(variant, problem, layer, torch.arange(len(problem.out)))[0]
    kept = torch.ones(chosen.shape)
    factor, first = float(variant["formula"].split()[1]), 0
    for length in problem.lengths:
        part = chosen[first : first + length]
        count = problem.inputs[1].shape[1]
        capacity = -int(-factor * part.numel() // count)
        for expert in range(count):
            rows, places = (part == expert).nonzero(as_tuple=True)
            kept[first + rows[capacity:], places[capacity:]] = 0.0
        first += length
    return kept


def _choice(
    variant: Variant, problem: Problem, layer: _Layer, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts [rows, k], the largest score first, and their FP32 weights; None: of the sample's rows."""
    logits = problem.inputs[1][problem.rows if rows is None else rows].to(FP32)
    if variant["router/output"] == "bf16":
        logits = round_to(logits, "bf16")
    formula, k = variant["router/formula"], int(problem.number("top_k") or 1)
    other = re.search(r", top (\d+)", formula)
    k = int(other[1]) if other else k
    scores = torch.sigmoid(logits) if formula.startswith("sigmoid") else torch.softmax(logits, -1)
    biased = scores if layer.bias is None or IGNORED in formula else scores + layer.bias.to(FP32)
    groups, kept = (int(problem.number(n) or 1) for n in ("groups", "top_groups"))
    if UNGROUPED in formula:
        groups = kept = 1
    eligible = _of_groups(biased, groups, kept, 1 if BY_LARGEST in formula else 2)
    ranked = eligible.flip(-1) if variant["router/tie_rule"] == "higher index" else eligible
    chosen = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :k]
    if variant["router/tie_rule"] == "higher index":
        chosen = biased.shape[1] - 1 - chosen
    weights = (biased if IN_WEIGHTS in formula else scores).gather(-1, chosen)
    if formula.startswith("softmax of the chosen"):
        weights = torch.softmax(logits.gather(-1, chosen), -1)
    elif "normalised" in formula:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if formula.startswith("sigmoid") else 0.0))
    weights = weights * float(variant["router/scale"])
    return chosen, round_to(weights, problem.storage) if variant["router/rounding"] == "weights" else weights


def _of_groups(scores: torch.Tensor, groups: int, kept: int, summed: int) -> torch.Tensor:
    """Scores with -inf outside the groups with the largest sums of their `summed` best (2: DeepSeek-V3; 1: V2)."""
    if kept >= groups:
        return scores
    parts = scores.unflatten(-1, (groups, -1))
    sums = parts.topk(min(summed, parts.shape[-1]), -1).values.sum(-1)
    best = torch.sort(sums, dim=-1, descending=True, stable=True).indices[..., :kept]
    inside = torch.zeros_like(sums, dtype=torch.bool).scatter(-1, best, True)
    return parts.masked_fill(~inside[..., None], float("-inf")).flatten(-2)


def _linear(x: torch.Tensor, w: torch.Tensor, coding: tuple[str, str, str], primitive: str) -> torch.Tensor:
    """Not rounded to the storage dtype, but by a library."""
    operands, block, scale = coding
    if operands != "stored":
        narrow = x.dtype if operands.endswith(ROUNDED) else FP32
        tall, wide = (0 if n == "all" else int(n) for n in block.split("x"))
        two = scale.startswith("pow2")
        w = _coded(w, tall, wide, two)
        x = x if operands.startswith("e4m3 weights") else _coded(x, 1, wide, two)
        w, x = w.to(narrow), x.to(narrow)
    if primitive.startswith(LIBRARY):
        return torch.nn.functional.linear(x, w).to(FP32)
    return dots.native(x, w)


def _coded(value: torch.Tensor, tall: int, wide: int, power_of_two: bool) -> torch.Tensor:
    """Through E4M3 and back, in blocks of tall x wide (0: all), FP32."""
    rows, columns = value.shape
    tall, wide = min(tall or rows, rows) or 1, min(wide or columns, columns) or 1
    padded = torch.nn.functional.pad(value.to(FP32), (0, -columns % wide, 0, -rows % tall))
    blocks = padded.view(len(padded) // tall, tall, padded.shape[1] // wide, wide)
    amax = blocks.abs().amax((1, 3), keepdim=True).expand(blocks.shape)
    grid, scales = quantise_e4m3(blocks, amax, 448.0, power_of_two)
    return (grid * scales).reshape(padded.shape)[:rows, :columns].contiguous()


def _mlp(x: torch.Tensor, layer: _Layer, experts: torch.Tensor, how: tuple, parts: int) -> torch.Tensor:
    """Each row through its own expert: FP32 [rows, H] of the storage dtype, or not rounded; parts > 1: [rows, parts,
    H], each of its share of the inner columns."""
    out = torch.zeros(len(x), parts, x.shape[1], dtype=FP32)
    for expert in experts.unique().tolist():
        rows = (experts == expert).nonzero()[:, 0]
        out[rows] = _gated(x[rows], layer.experts[expert], how, parts)
    return out[:, 0] if parts == 1 else out


def _gated(x: torch.Tensor, weights: dict[str, torch.Tensor], how: tuple, parts: int = 1) -> torch.Tensor:
    """FP32 [rows, parts, H]."""
    coding, primitive, inner, formula, storage = how
    if FUSED in coding[2]:
        both = torch.cat([weights["gate"], weights["up"]]).to(x.dtype)
        gate, up = round_to(_linear(x, both, coding, primitive), storage).chunk(2, -1)
    else:
        gate, up = (round_to(_linear(x, weights[p].to(x.dtype), coding, primitive), storage) for p in ("gate", "up"))
    once = inner.startswith("inner once")
    silu, rounding = ("contract", "once") if once else ("torch silu", "activation first")
    middle = activation.gated(gate, up, formula, silu, rounding, storage).to(x.dtype)
    down = weights["down"].to(x.dtype)
    wide = inner.endswith(WIDE)
    if wide and primitive.startswith(LIBRARY):
        middle, down = middle.to(FP32), down.to(FP32)
    pairs = zip(middle.chunk(parts, -1), down.chunk(parts, -1), strict=True)
    outs = torch.stack([_linear(m.contiguous(), d.contiguous(), coding, primitive) for m, d in pairs], 1)
    return outs if wide else round_to(outs, storage)


def _shared(x: torch.Tensor, layer: _Layer, how: tuple, problem: Problem) -> torch.Tensor:
    return problem.once(("shared", how), lambda: _gated(x, layer.shared, how)[:, 0])


def _over_ranks(
    outs: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    shared: torch.Tensor | None,
    variant: Variant,
    storage: str,
    count: int,
) -> torch.Tensor:
    """The sum over all chosen experts: at once, or of the ranks' sums, rank by rank; the shared experts last."""
    split, narrow = variant["split"], variant["accumulate"] != "fma"
    if split == "1" or not outs.shape[1]:
        return _combined(outs, weights, chosen, shared, variant, storage)
    ranks = int(split.split()[0])
    sums = []
    for rank in range(ranks):
        if split.endswith(INNER):
            mine, theirs = weights, outs[:, :, rank]
        else:
            held = chosen % ranks if split.endswith(IN_TURNS) else chosen // (count // ranks)
            mine = torch.where(held[:, : weights.shape[1]] == rank, weights, torch.zeros(()))
            theirs = outs
        sums.append(round_to(_combined(theirs, mine, chosen, None, variant, storage), storage))
    total = sums[0]
    for part in sums[1:]:
        total = round_to(total + part, storage) if narrow else total + part
    return total if shared is None else round_to(total, storage) + shared


def _combined(
    outs: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    shared: torch.Tensor | None,
    variant: Variant,
    storage: str,
) -> torch.Tensor:
    """The weighted sum of [rows, k, H] in the variant's order, the shared experts last."""
    order, accumulate = variant["order"], variant["accumulate"]
    if outs.shape[1]:
        places = chosen[:, : outs.shape[1]].argsort(-1)
        if order == "descending":
            places = places.flip(-1)
        elif order.startswith("by weight"):
            places = torch.arange(outs.shape[1]).expand_as(places)
            places = places.flip(-1) if order.endswith("first") else places
        outs = outs.gather(1, places[..., None].expand_as(outs))
        weights = weights.gather(1, places)
    start = shared if shared is not None and variant["formula"] == "shared first" else None
    total = torch.zeros(outs.shape[0], outs.shape[-1]) if start is None else start
    for i in range(outs.shape[1]):
        factor = weights[:, i, None].expand_as(outs[:, i])
        if WEIGHTED in variant["rounding"]:
            total = total + round_to(outs[:, i] * factor, storage)
        else:
            total = fma(factor, outs[:, i], total) if accumulate == "fma" else total + outs[:, i] * factor
        if accumulate == "storage":
            total = round_to(total, storage)
    if shared is not None and start is None:
        routed = round_to(total, storage) if accumulate != "fma" else total
        total = routed + shared
    return total
