"""Tiny models whose routers are made to do what happens rarely: ties at the border between chosen and not, an expert
that takes every token, one that takes none."""

from collections.abc import Iterator

import torch

from tests.tiny import tiny_spec
from zerogap.models.decoder import Decoder
from zerogap.models.latent_spec import LatentSpec
from zerogap.models.moe_spec import MoESpec
from zerogap.models.rope_spec import RopeSpec
from zerogap.models.spec import ModelSpec
from zerogap.models.tensors import ROUTER
from zerogap.numerics import preset
from zerogap.ops import tap
from zerogap.ops.latent import LatentSizes
from zerogap.ops.moe import Routing
from zerogap.verify.checks import Ids
from zerogap.verify.paths import trainer_logits
from zerogap.weights.random_model import random_tensors

HOT, EMPTY = 1, 2  # of a steered router: the expert of every token, and of none
TIED_TO = (0, 1, 0, 1, 0, 1, 6, 6, 8)  # of a tied router: whose row each expert has; DeepSeek's groups of two tie, too


def qwen(experts: int = 9, top_k: int = 3, **changes: object) -> ModelSpec:
    """A routed layer, then a dense one; widths that are no multiples of a block of 128."""
    sizes = {"hidden_size": 160, "num_heads": 4, "num_kv_heads": 2, "head_dim": 48, "intermediate_size": 208}
    moe = MoESpec(Routing(experts, top_k), expert_size=48, dense_layers=(1,))
    return tiny_spec("qwen3_moe", **{"max_position": 256, "moe": moe, **sizes, **changes})


def deepseek(q_rank: int | None = None, *, yarn: bool = False, grouped: bool = True, **changes: object) -> ModelSpec:
    """A dense layer, then a routed one with a shared one of two leaves; `yarn` turns halves, else neighbours."""
    if yarn:
        changes["rope"] = RopeSpec(
            10000.0, "yarn", factor=8.0, original_max_position=32, mscale=1.0, mscale_all_dim=0.8
        )
    groups, top_groups = (4, 2) if grouped else (1, 1)
    rule = Routing(8, 3, "sigmoid", scaling=2.5, groups=groups, top_groups=top_groups)
    moe = MoESpec(rule, expert_size=64, shared_size=256, dense_layers=(0,), has_bias=True)
    mla = LatentSpec(LatentSizes(8, 32, 32, 256, 32), q_rank, interleaved=not yarn)
    return tiny_spec("deepseek_v3", **{"max_position": 256, "mla": mla, "moe": moe, **changes})


def decoder_of(spec: ModelSpec, numerics: str = "bf16", router: str = "", seed: int = 1, **fields: object) -> Decoder:
    """A decoder with random weights and, by `router`, `tied` or `steered` routers in all routed layers."""
    tensors = _planted(spec, router, random_tensors(spec, seed=seed, peak=1.0))
    return Decoder(spec, preset(numerics, **fields)).load(tensors)


def _planted(
    spec: ModelSpec, router: str, tensors: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    assert router in ("", "tied", "steered") and spec.moe is not None, router
    by_bias = spec.moe.has_bias
    for name, tensor in tensors:
        if router == "tied" and (name.endswith(ROUTER) or "correction_bias" in name):
            tensor = tensor[list(TIED_TO[: len(tensor)])]
        if router == "steered" and "correction_bias" in name:
            tensor[HOT], tensor[EMPTY] = 4.0, -4.0  # scores are between 0 and 1
        if router == "steered" and not by_bias and name == "model.embed_tokens.weight":
            tensor[:, 0] = 8.0  # a direction that all tokens share
        if router == "steered" and not by_bias and name.endswith(ROUTER):
            tensor[[HOT, EMPTY]] = 0.0
            tensor[HOT, 0], tensor[EMPTY, 0] = 4.0, -4.0
        yield name, tensor


def choices(decoder: Decoder, ids: Ids) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What each routed layer chooses for the tokens, in the trainer's forward: experts int32 [T, k] and margins [T]."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(name: str, outputs: object, info: object) -> None:
        if name == "router":
            seen.append((outputs["experts"].clone(), outputs["margins"].clone()))  # type: ignore[index]

    with tap.listen(keep):
        trainer_logits(decoder, [ids], [[0]])
    return seen


def assert_planted(decoder: Decoder, ids: Ids, router: str) -> None:
    """The decoder's routers do what they were made for."""
    assert decoder.spec.moe is not None
    layers = decoder.spec.moe.routed_layers(decoder.spec.num_layers)
    found = choices(decoder, ids)
    assert len(found) == len(layers)
    for layer, (experts, margins) in zip(layers, found, strict=True):
        if router == "steered":
            loads = torch.bincount(experts.flatten(), minlength=decoder.spec.moe.num_experts)
            assert loads[HOT] == len(ids), f"layer {layer}: {loads}"
            assert decoder.spec.moe.num_experts <= EMPTY or loads[EMPTY] == 0, f"layer {layer}: {loads}"
        if router == "tied":
            assert (margins == 0).float().mean() > 0.1, f"layer {layer}: {int((margins == 0).sum())} ties"
