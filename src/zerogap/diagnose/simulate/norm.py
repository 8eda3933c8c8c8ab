"""RMSNorm: the forms of real stacks, and changes of one field. `weight` may be per head (query and key norms).

formula     `rms, eps E`, `rms with 1 + weight, eps E`, `rms with 1 + weight, rounded, eps E`, `rms over all heads, eps
            E`, `rms without weight, eps E`, `layer norm, eps E`, `rms, eps E outside the root`, `none, eps E` (rows
            as they are); E as stated, usual ones, and what the rows show
order       of the sum of squares: lanes of N (halving tree), ascending, descending, pairwise, `torch sum, vectors of
            N` (ATen's cascade); `library: torch.nn.functional.rms_norm`
primitive   fma or mul+add of the sum, then 1/sqrt (correctly rounded; torch's rsqrt is the same), `1/torch sqrt`
            (torch's sqrt is not correctly rounded), `x / sqrt`, `x / torch sqrt`
split       1, or N parts, ascending: partial sums of squares
operands    stored; bf16, fp16 (rows rounded first)
accumulate  fp32, fp64, bf16 and fp16 (squares and their mean are rounded), `bf16 sums` and `fp16 sums` (every sum is)
rounding    after the weight; before the weight (and after it); `before the weight, FP32 weight`
output      bf16, fp16, fp32
"""

from collections.abc import Iterator

import torch

from zerogap.diagnose.simulate import arithmetic, shown
from zerogap.diagnose.simulate.arithmetic import FP32, round_to
from zerogap.diagnose.simulate.dots import cuts, joined
from zerogap.diagnose.simulate.variant import LIBRARY, Problem, Variant

TORCH = f"{LIBRARY} torch.nn.functional.rms_norm"
MEAN = f"{LIBRARY} torch.mean"
ROOTS = ("1/sqrt", "1/torch sqrt", "x / sqrt", "x / torch sqrt")
SUMS = ("ascending", "descending", "lanes of 4", "lanes of 8", "lanes of 16", "lanes of 32")
EPSILONS = (1e-5, 1e-6, 1e-8, 0.0, 1e-12, 1e-3)


def _eps(problem: Problem) -> float:
    found = problem.number("eps", 1e-6)
    assert found is not None
    return found


def bases(problem: Problem) -> list[Variant]:
    """The contract's form; transformers' (FP32 mean by torch, rounded before the weight); torch's own op."""
    output = problem.recorded
    contract = Variant.of(
        "norm",
        {
            "formula": f"rms, eps {_eps(problem):g}",
            "order": "lanes of 16",
            "primitive": "fma, 1/sqrt",
            "split": "1",
            "operands": "stored",
            "accumulate": "fp32",
            "rounding": "after the weight",
            "output": output,
        },
    )
    foreign = contract.but(order="torch sum, vectors of 8", primitive="mul+add, 1/sqrt", rounding="before the weight")
    return [
        contract,
        foreign,
        foreign.but(order="torch sum, vectors of 16"),
        foreign.but(order=MEAN),
        foreign.but(order=MEAN, rounding="after the weight"),
        foreign.but(order=TORCH, rounding="after the weight"),
    ]


