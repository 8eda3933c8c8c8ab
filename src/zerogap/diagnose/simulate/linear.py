"""Linear layers, the head and the router's logits: fields, the forms that real stacks have, and changes of one field.

operands    stored, bf16, fp16, tf32, `... truncated`, e4m3, `e4m3 weights` (rows as they are)
order, primitive, split, accumulate: `dots`
rounding    once; `before the bias` (the product is rounded, too); `truncated` (bits dropped at the end)
output      bf16, fp16, fp32
scale       none; of E4M3: fp32, pow2, `fp32, amax 240`; of the head: a factor of the logits
block       none; of E4M3: `BLOCKS`, of the weight, then of the rows. Ascending sums multiply codes and apply scales
            to sums; torch's product takes de-quantised operands
formula     plain, no bias, `softcap C`, `softcap C in steps` (rounded at each)
"""

from collections.abc import Hashable, Iterator
from typing import Any

import torch

from zerogap.diagnose.simulate import dots
from zerogap.diagnose.simulate.arithmetic import FP32, quantise_e4m3, round_to
from zerogap.diagnose.simulate.contract import contract_leaves
from zerogap.diagnose.simulate.variant import LIBRARY, Problem, Variant
from zerogap.numerics import preset

TORCH = f"{LIBRARY} torch.nn.functional.linear"
ALONE = f"{TORCH}, each sequence alone"
WEIGHTS, STORED = ("128x128", "64x64", "32x32", "256x256", "channel", "tensor"), "stored"
BLOCKS = (
    *(f"{n}x{n}, 1x{n}" for n in (128, 64, 32, 256)),
    "128x128, token",
    "channel, token",
    "tensor, token",
    "tensor, tensor",
    "tensor, each sequence",  # as each was computed in a pass of its own
    *(f"{weight}, {STORED}" for weight in WEIGHTS),
)
UPCAST = f"{TORCH} on FP32 copies"


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
    for operands in ("bf16", "fp16", "tf32", "bf16 truncated", "tf32 truncated"):
        yield variant.but(operands=operands)
    for output in ("bf16", "fp16", "fp32"):
        yield variant.but(output=output)
    for rounding in ("before the bias", "truncated"):
        yield variant.but(rounding=rounding)
    for formula in ("no bias", *(f"softcap {cap}{end}" for cap in (15, 20, 30, 50) for end in ("", " in steps"))):
        yield variant.but(formula=formula)
    for order in ("ascending", TORCH):
        for block in BLOCKS:
            for scale in ("fp32", "pow2", "fp32, amax 240"):
                operands = "e4m3 weights" if block.endswith(STORED) else "e4m3"
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
    narrow = variant["accumulate"] in ("bf16", "fp16")
    if narrow or variant["order"] == "pairwise" or variant["primitive"] == "tensor core":
        return 2
    dear = variant["operands"].startswith("e4m3") or variant["accumulate"].endswith("parts")
    return int(dear or variant["primitive"] == "mul+add")


def _applies(variant: Variant, problem: Problem) -> bool:
    """False for what says the same as another variant, or nothing, on this problem."""
    bias = problem.weight(".bias")
    if bias is None and (variant["rounding"] == "before the bias" or variant["formula"] == "no bias"):
        return False
    if variant["order"].startswith(LIBRARY) and not _replayed(variant, problem):
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
    if variant["operands"].startswith("e4m3"):
        stored = variant["block"].endswith(STORED) and variant["order"] == "ascending" and problem.storage != "bf16"
        if (variant["operands"] == "e4m3") == variant["block"].endswith(STORED):
            return False
        alone = variant["block"].endswith("sequence") and len(problem.lengths) < 2
        return variant["order"] in ("ascending", TORCH) and variant["split"] == "1" and not stored and not alone
    reduced = problem.inputs[0].shape[1]
    return variant["split"] == "1" or len(dots.cuts(variant["split"], reduced)) > 1


