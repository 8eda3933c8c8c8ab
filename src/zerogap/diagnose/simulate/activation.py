"""The inner step of a gated MLP: forms of real stacks, and changes of one field.

formula     silu, gelu, gelu tanh, `x sigmoid(A x)` (quick GELU has A 1.702), relu, relu squared, relu6, mish, tanh,
            sigmoid, softplus, none (the gate as it is), up alone, gate alone; then, where they apply, `, gate and up
            swapped`, `, up plus 1`, `, limit L` (the gate at most L, the up between -L and L), `, gate limit L`.
            A and L as the rows show them
primitive   of silu: contract (its own exp), `torch silu`, `x * sigmoid(x)`, `x / (1 + exp(-x))`, `x * (1 / (1 +
            exp(-x)))`, the same by exp2, `x * (1 + tanh(x / 2)) / 2`
rounding    once; `activation first` (it is rounded before the product); `every step` (inside the activation, too);
            `not at all` (FP32 is handed on)
"""

import math
from collections.abc import Callable, Iterator

import torch

from zerogap.diagnose.simulate import shown
from zerogap.diagnose.simulate.arithmetic import exp, round_to
from zerogap.diagnose.simulate.variant import Problem, Variant

QUOTIENT, RECIPROCAL, BY_TANH = "x / (1 + exp(-x))", "x * (1 / (1 + exp(-x)))", "x * (1 + tanh(x / 2)) / 2"
POWERS = {
    name.replace("exp(-x)", f"{power}(-x)"): power for name in (QUOTIENT, RECIPROCAL) for power in ("exp", "exp2")
}
PRIMITIVES = ("contract", "torch silu", "x * sigmoid(x)", *POWERS, BY_TANH)
QUICK, SLOPE = "x sigmoid(1.702 x)", "x sigmoid("
ALONE = ("up alone", "gate alone")
ACTIVATIONS = (
    *("silu", "gelu", "gelu tanh", QUICK, "relu", "relu squared", "relu6", "mish", "tanh", "sigmoid", "softplus"),
    *("none", *ALONE),
)
NAMES = {  # in Hugging Face configs
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), "gelu tanh"),
    "quick_gelu": QUICK,
    "gelu_python": "gelu",
    "swish": "silu",
    "relu2": "relu squared",
    "linear": "none",
}
SWAPPED, PLUS_ONE, LIMIT, GATE_LIMIT = ", gate and up swapped", ", up plus 1", ", limit ", ", gate limit "
LIMITS = (7.0, 10.0)  # gpt-oss, and what other families use
ROUNDINGS = ("once", "activation first", "every step", "not at all")
Rounded = Callable[[torch.Tensor], torch.Tensor]


def bases(problem: Problem) -> list[Variant]:
    """The contract's; transformers' (the activation is rounded, then the product)."""
    named = str(problem.parameters.get("activation", "silu"))
    named = NAMES.get(named, named)
    formula = named if named in ACTIVATIONS else "silu"
    contract = Variant.of("activation", {"formula": formula, "primitive": "contract", "rounding": "once"})
    torch_form = contract.but(primitive="torch silu", rounding="activation first")
    return [contract, torch_form, contract.but(primitive="torch silu")]


def changes(variant: Variant, problem: Problem) -> Iterator[Variant]:
    """Variants with one field changed; another formula also with every step rounded, as eager code has it."""
    for rounding in ROUNDINGS:
        yield variant.but(rounding=rounding)
    for primitive in PRIMITIVES:
        yield variant.but(primitive=primitive)
    kind, ends = _parts(variant["formula"])
    formulas = [*(f"{k}{end}" for end in ("", SWAPPED) for k in ACTIVATIONS)]
    formulas += [f"{k}{end}" for k in dict.fromkeys((kind, "silu", QUICK)) for end in _ends(ends)]
    if len(problem.inputs) >= 2 and problem.inputs[0].shape == problem.inputs[1].shape:
        formulas += problem.once(("shown", variant["formula"]), lambda: _shown(variant["formula"], problem))
    for formula in dict.fromkeys(formulas):
        yield variant.but(formula=formula)
        yield variant.but(formula=formula, rounding="every step")


def _parts(formula: str) -> tuple[str, str]:
    """The activation's name, and what is added to it."""
    kind, comma, rest = formula.partition(", ")
    return kind, comma + rest


def _ends(ends: str) -> list[str]:
    """A modifier more or less, and usual limits."""
    bare = ends.partition(LIMIT)[0].partition(GATE_LIMIT)[0]
    plus = bare.replace(PLUS_ONE, "") if PLUS_ONE in bare else bare + PLUS_ONE
    limits = [f"{end}{mark}{n:g}" for end in (bare, plus) for mark in (LIMIT, GATE_LIMIT) for n in LIMITS]
    return [bare, plus, *limits]