def changes(variant: Variant, problem: Problem) -> Iterator[Variant]:
    """Variants with one field changed."""
    for rounding in ("after the weight", "before the weight", "before the weight, FP32 weight"):
        yield variant.but(rounding=rounding)
    yield variant.but(formula=f"none, eps {_eps(problem):g}")
    for eps in problem.once("epsilons", lambda: _shown(problem)):
        yield variant.but(formula=f"rms, eps {shown.name(eps)}")
    for eps in dict.fromkeys((_eps(problem), *EPSILONS)):
        for form in (
            "rms, eps {}",
            "rms with 1 + weight, eps {}",
            "rms with 1 + weight, rounded, eps {}",
            "rms over all heads, eps {}",
            "rms without weight, eps {}",
            "layer norm, eps {}",
            "rms, eps {} outside the root",
        ):
            yield variant.but(formula=form.format(f"{eps:g}"))
    for step in ("fma", "mul+add"):  # what stands outside a root is divided by, most of all by torch's
        outside = f"rms, eps {_eps(problem):g} outside the root"
        yield variant.but(formula=outside, primitive=f"{step}, x / torch sqrt")
    vectors = [f"torch sum, vectors of {n}" for n in (4, 8, 16)]
    for order in (
        *(f"lanes of {n}" for n in (4, 8, 16, 32, 64)),
        "ascending",
        "descending",
        "pairwise",
        *vectors,
        MEAN,
    ):
        yield variant.but(order=order)
    for primitive in [f"{step}, {root}" for step in ("fma", "mul+add") for root in ROOTS]:
        yield variant.but(primitive=primitive)
    for accumulate in ("fp32", "fp64", "bf16", "fp16"):
        yield variant.but(accumulate=accumulate)
    for accumulate in ("bf16 sums", "fp16 sums"):
        for order in SUMS:
            yield variant.but(accumulate=accumulate, order=order)
    for operands in ("stored", "bf16", "fp16"):
        yield variant.but(operands=operands)
    for output in ("bf16", "fp16", "fp32"):
        yield variant.but(output=output)
    for count in (2, 4, 8, 16):
        yield variant.but(split=f"{count} parts, ascending")


