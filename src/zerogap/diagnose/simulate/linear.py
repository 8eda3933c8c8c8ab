"""Linear layers, the head and the router's logits: fields, the forms that real stacks have, and changes of one field.

operands    stored, bf16, fp16, tf32, `... truncated`, e4m3, `e4m3 weights` (rows as they are)
order, primitive, split, accumulate: `dots`
rounding    once; `before the bias` (the product is rounded, too); `truncated` (bits dropped at the end)
output      bf16, fp16, fp32
scale       none; `times F`, `over F`, `... in steps` (the product is rounded first), `rows times F`, `rows over F`
            (they are rounded then), F as the rows show it; of narrow operands: `fp8.SCALES`
block       none; of narrow operands: `fp8.choices`, of the weight, then of the rows. Ascending sums multiply codes and
            apply scales to sums; torch's product takes de-quantised operands
formula     plain, no bias, `softcap C`, `softcap C in steps` (rounded at each), usual C and what the rows show;
            `clamped to L` (either way), `at most L`, `at least L`, L as the rows show it
"""

from collections.abc import Iterator

import torch

from zerogap.diagnose.simulate import dots, fp8, shown
from zerogap.diagnose.simulate.arithmetic import FP32, round_to
from zerogap.diagnose.simulate.contract import contract_leaves
from zerogap.diagnose.simulate.variant import LIBRARY, Problem, Variant
from zerogap.numerics import preset

TORCH = f"{LIBRARY} torch.nn.functional.linear"
ALONE = f"{TORCH}, each sequence alone"
UPCAST = f"{TORCH} on FP32 copies"
CAPS, STEPS = (15.0, 20.0, 30.0, 50.0), " in steps"


def bases(problem: Problem) -> list[Variant]:
    """The contract's form, torch's on this machine (taken apart where its order is known, else replayed)."""
    narrow = problem.storage == "bf16"
    contract = contract_form(problem)
    found = [contract]
    if narrow:
        found += [contract.but(split=f"blocks of {size}") for size in (512, 1024)]  # oneDNN
    else:
        found += [contract.but(split=f"blocks of {size}") for size in (192, 384)]  # MKL
    found += [contract.but(order=name, split="1") for name in (TORCH, UPCAST, ALONE)]
    return [variant for variant in found if _applies(variant, problem)]


def contract_form(problem: Problem) -> Variant:
    """The contract's, with the recorded output dtype."""
    plain = {
        "operands": "stored",
        "order": "ascending",
        "primitive": "dot2" if problem.storage == "bf16" else "fma",
        "split": contract_split(problem),
        "accumulate": "fp32",
        "rounding": "once",
        "output": problem.recorded,
        "scale": "none",
        "block": "none",
        "formula": "plain",
    }
    return Variant.of(problem.kind, plain)


def contract_split(problem: Problem) -> str:
    """Leaves of the contract: those of o_proj and down_proj, by their rules; 1 elsewhere."""
    if problem.kind != "linear":
        return "1"
    leaves = contract_leaves(problem.weights, problem.inputs[0].shape[1], problem.parameters, preset("bf16"))
    if leaves == 1:
        return "1"
    return f"{leaves} parts, {'tree' if leaves > 2 else 'ascending'}"


def changes(variant: Variant, problem: Problem) -> Iterator[Variant]:
    """Variants with one field changed, cheap ones first."""
    narrow = problem.storage == "bf16"
    library = variant["order"].startswith(LIBRARY)
    for order in ("ascending", "descending", *(f"lanes of {n}" for n in (2, 4, 8, 16, 32)), TORCH, UPCAST):
        yield variant.but(order=order)
    for primitive in ("dot2", "fma") if narrow else ("fma", "mul+add"):
        yield variant.but(primitive=primitive)
    for split in dots.splits(problem.inputs[0].shape[1]):
        yield variant.but(split=split)
    for split in dots.odd_blocks(problem.inputs[0].shape[1]):
        for order in dict.fromkeys((variant["order"], TORCH)):
            yield variant.but(split=split, order=order)
    for operands in ("bf16", "fp16", "tf32", "bf16 truncated", "tf32 truncated"):
        yield variant.but(operands=operands)
    for output in ("bf16", "fp16", "fp32"):
        yield variant.but(output=output)
    for rounding in ("before the bias", "truncated"):
        yield variant.but(rounding=rounding)
    scales, caps = problem.once("shown", lambda: _shown(problem))
    for formula in ("no bias", *(f"softcap {cap:.9g}{end}" for cap in (*CAPS, *caps) for end in ("", STEPS))):
        yield variant.but(formula=formula)
    for formula in problem.once("clamped", lambda: _clamped(problem)):
        yield variant.but(formula=formula)
    for scale in scales:
        for end in ("",) if scale.startswith("rows") else ("", STEPS):
            yield variant.but(scale=scale + end)
    for operands, block, scale in fp8.choices():
        for order in ("ascending", TORCH, UPCAST):
            yield variant.but(operands=operands, block=block, scale=scale, split="1", order=order)
    for split in dots.splits(problem.inputs[0].shape[1])[1:]:  # narrow parts need a split
        for order in dict.fromkeys((variant["order"], TORCH)):
            for narrow_parts in ("bf16 parts", "fp16 parts"):
                yield variant.but(split=split, accumulate=narrow_parts, order=order)
    if not library:
        for accumulate in ("fp64", "bf16 parts", "fp16 parts", "bf16", "fp16"):
            yield variant.but(accumulate=accumulate)
        yield variant.but(order="pairwise")
        yield variant.but(primitive="tensor core")
    else:
        for accumulate in ("fp64", "bf16 parts", "fp16 parts"):
            yield variant.but(accumulate=accumulate)


