"""The log-prob of a row's next token from its logits: forms of real stacks, and changes of one field.

order       of the sum over the vocabulary: `contract` (leaves of sixteen lanes), `torch sum`, `N shards` (each by
            torch, added ascending), `blocks of N` (online: each under the maximum so far), ascending, descending,
            pairwise, `lanes of N` (halving tree over lanes); `library: torch.log_softmax`, `library: torch.logsumexp`
primitive   `contract` exp and log; torch; `exp2, log2`, `exp2, log` (of differences times log2 e), `exp2 of products,
            log2` (products with log2 e are subtracted); `FP64`
rounding    none; `logits` (to BF16), `log-softmax` (BF16 in and out), `result` (to BF16), `FP16 logits`, `FP16 result`,
            `N decimals`
formula     `log-softmax`; `log(softmax)`, `log(softmax + E)`; `temperature T`; `no maximum`; `times log2 e`;
            `N more of 0` (a padded vocabulary's), `first N` (of the vocabulary), N as the rows show it
"""

from collections.abc import Iterator

import torch

from zerogap.diagnose.simulate.arithmetic import FP32, chain, halving, lanes, pairwise, round_to
from zerogap.diagnose.simulate.contract import contract_output
from zerogap.diagnose.simulate.variant import LIBRARY, Problem, Variant

TORCH = f"{LIBRARY} torch.log_softmax"
LOGSUMEXP = f"{LIBRARY} torch.logsumexp"
ELEMENTS = 1 << 21  # logits of a sample
LOOPS = ("ascending", "descending")
LANES = (1024, 512, 256, 128, 64, 32, 16, 8)
BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
BASE_TWO = ("exp2, log2", "exp2, log", "exp2 of products, log2")
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
ADDED = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-10, 1e-12, 1e-3)


def bases(problem: Problem) -> list[Variant]:
    """The contract's, torch's, and the plain sum."""
    plain = {"order": "contract", "primitive": "contract", "rounding": "none", "formula": "log-softmax"}
    contract = Variant.of("logprob", plain)
    library = contract.but(order=TORCH, primitive="torch")
    by_sum = library.but(order="torch sum")
    return [contract, library, library.but(order=LOGSUMEXP), by_sum, library.but(rounding="log-softmax")]


def changes(variant: Variant, problem: Problem) -> Iterator[Variant]:
    """Variants with one field changed."""
    by_sum = variant if variant["order"] not in ("contract", TORCH, LOGSUMEXP) else bases(problem)[3]
    for order in (TORCH, LOGSUMEXP):
        yield variant.but(order=order)
    width = problem.inputs[0].shape[1]
    blocks, wide = ([f"{w} of {n}" for n in ns if n < width] for w, ns in (("blocks", BLOCKS), ("lanes", LANES)))
    for order in ("torch sum", *(f"{n} shards" for n in (2, 3, 4, 8, 16)), *blocks, *wide, *LOOPS, "pairwise"):
        yield by_sum.but(order=order)
    for primitive in ("torch", *BASE_TWO, "FP64"):
        yield by_sum.but(primitive=primitive)
    for rounding in ("none", "logits", "log-softmax", "result", "FP16 logits", "FP16 result"):
        yield variant.but(rounding=rounding)
    for count in problem.once("decimals", lambda: _decimals(problem)):
        yield variant.but(rounding=f"{count} decimals")
    for formula in problem.once("counted", lambda: _counted(problem)):
        yield variant.but(formula=formula)
    for formula in ("log-softmax", "log(softmax)", *(f"log(softmax + {e:g})" for e in ADDED)):
        yield variant.but(formula=formula)
    for temperature in (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0):
        yield variant.but(formula=f"temperature {temperature}")
    for formula in ("no maximum", "times log2 e"):
        yield variant.but(formula=formula)


def _decimals(problem: Problem) -> list[int]:
    """Decimals that are enough for every recorded number."""
    out = problem.out.double().flatten()
    out = out[out.isfinite()]
    for count in range(1, 7):
        nearest = ((out * 10**count).round() / 10**count).to(problem.out.dtype).double()
        if len(out) >= 4 and bool((nearest == out).all()):
            return [count]
    return []