def _shown(problem: Problem) -> list[float]:
    """Epsilons that the rows show: what is left of the squared factor when the mean square is taken away."""
    weight = problem.weight()
    if weight is None or problem.inputs[0].shape != problem.out.shape or problem.inputs[0].shape[1] % len(weight):
        return []
    rows = torch.arange(0, len(problem.out), max(1, len(problem.out) // 64))
    x, y = (t[rows].double().unflatten(1, (-1, len(weight))) for t in (problem.inputs[0], problem.out))
    normed = x * weight.double()
    scale = (normed * y).sum(-1) / normed.square().sum(-1).clamp_min(1e-30)
    left = (scale**-2 - x.square().mean(-1)).flatten()
    weights = (scale**4).flatten()  # a small row says it best
    known = left.isfinite() & weights.isfinite()
    eps = float((left * weights)[known].sum() / weights[known].sum().clamp_min(1e-300)) if known.any() else 0.0
    return shown.near(eps, 0.1, 10) if eps > 1e-9 else []


def applies(variant: Variant, problem: Problem) -> bool:
    """True if the problem has what the variant speaks of."""
    weight = problem.weight()
    if weight is None or problem.inputs[0].shape[1] % len(weight):
        return False
    if variant["operands"] == problem.storage or (variant["operands"] == "bf16") > (problem.storage == "fp32"):
        return False
    if variant["order"] == TORCH and variant["rounding"] != "after the weight":
        return False
    if variant["accumulate"].endswith("sums") and (variant["order"] not in SUMS or variant["split"] != "1"):
        return False
    if "all heads" in variant["formula"] and problem.inputs[0].shape[1] == len(weight):
        return False
    if variant["order"].startswith("torch sum") and variant["primitive"].startswith("fma"):
        return False
    return problem.recorded == "fp32" or variant["rounding"] != "before the weight" or variant["output"] != "fp32"


def simulate(variant: Variant, problem: Problem) -> torch.Tensor:
    """The sample [rows, columns], FP32."""
    weight = problem.weight()
    assert weight is not None
    rows = problem.inputs[0][problem.rows]
    heads = rows.unflatten(-1, (-1, len(weight)))
    kind, _, rest = variant["formula"].partition(", eps ")
    eps = float(rest.split()[0])
    w = _factors(weight, kind)
    if kind == "none":
        return round_to(rows.to(FP32), variant["output"])[:, problem.columns]
    if variant["order"] == TORCH:
        if kind != "rms" or "outside" in rest:
            return torch.full((len(rows), len(problem.columns)), float("nan"))
        found = torch.nn.functional.rms_norm(heads, (len(weight),), w.to(heads.dtype), eps)
        return round_to(found.to(FP32), variant["output"]).flatten(-2)[:, problem.columns]
    x = round_to(heads.to(FP32), variant["operands"])
    if kind == "layer norm":
        x = x - x.mean(-1, keepdim=True)
    mean = mean_square(x, variant, problem, kind)[..., None]
    if kind.endswith("all heads"):
        mean = mean.mean(-2, keepdim=True)
    if "outside" in rest:
        scaled = x / ((torch.sqrt(mean) if "torch sqrt" in variant["primitive"] else _root(mean)) + eps)
    elif variant["primitive"].endswith("1/torch sqrt"):
        scaled = x * (1 / torch.sqrt(mean + eps))
    elif variant["primitive"].endswith("x / torch sqrt"):
        scaled = x / torch.sqrt(mean + eps)
    elif variant["primitive"].endswith("x / sqrt"):
        scaled = x / _root(mean + eps)
    else:
        scaled = x * (1 / _root(mean + eps))
    output = variant["output"]
    if variant["rounding"] != "after the weight":
        scaled = round_to(scaled, output if output != "fp32" else problem.storage)
    return round_to(scaled * w, output).flatten(-2)[:, problem.columns]


def _factors(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """What normed rows are multiplied by."""
    if kind.endswith("without weight"):
        return torch.ones(weight.shape)
    if kind.endswith("1 + weight, rounded"):
        return (weight + 1).to(FP32)
    return weight.to(FP32) + 1 if kind.endswith("1 + weight") else weight.to(FP32)


def _root(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded, which torch's own is not."""
    return x.double().sqrt().to(FP32)


def mean_square(x: torch.Tensor, variant: Variant, problem: Problem, kind: str) -> torch.Tensor:
    """[rows, heads]: mean of squares of [rows, heads, D]."""
    shown = tuple(variant[n] for n in ("operands", "order", "primitive", "split", "accumulate"))
    return problem.once(("mean", kind, *shown), lambda: _mean_square(x, variant))


def _mean_square(x: torch.Tensor, variant: Variant) -> torch.Tensor:
    order, width, accumulate = variant["order"], x.shape[-1], variant["accumulate"]
    if accumulate == "fp64":
        return x.double().square().mean(-1).to(FP32)
    if accumulate in ("bf16", "fp16"):
        narrow = arithmetic.DTYPES[accumulate]
        return x.to(narrow).pow(2).mean(-1).to(FP32)
    if accumulate.endswith("sums"):
        return _narrow_sum(x, order, accumulate.split()[0]) / width
    if order == MEAN:
        return x.pow(2).mean(-1)
    fused = variant["primitive"].startswith("fma")
    parts = [_square_sum(x[..., begin:end], order, fused) for begin, end in cuts(variant["split"], width)]
    return joined(parts, variant["split"]) / width


def _square_sum(x: torch.Tensor, order: str, fused: bool) -> torch.Tensor:
    if order.startswith("lanes"):
        return arithmetic.halving(arithmetic.lanes(x, x, int(order.split()[-1]), fused))
    if order.startswith("torch sum"):
        return arithmetic.cascade(x * x, int(order.split()[-1]))
    if order == "pairwise":
        return arithmetic.pairwise(x * x)
    if order == "descending":
        x = x.flip(-1)
    return arithmetic.lanes(x, x, 1, fused)[..., 0]


def _narrow_sum(x: torch.Tensor, order: str, narrow: str) -> torch.Tensor:
    """Sum of squares with every square's addition rounded to a narrow format."""
    terms = (x * x).flip(-1) if order == "descending" else x * x
    count = int(order.split()[-1]) if order.startswith("lanes") else 1
    terms = torch.nn.functional.pad(terms, (0, -terms.shape[-1] % count))
    total = torch.zeros_like(terms[..., :count])
    for i in range(0, terms.shape[-1], count):
        total = round_to(total + terms[..., i : i + count], narrow)
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = round_to(total[..., :half] + total[..., half:], narrow)
    return total[..., 0]
