"""The log-prob of a row's next token from its logits: forms of real stacks, and changes of one field.

order       of the sum over the vocabulary: `contract` (leaves of sixteen lanes), `torch sum`, `N shards` (each by
            torch, added ascending), ascending; `library: torch.log_softmax`, `library: torch.logsumexp`
primitive   `contract` exp and log; torch
rounding    none; `logits` (to BF16), `log-softmax` (BF16 in and out), `result` (to BF16), `FP16 logits`
formula     `log-softmax`; `log(softmax)`, `log(softmax + E)`; `temperature T`; `no maximum`; `times log2 e`
"""

from collections.abc import Iterator

import torch

from zerogap.diagnose.simulate.arithmetic import FP32, chain, round_to
from zerogap.diagnose.simulate.contract import contract_output
from zerogap.diagnose.simulate.variant import LIBRARY, Problem, Variant

TORCH = f"{LIBRARY} torch.log_softmax"
LOGSUMEXP = f"{LIBRARY} torch.logsumexp"
ELEMENTS = 1 << 21  # logits of a sample
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
    for order in ("torch sum", *(f"{n} shards" for n in (2, 3, 4, 8, 16)), TORCH, LOGSUMEXP, "ascending"):
        yield variant.but(order=order)
    for rounding in ("none", "logits", "log-softmax", "result", "FP16 logits"):
        yield variant.but(rounding=rounding)
    for formula in ("log-softmax", "log(softmax)", *(f"log(softmax + {e:g})" for e in ADDED)):
        yield variant.but(formula=formula)
    for temperature in (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0):
        yield variant.but(formula=f"temperature {temperature}")
    for formula in ("no maximum", "times log2 e"):
        yield variant.but(formula=formula)


def _targets(problem: Problem) -> torch.Tensor | None:
    given = problem.parameters.get("targets")
    return None if given is None else torch.as_tensor(given, dtype=torch.int64).flatten()


def applies(variant: Variant, problem: Problem) -> bool:
    """True if the next tokens are known."""
    if _targets(problem) is None or len(problem.inputs) != 1:
        return False
    if variant["order"] == "contract":
        plain = variant["rounding"] in ("none", "logits", "result") and variant["formula"].startswith(("log-s", "temp"))
        return variant["primitive"] == "contract" and plain
    if variant["primitive"] == "contract":
        return False
    if variant["rounding"] == "log-softmax":
        return variant["order"] == TORCH and variant["formula"] == "log-softmax"
    if variant["order"] == TORCH:
        return variant["formula"] != "no maximum"
    return variant["order"] == "torch sum" or variant["formula"].startswith(("log-s", "temp"))


def cost(variant: Variant) -> int:
    """2: a loop over the vocabulary."""
    return 2 if variant["order"] == "ascending" else 0


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
        if formula.startswith("log(softmax"):
            found = _of_softmax(z, ids, formula, variant["order"])
        elif rounding == "log-softmax":
            found = torch.log_softmax(z.to(torch.bfloat16), -1).to(FP32).gather(-1, ids[:, None])[:, 0]
        elif variant["order"] == TORCH:
            found = torch.log_softmax(z, -1).gather(-1, ids[:, None])[:, 0]
        else:
            found = _by_sum(z, ids, variant["order"], formula)
    if formula == "times log2 e":
        found = found * 1.4426950408889634
    return round_to(found, "bf16") if rounding == "result" else found


def _of_softmax(z: torch.Tensor, ids: torch.Tensor, formula: str, order: str) -> torch.Tensor:
    probabilities = torch.softmax(z, -1)
    if "+" in formula:
        probabilities = probabilities + float(formula.split("+ ")[1].rstrip(")"))
    return torch.log(probabilities).gather(-1, ids[:, None])[:, 0]


def _by_sum(z: torch.Tensor, ids: torch.Tensor, order: str, formula: str) -> torch.Tensor:
    picked = z.gather(-1, ids[:, None])[:, 0]
    if order == LOGSUMEXP:
        return picked - torch.logsumexp(z, -1)
    if formula == "no maximum":
        return picked - torch.log(torch.exp(z).sum(-1))
    top = z.amax(-1, keepdim=True)
    if order == "ascending":
        total = chain(torch.exp(z - top))
    elif order.endswith("shards"):
        parts = [torch.exp(part - top).sum(-1) for part in z.chunk(int(order.split()[0]), -1)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
    else:
        total = torch.exp(z - top).sum(-1)
    return (picked - top[:, 0]) - torch.log(total)
