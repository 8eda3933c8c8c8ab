"""Boundaries of one side stand under the names of a wrapped module (FSDP, compiled), some under names unknown."""

import dataclasses

from zerogap.diagnose.corpus.workshop import Sides, Workshop, retold

EXPECTED = "clean"
NAMES = {"0.q_proj": "_fsdp_wrapped_module.model.layers.0.self_attn.q_proj", "1.post_norm": "engine.layer1.ln2"}


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair()
    first = b.trace.recorded
    renamed = {NAMES.get(name, name): rows for name, rows in first.boundaries.items()}
    return a, retold(b, passes=(dataclasses.replace(first, boundaries=renamed),))
