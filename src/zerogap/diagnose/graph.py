"""The operators of a decoder-only model in the order they run: the names under which both sides record their outputs.

A node's tensor has one row per token: [R, width], rows of all sequences one after another. `residual_*` nodes hold the
residual stream after the addition; norms hold normed rows only, whether or not the stack fuses the addition into them.
Foreign module names are mapped by `canonical`; what it does not know keeps its own name and is compared by that name.
"""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Node:
    """One operator.

    Attributes:
        name: `embed`, `3.q_proj`, `lm_head`, ...: decoder layer and operator.
        kind: subject of verdict.OPERATORS that it belongs to.
        inputs: nodes whose rows it reads (attention also reads earlier rows of `k_rope` and `v_proj`).
        weights: checkpoint names of its weights, without those of optional biases.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    weights: tuple[str, ...] = ()


def layer_nodes(layer: int, residual: str, *, qk_norm: bool, moe: bool) -> list[Node]:
    """Nodes of one decoder layer over the residual stream `residual`."""

    def at(name: str) -> str:
        return f"{layer}.{name}"

    def weight(module: str) -> tuple[str]:
        return (f"model.layers.{layer}.{module}.weight",)

    found = [Node(at("input_norm"), "norm", (residual,), weight("input_layernorm"))]
    for part in ("q", "k", "v"):
        found.append(Node(at(f"{part}_proj"), "linear", (at("input_norm"),), weight(f"self_attn.{part}_proj")))
    q, k = at("q_proj"), at("k_proj")
    if qk_norm:
        found.append(Node(at("q_norm"), "norm", (q,), weight("self_attn.q_norm")))
        found.append(Node(at("k_norm"), "norm", (k,), weight("self_attn.k_norm")))
        q, k = at("q_norm"), at("k_norm")
    found.append(Node(at("q_rope"), "rope", (q,)))
    found.append(Node(at("k_rope"), "rope", (k,)))
    found.append(Node(at("attention"), "attention", (at("q_rope"), at("k_rope"), at("v_proj"))))
    found.append(Node(at("o_proj"), "linear", (at("attention"),), weight("self_attn.o_proj")))
    found.append(Node(at("residual_attention"), "residual", (residual, at("o_proj"))))
    found.append(Node(at("post_norm"), "norm", (at("residual_attention"),), weight("post_attention_layernorm")))
    if moe:
        found.append(Node(at("router"), "router", (at("post_norm"),), weight("mlp.gate")))
        found.append(Node(at("experts"), "experts", (at("post_norm"), at("router"))))
        update = at("experts")
    else:
        for part in ("gate", "up"):
            found.append(Node(at(f"{part}_proj"), "linear", (at("post_norm"),), weight(f"mlp.{part}_proj")))
        found.append(Node(at("activation"), "activation", (at("gate_proj"), at("up_proj"))))
        found.append(Node(at("down_proj"), "linear", (at("activation"),), weight("mlp.down_proj")))
        update = at("down_proj")
    return [*found, Node(at("residual_mlp"), "residual", (at("residual_attention"), update))]


def model_nodes(num_layers: int, *, qk_norm: bool, moe_layers: frozenset[int] = frozenset()) -> list[Node]:
    """All nodes in running order. `router` holds FP32 logits [R, experts]; `lm_head` logits [R, vocabulary], `logprob`
    [R, 1] the log-prob of each row's *next* token."""
    found = [Node("embed", "embedding", (), ("model.embed_tokens.weight",))]
    residual = "embed"
    for layer in range(num_layers):
        found += layer_nodes(layer, residual, qk_norm=qk_norm, moe=layer in moe_layers)
        residual = f"{layer}.residual_mlp"
    found.append(Node("final_norm", "norm", (residual,), ("model.norm.weight",)))
    found.append(Node("lm_head", "head", ("final_norm",), ("lm_head.weight",)))
    return [*found, Node("logprob", "logprob", ("lm_head",))]


_MODULES = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_norm",
    **{f"self_attn.{name}": name for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
    **{f"self_attn.{name}": name for name in ("q_a_proj", "q_b_proj")},
    "self_attn.q_a_layernorm": "q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "kv_a_proj",
    "self_attn.attn": "attention",
    **{f"mlp.{name}": name for name in ("gate_proj", "up_proj", "down_proj")},
    "mlp.act_fn": "activation",
    "mlp.gate": "router",
}
# Further spellings, of models written by hand.
_ATTENTION = ("self_attn", "attention", "attn", "self_attention")
_MLP = ("mlp", "feed_forward", "ffn", "moe", "block_sparse_moe")
_PARTS = {
    **{f"{part}{end}": f"{part}_proj" for part in "qkv" for end in ("", "_proj")},
    **{f"w{part}": f"{part}_proj" for part in "qkv"},
    **dict.fromkeys(("o", "wo", "out", "o_proj", "out_proj"), "o_proj"),
    **{spelling: spelling for spelling in ("q_norm", "k_norm")},
}
_MLP_PARTS = {
    **{f"{part}{end}": f"{part}_proj" for part in ("up", "down") for end in ("", "_proj")},
    "gate_proj": "gate_proj",
    "router": "router",
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
}
_SPELLINGS = {
    **{f"{block}.{part}": node for block in _ATTENTION for part, node in _PARTS.items()},
    **{f"{block}.{part}": node for block in _MLP for part, node in _MLP_PARTS.items()},
    **{f"{block}.gate": "router" for block in ("moe", "block_sparse_moe")},
    **dict.fromkeys(("norm1", "attention_norm", "attn_norm", "input_norm", "ln_1"), "input_norm"),
    **dict.fromkeys(("norm2", "ffn_norm", "mlp_norm", "moe_norm", "post_norm", "ln_2"), "post_norm"),
    **_MODULES,
}
_TOP = {
    **dict.fromkeys(("embed_tokens", "embedding", "embed", "tok_embeddings", "wte"), "embed"),
    **dict.fromkeys(("norm", "final_norm", "ln_f"), "final_norm"),
    **dict.fromkeys(("lm_head", "head", "output"), "lm_head"),
}
_ROOTS = ("", "model", "transformer", "decoder", "language_model", "model.language_model")


def canonical(module: str) -> str | None:
    """The node that a module's output belongs to (`model.layers.3.self_attn.q_proj` -> `3.q_proj`; `layers`, `blocks`
    and `h` hold decoder layers), or None. Of further spellings those that can mean one thing only are known; `w1`, `w2`
    and `w3` are gate, down and up, as in Llama."""
    name = re.sub(r"^(_fsdp_wrapped_module\.|module\.|_orig_mod\.)+", "", module)
    if found := re.search(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.(.+)$", name):
        node = _SPELLINGS.get(found[2])
        return node and f"{found[1]}.{node}"
    root, _, last = name.rpartition(".")
    return _TOP.get(last) if root in _ROOTS or last in ("embed_tokens", "norm", "lm_head") else None
