"""What a torch model computed, layer by layer, recorded from outside: forward hooks only, nothing is patched.

    with zg.capture(model) as seen:
        model(input_ids=ids, attention_mask=mask)
    rows = seen.boundaries()                      # node name (diagnose/graph.py) -> [R, width], padded rows left out
    save_trace(seen.trace("trainer", prompt_lengths=[12, 9]), Path("trainer-trace"))

Inside the block the model's modules have hooks that copy outputs; before and after it has none, and the bits it
computes are the same in all three cases. Modules may be wrapped (FSDP, checkpoint wrappers, torch.compile). What no
module returns is read where the next module takes it: attention's output at `o_proj`, the activation at `down_proj`,
the residual stream at the norms. Queries and keys after RoPE exist only between modules; with `rope=True` they are read
by an attention function that transformers lets anyone register, which records and then calls the model's own.

Forward passes outside the root module (a recomputation during the backward pass) are not recorded.
"""

import contextlib
import contextvars
import dataclasses
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from zerogap.diagnose.adapters.logprobs import defined_logprobs
from zerogap.diagnose.graph import canonical
from zerogap.diagnose.trace import Definition, Pass, SequenceTrace, Trace
from zerogap.errors import ConfigError

_WRAPPERS = re.compile(r"(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
LISTED = 6  # names in a note
RAW = Definition(temperature=1.0, processed=False)
RESIDUAL_MEANING = "residual stream after the addition"


def plain_name(module: str) -> str:
    """A module's or parameter's name without the wrappers around it."""
    name = _WRAPPERS.sub("", module)
    return name.removeprefix("module.")


@dataclasses.dataclass(eq=False)
class Forward:
    """One forward pass of the root module over B sequences of T columns. The recording hooks write it.

    Attributes:
        shape: (B, T); rows of every tensor are [B * T, width], row b * T + t.
        tensors: node name -> rows, padded ones included.
        ids: int64 [B, T] token ids, if they were given.
        mask: bool [B, T] True where a column is a token; None: everywhere.
        positions: int64 [B, T] if they were given.
    """

    shape: tuple[int, int]
    tensors: dict[str, torch.Tensor]
    ids: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    positions: torch.Tensor | None = None


class Capture:
    """The recording of all forward passes inside one `capture` block.

    Attributes:
        forwards: one by one.
        unrecognised: modules with weights whose names stand for no known operator; recorded under their own names.
    """

    def __init__(self, keep: Callable[[str], bool] | None = None) -> None:
        self.forwards: list[Forward] = []
        self.unrecognised: tuple[str, ...] = ()
        self._keep = keep
        self._open: Forward | None = None

    def boundaries(self) -> dict[str, torch.Tensor]:
        """Rows of all passes, one pass after another, sequence by sequence, without padded rows."""
        parts: dict[str, list[torch.Tensor]] = {}
        for forward in self.forwards:
            for name, tensor in forward.tensors.items():
                rows = tensor if forward.mask is None else tensor[forward.mask.reshape(-1)]
                parts.setdefault(name, []).append(rows)
        return {name: torch.cat(rows) for name, rows in parts.items() if len(rows) == len(self.forwards)}

    def meaning(self) -> dict[str, str]:
        """Words on the boundaries that need them, by name."""
        return {name: RESIDUAL_MEANING for name in sorted(self.boundaries()) if ".residual_" in name}

    def note(self) -> str:
        """What was not recognised, in words; empty if nothing."""
        if not self.unrecognised:
            return ""
        first = ", ".join(self.unrecognised[:LISTED])
        more = f" and {len(self.unrecognised) - LISTED} more" if len(self.unrecognised) > LISTED else ""
        return f"modules of no known operator: {first}{more}; name them by zg.capture(model, names={{pattern: node}})"

    def trace(
        self,
        name: str,
        prompt_lengths: Sequence[int],
        *,
        logprobs: Sequence[np.ndarray] | None = None,
        definition: Definition | None = None,
        **facts: Any,
    ) -> Trace:
        """A trace of passes that each computed whole sequences.

        Args:
            name: for people.
            prompt_lengths: of all sequences, in the order in which they were computed.
            logprobs: float32 [N] each, as the stack reports them; None: raw ones from the recorded logits.
            definition: what `logprobs` mean.
            facts: further fields of `Trace` (`settings`, `weights`, `versions`, ...).

        Raises:
            ConfigError: no token ids or no logits were seen, or the number of prompt lengths is another one.
        """
        ids = [part for forward in self.forwards for part in _sequences(forward)]
        if len(ids) != len(prompt_lengths):
            raise ConfigError(
                "prompt_lengths", len(prompt_lengths), f"{len(ids)} sequences were computed: one for each"
            )
        rows = self.boundaries()
        if logprobs is None:
            if "lm_head" not in rows:
                raise ConfigError("logprobs", None, "no output of lm_head was recorded: give the log-probs")
            definition = RAW
            split = rows["lm_head"].split([len(part) for part in ids])
            logprobs = [defined_logprobs(part, values, RAW) for part, values in zip(ids, split)]
        sequences = tuple(SequenceTrace(part, length) for part, length in zip(ids, prompt_lengths))
        if note := self.note():
            warnings.warn(note, stacklevel=2)
        stated = definition or Definition()
        recorded = Pass(tuple(logprobs), definition=stated, boundaries=rows, meaning=self.meaning(), note=note)
        return Trace(name, sequences, (recorded,), **facts)

    # What the hooks call.

    def _begin(self, forward: Forward) -> None:
        self._open = forward

    def _end(self) -> None:
        if self._open is not None:
            self.forwards.append(self._open)
        self._open = None

    def record(self, name: str, tensor: object) -> None:
        """Copy a tensor as rows of the open pass; what has not one row per column is left out, and only the first
        tensor of a name counts."""
        forward = self._open
        if forward is None or name in forward.tensors or not isinstance(tensor, torch.Tensor):
            return
        if self._keep is not None and not self._keep(name):
            return
        rows = as_rows(tensor, forward.shape)
        if rows is not None:
            forward.tensors[name] = rows.detach().to("cpu", copy=True)


def as_rows(tensor: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor | None:
    """[B, T, ...], [B, heads, T, width] or [B * T, ...] as [B * T, width]; None if it is none of them."""
    batch, length = shape
    if tensor.dim() >= 3 and tensor.shape[0] == batch and tensor.shape[1] == length:
        return tensor.reshape(batch * length, -1)
    if tensor.dim() == 4 and tensor.shape[0] == batch and tensor.shape[2] == length:
        return tensor.transpose(1, 2).reshape(batch * length, -1)
    if tensor.dim() >= 2 and tensor.shape[0] == batch * length:
        return tensor.reshape(batch * length, -1)
    return None


def _sequences(forward: Forward) -> list[np.ndarray]:
    """Token ids of each sequence of a pass; packed sequences are told apart by positions that begin at 0 again."""
    if forward.ids is None:
        raise ConfigError("input_ids", None, "the model was not called with input_ids: write the trace by hand")
    mask = torch.ones_like(forward.ids, dtype=torch.bool) if forward.mask is None else forward.mask
    rows = [ids[kept].numpy().astype(np.int32) for ids, kept in zip(forward.ids, mask)]
    if forward.positions is None or len(rows) != 1 or len(forward.positions) != 1:
        return rows
    starts = np.flatnonzero(forward.positions[0][mask[0]].numpy() == 0)
    return np.split(rows[0], starts[starts > 0])


def first_tensor(value: object) -> torch.Tensor | None:
    """The tensor that a module returned, or the first of several."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (tuple, list)):
        return next((v for v in value if isinstance(v, torch.Tensor)), None)
    return getattr(value, "logits", None)


def _given(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> torch.Tensor | None:
    """A copy of an argument as [B, T]; flat engines give [T], which is one row of columns."""
    value = kwargs.get(name)
    if value is None and name == "input_ids" and args:
        value = args[0]
    if not isinstance(value, torch.Tensor) or value.dim() not in (1, 2):
        return None
    copied = value.detach().to("cpu", copy=True)
    return copied[None] if copied.dim() == 1 else copied


def open_forward(args: Sequence[object], kwargs: Mapping[str, object]) -> Forward:
    """The empty record of a pass whose root module is called with these arguments."""
    ids, positions = _given("input_ids", args, kwargs), _given("position_ids", args, kwargs)
    positions = _given("positions", args, kwargs) if positions is None else positions
    mask = _given("attention_mask", args, kwargs)
    embeddings = kwargs.get("inputs_embeds")
    if ids is not None:
        shape = (ids.shape[0], ids.shape[1])
    elif isinstance(embeddings, torch.Tensor):
        shape = (embeddings.shape[0], embeddings.shape[1])
    else:
        flat = first_tensor([*args, *kwargs.values()])
        if flat is None:
            raise ConfigError("capture", None, "the model was called without a tensor")
        shape = (1, flat.shape[0]) if flat.dim() == 1 else (flat.shape[0], flat.shape[1])
    if mask is not None:
        mask = mask[:, -shape[1] :] != 0  # with a cache the mask covers earlier columns too
    return Forward(shape, {}, ids, mask, positions)


# Norms whose *input* is the residual stream, and the stream's name there.
def _residual_before(name: str) -> str | None:
    if name == "final_norm":
        return "last"
    layer, _, node = name.partition(".")
    if node == "post_norm":
        return f"{layer}.residual_attention"
    if node == "input_norm" and int(layer) > 0:
        return f"{int(layer) - 1}.residual_mlp"
    return None


def _num_layers(names: Sequence[str]) -> int:
    found = [int(n.split(".")[0]) for n in names if n.split(".")[0].isdigit()]
    return max(found, default=-1) + 1


_ROUTED = re.compile(r"(?:layers|blocks|h)\.(\d+)\.(?:mlp|feed_forward|ffn|moe|block_sparse_moe)$")


def own_name(module: str, names: Mapping[str, str]) -> str | None:
    """The node that a mapping of patterns (of whole module names) to node names gives a module, or None."""
    for pattern, node in names.items():
        if found := re.fullmatch(pattern, module):
            return found.expand(node)
    return None


def node_modules(model: torch.nn.Module, names: Mapping[str, str] | None = None) -> dict[str, torch.nn.Module]:
    """Node name -> the module that computes it (`experts`: the routed block; `activation` has none).

    Args:
        names: see `capture`; goes before the names that are known.
    """
    found: dict[str, torch.nn.Module] = {}
    modules = {plain_name(raw): module for raw, module in model.named_modules(remove_duplicate=False)}
    for name, module in modules.items():
        if (own := own_name(name, names or {})) is not None:
            found[own] = module
            continue
        node = canonical(name)
        block, _, part = name.rpartition(".")
        if part == "gate" and (f"{block}.up" in modules or f"{block}.up_proj" in modules):
            layer = re.search(r"(?:layers|blocks|h)\.(\d+)\.\w+$", block)
            node = f"{layer[1]}.gate_proj" if layer else None  # of a gated MLP, no router
        if node is not None and node.endswith((".activation", ".attention")):
            continue  # read at the module that takes them: what `act_fn` and `attn` return differs between stacks
        if node is None and (routed := _ROUTED.search(name)):
            children = {plain_name(child) for child, _ in module.named_children()}
            known = children & {"gate", "router"} and (name.endswith(".mlp") or "experts" in children)
            node = f"{routed[1]}.experts" if known and not children & {"up", "up_proj"} else None
        if node is not None:
            found[node] = module
    return found


@contextlib.contextmanager
def capture(
    model: torch.nn.Module,
    *,
    keep: Callable[[str], bool] | None = None,
    rope: bool = False,
    names: Mapping[str, str] | None = None,
) -> Iterator[Capture]:
    """Record what a model computes inside the block, over one or several forward passes.

    Args:
        model: the root module whose forward passes are recorded, wrapped or not.
        keep: which boundaries to keep, by name; None: all.
        rope: record queries and keys after RoPE too; the model must be one of transformers.
        names: regular expression of a whole module name -> name of its output's node, for modules whose names are not
            known: `{r"stack\\.(\\d+)\\.to_q": r"\\1.q_proj"}`. Modules with weights that stay unknown are listed in
            `Capture.unrecognised` and keep their own names.
    """
    seen = Capture(keep)
    with contextlib.ExitStack() as undo:
        for handle in _hooks(model, seen, names or {}):
            undo.callback(handle.remove)
        if rope:
            undo.enter_context(watch_attention(model, _record_rope(model, seen)))
        yield seen


def _record_rope(model: torch.nn.Module, seen: Capture) -> "Watcher":
    layers = {id(m): plain_name(name) for name, m in model.named_modules()}

    def watch(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if found := re.search(r"layers\.(\d+)\.", layers.get(id(module), "")):
            seen.record(f"{found[1]}.q_rope", query.transpose(1, 2))
            seen.record(f"{found[1]}.k_rope", key[:, :, -query.shape[2] :].transpose(1, 2))

    return watch


def _hooks(model: torch.nn.Module, seen: Capture, names: Mapping[str, str]) -> Iterator[Any]:
    """Handles of all hooks; the root's are first and last."""
    nodes = node_modules(model, names)
    layers = _num_layers(list(nodes))
    last = f"{layers - 1}.residual_mlp" if layers else ""

    def begin(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen._begin(open_forward(args, kwargs))

    yield model.register_forward_pre_hook(begin, with_kwargs=True)
    for name, module in nodes.items():
        yield module.register_forward_hook(_output_hook(seen, name, last))
        layer, _, node = name.partition(".")
        if node == "o_proj":
            yield module.register_forward_pre_hook(_input_hook(seen, f"{layer}.attention"), with_kwargs=True)
        if node == "down_proj":
            yield module.register_forward_pre_hook(_input_hook(seen, f"{layer}.activation"), with_kwargs=True)
    yield from _fused_hooks(model, seen)
    known = {id(module) for module in nodes.values()}
    known |= {id(m) for n, m in model.named_modules() if plain_name(n).rsplit(".", 1)[-1] in _FUSED}
    for raw, module in model.named_modules():
        name = plain_name(raw)
        if id(module) not in known and name and not any(module.children()) and canonical(name) is None:
            if any(True for _ in module.parameters(recurse=False)) and ".experts." not in name:
                seen.unrecognised += (name,)
            yield module.register_forward_hook(_output_hook(seen, name, last))

    def end(module: torch.nn.Module, args: tuple[Any, ...], output: object) -> None:
        seen._end()

    yield model.register_forward_hook(end)


_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def _fused_hooks(model: torch.nn.Module, seen: Capture) -> Iterator[Any]:
    """Hooks of projections that one module computes side by side (its `output_sizes` are their widths), and of an
    attention module that is given queries and keys after RoPE."""
    for raw, module in model.named_modules():
        found = re.search(r"layers\.(\d+)\.(?:self_attn|mlp)\.(qkv_proj|gate_up_proj|attn)$", plain_name(raw))
        if found is None:
            continue
        if found[2] == "attn":
            yield module.register_forward_pre_hook(
                _parts_hook(seen, [f"{found[1]}.q_rope", f"{found[1]}.k_rope"], None)
            )
        elif isinstance(sizes := getattr(module, "output_sizes", None), (list, tuple)):
            names = [f"{found[1]}.{part}" for part in _FUSED[found[2]]]
            yield module.register_forward_hook(_parts_hook(seen, names, list(sizes)))


def _parts_hook(seen: Capture, names: Sequence[str], sizes: list[int] | None) -> Callable[..., None]:
    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: object = None) -> None:
        whole = first_tensor(output)
        parts: Sequence[object] = args
        if sizes is not None:
            parts = whole.split(sizes, dim=-1) if whole is not None and whole.shape[-1] == sum(sizes) else ()
        for name, part in zip(names, parts):
            seen.record(name, part)

    return hook


def _input_hook(seen: Capture, name: str) -> Callable[..., None]:
    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.record(name, first_tensor([*args, *kwargs.values()]))

    return hook


def _output_hook(seen: Capture, name: str, last: str) -> Callable[..., None]:
    """Records an output, and at norms the residual stream: the input, or, where the norm adds, the second output."""
    before = _residual_before(name)
    before = last or None if before == "last" else before

    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: object) -> None:
        if before is not None:
            added = isinstance(output, (tuple, list)) and len(output) > 1
            seen.record(before, output[1] if added else first_tensor(args))  # type: ignore[index]
        seen.record(name, first_tensor(output))
        if name.endswith(".router") and isinstance(output, (tuple, list)) and len(output) == 3:
            seen.record(f"{name}_weights", output[1])
            seen.record(f"{name}_experts", output[2])

    return hook


# Attention of transformers.

Watcher = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], "tuple[torch.Tensor, ...] | None"]
_WATCHING: contextvars.ContextVar[tuple[str, Watcher] | None] = contextvars.ContextVar("watching", default=None)


