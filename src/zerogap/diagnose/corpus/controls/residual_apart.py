"""One side recorded updates before the addition under the residual's names, and says so in the boundaries' meaning.

Met with stacks that return (update, residual) from a layer.
"""

import dataclasses

from zerogap.diagnose.corpus.workshop import Sides, Workshop, retold

EXPECTED = "clean"


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair()
    first = b.trace.recorded
    apart, meaning = dict(first.boundaries), dict(first.meaning)
    for layer in (0, 1):
        apart[f"{layer}.residual_attention"] = first.boundaries[f"{layer}.o_proj"]
        apart[f"{layer}.residual_mlp"] = first.boundaries[f"{layer}.down_proj"]
        for name in ("residual_attention", "residual_mlp"):
            meaning[f"{layer}.{name}"] = "update alone, residual returned separately"
    return a, retold(b, passes=(dataclasses.replace(first, boundaries=apart, meaning=meaning),))
