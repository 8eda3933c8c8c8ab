"""The inner step of the MLP, the residual addition, and the embedding: forms of real stacks, and changes of one field.

Activation
    formula     silu, gelu, gelu tanh, relu squared, relu, sigmoid; `..., gate and up swapped`
    primitive   contract (its own exp), `torch silu`, `x * sigmoid(x)`, `x / (1 + exp(-x))`, `x * (1 / (1 + exp(-x)))`,
                the same by exp2, `x * (1 + tanh(x / 2)) / 2`
    rounding    once; `activation first` (it is rounded before the product); `sigmoid first` (and the activation);
                `not at all` (FP32 is handed on)
Residual
    formula     x + y, x, y, x - y, 2 x + y; `x + F y` with the factor F that the rows show
    accumulate  once (FP32, rounded once); one or both of an FP32 sum's terms, or F y, rounded first
    rounding    bf16, fp16, fp32 (kept as it is), bf16 truncated
Embedding
    formula     row, `row times sqrt(width)`
    output      bf16, fp16, fp32
"""

import math
from collections.abc import Iterator

import torch

from zerogap.diagnose.simulate.arithmetic import FP32, exp, round_to
from zerogap.diagnose.simulate.variant import Problem, Variant

ACTIVATIONS = ("silu", "gelu", "gelu tanh", "relu squared", "relu", "sigmoid")
QUOTIENT, RECIPROCAL, BY_TANH = "x / (1 + exp(-x))", "x * (1 / (1 + exp(-x)))", "x * (1 + tanh(x / 2)) / 2"
POWERS = {
    name.replace("exp(-x)", f"{power}(-x)"): power for name in (QUOTIENT, RECIPROCAL) for power in ("exp", "exp2")
}
PRIMITIVES = ("contract", "torch silu", "x * sigmoid(x)", *POWERS, BY_TANH)
NAMES = {"gelu_pytorch_tanh": "gelu tanh", "gelu_new": "gelu tanh", "swish": "silu", "relu2": "relu squared"}
SWAPPED = ", gate and up swapped"


def activation_bases(problem: Problem) -> list[Variant]:
    """The contract's; transformers' (the activation is rounded, then the product)."""
    named = str(problem.parameters.get("activation", "silu"))
    named = NAMES.get(named, named)
    contract = Variant.of("activation", {"formula": named, "primitive": "contract", "rounding": "once"})
    torch_form = contract.but(primitive="torch silu", rounding="activation first")
    return [contract, torch_form, contract.but(primitive="torch silu")]


def activation_changes(variant: Variant, problem: Problem) -> Iterator[Variant]:
    """Variants with one field changed."""
    for rounding in ("once", "activation first", "sigmoid first", "not at all"):
        yield variant.but(rounding=rounding)
    for primitive in PRIMITIVES:
        yield variant.but(primitive=primitive)
    for formula in ACTIVATIONS:
        yield variant.but(formula=formula)
        yield variant.but(formula=formula + SWAPPED)


def activation_applies(variant: Variant, problem: Problem) -> bool:
    """True if the problem has what the variant speaks of."""
    if len(problem.inputs) < 2 or problem.inputs[0].shape != problem.inputs[1].shape:
        return False
    if variant["rounding"] == "not at all":
        return problem.storage != "fp32" and problem.recorded == "fp32" and _activation_known(variant, problem)
    return _activation_known(variant, problem)


def _activation_known(variant: Variant, problem: Problem) -> bool:
    kind = variant["formula"].removesuffix(SWAPPED)
    if kind not in ACTIVATIONS or (kind != "silu" and variant["primitive"] != "torch silu"):
        return kind in ACTIVATIONS and variant["primitive"] == "contract" and variant["rounding"] != "sigmoid first"
    if variant["rounding"] == "sigmoid first":
        return variant["primitive"] == "x * sigmoid(x)" and problem.storage != "fp32"
    return problem.storage != "fp32" or variant["rounding"] in ("once", "not at all")


def _activated(g: torch.Tensor, kind: str, primitive: str, rounding: str, storage: str) -> torch.Tensor:
    if kind == "gelu":
        return torch.nn.functional.gelu(g)
    if kind == "gelu tanh":
        return torch.nn.functional.gelu(g, approximate="tanh")
    if kind == "relu squared":
        return g.relu().square()
    if kind in ("relu", "sigmoid"):
        return g.relu() if kind == "relu" else g.sigmoid()
    if primitive == "contract":
        e = exp(-g.abs())
        return g * (torch.where(g >= 0, 1.0, e) / (1 + e))
    if primitive == "torch silu":
        return torch.nn.functional.silu(g)
    if primitive == "x * sigmoid(x)":
        sigmoid = g.sigmoid()
        return g * (round_to(sigmoid, storage) if rounding == "sigmoid first" else sigmoid)
    if primitive == BY_TANH:
        return g * (1 + torch.tanh(g / 2)) / 2
    power = torch.exp(-g) if POWERS[primitive] == "exp" else torch.exp2(-g * math.log2(math.e))
    return g / (1 + power) if primitive.startswith("x /") else g * (1 / (1 + power))


