"""Check 8: both sides cut sums over ranks in the same way.

Unlike parallel sizes change the order of the sums behind row-parallel products. They account for the logdiff where the
sides part first at such a product.
"""

from typing import Any

from zerogap.diagnose.facts import Facts
from zerogap.diagnose.side import Side
from zerogap.diagnose.verdict import Cause, Finding

NEEDS = "record the parallel sizes of both sides (tensor, expert, data, sequence) in the trace's layout"
SIZES = (
    "ranks",
    "tensor_parallel_size",
    "expert_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "tp",
    "ep",
    "pp",
    "cp",
    "sp",
)
_SUMS = ("embed", "o_proj", "down_proj", "experts", "lm_head", "residual_attention", "residual_mlp")


def check(a: Side, b: Side, facts: Facts) -> Finding:
    """See the module."""
    one, other = _sizes(a.trace.layout), _sizes(b.trace.layout)
    known = [n for n in one if n in other]
    apart = {n: (one.get(n, 1), other.get(n, 1)) for n in {*one, *other} if one.get(n, 1) != other.get(n, 1)}
    if not one and not other:
        return Finding("layout", "not checked", "no side says how many ranks it runs on", needs=NEEDS)
    if not apart:
        if not known:
            return Finding("layout", "not checked", "only one side says how many ranks it runs on", needs=NEEDS)
        return Finding("layout", "passed", f"the same parallel sizes ({', '.join(known)})")
    words = ", ".join(f"{n} {x} and {y}" for n, (x, y) in sorted(apart.items()))
    found = facts.walk()
    accounts: bool | None = None
    if found.first is not None:
        accounts = found.first.node.name.split(".")[-1] in _SUMS
    if facts.difference.same:
        accounts = False
    text = f"unlike layouts: {words}"
    cause = Cause("layout", "ranks", text)
    return Finding("layout", "failed", text, (cause,), evidence={"accounts": accounts, "sizes": words})


def _sizes(layout: Any) -> dict[str, int]:
    return {n: int(layout[n]) for n in SIZES if isinstance(layout.get(n), int)}