def _counted(problem: Problem) -> list[str]:
    """Vocabularies that the rows show: more logits of 0 than there are, or fewer than all."""
    targets = _targets(problem)
    if targets is None or len(targets) != len(problem.out):
        return []
    rows = ((targets >= 0) & problem.out[:, 0].isfinite()).nonzero()[:64, 0]
    if len(rows) < 4:
        return []
    z = problem.inputs[0][rows].double()
    picked = z.gather(1, targets[rows, None])[:, 0]
    top = z.amax(1, keepdim=True)
    sums = torch.exp(z - top).cumsum(1)
    wanted = torch.exp(picked - problem.out[rows, 0].double() - top[:, 0])
    more = (wanted - sums[:, -1]) * torch.exp(top[:, 0])
    count = float(more.median())
    if count > 0.5 and float((more - count).abs().median()) < 0.05 * count:
        return [f"{n} more of 0" for n in (round(count), round(count) + 1, round(count) - 1) if n > 0]
    if bool((wanted < sums[:, -1] * (1 - 1e-6)).all()):
        places = ((sums - wanted[:, None]).abs().argmin(1) + 1).unique()
        return [f"first {int(n)}" for n in places] if len(places) <= 4 else []
    return []


def _targets(problem: Problem) -> torch.Tensor | None:
    given = problem.parameters.get("targets")
    return None if given is None else torch.as_tensor(given, dtype=torch.int64).flatten()


def applies(variant: Variant, problem: Problem) -> bool:
    """True if the next tokens are known."""
    if _targets(problem) is None or len(problem.inputs) != 1:
        return False
    if variant["order"] == "contract":
        narrow = variant["rounding"] in ("log-softmax", "FP16 logits")
        plain = not narrow and variant["formula"].startswith(("log-s", "temp"))
        return variant["primitive"] == "contract" and plain
    if variant["primitive"] == "contract":
        return False
    if variant["rounding"] == "log-softmax":
        return variant["order"] == TORCH and variant["formula"] == "log-softmax"
    if variant["primitive"] != "torch" and (
        variant["order"] in (TORCH, LOGSUMEXP) or not variant["formula"].startswith("log-s")
    ):
        return False
    if variant["primitive"] == "FP64" or variant["formula"].endswith("more of 0") or variant["formula"][:5] == "first":
        return variant["order"] in ("torch sum", TORCH, LOGSUMEXP)
    if variant["order"] == TORCH:
        return variant["formula"] != "no maximum"
    return variant["order"] == "torch sum" or variant["formula"].startswith(("log-s", "temp"))


def cost(variant: Variant) -> int:
    """1: short loops over the vocabulary, 2: long ones."""
    if variant["order"] in (*LOOPS, "lanes of 16", "lanes of 8"):
        return 2
    return int(variant["order"].startswith(("lanes", "blocks", "pairwise")))


