"""What zerogap's ops produced in one pass, by node name and token: the op tap's events put in order.

Tensors are kept by reference until the forward pass that made them is over and copied then, so that whatever was
written into an op's output later on (by a planted fault, or by a callback behind this one) is seen as what the next op
read. Rows are found by the pass's context: slot and position. Recording changes no bit.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from zerogap.diagnose.graph import canonical
from zerogap.types import ForwardContext


def node_of(weight: str) -> str:
    """Node that a weight's output belongs to (`model.layers.3.self_attn.q_proj.weight` -> `3.q_proj`)."""
    module = weight.removesuffix(".weight")
    return canonical(module) or module


@dataclasses.dataclass
class TapBoundaries:
    """Collects the rows of one pass over all sequences; a tap callback.

    Attributes:
        starts: first row of each sequence, then R.
        num_layers: decoder layers, for the name of the last residual.
        boundaries: node name -> [R, width] in the dtype it was computed in; NaN where no row was computed.
        experts, margins: decoder layer -> int16 [R, k] and float32 [R] of its router; experts -1 where not computed.
    """

    starts: Sequence[int]
    num_layers: int
    boundaries: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    experts: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    margins: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    _rows: torch.Tensor | None = None  # row of each token of the running forward pass; -1: not recorded
    _output_rows: torch.Tensor | None = None
    _seen: list[tuple[str, torch.Tensor]] = dataclasses.field(default_factory=list)
    _routed: list[tuple[int, torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=list)
    _layer: int = 0

    def begin(self, context: ForwardContext, sequences: Sequence[int]) -> None:
        """A forward pass begins. `sequences`: which sequence each slot of the page table holds, -1 for none of ours."""
        self.finish()
        slots, positions = context.sequences.tolist(), context.positions.tolist()
        rows = []
        for slot, position in zip(slots, positions, strict=True):
            sequence = sequences[slot]
            rows.append(-1 if sequence < 0 else self.starts[sequence] + position)
        self._rows = torch.tensor(rows, dtype=torch.int64)
        self._output_rows = self._rows if context.output_rows is None else self._rows[context.output_rows]

    def finish(self) -> None:
        """Copy what the last forward pass left."""
        rows, heads = self._rows, self._output_rows
        if rows is None or heads is None:
            return
        joined: dict[str, list[torch.Tensor]] = {}
        for name, tensor in self._seen:
            joined.setdefault(name, []).append(tensor.detach())
        for name, parts in joined.items():
            at_head = name in ("lm_head", "logprob")
            value = torch.cat(parts) if at_head else parts[-1]  # the head comes in blocks of rows
            self._keep(name, value.reshape(len(value), -1), heads if at_head else rows)
        for layer, experts, margins in self._routed:
            count, top_k = experts.shape
            held = self.experts.setdefault(layer, torch.full((self.starts[-1], top_k), -1, dtype=torch.int16))
            by = self.margins.setdefault(layer, torch.zeros(self.starts[-1]))
            ours = rows[:count] >= 0
            held[rows[ours]], by[rows[ours]] = experts[ours].to(torch.int16), margins[ours]
        self._seen, self._routed, self._rows, self._output_rows, self._layer = [], [], None, None, 0

    def _keep(self, name: str, value: torch.Tensor, rows: torch.Tensor) -> None:
        ours = rows >= 0
        if len(value) != len(rows) or not ours.any():
            return
        if name not in self.boundaries:
            self.boundaries[name] = torch.full((self.starts[-1], value.shape[1]), float("nan"), dtype=value.dtype)
        self.boundaries[name][rows[ours]] = value[ours]

    def __call__(self, name: str, outputs: Mapping[str, torch.Tensor], info: Mapping[str, object]) -> None:
        if self._rows is None:
            return
        if name == "linear":
            self._seen += [(node_of(weight), value) for weight, value in outputs.items()]
        elif name == "rms_norm":
            self._norm(str(info["weight"]), outputs)
        elif name == "head_norm":
            self._seen.append((node_of(str(info["weight"])), outputs["normed"]))
        elif name == "rope":
            self._seen += [(f"{self._layer}.{part}_rope", outputs[part]) for part in ("q", "k")]
        elif name in ("attention", "mla"):
            self._seen.append((f"{self._layer}.attention", outputs["out"]))
        elif name == "silu_mul":
            self._seen.append((f"{self._layer}.activation", outputs["out"]))
        elif name == "router":
            self._seen.append((f"{self._layer}.router", outputs["logits"]))
            self._routed.append((self._layer, outputs["experts"], outputs["margins"]))
        elif name == "moe":
            self._seen.append((f"{self._layer}.experts", outputs["out"]))
        elif name == "embedding":
            self._seen.append(("embed", outputs["out"]))
        elif name == "head_logits":
            self._seen.append(("lm_head", next(iter(outputs.values()))))
        elif name == "token_logprobs":
            self._seen.append(("logprob", outputs["logp"]))

    def _norm(self, weight: str, outputs: Mapping[str, torch.Tensor]) -> None:
        """A norm's rows, and the residual stream that it read after adding the last update."""
        node = node_of(weight)
        if node.endswith(".input_norm"):
            self._layer = int(node.split(".")[0])
            if self._layer:
                self._seen.append((f"{self._layer - 1}.residual_mlp", outputs["residual"]))
        elif node.endswith(".post_norm"):
            self._seen.append((f"{self._layer}.residual_attention", outputs["residual"]))
        elif node == "final_norm":
            self._seen.append((f"{self.num_layers - 1}.residual_mlp", outputs["residual"]))
        self._seen.append((node, outputs["normed"]))
