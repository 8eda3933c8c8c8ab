"""What operators depend on besides inputs and weights, as a Hugging Face config says it: all that is known of a trace's
operators, and what a live side starts from."""

from collections.abc import Mapping
from typing import Any


def config_parameters(node: str, config: Mapping[str, Any]) -> dict[str, object]:
    """Facts of one operator (`3.q_norm`, `lm_head`, ...).

    Keys, where they apply: `eps`, `num_heads` (of a norm: how many norms a row holds), `num_kv_heads`, `head_dim`,
    `scale`, `causal`, `sliding_window`, `theta`, `scaling` (of RoPE), `activation`, `top_k`, `num_experts`,
    `normalise`, `scoring`, `groups`, `top_groups`. Empty where the config does not say what the model looks like.
    """
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int):
        return {}
    kv_heads = config.get("num_key_value_heads") or heads
    operator = node.rsplit(".", 1)[-1]
    if operator.endswith("norm"):
        eps = config.get("rms_norm_eps", config.get("layer_norm_eps"))
        return {"eps": eps, "num_heads": {"q_norm": heads, "k_norm": kv_heads}.get(operator, 1)}
    if operator == "o_proj":
        return {"num_heads": heads}
    if operator == "activation":
        return {"activation": config.get("hidden_act", "silu")}
    if operator in ("q_rope", "k_rope", "attention"):
        return _attention(operator, config, heads, kv_heads)
    if operator in ("router", "experts") and config.get("num_experts_per_tok"):
        return _routing(config)
    return {}


def _routing(config: Mapping[str, Any]) -> dict[str, object]:
    """How routers choose; families with correction biases score by sigmoids (DeepSeek-V3)."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    grouped = "n_group" in config and "routed_scaling_factor" in config
    return {
        "top_k": config["num_experts_per_tok"],
        "num_experts": next((config[n] for n in names if config.get(n)), None),
        "scoring": str(config.get("scoring_func") or ("sigmoid" if grouped else "softmax")),
        "normalise": bool(config.get("norm_topk_prob", True)),
        "scaling": float(config.get("routed_scaling_factor") or 1.0),
        "groups": config.get("n_group") or 1,
        "top_groups": config.get("topk_group") or 1,
        "activation": config.get("hidden_act", "silu"),
    }


def _attention(operator: str, config: Mapping[str, Any], heads: int, kv_heads: int) -> dict[str, object]:
    if config.get("kv_lora_rank"):  # latent attention: neither heads nor scale follow from these keys
        return {}
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if operator == "attention":
        window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
        base = config.get("query_pre_attn_scalar") or head_dim
        facts = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "sliding_window": window}
        return facts | {"scale": float(base) ** -0.5, "causal": True}
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", config.get("rope_theta"))
    shape = {"head_dim": head_dim, "num_heads": heads if operator == "q_rope" else kv_heads}
    return {"theta": theta, "scaling": rope} | shape