def sample(problem: Problem, differs: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that have a next token, those that differ first: many, for there is one number in each."""
    targets = _targets(problem)
    known = torch.ones(len(differs), dtype=torch.bool) if targets is None else targets >= 0
    wanted = max(rows, min(8 * rows, ELEMENTS // max(1, problem.inputs[0].shape[1])))
    rank = torch.where(known, differs[:, 0].to(torch.int64), -1)
    best = torch.argsort(rank, descending=True, stable=True)[: min(wanted, int(known.sum()))]
    return best.sort().values, torch.zeros(1, dtype=torch.int64)


def simulate(variant: Variant, problem: Problem) -> torch.Tensor:
    """The sample [rows, 1], FP32; NaN where there is no next token."""
    targets = _targets(problem)
    assert targets is not None
    ids = targets[problem.rows]
    key = ("logprob", *(f for f in variant.fields))
    found = problem.once(key, lambda: _scored(variant, problem, ids.clamp_min(0)))
    return torch.where(ids < 0, float("nan"), found)[:, None]


def _scored(variant: Variant, problem: Problem, ids: torch.Tensor) -> torch.Tensor:
    logits = problem.inputs[0][problem.rows].to(FP32)
    formula, rounding = variant["formula"], variant["rounding"]
    if rounding in ("logits", "log-softmax", "FP16 logits"):
        logits = round_to(logits, "fp16" if rounding.startswith("FP16") else "bf16")
    given = problem.number("temperature", 1.0) if problem.parameters.get("processed") else 1.0
    temperature = float(formula.split()[1]) if formula.startswith("temperature") else (given or 1.0)
    if variant["order"] == "contract":
        parameters = {"targets": ids, "temperature": temperature}
        found = contract_output("logprob", (logits,), {}, parameters)[:, 0]
    else:
        z = logits if temperature == 1.0 else logits / temperature
        if formula.endswith("more of 0"):
            z = torch.nn.functional.pad(z, (0, int(formula.split()[0])))
        elif formula.startswith("first"):
            z = torch.where(torch.arange(z.shape[1]) < int(formula.split()[1]), z, float("-inf"))
        if formula.startswith("log(softmax"):
            found = _of_softmax(z, ids, formula, variant["order"])
        elif rounding == "log-softmax":
            found = torch.log_softmax(z.to(torch.bfloat16), -1).to(FP32).gather(-1, ids[:, None])[:, 0]
        elif variant["order"] == TORCH:
            found = torch.log_softmax(z, -1).gather(-1, ids[:, None])[:, 0]
        else:
            found = _by_sum(z, ids, variant)
    if formula == "times log2 e":
        found = found * 1.4426950408889634
    if rounding.endswith("decimals"):
        unit = 10.0 ** int(rounding.split()[0])
        return ((found.double() * unit).round() / unit).to(FP32)
    narrow = {"result": "bf16", "FP16 result": "fp16"}.get(rounding)
    return found if narrow is None else round_to(found, narrow)


def _of_softmax(z: torch.Tensor, ids: torch.Tensor, formula: str, order: str) -> torch.Tensor:
    probabilities = torch.softmax(z, -1)
    if "+" in formula:
        probabilities = probabilities + float(formula.split("+ ")[1].rstrip(")"))
    return torch.log(probabilities).gather(-1, ids[:, None])[:, 0]


def _by_sum(z: torch.Tensor, ids: torch.Tensor, variant: Variant) -> torch.Tensor:
    order, primitive = variant["order"], variant["primitive"]
    if primitive == "FP64":
        return torch.log_softmax(z.double(), -1).gather(-1, ids[:, None])[:, 0].to(FP32)
    picked = z.gather(-1, ids[:, None])[:, 0]
    if order == LOGSUMEXP:
        return picked - torch.logsumexp(z, -1)
    if variant["formula"] == "no maximum":
        return picked - torch.log(torch.exp(z).sum(-1))
    top = z.amax(-1, keepdim=True)
    if order.startswith("blocks"):
        total = _online(z, int(order.split()[-1]), primitive)
    else:
        total = _total(_power(z, top, primitive), order)
    logarithm = torch.log2(total) * LN2 if primitive.endswith("log2") else torch.log(total)
    return (picked - top[:, 0]) - logarithm


def _power(z: torch.Tensor, top: torch.Tensor, primitive: str) -> torch.Tensor:
    """exp(z - top) as the primitive has it."""
    if primitive.startswith("exp2 of products"):
        return torch.exp2(z * LOG2E - top * LOG2E)
    return torch.exp2((z - top) * LOG2E) if primitive.startswith("exp2") else torch.exp(z - top)


def _total(terms: torch.Tensor, order: str) -> torch.Tensor:
    """Sum over the vocabulary in an order."""
    if order in LOOPS:
        return chain(terms if order == "ascending" else terms.flip(-1))
    if order == "pairwise":
        return pairwise(terms)
    if order.startswith("lanes"):
        return halving(lanes(terms, torch.ones_like(terms), int(order.split()[-1]), False))
    if order.endswith("shards"):
        parts = [part.sum(-1) for part in terms.chunk(int(order.split()[0]), -1)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total
    return terms.sum(-1)


def _online(z: torch.Tensor, size: int, primitive: str) -> torch.Tensor:
    """Sum of blocks, ascending, each under the largest logit so far."""
    top = torch.full_like(z[:, :1], float("-inf"))
    total = torch.zeros_like(z[:, 0])
    for part in z.split(size, -1):
        peak = torch.maximum(top, part.amax(-1, keepdim=True))
        total = total * _power(top, peak, primitive)[:, 0] + _power(part, peak, primitive).sum(-1)
        top = peak
    return total
