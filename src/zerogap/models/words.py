"""A model's sizes in words, for people: the same in every command and report."""

from collections.abc import Iterable

from zerogap.models.spec import ModelSpec


def sizes(spec: ModelSpec) -> list[str]:
    """A model's sizes, in words."""
    rope = spec.rope.kind if spec.rope.kind == "default" else f"{spec.rope.kind} x {spec.rope.factor:g}"
    words = [f"{spec.num_layers} layers", f"hidden {spec.hidden_size:,}"]
    if spec.moe is None or spec.moe.dense_layers:
        where = "" if spec.moe is None else f" (layer {ranges(spec.moe.dense_layers)})"
        words.append(f"MLP {spec.intermediate_size:,}{where}")
    if spec.moe is not None:
        words.append(f"{spec.moe.num_experts} experts of {spec.moe.expert_size:,}, {spec.moe.top_k} per token")
        if spec.moe.shared_size:
            words.append(f"shared experts {spec.moe.shared_size:,}")
    if spec.mla is None:
        words.append(f"{spec.num_heads} heads / {spec.num_kv_heads} KV heads of {spec.head_dim}")
    else:
        parts = spec.mla.sizes
        words.append(f"{spec.num_heads} heads of {parts.nope} + {parts.rope}, values of {parts.value}")
        words.append(f"latent {parts.latent}" + ("" if spec.mla.q_rank is None else f", of queries {spec.mla.q_rank}"))
    words += [f"vocabulary {spec.vocab_size:,}", f"{spec.max_position:,} positions"]
    words.append(f"RoPE {rope} (theta {spec.rope.theta:g})")
    return words + [name for name in ("tied", "qkv_bias", "o_bias", "qk_norm") if getattr(spec, name)]


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers in words: `0-3, 5`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