def _shown(formula: str, problem: Problem) -> list[str]:
    """Formulas with a slope or a limit that the rows show; a few thousand elements are read."""
    rows = slice(0, len(problem.out), max(1, len(problem.out) // 64))
    gate, up, out = (t[rows].to(torch.float64) for t in (*problem.inputs[:2], problem.out))
    kind, ends = _parts(formula)
    if kind in ALONE:
        return []
    bare = ends.partition(LIMIT)[0].partition(GATE_LIMIT)[0]
    found: list[str] = []
    for end in dict.fromkeys(("", PLUS_ONE, bare)):
        first, second = (up, gate) if SWAPPED in end else (gate, up)
        second = second + 1 if PLUS_ONE in end else second
        slope = shown.sigmoid_slope(first, out / second)
        found += [f"{SLOPE}{shown.name(a)} x){end}" for a in (shown.near(slope, 0.01, 4) if slope else ())]

        def activated(g: torch.Tensor) -> torch.Tensor:
            return _activated(g, kind, "torch silu", lambda t: t)

        small = second.abs() < 0.75  # these no limit cuts, so that the other one's shows
        cuts = [shown.limit_inside(activated, first[small], (out / second)[small])]
        if PLUS_ONE not in end:
            low = (first < 0.75) & (activated(first).abs() > 0.02)
            cuts.append(shown.limit(second[low], (out / activated(first))[low]))
        numbers = [n for cut in cuts if cut is not None for n in shown.near(cut, 0.02, 4)]
        found += [f"{kind}{end}{mark}{shown.name(n)}" for n in dict.fromkeys(numbers) for mark in (LIMIT, GATE_LIMIT)]
    return found


def applies(variant: Variant, problem: Problem) -> bool:
    """True if the problem has what the variant speaks of, and another variant does not say the same."""
    if len(problem.inputs) < 2 or problem.inputs[0].shape != problem.inputs[1].shape:
        return False
    kind, ends = _parts(variant["formula"])
    primitive, rounding, narrow = variant["primitive"], variant["rounding"], problem.storage != "fp32"
    if kind in ALONE and (ends or primitive != "contract" or rounding != "once"):
        return False
    if rounding == "not at all" and not (narrow and problem.recorded == "fp32"):
        return False
    if rounding == "every step" and not narrow:
        return False
    if kind == "silu":
        return rounding != "every step" or primitive == "x * sigmoid(x)"
    if primitive not in ("contract", "torch silu"):
        return False
    return narrow or rounding in ("once", "not at all")


def _activated(g: torch.Tensor, kind: str, primitive: str, step: Rounded) -> torch.Tensor:
    """The activation of g; `step` rounds what is between."""
    if kind.startswith(SLOPE):
        return g * step(torch.sigmoid(step(g * float(kind[len(SLOPE) :].split()[0]))))
    if kind == "silu":
        return _silu(g, primitive, step)
    functional = torch.nn.functional
    plain: dict[str, Callable[[], torch.Tensor]] = {
        "gelu": lambda: step(g * 0.5) * step(1 + step(torch.erf(step(g * math.sqrt(0.5))))),
        "gelu tanh": lambda: _gelu_tanh(g, step),
        "relu": g.relu,
        "relu squared": lambda: g.relu().square(),
        "relu6": lambda: g.clamp(0, 6),
        "mish": lambda: g * step(torch.tanh(step(functional.softplus(g)))),
        "tanh": g.tanh,
        "sigmoid": g.sigmoid,
        "softplus": lambda: functional.softplus(g),
        "none": lambda: g,
    }
    return plain[kind]()


def _gelu_tanh(g: torch.Tensor, step: Rounded) -> torch.Tensor:
    inner = step(g + step(0.044715 * step(g**3)))
    return step(0.5 * g) * step(1 + step(torch.tanh(step(math.sqrt(2 / math.pi) * inner))))


def _silu(g: torch.Tensor, primitive: str, step: Rounded) -> torch.Tensor:
    if primitive == "contract":
        e = exp(-g.abs())
        return g * (torch.where(g >= 0, 1.0, e) / (1 + e))
    if primitive == "torch silu":
        return torch.nn.functional.silu(g)
    if primitive == "x * sigmoid(x)":
        return g * step(g.sigmoid())
    if primitive == BY_TANH:
        return g * (1 + torch.tanh(g / 2)) / 2
    power = torch.exp(-g) if POWERS[primitive] == "exp" else torch.exp2(-g * math.log2(math.e))
    return g / (1 + power) if primitive.startswith("x /") else g * (1 / (1 + power))


def simulate(variant: Variant, problem: Problem) -> torch.Tensor:
    """The sample [rows, columns], FP32."""
    gate, up = (problem.cut(t) for t in problem.inputs[:2])
    kind = _parts(variant["formula"])[0]
    if kind in ALONE:
        return round_to(up if kind == "up alone" else gate, problem.recorded)
    return gated(gate, up, variant["formula"], variant["primitive"], variant["rounding"], problem.storage)


def gated(
    gate: torch.Tensor, up: torch.Tensor, formula: str, primitive: str, rounding: str, storage: str
) -> torch.Tensor:
    """The product of FP32 rows by the fields of a variant, rounded to the storage dtype as `rounding` says."""
    kind, ends = _parts(formula)
    if SWAPPED in ends:
        gate, up = up, gate
    if LIMIT in ends or GATE_LIMIT in ends:
        highest = float(ends.split()[-1])
        gate = gate.clamp(max=highest)
        up = up if GATE_LIMIT in ends else up.clamp(-highest, highest)
    steps = rounding == "every step"

    def step(t: torch.Tensor) -> torch.Tensor:
        return round_to(t, storage) if steps else t

    if PLUS_ONE in ends:
        up = step(up + 1)
    if kind in ("gelu", "gelu tanh") and not steps:  # the library's own
        found = torch.nn.functional.gelu(gate, approximate="tanh" if kind == "gelu tanh" else "none")
    else:
        found = _activated(gate, kind, primitive, step)
    if rounding == "not at all":
        return found * up
    if rounding != "once":
        found = round_to(found, storage)
    return round_to(found * up, storage)
