"""Routed layers of transformers, opened up for gradients: the experts are named from outside, and intermediate results
can be moved.

A choice is no rounding error: where two sides choose other experts, no bound on rounding says anything. So reference
gradients are those of the experts that the implementation under test chose; that it chooses rightly is shown by the
log-probs in FP32, with the reference choosing for itself.
"""

import dataclasses
import types
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional

from tests.parity.reference import as_sample
from zerogap.ops import tap


@dataclasses.dataclass
class Inside:
    """What patched modules share. `chosen`: (layer, tokens in the text) -> int64 [T, k]; `shake`: moves a result."""

    chosen: dict[tuple[int, int], torch.Tensor]
    free: list[tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=list)
    shake: Callable[[torch.Tensor], torch.Tensor] | None = None

    def moved(self, value):
        return value if self.shake is None else self.shake(value)


def choices(trainer, texts):
    """What each routed layer chooses for each text; texts of distinct lengths."""
    chosen: dict[tuple[int, int], torch.Tensor] = {}
    assert len({len(ids) for ids in texts}) == len(texts), "texts are told apart by their length"
    for ids in texts:

        def see(name, outputs, info, length=len(ids)):
            if name == "router":
                chosen[info["layer"], length] = outputs["experts"][:length].long().clone()

        with tap.listen(see):
            trainer.logprobs([as_sample(ids, trainer.decoder.identity)])
    return chosen


def open_up(model, spec, chosen):
    """Patch the routers and experts of this one model object; returns what they share."""
    inside = Inside(chosen)
    for layer in spec.moe.routed_layers(spec.num_layers):
        mlp = model.model.layers[layer].mlp
        mlp.gate.to(model.dtype)  # transformers keeps some families' routers in FP32, whatever is asked for
        mlp.gate.forward = types.MethodType(_router(spec.moe.routing, layer, inside, mlp.gate.forward), mlp.gate)
        mlp.experts.forward = types.MethodType(_experts(inside), mlp.experts)
    return inside


def _router(routing, layer, inside, original):
    """The formula of docs/numerics.md in float64, for experts that are named."""

    def forward(self, hidden):
        rows = hidden.reshape(-1, hidden.shape[-1])
        logits = inside.moved(functional.linear(rows, self.weight))
        index = inside.chosen[layer, len(rows)]
        scores = logits.sigmoid() if routing.scoring == "sigmoid" else logits.softmax(-1)
        weights = scores.gather(1, index)
        if routing.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        if inside.shake is None:
            with torch.no_grad():
                inside.free.append((original(hidden)[2].sort(-1).values, index))
        return logits, inside.moved(weights * routing.scaling), index

    return forward


def _experts(inside):
    def forward(self, hidden, index, weights):
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, slot = torch.where(index == expert)
            gate, up = functional.linear(hidden[token], self.gate_up_proj[expert]).chunk(2, -1)
            inner = inside.moved(self.act_fn(inside.moved(gate)) * inside.moved(up))
            rows = inside.moved(functional.linear(inner, self.down_proj[expert]))
            out = out.index_add(0, token, rows * weights[token, slot, None])
        return out

    return forward


def experts_apart(gradients, spec):
    """Gradients under the checkpoint's names: those of stacked experts cut up."""
    out = {}
    for name, gradient in gradients.items():
        prefix, found, part = name.partition(".mlp.experts.")
        if not found:
            out[name] = gradient
            continue
        pieces = {"gate_proj": slice(0, spec.moe.expert_size), "up_proj": slice(spec.moe.expert_size, None)}
        for piece, rows in (pieces if part == "gate_up_proj" else {"down_proj": slice(None)}).items():
            for expert in range(spec.moe.num_experts):
                out[f"{prefix}.mlp.experts.{expert}.{piece}.weight"] = gradient[expert, rows]
    return out


def same_choices(inside):
    """Share of tokens for which the reference would have chosen the same experts by itself."""
    return float(np.mean([(ours == theirs).all(-1).double().mean() for theirs, ours in inside.free]))
