"""Computing one kind of operator differently inside a foreign model, by hooks that return other outputs.

Which kinds can be replaced: embedding, norm, linear, head (a module's own output), activation and attention (what
`down_proj` and `o_proj` are given), rope (what attention is given; without a cache), experts (the routed block).
A residual addition happens between modules, so no hook reaches it; a router's choice follows from its logits inside the
module. What a replacement reads has the names of `graph.Node.inputs`; rows are those of the whole batch, padding
included, except for attention: it is asked once per sequence, with T query rows and all K key and value rows (the
queries are the last T of the K positions) and no padding. `rope` also gets `positions`, `embedding` only `ids`.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from zerogap.diagnose.adapters.capture import as_rows, first_tensor, node_modules, plain_name, watch_attention
from zerogap.diagnose.graph import Node
from zerogap.diagnose.side import Replacement

REPLACEABLE = frozenset({"embedding", "norm", "linear", "head", "activation", "attention", "rope", "experts"})
_BY_OUTPUT = ("embedding", "norm", "linear", "head", "experts")


class Columns:
    """Which columns of the running forward pass are tokens; who runs the model keeps it up to date.

    Attributes:
        shape: (B, T) of the pass.
        mask: bool [B, K] of all columns so far, the pass's own last.
        positions: int64 [B, T].
    """

    shape: tuple[int, int]
    mask: torch.Tensor
    positions: torch.Tensor


@contextlib.contextmanager
def replacing(
    model: torch.nn.Module, nodes: Mapping[str, Node], replace: Mapping[str, Replacement], columns: Columns
) -> Iterator[None]:
    """Inside the block operators of the kinds in `replace` are computed by its functions."""
    with contextlib.ExitStack() as undo:
        if not replace:
            yield
            return
        rows: dict[str, torch.Tensor] = {}  # outputs that later replacements read, of the running pass
        modules = node_modules(model)
        for name, module in modules.items():
            kind = nodes[name].kind if name in nodes else ""
            if kind in replace and kind in _BY_OUTPUT:
                hook = _output_hook(nodes[name], replace[kind], rows, columns)
                undo.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            undo.callback(module.register_forward_hook(_remember(name, rows, columns)).remove)
            layer, _, node = name.partition(".")
            if node == "down_proj" and "activation" in replace:
                undo.callback(
                    module.register_forward_pre_hook(
                        _input_hook(nodes[f"{layer}.activation"], replace["activation"], rows)
                    ).remove
                )
            if node == "o_proj" and "attention" in replace:
                undo.callback(module.register_forward_pre_hook(_attention_hook(f"{layer}.attention", rows)).remove)
        if "attention" in replace or "rope" in replace:
            undo.enter_context(watch_attention(model, _watcher(model, nodes, replace, rows, columns)))
        yield


def _remember(name: str, rows: dict[str, torch.Tensor], columns: Columns) -> Callable[..., None]:
    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: object) -> None:
        tensor = first_tensor(output)
        found = None if tensor is None else as_rows(tensor, columns.shape)
        if found is not None:
            rows[name] = found

    return hook


def _like(computed: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Rows in the shape of the output that they stand for; logits keep their dtype."""
    if computed.numel() != old.numel():
        raise ValueError(f"a replacement returned {tuple(computed.shape)} for an output of {tuple(old.shape)}")
    return computed.reshape(old.shape).to(old.dtype)


def _output_hook(
    node: Node, function: Replacement, rows: dict[str, torch.Tensor], columns: Columns
) -> Callable[..., object]:
    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> object:
        given = first_tensor([*args, *kwargs.values()])
        old = first_tensor(output)
        assert given is not None and old is not None, f"{node.name}: no tensor went in or came out"
        if node.kind == "embedding":
            inputs = {"ids": given.reshape(-1)}
        else:
            read = as_rows(given, columns.shape)
            assert read is not None, f"{node.name}: an input that has not one row per column"
            inputs = {node.inputs[0]: read, **{name: rows[name] for name in node.inputs[1:]}}
        computed = function(node.name, inputs)
        if node.kind == "head":  # its own dtype: FP32 logits need not be rounded to the model's
            new = computed.reshape(old.shape)
        elif old.dim() == 4 and old.shape[1] != columns.shape[1]:  # heads before columns
            new = _like(computed, old.transpose(1, 2)).transpose(1, 2)
        else:
            new = _like(computed, old)
        return (new, *output[1:]) if isinstance(output, tuple) else new

    return hook


def _input_hook(node: Node, function: Replacement, rows: dict[str, torch.Tensor]) -> Callable[..., object]:
    def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> object:
        computed = function(node.name, {name: rows[name] for name in node.inputs})
        return (_like(computed, args[0]), *args[1:])

    return hook


def _attention_hook(name: str, rows: dict[str, torch.Tensor]) -> Callable[..., object]:
    def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> object:
        return (_like(rows[name], args[0]), *args[1:])

    return hook


def _watcher(
    model: torch.nn.Module,
    nodes: Mapping[str, Node],
    replace: Mapping[str, Replacement],
    rows: dict[str, torch.Tensor],
    columns: Columns,
) -> Callable[..., tuple[torch.Tensor, ...] | None]:
    layers = {id(m): plain_name(name) for name, m in model.named_modules()}

    def watch(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, ...] | None:
        found = re.search(r"layers\.(\d+)\.", layers.get(id(module), ""))
        if found is None:
            return None
        layer, changed = found[1], False
        if "rope" in replace:
            assert key.shape[2] == query.shape[2], "rope is replaced in passes without a cache only"
            query = _rotated(nodes[f"{layer}.q_rope"], replace["rope"], query, rows, columns)
            key = _rotated(nodes[f"{layer}.k_rope"], replace["rope"], key, rows, columns)
            changed = True
        if "attention" in replace:
            node = nodes[f"{layer}.attention"]
            rows[node.name] = _attended(node, replace["attention"], (query, key, value), columns)
        return (query, key, value) if changed else None

    return watch


def _rotated(
    node: Node, function: Replacement, old: torch.Tensor, rows: Mapping[str, torch.Tensor], columns: Columns
) -> torch.Tensor:
    inputs = {node.inputs[0]: rows[node.inputs[0]], "positions": columns.positions.reshape(-1)}
    return _like(function(node.name, inputs), old.transpose(1, 2)).transpose(1, 2)


def _attended(
    node: Node, function: Replacement, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor], columns: Columns
) -> torch.Tensor:
    """[B * T, width]: attention's output sequence by sequence; padded rows are zeros."""
    query, key, value = given
    batch, heads, length, width = query.shape
    out = query.new_zeros((batch, length, heads * width))
    for b in range(batch):
        keys, queries = columns.mask[b], columns.mask[b, -length:]
        if not queries.any():
            continue
        parts = [t[b].transpose(0, 1).flatten(1) for t in (query, key, value)]
        kept = (parts[0][queries], parts[1][keys], parts[2][keys])
        out[b, queries] = function(node.name, dict(zip(node.inputs, kept))).to(out.dtype)
    return out.reshape(batch * length, -1)