def _watched(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The registered attention function: show queries, keys and values, then call the model's own function."""
    watching = _WATCHING.get()
    assert watching is not None, "a watched attention function was called outside its block"
    implementation, watcher = watching
    changed = watcher(module, query, key, value)
    if changed is not None:
        query, key, value = changed
    return attention_function(module, implementation)(module, query, key, value, attention_mask, **settings)


def attention_function(module: torch.nn.Module, implementation: str) -> Callable[..., Any]:
    """transformers' attention function of this name; `eager` stands beside the module's own `forward`, which is what
    that forward falls back to."""
    from transformers import AttentionInterface

    eager = inspect.unwrap(type(module).forward).__globals__.get("eager_attention_forward")
    return AttentionInterface().get_interface(implementation, eager)


@contextlib.contextmanager
def watch_attention(model: torch.nn.Module, watcher: "Watcher") -> Iterator[bool]:
    """Show `watcher` what every attention of a transformers model is given; it may return other (query, key, value).

    Yields False, and shows nothing, where the model does not let its attention function be chosen.
    """
    root: Any = next((m for m in model.modules() if hasattr(m, "set_attn_implementation")), None)
    if root is None:
        yield False
        return
    from transformers import AttentionInterface, AttentionMaskInterface

    original: str = root.config._attn_implementation
    name = f"watched_{original}"
    masks = AttentionMaskInterface()
    if name not in AttentionInterface():
        AttentionInterface.register(name, _watched)
        if original in masks:
            AttentionMaskInterface.register(name, masks[original])
    root.set_attn_implementation(name)
    token = _WATCHING.set((original, watcher))
    try:
        yield root.config._attn_implementation == name
    finally:
        _WATCHING.reset(token)
        root.set_attn_implementation(original)
