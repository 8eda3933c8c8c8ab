"""The inner step of the MLP, the residual addition, and the embedding: forms of real stacks, and changes of one field.

Activation
    formula     silu, gelu, gelu tanh, relu squared, relu, sigmoid; `..., gate and up swapped`
    primitive   contract (its own exp), `torch silu`, `x * sigmoid(x)`, `x / (1 + exp(-x))`
    rounding    once; `activation first` (it is rounded before the product); `sigmoid first` (and the activation);
                `not before the product` (operands of higher precision: the product alone, unrounded output)
Residual
    formula     x + y, `x + F y`, x, y
    accumulate  once (FP32, rounded once); `fp16`
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
PRIMITIVES = ("contract", "torch silu", "x * sigmoid(x)", "x / (1 + exp(-x))")
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
    for rounding in ("once", "activation first", "sigmoid first"):
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
    kind = variant["formula"].removesuffix(SWAPPED)
    if kind not in ACTIVATIONS or (kind != "silu" and variant["primitive"] != "torch silu"):
        return kind in ACTIVATIONS and variant["primitive"] == "contract" and variant["rounding"] != "sigmoid first"
    if variant["rounding"] == "sigmoid first":
        return variant["primitive"] == "x * sigmoid(x)" and problem.storage != "fp32"
    return problem.storage != "fp32" or variant["rounding"] == "once"


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
    return g / (1 + torch.exp(-g))


def simulate_activation(variant: Variant, problem: Problem) -> torch.Tensor:
    """The sample [rows, columns], FP32."""
    gate, up = (problem.cut(t) for t in problem.inputs[:2])
    kind = variant["formula"].removesuffix(SWAPPED)
    if variant["formula"] != kind:
        gate, up = up, gate
    found = _activated(gate, kind, variant["primitive"], variant["rounding"], problem.storage)
    if variant["rounding"] != "once":
        found = round_to(found, problem.storage)
    return round_to(found * up, problem.recorded)


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
    for formula in ("x", "y", "x - y", "x + 2 y", "x + 0.5 y", "2 x + y", "x + y, normed twice"):
        if not formula.endswith("twice"):
            yield variant.but(formula=formula)


def residual_applies(variant: Variant, problem: Problem) -> bool:
    """True if the problem has what the variant speaks of."""
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
        "x + 2 y": lambda: x + 2 * y,
        "x + 0.5 y": lambda: x + 0.5 * y,
        "2 x + y": lambda: 2 * x + y,
    }
    return round_to(round_to(forms[variant["formula"]](), variant["rounding"]), problem.recorded)


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
