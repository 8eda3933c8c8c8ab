"""The residual addition and the embedding: forms of real stacks, and changes of one field.

Residual
    formula     x + y, x, y, x - y, 2 x + y; `x + F y` and `F x + y` with the factor F that the rows show
    accumulate  once (FP32, rounded once); one or both of an FP32 sum's terms, or F y, rounded first
    rounding    bf16, fp16, fp32 (kept as it is), bf16 truncated
Embedding
    formula     row, `row times sqrt(width)`, `row times F`, F as the rows show it; `row, zeros of ids A to B`,
                `row, times 0 of ids A to B` (zeros keep signs)
    output      bf16, fp16, fp32
"""

import math
from collections.abc import Iterator

import torch

from zerogap.diagnose.simulate import shown
from zerogap.diagnose.simulate.arithmetic import FP32, round_to
from zerogap.diagnose.simulate.variant import Problem, Variant


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
    if len(problem.inputs) >= 2:
        for form, numbers in problem.once("factors", lambda: _factors(problem)).items():
            for number in numbers:
                formula = form.replace("F", number)
                yield variant.but(formula=formula)
                yield variant.but(formula=formula, accumulate="product rounded first")


def _factors(problem: Problem) -> dict[str, list[str]]:
    """F of `x + F y` and of `F x + y` by the rows themselves; none where it is 1, or no factor fits."""
    rows = torch.arange(0, len(problem.out), max(1, len(problem.out) // 64))
    x, y, out = (t[rows].double() for t in (*problem.inputs[:2], problem.out))
    found = {"x + F y": shown.factor(y, out - x, 0.05), "F x + y": shown.factor(x, out - y, 0.05)}
    return {form: [shown.name(n) for n in shown.near(f, 1e-3, 12)] for form, f in found.items() if f is not None}


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
    words = variant["formula"].split()
    scaled, plain, number = (x, y, words[0]) if words[0] != "x" else (y, x, words[2])
    product = scaled * float(number)
    if variant["accumulate"] == "product rounded first":
        product = round_to(product, problem.storage)
    return round_to(plain + product, variant["rounding"])


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
    for number in problem.once("factors", lambda: _embedding_factors(problem)):
        yield variant.but(formula=f"row times {number}")
    for formula in problem.once("zeroed", lambda: _zeroed(problem)):
        yield variant.but(formula=formula)


def _embedding_factors(problem: Problem) -> list[str]:
    """Factors that the rows show."""
    weight, ids = problem.weight(), _ids(problem)
    if weight is None or ids is None or len(ids) != len(problem.out):
        return []
    rows = torch.arange(0, len(ids), max(1, len(ids) // 64))
    found = shown.factor(weight[ids[rows]], problem.out[rows])
    return [] if found is None else [shown.name(n) for n in shown.near(found, 3e-4, 12)]


def _zeroed(problem: Problem) -> list[str]:
    """The run of ids whose rows are zeros (a shard that was lost, a padding id), if the rows show one."""
    weight, ids = problem.weight(), _ids(problem)
    if weight is None or ids is None or len(ids) != len(problem.out):
        return []
    empty = (problem.out == 0).all(1) & (weight[ids] != 0).any(1)
    if not bool(empty.any()):
        return []
    first, last = int(ids[empty].min()), int(ids[empty].max())
    inside = (ids >= first) & (ids <= last) & ~empty & ~problem.out.isnan().any(1)
    return [] if bool(inside.any()) else [f"row, {how} of ids {first} to {last}" for how in ("zeros", "times 0")]


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
    if " of ids " in variant["formula"]:
        first, last = (int(variant["formula"].split()[i]) for i in (-3, -1))
        gone = (ids[problem.rows] >= first) & (ids[problem.rows] <= last)
        return round_to(
            torch.where(gone[:, None], found * 0.0 if ", times" in variant["formula"] else 0.0, found),
            variant["output"],
        )
    factor = math.sqrt(weight.shape[1])
    if not variant["formula"].endswith(("factor", "sqrt(width)", "row")):
        factor = float(variant["formula"].split()[-1])
    elif variant["formula"].endswith("rounded factor"):
        factor = float(torch.tensor(factor).to(torch.bfloat16))
    if variant["formula"] != "row":
        found = found * factor
    return round_to(found, variant["output"])
