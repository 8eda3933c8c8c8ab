"""Decoder layers from a spec: which handle goes where, with the sizes and cuts that the contract says."""

import dataclasses
from collections.abc import Mapping

from zerogap.layers.attention import Attention, AttentionSizes
from zerogap.layers.block import Block
from zerogap.layers.latent_attention import CompressedQuery, LatentAttention, LatentHead
from zerogap.layers.mlp import GatedMLP
from zerogap.layers.moe import RoutedMLP
from zerogap.models.latent_spec import LatentSpec
from zerogap.models.moe_spec import MoESpec
from zerogap.models.spec import ModelSpec
from zerogap.models.tensors import EXPERT_PARTS
from zerogap.numerics import Numerics
from zerogap.ops.backend import TORCH_DTYPES
from zerogap.ops.handle import WeightHandle
from zerogap.ops.moe import MoEWeights
from zerogap.ops.stack import PanelStack
from zerogap.types import Exchange, WeightSpec


def make_weights(
    specs: Mapping[str, WeightSpec], numerics: Numerics
) -> tuple[dict[str, WeightHandle], dict[str, PanelStack]]:
    """Unloaded handles by checkpoint name, and the stacks that their packed forms are part of, by stack name."""
    storage = TORCH_DTYPES[numerics.storage]
    weights: dict[str, WeightHandle] = {}
    stacks: dict[str, PanelStack] = {}
    for name, spec in specs.items():
        stack = None
        if spec.stack is not None:
            label, _, size = spec.stack
            out, reduced = spec.shape
            if label not in stacks:
                stacks[label] = PanelStack(label, size, (out, reduced), storage, spec.fp8)
            stack = stacks[label]
        weights[name] = WeightHandle(spec, storage, stack)
    return weights, stacks


@dataclasses.dataclass(frozen=True)
class BlockBuilder:
    """Builds the layers of one decoder over its weights and stacks."""

    spec: ModelSpec
    numerics: Numerics
    weights: Mapping[str, WeightHandle]
    stacks: Mapping[str, PanelStack]
    exchange: Exchange

    def block(self, layer: int) -> Block:
        """Decoder layer number `layer`."""
        spec, prefix = self.spec, f"model.layers.{layer}."
        attn, mlp = prefix + "self_attn.", prefix + "mlp."
        routed = spec.moe is not None and layer not in spec.moe.dense_layers
        return Block(
            self.weights[prefix + "input_layernorm.weight"],
            self._attention(attn) if spec.mla is None else self._latent(attn, spec.mla),
            self.weights[prefix + "post_attention_layernorm.weight"],
            self._routed(mlp, layer, spec.moe) if spec.moe is not None and routed else self._mlp(mlp),
            spec.norm_eps,
        )

    def _attention(self, attn: str) -> Attention:
        spec, numerics, weights = self.spec, self.numerics, self.weights
        sizes = AttentionSizes(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            norm_eps=spec.norm_eps,
            kv_split=numerics.kv_split,
            leaves=numerics.head_leaves(spec.num_heads, spec.q_width),
            kv_leaves=numerics.head_leaves(spec.num_kv_heads, spec.kv_width),
        )
        return Attention(
            sizes=sizes,
            projections=(
                weights[attn + "q_proj.weight"],
                weights[attn + "k_proj.weight"],
                weights[attn + "v_proj.weight"],
            ),
            biases=(
                weights.get(attn + "q_proj.bias"),
                weights.get(attn + "k_proj.bias"),
                weights.get(attn + "v_proj.bias"),
            ),
            output=weights[attn + "o_proj.weight"],
            output_bias=weights.get(attn + "o_proj.bias"),
            query_norm=weights.get(attn + "q_norm.weight"),
            key_norm=weights.get(attn + "k_norm.weight"),
            exchange=self.exchange,
        )

    def _latent(self, attn: str, mla: LatentSpec) -> LatentAttention:
        weights, sizes = self.weights, mla.sizes
        head = LatentHead(
            sizes=sizes,
            scale=(sizes.nope + sizes.rope) ** -0.5 * self.spec.rope.score_factor,
            norm_eps=mla.norm_eps,
            kv_split=self.numerics.kv_split,
            leaves=mla.leaves(self.numerics),
            interleaved=mla.interleaved,
        )
        compressed = None
        if mla.q_rank is not None:
            compressed = CompressedQuery(weights[attn + "q_a_layernorm.weight"], weights[attn + "q_b_proj.weight"])
        return LatentAttention(
            head=head,
            query=weights[attn + ("q_proj.weight" if compressed is None else "q_a_proj.weight")],
            compressed=compressed,
            latent=weights[attn + "kv_a_proj_with_mqa.weight"],
            biases=(weights.get(attn + "q_a_proj.bias"), weights.get(attn + "kv_a_proj_with_mqa.bias")),
            norm=weights[attn + "kv_a_layernorm.weight"],
            expansion=weights[attn + "kv_b_proj.weight"],
            output=weights[attn + "o_proj.weight"],
            output_bias=weights.get(attn + "o_proj.bias"),
            exchange=self.exchange,
        )

    def _mlp(self, mlp: str) -> GatedMLP:
        gate, up, down = (self.weights[f"{mlp}{part}.weight"] for part in EXPERT_PARTS)
        return GatedMLP(gate, up, down, self.exchange)

    def _routed(self, mlp: str, layer: int, moe: MoESpec) -> RoutedMLP:
        gate, up, down = (self.stacks[f"{mlp}experts.{part}"] for part in EXPERT_PARTS)
        shared = None
        if moe.shared_size:
            s_gate, s_up, s_down = (self.weights[f"{mlp}shared_experts.{part}.weight"] for part in EXPERT_PARTS)
            shared = (s_gate, s_up, s_down)
        weights = MoEWeights(
            router=self.weights[mlp + "gate.weight"],
            bias=self.weights.get(mlp + "gate.e_score_correction_bias"),
            gate=gate,
            up=up,
            down=down,
            shared=shared,
        )
        return RoutedMLP(weights, moe.routing, layer, self.exchange)