def cost(variant: Variant) -> int:
    """0: one product; 1: operands are quantised first; 2: a step of elementwise code for each product."""
    if variant["split"].startswith("blocks of") and int(variant["split"].split()[-1]) not in dots.BLOCKS:
        return 2
    narrow = variant["accumulate"] in ("bf16", "fp16")
    if narrow or variant["order"] == "pairwise" or variant["primitive"] == "tensor core":
        return 2
    if fp8.coded(variant["operands"]) and not fp8.usual(variant["block"], variant["scale"], variant["operands"]):
        return 2
    dear = fp8.coded(variant["operands"]) or variant["accumulate"].endswith("parts")
    return int(dear or variant["primitive"] == "mul+add")


def _applies(variant: Variant, problem: Problem) -> bool:
    """False for what says the same as another variant, or nothing, on this problem."""
    bias = problem.weight(".bias")
    if bias is None and (variant["rounding"] == "before the bias" or variant["formula"] == "no bias"):
        return False
    if variant["order"].startswith(LIBRARY) and not fp8.coded(variant["operands"]) and not _replayed(variant, problem):
        return False
    if variant["order"] == ALONE and len(problem.lengths) < 2:
        return False
    if variant["order"] == UPCAST and problem.storage == "fp32":
        return False
    if variant["accumulate"].endswith("parts") and variant["split"] == "1":
        return False
    wide = ("bf16", "bf16 truncated", "tf32", "tf32 truncated")
    if problem.storage == "bf16" and variant["operands"] in wide:
        return False
    if fp8.coded(variant["operands"]):
        exact = problem.storage == "bf16" or not fp8.has_stored(variant["block"])  # whose products a kernel can take
        alone = variant["block"].endswith("sequence") and len(problem.lengths) < 2
        ordered = variant["order"] in (TORCH, UPCAST) or (variant["order"] == "ascending" and exact)
        return ordered and variant["split"] == "1" and not alone
    reduced = problem.inputs[0].shape[1]
    return variant["split"] == "1" or len(dots.cuts(variant["split"], reduced)) > 1


def _replayed(variant: Variant, problem: Problem) -> bool:
    """True if a library's product is all that the fields say: it has one primitive, accumulates FP32, rounds once."""
    plain = contract_form(problem)
    same = ["primitive", *(["accumulate", "rounding", "output"] if variant["split"] == "1" else [])]
    if variant["order"] == UPCAST:
        same = ["primitive"]
    if variant["split"] != "1" and variant["order"] != TORCH:
        return False
    return variant["accumulate"] != "fp64" and all(variant[n] == plain[n] for n in same)


def applies(variant: Variant, problem: Problem) -> bool:
    """True if the problem has what the variant speaks of."""
    return problem.weight() is not None and _applies(variant, problem)


def simulate(variant: Variant, problem: Problem) -> torch.Tensor:
    """The sample [rows, columns], FP32."""
    bias = problem.weight(".bias")
    if variant["order"].startswith(LIBRARY) and variant["split"] == "1" and not fp8.coded(variant["operands"]):
        return _finished(_whole(variant, problem), None, variant, problem)
    weight = problem.weight()
    assert weight is not None
    ring = variant["split"].endswith("ring")  # a column's order depends on where it stands among all
    columns = torch.arange(len(weight)) if ring else problem.columns
    x, w = problem.once(("operands", ring), lambda: (problem.inputs[0][problem.rows], weight[columns]))
    if fp8.coded(variant["operands"]):
        form = fp8.Form(variant["operands"], variant["block"], variant["scale"])
        if variant["order"].startswith(LIBRARY):
            total = fp8.library_product(form, problem, wide=variant["order"] == UPCAST)
        else:
            total = fp8.product(form, problem, variant["primitive"])
    else:
        x = _scaled_rows(x, variant)
        if variant["operands"] != "stored":
            x, w = (_as_operand(t, variant["operands"]) for t in (x, w))
        how = (variant["order"], variant["primitive"], variant["split"], variant["accumulate"])
        total = dots.dot(x, w, *how)
        total = total[:, problem.columns] if ring else total
    picked = None if bias is None or variant["formula"] == "no bias" else bias[problem.columns].to(FP32)
    return _finished(total, picked, variant, problem)


