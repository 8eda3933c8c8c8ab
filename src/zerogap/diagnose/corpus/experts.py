"""The inner steps of a transformers routed layer, so that a fault can replace one of them."""

from collections.abc import Iterator
from typing import Any

import torch

Linear = Any  # (x, weight) -> x weight^T


def expert_outputs(
    layer: Any,
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    *,
    fused: bool = False,
    on_input: bool = False,
    linear: Linear = torch.nn.functional.linear,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(rows, their weighted outputs) of each expert, ascending, as transformers' eager experts compute them.

    Args:
        layer: stacked experts with `gate_up_proj` [E, 2F, H] and `down_proj` [E, H, F].
        x, chosen, weights: [R, H], [R, k], [R, k].
        fused: SiLU times up in FP32, rounded once.
        on_input: weights multiply the input.
        linear: computes the products.
    """
    for expert in range(len(layer.down_proj)):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        factor = weights[token, place, None]
        rows = (x[token] * factor).to(x.dtype) if on_input else x[token]
        gate, up = linear(rows, layer.gate_up_proj[expert]).chunk(2, -1)
        if fused:
            inner = (torch.nn.functional.silu(gate.float()) * up.float()).to(x.dtype)
        else:
            inner = torch.nn.functional.silu(gate) * up
        out = linear(inner, layer.down_proj[expert])
        yield token, out if on_input else out * factor
