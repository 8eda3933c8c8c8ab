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
operands         stored; `e4m3` (weights in 128x128, rows in 1x128), `e4m3 weights`; `..., gate and up together`;
                 `..., rounded` (products read the codes' values in the storage dtype)
accumulate       fma, `fp32` (multiply, then add), `storage` (the sum is rounded after every expert)
rounding         `inner once` (SiLU times up), `activation first`; `..., weighted outputs` (each is rounded)
output           bf16, fp16, fp32
formula          plain (SiLU); `activation F`, F a formula of `activation`; weight on input; no shared experts; shared
                 experts alone; `first of the chosen only`;
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
            "primitive": "chain",
            "operands": "stored",
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
    for rounding in ("inner once", "activation first", f"inner once{WEIGHTED}", f"activation first{WEIGHTED}"):
        yield variant.but(rounding=rounding)
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
    coded = [f"{operands}{fused}" for operands in ("e4m3", "e4m3 weights") for fused in ("", FUSED)]
    for operands in ("stored", *(f"{name}{end}" for name in coded for end in ("", ROUNDED))):
        yield variant.but(operands=operands)
    for primitive in ("chain", TORCH):
        yield variant.but(primitive=primitive)


def _scales(variant: Variant, problem: Problem) -> list[float]:
    """Factors of the routed sum that the rows show: it is what another factor changes."""
    few = torch.arange(0, len(problem.out), max(1, len(problem.out) // 12))
    part = problem.narrowed(few, torch.arange(problem.out.shape[1]))
    one, two = (simulate(variant.but(router__scale=scale), part) for scale in ("1", "2"))
    found = shown.factor(two - one, part.expected - (2 * one - two), 0.05)
    return [] if found is None else shown.near(found, 2e-3, 10)


def applies(variant: Variant, problem: Problem) -> bool:
    """True if logits and all experts' weights are known."""
    if len(problem.inputs) != 2 or problem.number("top_k") is None:
        return False
    layer = _layer(problem)
    whole = len(layer.experts) == problem.inputs[1].shape[1] and all(len(e) == 3 for e in layer.experts.values())
    if variant["formula"] in ("no shared experts", "shared experts alone", "shared first") and not layer.shared:
        return False
    if problem.storage == "fp32":
        narrow = (variant["router/rounding"] == "weights", "activation" in variant["rounding"])
        if any(narrow) or WEIGHTED in variant["rounding"] or variant["accumulate"] == "storage":
            return False
    return whole


def cost(variant: Variant) -> int:
    """1: weights are quantised first."""
    return int(variant["operands"] != "stored")


def simulate(variant: Variant, problem: Problem) -> torch.Tensor:
    """The sample [rows, columns], FP32; whole rows of the sample are computed."""
    layer, storage = _layer(problem), problem.storage
    x = problem.inputs[0][problem.rows]
    key = tuple(variant[n] for n in variant_names("router", variant))
    chosen, weights = problem.once(("choice", *key), lambda: _choice(variant, problem, layer))
    if variant["formula"].startswith("capacity"):
        weights = weights * _kept(variant, problem, layer)[problem.rows]
    on_input = variant["formula"] == "weight on input"
    inner = variant["rounding"].removesuffix(WEIGHTED)
    how = (variant["operands"], variant["primitive"], inner, _activation(variant["formula"]), storage)
    if on_input:
        rows = [
            _mlp((x.to(FP32) * weights[:, i, None]).to(x.dtype), layer, chosen[:, i], how)
            for i in range(chosen.shape[1])
        ]
        outs, weights = torch.stack(rows, 1), torch.ones_like(weights)
    else:
        outs = problem.once(
            ("outs", *key[:2], how, variant["router/output"]),
            lambda: torch.stack([_mlp(x, layer, chosen[:, i], how) for i in range(chosen.shape[1])], 1),
        )
    shared = _shared(x, layer, how, problem) if layer.shared and variant["formula"] != "no shared experts" else None
    if variant["formula"] == "first of the chosen only":
        outs, weights = outs[:, :1], weights[:, :1]
    if variant["formula"] == "one weight for all":
        weights = torch.full_like(weights, 1.0 / weights.shape[1])
    if variant["formula"] == "shared experts alone":
        outs, weights = outs[:, :0], weights[:, :0]
    total = _combined(outs, weights, chosen, shared, variant, storage)
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
    k = int(formula.split()[-1]) if ", top " in formula else k
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


def _linear(x: torch.Tensor, w: torch.Tensor, operands: str, primitive: str, storage: str) -> torch.Tensor:
    if operands != "stored":
        narrow = x.dtype if operands.endswith(ROUNDED) else FP32
        w, x = _coded(w, 128), x if operands.startswith("e4m3 weights") else _coded(x, 1)
        w, x = w.to(narrow), x.to(narrow)
    if primitive.startswith(LIBRARY):
        return round_to(torch.nn.functional.linear(x, w).to(FP32), storage)
    return round_to(dots.native(x, w), storage)


def _coded(value: torch.Tensor, tall: int) -> torch.Tensor:
    """Through E4M3 and back, in blocks of tall x 128, FP32."""
    out = torch.empty_like(value, dtype=FP32)
    for i in range(0, len(value), tall if tall > 1 else max(1, len(value))):
        for j in range(0, value.shape[1], 128):
            block = value[i : i + (tall if tall > 1 else len(value)), j : j + 128].to(FP32)
            amax = block.abs().amax(1, keepdim=True) if tall == 1 else block.abs().amax()
            grid, scales = quantise_e4m3(block, amax.expand(block.shape), 448.0, False)
            out[i : i + len(block), j : j + 128] = grid * scales
    return out


def _mlp(x: torch.Tensor, layer: _Layer, experts: torch.Tensor, how: tuple) -> torch.Tensor:
    """Each row through its own expert: FP32 values of the storage dtype."""
    out = torch.zeros(x.shape, dtype=FP32)
    for expert in experts.unique().tolist():
        rows = (experts == expert).nonzero()[:, 0]
        out[rows] = _gated(x[rows], layer.experts[expert], how)
    return out


def _gated(x: torch.Tensor, weights: dict[str, torch.Tensor], how: tuple) -> torch.Tensor:
    operands, primitive, inner, formula, storage = how
    if FUSED in operands:
        both = torch.cat([weights["gate"], weights["up"]]).to(x.dtype)
        gate, up = _linear(x, both, operands, primitive, storage).chunk(2, -1)
    else:
        gate, up = (_linear(x, weights[p].to(x.dtype), operands, primitive, storage) for p in ("gate", "up"))
    silu, rounding = ("contract", "once") if inner == "inner once" else ("torch silu", "activation first")
    middle = activation.gated(gate, up, formula, silu, rounding, storage).to(x.dtype)
    return _linear(middle, weights["down"].to(x.dtype), operands, primitive, storage)


def _shared(x: torch.Tensor, layer: _Layer, how: tuple, problem: Problem) -> torch.Tensor:
    return problem.once(("shared", how), lambda: _gated(x, layer.shared, how))


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
    total = torch.zeros(outs.shape[0], outs.shape[2]) if start is None else start
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
