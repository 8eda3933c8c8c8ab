"""A live causal language model of transformers, or one shaped like it, as a side of a diagnosis.

The model is used as it is: its own modules in its own dtype and mode, called through its public forward, so whatever
was changed in it shows. Log-probs are computed from its logits in FP32 under the definition that is asked for. Hooks
are installed only while boundaries are captured or operators replaced.
"""

import contextlib
import dataclasses
import functools
import inspect
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from zerogap.diagnose.adapters.capture import Forward, capture, node_modules, plain_name
from zerogap.diagnose.adapters.logprobs import defined_logprobs
from zerogap.diagnose.adapters.replacing import REPLACEABLE, Columns, replacing
from zerogap.diagnose.adapters.torch_facts import node_parameters, routing_facts
from zerogap.diagnose.graph import Node, model_nodes
from zerogap.diagnose.side import Ask
from zerogap.diagnose.sketch import sketch
from zerogap.diagnose.trace import Definition, Pass, SequenceTrace, Trace, json_ready
from zerogap.errors import ConfigError

CHUNK = 8  # tokens per chunk where nobody said


class TorchSide:
    """Implements `side.Side` over a model of transformers (Llama, Qwen3, Qwen3-MoE, ...), plain or changed.

    Args:
        model: called as `model(input_ids, attention_mask, position_ids[, cache])`, returns `.logits`.
        sequences: what is computed: prompt and completion of each.
        name: for people.
        definition: what this side's log-probs mean; default: raw, temperature 1.
        source: folder of the weights, if there is one.
        path, batches: how the side's answer (the trace's first pass) is computed.
        padding: `right` or `left` where sequences of several lengths share a pass (decoding always pads prompts left).
        settings: sampling settings for the trace.

    Attributes:
        running: sequences of the batch that is being computed, for replacements.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        sequences: Sequence[SequenceTrace],
        name: str = "transformers",
        definition: Definition = Definition(temperature=1.0, processed=False),
        source: str = "",
        *,
        path: str = "whole",
        batches: tuple[tuple[int, ...], ...] | None = None,
        padding: str = "right",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if padding not in ("left", "right"):
            raise ConfigError("padding", padding, "choose left or right")
        self.model, self.name = model, name
        self._sequences, self._definition, self._source = tuple(sequences), definition, source
        self._path, self._batches, self._padding = path, batches, padding
        self._settings = dict(settings or {})
        self.running: tuple[int, ...] = ()

    @property
    def sequences(self) -> tuple[SequenceTrace, ...]:
        """What is computed, as given."""
        return self._sequences

    @property
    def config(self) -> Any:
        """The model's Hugging Face config."""
        return next(m.config for m in self.model.modules() if hasattr(m, "config"))

    @functools.cached_property
    def nodes(self) -> Mapping[str, Node]:
        """The operators that the model has, by name."""
        modules = node_modules(self.model)
        layers = {int(name.split(".")[0]) for name in modules if name[0].isdigit()}
        moe = frozenset(int(name.split(".")[0]) for name in modules if name.endswith(".experts"))
        found = model_nodes(len(layers), qk_norm=any(n.endswith(".q_norm") for n in modules), moe_layers=moe)
        return {node.name: node for node in found}

    @functools.cached_property
    def trace(self) -> Trace:
        """The side's answer with boundaries, weights and facts; computed when first asked for."""
        recorded = self.again(Ask(path=self._path, batches=self._batches, capture=True))
        assert recorded is not None, f"no way to compute path {self._path}"
        config = self.config
        return Trace(
            name=self.name,
            sequences=routing_facts(self._sequences, recorded.boundaries),
            passes=(recorded,),
            weights={name: sketch(tensor) for name, tensor in self._weights()},
            buffers={plain_name(name): sketch(buffer) for name, buffer in self.model.named_buffers()},
            settings=self._settings,
            model=json_ready(config.to_dict()),
            source=self._source,
            versions=_versions(),
            layout=self._layout(),
        )

    def _layout(self) -> dict[str, Any]:
        parameter = next(self.model.parameters())
        return {
            "attention": self.config._attn_implementation,
            "experts": getattr(self.config, "_experts_implementation", None),
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "device": str(parameter.device),
            "padding": self._padding,
            "tensor_parallel_size": 1,
            "threads": torch.get_num_threads(),
        }

    def again(self, ask: Ask) -> Pass | None:
        """Compute as asked; None for speculative decoding and for kinds that hooks cannot replace."""
        if ask.path == "speculative" or not set(ask.replace) - {"logprob"} <= REPLACEABLE:
            return None
        if "rope" in ask.replace and ask.path != "whole":
            return None
        definition = ask.definition or self._definition
        batches = ask.batches or self._batches or tuple((i,) for i in range(len(self._sequences)))
        starts = np.cumsum([0, *(len(s.ids) for s in self._sequences)])
        boundaries: dict[str, torch.Tensor] = {}
        logprobs = [np.full(len(s.ids), np.nan, np.float32) for s in self._sequences]
        for batch in batches:
            plan = _plan(self._sequences, batch, ask, self._padding)
            logits = [torch.empty(0)] * len(batch)
            self.running = tuple(batch)
            for forward in self._forwards(plan, ask):
                _scatter(forward, plan, [int(starts[i]) for i in batch], int(starts[-1]), boundaries)
                _collect(forward, plan, logits)
            for i, rows in zip(batch, logits):
                ids = np.asarray(self._sequences[i].ids)
                if "logprob" in ask.replace:
                    following = torch.from_numpy(np.append(ids[1:], 0).astype(np.int64))
                    given = ask.replace["logprob"]("logprob", {"lm_head": rows, "ids": following})
                    logprobs[i][1:] = given.reshape(-1)[:-1].float().numpy()
                else:
                    logprobs[i] = defined_logprobs(ids, rows, definition)
        if not ask.capture:
            boundaries = {}
        else:
            following_rows = [np.append(p[1:], np.float32(np.nan)) for p in logprobs]
            boundaries["logprob"] = torch.from_numpy(np.concatenate(following_rows)[:, None])
        meaning = {n: "residual stream after the addition" for n in boundaries if ".residual_" in n}
        return Pass(tuple(logprobs), ask.path, batches, definition, boundaries, meaning)

    def _forwards(self, plan: "_Plan", ask: Ask) -> Iterator["_Computed"]:
        """Run a plan; yields each forward pass with its logits and, where captured, its boundaries."""
        device = next(self.model.parameters()).device
        columns = Columns()
        cache = None
        if len(plan.slices) > 1:
            from transformers import DynamicCache

            cache = DynamicCache(config=self.config)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(replacing(self.model, self.nodes, ask.replace, columns))
            seen = stack.enter_context(capture(self.model, rope=True)) if ask.capture else None
            for first, last in plan.slices:
                columns.shape = (len(plan.ids), last - first)
                columns.mask, columns.positions = plan.mask[:, :last], plan.positions[:, first:last]
                given: dict[str, Any] = {
                    "input_ids": plan.ids[:, first:last].to(device),
                    "attention_mask": plan.mask[:, :last].long().to(device),
                    "position_ids": columns.positions.to(device),
                    "use_cache": cache is not None,
                }
                if cache is not None:
                    given[self._cache_name] = cache
                logits = self.model(**given).logits.detach().cpu()
                forward = seen.forwards.pop() if seen is not None else Forward(columns.shape, {})
                yield _Computed(first, logits, forward)

    @functools.cached_property
    def _cache_name(self) -> str:
        """How the model's forward calls its KV cache: `past_key_values`, or `cache` since transformers 5.2."""
        root = next(m for m in self.model.modules() if hasattr(m, "config") and hasattr(m, "forward"))
        return "cache" if "cache" in inspect.signature(inspect.unwrap(root.forward)).parameters else "past_key_values"

    def _weights(self, wanted: Callable[[str], bool] = bool) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, tensor): stacked experts one by one, parameters whose own names are wanted only."""
        for raw, parameter in self.model.named_parameters(remove_duplicate=False):
            if not wanted(plain_name(raw)):
                continue
            full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            yield from _unstacked(plain_name(raw), full.detach())

    def weight(self, name: str) -> torch.Tensor | None:
        """A parameter or buffer by its checkpoint name, as the model holds it now."""
        expert = re.search(r"^(.*\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.weight$", name)
        stacked = expert and f"{expert[1]}.{'down_proj' if expert[2] == 'down' else 'gate_up_proj'}"
        for held, tensor in self._weights(lambda n: n in (name, stacked)):
            if held == name:
                return tensor
        return next((b.detach() for n, b in self.model.named_buffers() if plain_name(n) == name), None)

    def parameters(self, node: str) -> Mapping[str, object]:
        """See `torch_facts.node_parameters`."""
        found = self.nodes.get(node)
        if found is None:
            return {}
        facts = node_parameters(found, node_modules(self.model), self.config, next(self.model.parameters()).dtype)
        return facts | {"lengths": tuple(len(s.ids) for s in self._sequences)}


@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """How a batch is laid out in columns: B rows, neighbours first.

    ids, positions int64 and mask bool [B, C]; `slices`: columns of each forward pass; `own`: per own sequence
    (row, first column, number of tokens).
    """

    ids: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    slices: tuple[tuple[int, int], ...]
    own: tuple[tuple[int, int, int], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _Computed:
    """One forward pass: its first column, its logits [B, T, V] and its recorded rows."""

    first: int
    logits: torch.Tensor
    forward: Forward


def _plan(sequences: Sequence[SequenceTrace], batch: Sequence[int], ask: Ask, padding: str) -> _Plan:
    """Columns and passes of one batch under the asked path."""
    rows = [np.asarray(n, np.int64) for n in ask.neighbours] + [np.asarray(sequences[i].ids) for i in batch]
    prompts = [max(1, len(n) // 2) for n in ask.neighbours] + [max(1, sequences[i].prompt_length) for i in batch]
    if ask.path == "decode":
        first = [max(prompts) - prompt for prompt in prompts]
    elif ask.path == "whole" and padding == "left":
        first = [max(len(r) for r in rows) - len(r) for r in rows]
    else:
        first = [0] * len(rows)
    width = max(start + len(r) for start, r in zip(first, rows))
    ids, mask = torch.zeros((len(rows), width), dtype=torch.int64), torch.zeros((len(rows), width), dtype=torch.bool)
    for b, (start, row) in enumerate(zip(first, rows)):
        ids[b, start : start + len(row)] = torch.from_numpy(row.astype(np.int64))
        mask[b, start : start + len(row)] = True
    if ask.path == "decode":
        borders = [0, *range(max(prompts), width)]
    elif ask.path == "chunked":
        borders = [*range(0, width, ask.chunk or CHUNK)]
    elif ask.path == "prefix_hit":
        hits = [sequences[i].hit_length or max(1, sequences[i].prompt_length - 1) for i in batch]
        borders = [0, *(h for h in [min(hits)] if h < width)]
    else:
        borders = [0]
    slices = tuple(zip(borders, [*borders[1:], width]))
    own = tuple((b, first[b], len(rows[b])) for b in range(len(ask.neighbours), len(rows)))
    positions = (mask.long().cumsum(1) - 1).clamp_min(0)
    return _Plan(ids, mask, positions, slices, own)


def _rows_of(computed: _Computed, plan: _Plan, place: int) -> tuple[slice, int]:
    """Columns of a pass that hold tokens of the own sequence `place`, and the first such token's index."""
    _, first, count = plan.own[place]
    begin = max(first, computed.first)
    end = min(first + count, computed.first + computed.forward.shape[1])
    return slice(begin - computed.first, max(begin, end) - computed.first), begin - first


