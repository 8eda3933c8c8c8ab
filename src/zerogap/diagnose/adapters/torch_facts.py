"""What else is known of a transformers model: what each operator depends on besides its inputs, and routing records."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from zerogap.diagnose.config_facts import config_parameters
from zerogap.diagnose.graph import Node
from zerogap.diagnose.trace import SequenceTrace


def node_parameters(
    node: Node, modules: Mapping[str, torch.nn.Module], config: Any, dtype: torch.dtype
) -> dict[str, object]:
    """What an operator depends on: `config_facts.config_parameters`, and what the module itself says (`eps`, `bias`),
    `dtype`, and `implementation` (library call, or class of the module)."""
    module = modules.get(node.name)
    found: dict[str, object] = {"dtype": str(dtype).removeprefix("torch.")}
    if module is not None:
        found["implementation"] = f"{type(module).__module__}.{type(module).__qualname__}"
    found |= config_parameters(node.name, config.to_dict())
    if node.kind == "norm":
        own = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        found["eps"] = found.get("eps") if own is None else own
    elif node.kind in ("linear", "head"):
        if type(module) is torch.nn.Linear:
            found["implementation"] = "torch.nn.functional.linear"
        found["bias"] = getattr(module, "bias", None) is not None
    elif node.kind == "attention":
        found["implementation"] = config._attn_implementation
    elif node.kind == "experts":
        found["implementation"] = getattr(config, "_experts_implementation", None)
    return found


def routing_facts(
    sequences: Sequence[SequenceTrace], boundaries: Mapping[str, torch.Tensor]
) -> tuple[SequenceTrace, ...]:
    """The sequences with the experts of each token (ascending) and by how much the last of them won, as FP32
    probabilities; as they were where no router was recorded."""
    names = [n for n in boundaries if n.endswith(".router") and f"{n}_experts" in boundaries]
    names.sort(key=lambda n: int(n.split(".")[0]))
    if not names:
        return tuple(sequences)
    experts = torch.stack([boundaries[f"{n}_experts"].sort(-1).values for n in names], 1).numpy().astype(np.int16)
    top_k = experts.shape[2]
    margins = []
    for name in names:
        best = boundaries[name].float().softmax(-1).topk(min(top_k + 1, boundaries[name].shape[1])).values
        margins.append(best[:, top_k - 1] - best[:, top_k] if best.shape[1] > top_k else best[:, 0] * 0 + torch.inf)
    columns = torch.stack(margins, 1).numpy()
    borders = np.cumsum([len(s.ids) for s in sequences])[:-1]
    return tuple(
        dataclasses.replace(s, experts=e, margins=m)
        for s, e, m in zip(sequences, np.split(experts, borders), np.split(columns, borders))
    )
