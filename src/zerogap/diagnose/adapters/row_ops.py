"""A torch model's own operators, one row at a time: what of a difference between decoding and a whole pass each kind
accounts for.

A whole pass of one sequence whose operators compute the prompt's rows together and every later row by itself is what
decoding does, but for operators that no hook reaches (residual additions, RoPE, which work element by element).
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from zerogap.diagnose.adapters.capture import attention_function, node_modules, plain_name
from zerogap.diagnose.adapters.torch_side import TorchSide
from zerogap.diagnose.graph import Node
from zerogap.diagnose.side import Replacement

BY_MODULE = ("norm", "linear", "head", "experts")


def row_replacements(side: TorchSide) -> dict[str, Replacement]:
    """What `Ask.replace` takes to compute a kind of operator as decoding does, in whole passes of single sequences."""
    kinds = {node.kind for node in side.nodes.values()} & {*BY_MODULE, "activation", "attention"}
    modules = node_modules(side.model)
    found: dict[str, Replacement] = {}
    for kind in sorted(kinds):
        if kind == "attention":
            found[kind] = _attention(side)
        elif kind == "activation":
            found[kind] = _activation(side)
        else:
            found[kind] = _by_module(side, modules)
    return found


def _parts(side: TorchSide, rows: int) -> list[tuple[int, int]]:
    """The prompt of the sequence that is being computed, then each row."""
    (sequence,) = side.running
    prompt = min(max(1, side.sequences[sequence].prompt_length), rows)
    return [(0, prompt), *((t, t + 1) for t in range(prompt, rows))]


def _by_module(side: TorchSide, modules: Mapping[str, torch.nn.Module]) -> Replacement:
    def compute(name: str, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        node = side.nodes[name]
        rows = inputs[node.inputs[0]]
        wide = _heads(node, side, rows.shape[1])
        done = []
        for begin, end in _parts(side, len(rows)):
            given = rows[None, begin:end]
            if wide:  # norms of heads read [B, T, heads, D]
                given = given.unflatten(-1, (-1, wide))
            out = modules[name].forward(given)  # not called: hooks would ask again
            out = out[0] if isinstance(out, tuple) else out
            done.append(out.reshape(end - begin, -1))
        return torch.cat(done)

    return compute


def _heads(node: Node, side: TorchSide, width: int) -> int:
    """Width of a head where a norm works head by head, else 0."""
    weight = side.weight(node.weights[0]) if node.kind == "norm" else None
    return len(weight) if weight is not None and len(weight) != width else 0


def _activation(side: TorchSide) -> Replacement:
    parents = _by_layer(side.model, r"layers\.(\d+)\.mlp$")

    def compute(name: str, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        gate, up = inputs.values()
        function: Any = parents[name.split(".")[0]].act_fn
        parts = _parts(side, len(gate))
        return torch.cat([function(gate[None, i:j])[0] * up[i:j] for i, j in parts])

    return compute


def _attention(side: TorchSide) -> Replacement:
    parents = _by_layer(side.model, r"layers\.(\d+)\.self_attn$")
    implementation: str = side.config._attn_implementation

    def compute(name: str, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        module: Any = parents[name.split(".")[0]]
        attend = attention_function(module, implementation)
        query, key, value = (t.unflatten(1, (-1, module.head_dim)).transpose(0, 1)[None] for t in inputs.values())
        done = []
        for begin, end in _parts(side, len(inputs[side.nodes[name].inputs[0]])):
            given = query[:, :, begin:end].contiguous(), key[:, :, :end].contiguous(), value[:, :, :end].contiguous()
            mask = _causal(end - begin, end, query.dtype) if implementation == "eager" else None
            out, _ = attend(module, *given, mask, scaling=module.scaling, dropout=0.0)
            done.append(out[0].flatten(1))
        return torch.cat(done)

    return compute


def _causal(rows: int, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """What eager attention adds to the scores of the last `rows` of all keys, [1, 1, rows, keys]."""
    hidden = torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1)
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)[None, None]


def _by_layer(model: torch.nn.Module, pattern: str) -> dict[str, torch.nn.Module]:
    found = {}
    for raw, module in model.named_modules():
        if match := re.search(pattern, plain_name(raw)):
            found[match[1]] = module
    return found
