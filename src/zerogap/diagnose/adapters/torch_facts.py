"""What else is known of a transformers model: what each operator depends on besides its inputs, and routing records."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from zerogap.diagnose.graph import Node
from zerogap.diagnose.trace import SequenceTrace


def node_parameters(
    node: Node, modules: Mapping[str, torch.nn.Module], config: Any, dtype: torch.dtype
) -> dict[str, object]:
    """What an operator depends on besides inputs and weights.

    Keys, where they apply: `implementation` (library call, or class of the module), `dtype`, `eps`, `bias`,
    `num_heads` (of a norm: how many norms a row holds), `num_kv_heads`, `head_dim`, `scale`, `causal`,
    `sliding_window`, `theta`, `scaling` (of RoPE), `activation`, `top_k`, `num_experts`, `normalise`, `scoring`.
    """
    module = modules.get(node.name)
    found: dict[str, object] = {"dtype": str(dtype).removeprefix("torch.")}
    if module is not None:
        found["implementation"] = f"{type(module).__module__}.{type(module).__qualname__}"
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    operator = node.name.rsplit(".", 1)[-1]
    if node.kind == "norm":
        found["num_heads"] = {"q_norm": heads, "k_norm": config.num_key_value_heads}.get(operator, 1)
        eps = [getattr(module, name, None) for name in ("variance_epsilon", "eps")]
        found["eps"] = next((e for e in eps if e is not None), config.rms_norm_eps)
    elif node.kind in ("linear", "head"):
        if type(module) is torch.nn.Linear:
            found["implementation"] = "torch.nn.functional.linear"
        found["bias"] = getattr(module, "bias", None) is not None
        if operator == "o_proj":
            found["num_heads"] = heads
    elif node.kind == "rope":
        rope = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
        found["theta"] = rope.get("rope_theta", getattr(config, "rope_theta", None))
        found["scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
        found |= {"head_dim": head_dim, "num_heads": heads if operator == "q_rope" else config.num_key_value_heads}
    elif node.kind == "attention":
        found |= {"num_heads": heads, "num_kv_heads": config.num_key_value_heads, "head_dim": head_dim}
        found |= {"implementation": config._attn_implementation, "scale": head_dim**-0.5, "causal": True}
        found["sliding_window"] = getattr(config, "sliding_window", None)
    elif node.kind == "activation":
        found["activation"] = config.hidden_act
    elif node.kind in ("router", "experts"):
        found |= _routing(config) | {"activation": config.hidden_act}
        if node.kind == "experts":
            found["implementation"] = getattr(config, "_experts_implementation", None)
    return found


def _routing(config: Any) -> dict[str, object]:
    """How the config's routers choose; families with correction biases score by sigmoids (DeepSeek-V3)."""
    grouped = hasattr(config, "n_group") and hasattr(config, "routed_scaling_factor")
    return {
        "top_k": config.num_experts_per_tok,
        "num_experts": config.num_experts if hasattr(config, "num_experts") else config.n_routed_experts,
        "scoring": str(getattr(config, "scoring_func", "sigmoid" if grouped else "softmax")),
        "normalise": bool(config.norm_topk_prob),
        "scaling": float(getattr(config, "routed_scaling_factor", None) or 1.0),
        "groups": getattr(config, "n_group", None) or 1,
        "top_groups": getattr(config, "topk_group", None) or 1,
    }


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