def _replayed(variant: Variant, problem: Problem) -> bool:
    """True if a library's product is all that the fields say: it has one primitive, accumulates FP32, rounds once."""
    plain = contract_form(problem)
    same = ["primitive", *(["accumulate", "rounding", "output", "formula"] if variant["split"] == "1" else [])]
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
    if variant["order"].startswith(LIBRARY) and variant["split"] == "1" and not variant["operands"].startswith("e4m3"):
        return _finished(_whole(variant, problem), None, variant, problem)
    weight = problem.weight()
    assert weight is not None
    ring = variant["split"].endswith("ring")  # a column's order depends on where it stands among all
    columns = torch.arange(len(weight)) if ring else problem.columns
    x, w = problem.once(("operands", ring), lambda: (problem.inputs[0][problem.rows], weight[columns]))
    if variant["operands"].startswith("e4m3"):
        total = _fp8(variant, problem)
    else:
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
        if variant["operands"] != "stored":
            x, w = (round_to(t.to(FP32), variant["operands"]).to(x.dtype) for t in (x, w))
        groups = x.split(problem.lengths) if variant["order"] == ALONE else [x]
        w, b = w.to(x.dtype), None if b is None else b.to(x.dtype)
        return torch.cat([torch.nn.functional.linear(part, w, b) for part in groups])

    return problem.whole(("linear", variant["order"], variant["operands"], variant["formula"] == "no bias"), run)


def _finished(total: torch.Tensor, bias: torch.Tensor | None, variant: Variant, problem: Problem) -> torch.Tensor:
    output = variant["output"]
    if variant["rounding"] == "before the bias":
        total = round_to(total, output)
    if bias is not None:
        total = total + bias
    if variant["formula"].startswith("softcap"):
        cap, step = float(variant["formula"].split()[1]), "fp32"
        if variant["formula"].endswith("in steps"):  # rounded before the division and after every step
            step = output
        total = round_to(torch.tanh(round_to(round_to(total, step) / cap, step)), step) * cap
    if variant["scale"].startswith("times"):
        total = total * float(variant["scale"].split()[-1])
    if variant["rounding"] == "truncated":
        return round_to(total, f"{output} truncated" if output == "bf16" else output)
    return round_to(total, output)


def _fp8(variant: Variant, problem: Problem) -> torch.Tensor:
    """The product of quantised operands: rows by token or in blocks, the weight whole, by channel or in squares."""
    weight = problem.weight()
    assert weight is not None
    block, scale = variant["block"], variant["scale"]
    top, power = (240.0 if scale.endswith("240") else 448.0), scale == "pow2"

    tall, _, wide = block.partition(", ")

    def squares() -> tuple[torch.Tensor, torch.Tensor]:
        value = weight.to(FP32)
        return quantise_e4m3(value, _largest(value, tall, [len(value)]), top, power)

    def rows() -> tuple[torch.Tensor, torch.Tensor]:
        value = problem.inputs[0].to(FP32)
        if wide == STORED:
            return value, torch.ones_like(value)
        return quantise_e4m3(value, _largest(value, wide, problem.lengths), top, power)

    key = (block, top, power)
    shared: dict[Hashable, Any] = problem.once("whole", dict)
    x, w = shared.get(("grids", *key)) or shared.setdefault(("grids", *key), (rows(), squares()))
    if variant["order"] == TORCH:
        left, right = (round_to(grid * scales, problem.storage).to(weight.dtype) for grid, scales in (x, w))
        return problem.whole(("e4m3", *key), lambda: torch.nn.functional.linear(left, right))
    step = int(tall.split("x")[1]) if "x" in tall else weight.shape[1]
    pick_x, pick_w = problem.rows, problem.columns
    step = min(step, weight.shape[1])
    scales = (x[1][pick_x][:, ::step], w[1][pick_w][:, ::step])
    grids = (x[0][pick_x], w[0][pick_w])
    promoted = 0 if step == weight.shape[1] else step
    return dots.fp8_dot((grids[0], scales[0]), (grids[1], scales[1]), promoted, variant["primitive"])


def _largest(value: torch.Tensor, block: str, lengths: list[int]) -> torch.Tensor:
    """Largest magnitude of every element's block, [M, K]: `HxW`, `channel` and `token` (a row), `tensor`, `each
    sequence` (rows of `lengths`)."""
    magnitude = value.abs()
    if block == "tensor":
        return magnitude.amax().expand(value.shape)
    if block == "each sequence":
        return torch.cat([part.amax().expand(part.shape) for part in magnitude.split(lengths)])
    if "x" not in block:
        return magnitude.amax(1, keepdim=True).expand(value.shape)
    tall, wide = (int(n) for n in block.split("x"))
    across = torch.cat([p.amax(1, keepdim=True).expand(p.shape) for p in magnitude.split(wide, dim=1)], 1)
    return across if tall == 1 else torch.cat([p.amax(0, keepdim=True).expand(p.shape) for p in across.split(tall)])
