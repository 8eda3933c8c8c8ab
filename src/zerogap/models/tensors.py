"""Which tensors a model's checkpoint has, by Hugging Face name, and what the numerics need to know of each.

Names, shapes, leaves, which matrices a contract quantises: loader, decoder, inventory and export all read this list, so
they cannot disagree. Never quantised, whatever the contract: embedding, head, vectors, routers (a flipped choice is no
rounding error) and the expansion of latent attention, which is used head by head (`kv_b_proj`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from zerogap.errors import ConfigError
from zerogap.models.latent_spec import LatentSpec
from zerogap.models.moe_spec import MoESpec
from zerogap.numerics import DType, Numerics, names_tensor
from zerogap.types import FP8Blocks, WeightSpec

if TYPE_CHECKING:
    from zerogap.models.spec import ModelSpec

ROUTER = "mlp.gate.weight"
EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")


def tensor_specs(spec: ModelSpec, numerics: Numerics) -> dict[str, WeightSpec]:
    """See `ModelSpec.weight_specs`."""
    hidden, leaf_size = spec.hidden_size, numerics.vocab_leaf_size(spec.vocab_size)
    embed = "model.embed_tokens.weight"
    shape = (spec.vocab_size, hidden)
    specs = [
        WeightSpec(embed, shape, "embedding", out_leaf_size=leaf_size if spec.tied else 0),
        WeightSpec("model.norm.weight", (hidden,), "vector"),
    ]
    if not spec.tied:
        specs.append(WeightSpec("lm_head.weight", shape, "matrix", out_leaf_size=leaf_size))
    for layer in range(spec.num_layers):
        specs += _quantised(_layer(spec, layer, numerics), layer, spec.num_layers, numerics)
    by_name = {weight.name: weight for weight in sorted(specs, key=lambda weight: weight.name)}
    _check_kept(by_name, spec.num_layers, numerics)
    return by_name


def _quantised(specs: list[WeightSpec], layer: int, num_layers: int, numerics: Numerics) -> list[WeightSpec]:
    """The specs of one layer, with the matrices marked that the contract quantises."""
    blocks = FP8Blocks(numerics.scale_format, numerics.linear_grad is DType.FP8)
    return [
        dataclasses.replace(weight, fp8=blocks)
        if weight.kind == "matrix"
        and not weight.name.endswith(ROUTER)
        and numerics.quantises(weight.name, layer, num_layers)
        else weight
        for weight in specs
    ]


def _check_kept(by_name: dict[str, WeightSpec], num_layers: int, numerics: Numerics) -> None:
    """Refuse a contract that means no tensor of this model, quantises nothing, or splits a stack."""
    if numerics.linear is DType.FP8 and not any(weight.fp8 for weight in by_name.values()):
        kept = (numerics.bf16_first, numerics.bf16_last, *numerics.bf16_tensors)
        mend = f"nothing of this model's {num_layers} layers is left to quantise: keep less, or choose bf16"
        raise ConfigError("numerics.bf16_layers", kept, mend)
    for pattern in numerics.bf16_tensors:
        if not any(names_tensor(pattern, name) for name in by_name):
            mend = "no tensor of this model matches; patterns are whole parts of names, such as mlp.down_proj"
            raise ConfigError("numerics.bf16_layers.tensors", pattern, mend)
    stacks: dict[str, WeightSpec] = {}
    for weight in by_name.values():
        if weight.stack is not None and (first := stacks.setdefault(weight.stack[0], weight)).fp8 != weight.fp8:
            mend = f"it keeps one of {first.name} and {weight.name}; experts share a form: name mlp.experts.*.{{part}}"
            raise ConfigError("numerics.bf16_layers.tensors", list(numerics.bf16_tensors), mend)


def _layer(spec: ModelSpec, layer: int, numerics: Numerics) -> list[WeightSpec]:
    prefix, hidden = f"model.layers.{layer}.", spec.hidden_size
    specs = [
        WeightSpec(prefix + "input_layernorm.weight", (hidden,), "vector"),
        WeightSpec(prefix + "post_attention_layernorm.weight", (hidden,), "vector"),
    ]
    attn, mlp = prefix + "self_attn.", prefix + "mlp."
    specs += _attention(spec, attn, numerics) if spec.mla is None else _latent(spec, spec.mla, attn, numerics)
    if spec.moe is None or layer in spec.moe.dense_layers:
        return specs + _mlp(mlp, hidden, spec.intermediate_size, numerics)
    return specs + _experts(spec.moe, mlp, hidden, numerics)


def _attention(spec: ModelSpec, attn: str, numerics: Numerics) -> list[WeightSpec]:
    hidden = spec.hidden_size
    q_leaves = numerics.head_leaves(spec.num_heads, spec.q_width)
    kv_leaves = numerics.head_leaves(spec.num_kv_heads, spec.kv_width)
    specs = [
        WeightSpec(attn + "q_proj.weight", (spec.q_width, hidden), "matrix", out_leaves=q_leaves),
        WeightSpec(attn + "k_proj.weight", (spec.kv_width, hidden), "matrix", out_leaves=kv_leaves),
        WeightSpec(attn + "v_proj.weight", (spec.kv_width, hidden), "matrix", out_leaves=kv_leaves),
        WeightSpec(attn + "o_proj.weight", (hidden, spec.q_width), "matrix", in_leaves=q_leaves),
    ]
    if spec.qkv_bias:
        widths = {"q": spec.q_width, "k": spec.kv_width, "v": spec.kv_width}
        specs += [WeightSpec(f"{attn}{part}_proj.bias", (width,), "vector") for part, width in widths.items()]
    if spec.o_bias:
        specs.append(WeightSpec(attn + "o_proj.bias", (hidden,), "vector"))
    if spec.qk_norm:
        leaves = {"q": q_leaves, "k": kv_leaves}
        shape = (spec.head_dim,)
        specs += [WeightSpec(f"{attn}{p}_norm.weight", shape, "vector", head_leaves=leaves[p]) for p in "qk"]
    return specs


def _latent(spec: ModelSpec, mla: LatentSpec, attn: str, numerics: Numerics) -> list[WeightSpec]:
    hidden, sizes, leaves = spec.hidden_size, mla.sizes, mla.leaves(numerics)
    specs = [
        WeightSpec(attn + "kv_a_proj_with_mqa.weight", (sizes.row, hidden), "matrix"),
        WeightSpec(attn + "kv_a_layernorm.weight", (sizes.latent,), "vector"),
        WeightSpec(
            attn + "kv_b_proj.weight",
            (sizes.num_heads * (sizes.nope + sizes.value), sizes.latent),
            "heads",
            out_leaves=leaves,
            head_parts=(sizes.num_heads, sizes.nope, sizes.value),
        ),
        WeightSpec(attn + "o_proj.weight", (hidden, sizes.out_width), "matrix", in_leaves=leaves),
    ]
    if mla.q_rank is None:
        specs.append(WeightSpec(attn + "q_proj.weight", (sizes.q_width, hidden), "matrix", out_leaves=leaves))
    else:
        specs += [
            WeightSpec(attn + "q_a_proj.weight", (mla.q_rank, hidden), "matrix"),
            WeightSpec(attn + "q_a_layernorm.weight", (mla.q_rank,), "vector"),
            WeightSpec(attn + "q_b_proj.weight", (sizes.q_width, mla.q_rank), "matrix", out_leaves=leaves),
        ]
    if spec.qkv_bias:  # of the projections down; those up to heads have none
        specs.append(WeightSpec(attn + "kv_a_proj_with_mqa.bias", (sizes.row,), "vector"))
        if mla.q_rank is not None:
            specs.append(WeightSpec(attn + "q_a_proj.bias", (mla.q_rank,), "vector"))
    if spec.o_bias:
        specs.append(WeightSpec(attn + "o_proj.bias", (hidden,), "vector"))
    return specs


def _mlp(mlp: str, hidden: int, inner: int, numerics: Numerics) -> list[WeightSpec]:
    leaves = numerics.axis_leaves(inner)
    return [
        WeightSpec(mlp + "gate_proj.weight", (inner, hidden), "matrix", out_leaves=leaves),
        WeightSpec(mlp + "up_proj.weight", (inner, hidden), "matrix", out_leaves=leaves),
        WeightSpec(mlp + "down_proj.weight", (hidden, inner), "matrix", in_leaves=leaves),
    ]


def _experts(moe: MoESpec, mlp: str, hidden: int, numerics: Numerics) -> list[WeightSpec]:
    """Router, experts (one leaf each: a layout gives whole experts to ranks), shared experts (the MLP rule)."""
    specs = [WeightSpec(mlp + "gate.weight", (moe.num_experts, hidden), "matrix")]
    if moe.has_bias:
        specs.append(WeightSpec(mlp + "gate.e_score_correction_bias", (moe.num_experts,), "buffer"))
    shapes = dict(zip(EXPERT_PARTS, [(moe.expert_size, hidden)] * 2 + [(hidden, moe.expert_size)], strict=True))
    for part, shape in shapes.items():
        specs += [
            WeightSpec(
                f"{mlp}experts.{expert}.{part}.weight",
                shape,
                "matrix",
                stack=(f"{mlp}experts.{part}", expert, moe.num_experts),
            )
            for expert in range(moe.num_experts)
        ]
    if moe.shared_size:
        specs += _mlp(mlp + "shared_experts.", hidden, moe.shared_size, numerics)
    return specs