def _as_operand(t: torch.Tensor, name: str) -> torch.Tensor:
    """Rounded operands; BF16 stays BF16, so that its products take the BF16 path."""
    rounded = round_to(t.to(FP32), name)
    return rounded.to(torch.bfloat16) if name.startswith("bf16") else rounded


def _whole(variant: Variant, problem: Problem) -> torch.Tensor:
    """torch's own call over all rows, rounded as it rounds."""
    weight, bias = problem.weight(), problem.weight(".bias")
    assert weight is not None

    def run() -> torch.Tensor:
        x, w, b = problem.inputs[0], weight, None if variant["formula"] == "no bias" else bias
        if variant["order"] == UPCAST:
            x, w, b = x.to(FP32), w.to(FP32), None if b is None else b.to(FP32)
        x = _scaled_rows(x, variant)
        if variant["operands"] != "stored":
            x, w = (round_to(t.to(FP32), variant["operands"]).to(x.dtype) for t in (x, w))
        groups = x.split(problem.lengths) if variant["order"] == ALONE else [x]
        w, b = w.to(x.dtype), None if b is None else b.to(x.dtype)
        return torch.cat([torch.nn.functional.linear(part, w, b) for part in groups])

    rows = variant["scale"] if variant["scale"].startswith("rows") else ""
    return problem.whole(("linear", variant["order"], variant["operands"], variant["formula"] == "no bias", rows), run)


def _scaled_rows(x: torch.Tensor, variant: Variant) -> torch.Tensor:
    """Rows multiplied by a factor, and rounded, before the product (muP: MiniCPM's head)."""
    if not variant["scale"].startswith("rows"):
        return x
    _, verb, number = variant["scale"].split()
    value = x.to(FP32) * float(number) if verb == "times" else x.to(FP32) / float(number)
    return value.to(x.dtype)


def _shown(problem: Problem) -> tuple[list[str], list[float]]:
    """Factors and caps that the rows show; a few thousand elements are read."""
    weight = problem.weight()
    if weight is None or len(weight) != problem.out.shape[1]:
        return [], []
    rows = torch.arange(0, len(problem.out), max(1, len(problem.out) // 32))
    columns = torch.arange(0, len(weight), max(1, len(weight) // 256))
    plain = problem.inputs[0][rows].double() @ weight[columns].double().T
    if (bias := problem.weight(".bias")) is not None:
        plain = plain + bias[columns].double()
    out = problem.out[rows][:, columns].double()
    exact = 3e-4 if problem.recorded != "fp32" or problem.storage != "fp32" else 1e-5
    found = shown.factor(plain, out)
    if found is not None:
        times = [shown.name(n) for n in shown.near(found, exact, 8)]
        over = [shown.name(n) for n in shown.near(1 / found, exact, 4)]
        return [f"{on}{v} {n}" for on in ("", "rows ") for v, ns in (("times", times), ("over", over)) for n in ns], []
    cap = shown.cap(plain, out)
    return [], [] if cap is None else shown.near(cap, 0.02, 8)


def _clamped(problem: Problem) -> list[str]:
    """Limits where several recorded numbers stand."""
    out = problem.out.to(FP32)
    high, low = out.nan_to_num(-torch.inf).amax(), out.nan_to_num(torch.inf).amin()
    at_most, at_least = (int((out == end).sum()) >= 3 for end in (high, low))
    if at_most and at_least and float(high) == -float(low) and float(high) > 0:
        return [f"clamped to {shown.name(float(high))}"]
    ends = [f"at most {shown.name(float(high))}"] if at_most else []
    return [*ends, *([f"at least {shown.name(float(low))}"] if at_least else [])]


def _finished(total: torch.Tensor, bias: torch.Tensor | None, variant: Variant, problem: Problem) -> torch.Tensor:
    output = variant["output"]
    if variant["rounding"] == "before the bias":
        total = round_to(total, output)
    if bias is not None:
        total = total + bias
    if variant["scale"].startswith(("times", "over")):
        verb, number = variant["scale"].split()[:2]
        total = round_to(total, output) if variant["scale"].endswith(STEPS) else total
        total = total * float(number) if verb == "times" else total / float(number)
    if variant["formula"].startswith("softcap"):
        cap, step = float(variant["formula"].split()[1]), "fp32"
        if variant["formula"].endswith(STEPS):  # rounded before the division and after every step
            step = output
        total = round_to(torch.tanh(round_to(round_to(total, step) / cap, step)), step) * cap
    if variant["formula"].startswith(("clamped to", "at most", "at least")):
        bound = float(variant["formula"].split()[-1])
        low = -bound if variant["formula"].startswith("clamped") else bound
        total = total if variant["formula"].startswith("at least") else total.clamp_max(bound)
        total = total if variant["formula"].startswith("at most") else total.clamp_min(low)
    if variant["rounding"] == "truncated":
        return round_to(total, f"{output} truncated" if output == "bf16" else output)
    return round_to(total, output)