def simulate_activation(variant: Variant, problem: Problem) -> torch.Tensor:
    """The sample [rows, columns], FP32."""
    gate, up = (problem.cut(t) for t in problem.inputs[:2])
    kind = variant["formula"].removesuffix(SWAPPED)
    if variant["formula"] != kind:
        gate, up = up, gate
    found = _activated(gate, kind, variant["primitive"], variant["rounding"], problem.storage)
    if variant["rounding"] == "not at all":
        return found * up
    if variant["rounding"] != "once":
        found = round_to(found, problem.storage)
    return round_to(found * up, problem.storage)


# ---------------------------------------------------------------------------------------------------- residual


def residual_bases(problem: Problem) -> list[Variant]:
    """The sum rounded once to the recorded dtype."""
    plain = {"formula": "x + y", "accumulate": "once", "rounding": problem.recorded}
    return [Variant.of("residual", plain)]


def residual_changes(variant: Variant, problem: Problem) -> Iterator[Variant]:
    """Variants with one field changed."""
    for rounding in ("bf16", "fp32", "bf16 truncated", "fp16", "tf32"):
        yield variant.but(rounding=rounding)
    for accumulate in ("update rounded first", "stream rounded first", "both rounded first"):
        yield variant.but(accumulate=accumulate)
    for formula in ("x", "y", "x - y", "2 x + y"):
        yield variant.but(formula=formula)
    if len(problem.inputs) >= 2 and (factor := _factor(problem)) is not None:
        yield variant.but(formula=f"x + {factor} y")
        yield variant.but(formula=f"x + {factor} y", accumulate="product rounded first")


def _factor(problem: Problem) -> str | None:
    """F of x + F y by the rows themselves, to three digits; None where it is 1, or no factor fits most of them."""
    x, y = (problem.cut(t) for t in problem.inputs[:2])
    large = (y.abs() > 0.25 * y.abs().amax(1, keepdim=True)) & (y != 0)
    if not large.any():
        return None
    found = ((problem.expected - x) / y)[large]
    middle = float(found.median())
    if not math.isfinite(middle) or float(((found - middle).abs() < 0.05 * abs(middle) + 0.01).float().mean()) < 0.5:
        return None
    name = f"{middle:.3g}" if abs(middle - round(middle, 2)) > 0.002 else f"{round(middle, 2):g}"
    return None if name == "1" else name


def residual_applies(variant: Variant, problem: Problem) -> bool:
    """True if the problem has what the variant speaks of."""
    if variant["accumulate"] == "product rounded first":
        return len(problem.inputs) >= 2 and variant["formula"] != "x + y" and problem.storage != "fp32"
    if variant["accumulate"] == "once":
        return len(problem.inputs) >= 2
    return len(problem.inputs) >= 2 and "fp32" in [_dtype(t) for t in problem.inputs[:2]]


def _dtype(t: torch.Tensor) -> str:
    return "fp32" if t.dtype == FP32 else "narrow"


def simulate_residual(variant: Variant, problem: Problem) -> torch.Tensor:
    """The sample [rows, columns], FP32."""
    x, y = (problem.cut(t) for t in problem.inputs[:2])
    if variant["accumulate"].startswith(("stream", "both")):
        x = round_to(x, "bf16")
    if variant["accumulate"].startswith(("update", "both")):
        y = round_to(y, "bf16")
    forms = {
        "x + y": lambda: x + y,
        "x": lambda: x,
        "y": lambda: y,
        "x - y": lambda: x - y,
        "2 x + y": lambda: 2 * x + y,
    }
    if variant["formula"] in forms:
        return round_to(forms[variant["formula"]](), variant["rounding"])
    product = y * float(variant["formula"].split()[2])
    if variant["accumulate"] == "product rounded first":
        product = round_to(product, problem.storage)
    return round_to(x + product, variant["rounding"])


# ---------------------------------------------------------------------------------------------------- embedding


def embedding_bases(problem: Problem) -> list[Variant]:
    """The row of the table."""
    return [Variant.of("embedding", {"formula": "row", "output": problem.recorded})]


def embedding_changes(variant: Variant, problem: Problem) -> Iterator[Variant]:
    """Variants with one field changed."""
    for formula in ("row", "row times sqrt(width)", "row times sqrt(width), rounded factor"):
        yield variant.but(formula=formula)
    for output in ("bf16", "fp16", "fp32", "bf16 truncated"):
        yield variant.but(output=output)


def embedding_applies(variant: Variant, problem: Problem) -> bool:
    """True if ids are known: `parameters["ids"]` [R], or an input of one column."""
    return problem.weight() is not None and _ids(problem) is not None


def _ids(problem: Problem) -> torch.Tensor | None:
    given = problem.parameters.get("ids")
    if given is not None:
        return torch.as_tensor(given, dtype=torch.int64)
    return problem.inputs[0].flatten().to(torch.int64) if problem.inputs else None


def simulate_embedding(variant: Variant, problem: Problem) -> torch.Tensor:
    """The sample [rows, columns], FP32."""
    weight, ids = problem.weight(), _ids(problem)
    assert weight is not None and ids is not None
    found = weight[ids[problem.rows]][:, problem.columns].to(FP32)
    factor = math.sqrt(weight.shape[1])
    if variant["formula"].endswith("rounded factor"):
        factor = float(torch.tensor(factor).to(torch.bfloat16))
    if variant["formula"] != "row":
        found = found * factor
    return round_to(found, variant["output"])