def _scatter(
    computed: _Computed, plan: _Plan, starts: Sequence[int], num_rows: int, boundaries: dict[str, torch.Tensor]
) -> None:
    """Put a pass's rows where the trace wants them; rows that were never computed stay NaN (integers: -1)."""
    length = computed.forward.shape[1]
    for name, tensor in computed.forward.tensors.items():
        if name not in boundaries:
            missing = torch.nan if tensor.dtype.is_floating_point else -1
            boundaries[name] = torch.full((num_rows, tensor.shape[1]), missing, dtype=tensor.dtype)
        for place, start in enumerate(starts):
            columns, token = _rows_of(computed, plan, place)
            row = plan.own[place][0]
            rows = tensor[row * length : (row + 1) * length][columns]
            boundaries[name][start + token : start + token + len(rows)] = rows


def _collect(computed: _Computed, plan: _Plan, logits: list[torch.Tensor]) -> None:
    """Append a pass's logits to those of its sequences."""
    for place in range(len(logits)):
        columns, token = _rows_of(computed, plan, place)
        rows = computed.logits[plan.own[place][0], columns]
        if len(rows):
            assert len(logits[place]) == token, "columns are computed in order"
            logits[place] = torch.cat([logits[place], rows]) if len(logits[place]) else rows


def _unstacked(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Stacked expert weights under the names that checkpoints give them."""
    found = re.search(r"^(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$", name)
    if found is None or tensor.dim() != 3:
        yield name, tensor
        return
    for expert, matrix in enumerate(tensor):
        if found[2] == "down_proj":
            yield f"{found[1]}.{expert}.down_proj.weight", matrix
        else:
            gate, up = matrix.chunk(2)
            yield f"{found[1]}.{expert}.gate_proj.weight", gate
            yield f"{found[1]}.{expert}.up_proj.weight", up


def _versions() -> dict[str, str]:
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
