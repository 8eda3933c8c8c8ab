"""The first operator at which two passes part: a walk over the model's operators in running order, by bits.

An operator *diverges itself* in a row where everything it reads is the same on both sides and what it gives is not;
attention reads the keys and values of the sequence's earlier rows, too. Inputs that were not recorded are looked for
further up: the operators in between form a *region*, and only a region of one operator names it. Later operators that
merely pass a difference on are never blamed.

Set aside, with a note, are recordings that are no output of the operator: zeros throughout on one side, another
operator's tensor under this name (a residual stream that is returned beside the norm), rows that were not recorded.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from zerogap.diagnose.compare import recorded_rows, unequal
from zerogap.diagnose.graph import Node, model_nodes
from zerogap.diagnose.trace import Pass

OVER_ROWS = ("attention",)  # kinds whose row depends on the sequence's earlier rows


@dataclasses.dataclass(frozen=True, eq=False)
class Divergence:
    """An operator that parts the sides.

    Attributes:
        node: the operator.
        region: unrecorded operators before it whose work is in its output; empty: it alone is to blame.
        rows: bool [R] rows in which it diverges itself.
        equal_inputs: bool [R] rows in which all that it reads is the same.
        differing, elements: elements of those rows that differ, and all of them.
        relative: largest |x - y| over the row's largest magnitude.
        inputs: names of the recorded tensors that it reads, the same on both sides in those rows.
    """

    node: Node
    region: tuple[Node, ...]
    rows: torch.Tensor
    equal_inputs: torch.Tensor
    differing: int
    elements: int
    relative: float
    inputs: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Walk:
    """What a walk saw.

    Attributes:
        compared: nodes that both passes recorded, in running order.
        diverging: those that diverge themselves, in running order.
        distance: node -> float32 [R]: largest |x - y| of the row over its largest magnitude; NaN where not recorded.
        notes: recordings that were set aside.
    """

    compared: tuple[str, ...]
    diverging: tuple[Divergence, ...]
    distance: Mapping[str, torch.Tensor]
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Divergence | None:
        """The operator that parts the sides first."""
        return self.diverging[0] if self.diverging else None

    @property
    def differing(self) -> tuple[str, ...]:
        """Nodes with any different row."""
        return tuple(n for n in self.compared if bool((self.distance[n] > 0).any()))


def nodes_of(names: Iterable[str]) -> list[Node]:
    """The operators of a model with these recorded tensors, in running order."""
    known = list(dict.fromkeys(names))
    numbered = [n.split(".", 1) for n in known if n.split(".")[0].isdigit() and "." in n]
    if not numbered:
        return [n for n in model_nodes(0, qk_norm=False) if n.name in known]
    parts = {part for _, part in numbered}
    moe = frozenset(int(layer) for layer, part in numbered if part in ("router", "experts"))
    layers = max(int(layer) for layer, _ in numbered) + 1
    nodes = model_nodes(layers, qk_norm="q_norm" in parts, moe_layers=moe)
    return _latent(nodes, parts) if "kv_a_proj" in parts else nodes


def _latent(nodes: list[Node], parts: set[str]) -> list[Node]:
    """The same for latent attention: one operator from the latents to the heads' outputs."""
    out = []
    dropped = ("q_rope", "k_rope", "v_proj", "k_proj")
    for node in nodes:
        layer, _, name = node.name.partition(".")
        if name in dropped:
            continue
        prefix = f"model.layers.{layer}.self_attn."
        if name == "q_proj" and "q_a_proj" in parts:
            x = node.inputs
            out.append(Node(f"{layer}.q_a_proj", "linear", x, (f"{prefix}q_a_proj.weight",)))
            out.append(Node(f"{layer}.q_a_norm", "norm", (f"{layer}.q_a_proj",), (f"{prefix}q_a_layernorm.weight",)))
            node = Node(f"{layer}.q_b_proj", "linear", (f"{layer}.q_a_norm",), (f"{prefix}q_b_proj.weight",))
        if name == "attention":
            query = f"{layer}.q_b_proj" if "q_a_proj" in parts else f"{layer}.q_proj"
            weights = (f"{prefix}kv_a_layernorm.weight", f"{prefix}kv_b_proj.weight")
            latent = (f"{prefix}kv_a_proj_with_mqa.weight",)
            out.append(Node(f"{layer}.kv_a_proj", "linear", (f"{layer}.input_norm",), latent))
            node = Node(node.name, "attention", (query, f"{layer}.kv_a_proj"), weights)
        out.append(node)
    return out


def walk(a: Pass, b: Pass, lengths: Sequence[int]) -> Walk:
    """Compare two passes over the same rows, operator by operator.

    Args:
        lengths: rows of each sequence, in order.
    """
    a, b = with_logprobs(a), with_logprobs(b)
    trusted: set[str] = set()
    twins = _twins(a), _twins(b)
    while True:
        found, aside = _walk(a, b, lengths, trusted, twins)
        # What was set aside is real after all if what follows it parts the sides by itself.
        needed = aside & {n.name for n in found.first.region} if found.first is not None else set()
        if not needed:
            return found
        trusted |= needed


def with_logprobs(found: Pass) -> Pass:
    """The pass with its log-probs as the rows of `logprob`, each token's at the row before it."""
    if not found.boundaries:
        return found
    rows = [np.append(p[1:], np.float32(np.nan)).astype(np.float32) for p in found.logprobs]
    last = torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *rows]))[:, None]
    return dataclasses.replace(found, boundaries={**found.boundaries, "logprob": last})


Twins = Mapping[str, Sequence[str]]


def _twins(found: Pass) -> Twins:
    """Node -> all nodes, itself among them, under which the same tensor was recorded; tensors of zeros are left out."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in found.boundaries.items():
        if tensor.any():
            bits = tensor.contiguous().view(torch.uint8).numpy()
            key = (tensor.shape, tensor.dtype, hashlib.blake2b(bits.data, digest_size=16).digest())
            groups.setdefault(key, []).append(name)
    return {name: names for names in groups.values() for name in names}


def _walk(
    a: Pass, b: Pass, lengths: Sequence[int], trusted: set[str], twins: tuple[Twins, Twins]
) -> tuple[Walk, set[str]]:
    """One walk, and the names of the recordings that were set aside; those in `trusted` never are."""
    aside: set[str] = set()
    shared = [n for n in a.boundaries if n in b.boundaries]
    nodes = {n.name: n for n in nodes_of([*a.boundaries, *b.boundaries])}
    order = [n for n in nodes if n in shared] + [n for n in shared if n not in nodes]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    parted: dict[str, torch.Tensor] = {}
    distance: dict[str, torch.Tensor] = {}
    diverging: list[Divergence] = []
    notes: list[str] = []
    for name in order:
        x, y = a.boundaries[name], b.boundaries[name]
        if x.shape != y.shape:
            notes.append(f"{name}: shapes {tuple(x.shape)} and {tuple(y.shape)} cannot be compared")
            continue
        bits = unequal(x, y)
        if bits.any() and name not in trusted and (why := _misrecorded(name, a, b, twins)):
            aside.add(name)
            notes.append(f"{name}: {why}; set aside")
            continue
        if bool((((x == 0) & (y == 0)) & (x.double().signbit() != y.double().signbit())).any()):
            notes.append(f"{name}: zeros of unlike sign, which count as equal")
        parted[name] = bits.any(1)
        distance[name] = _distance(name, x, y, bits)
        node = nodes.get(name)
        if node is None or not bits.any():
            continue
        reads, region = _recorded_inputs(node, nodes, parted)
        moved = _inputs_differ(node, region, reads, parted, starts, len(x))
        alone = parted[name] & ~moved
        if alone.any():
            rows = bits[alone]
            diverging.append(
                Divergence(
                    node,
                    region,
                    alone,
                    ~moved,
                    int(rows.sum()),
                    rows.numel(),
                    float(distance[name][alone].max()),
                    reads,
                )
            )
    return Walk(tuple(parted), tuple(diverging), distance, tuple(notes)), aside


def _distance(name: str, x: torch.Tensor, y: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    one, other = x.double(), y.double()
    gap = torch.where(bits, (one - other).abs(), torch.zeros(()).double())
    size = torch.maximum(one.abs(), other.abs()).nan_to_num(0.0).amax(1).clamp_min(1e-30)
    if name == "logprob":  # a ratio says nothing of log-probs near 0
        size = size.clamp_min(1.0)
    out = (gap.nan_to_num(float("inf")).amax(1) / size).float()
    out[~(recorded_rows(x) & recorded_rows(y))] = float("nan")
    return out


def _misrecorded(name: str, a: Pass, b: Pass, twins: tuple[Twins, Twins]) -> str:
    """Why a side's recording is not this operator's output, or empty."""
    for side, own, other, same in (("A", a, b, twins[0]), ("B", b, a, twins[1])):
        x, y = own.boundaries[name], other.boundaries[name]
        rows = recorded_rows(x)
        if rows.any() and not x[rows].any() and bool(y.any()):
            return f"{side} recorded nothing but zeros"
        for twin in same.get(name, ()):
            theirs = other.boundaries.get(twin)
            if twin != name and (theirs is None or theirs.shape != y.shape or unequal(theirs, y).any()):
                return f"{side} recorded the tensor of {twin} under this name"
    return ""


def _recorded_inputs(
    node: Node, nodes: Mapping[str, Node], parted: Mapping[str, torch.Tensor]
) -> tuple[tuple[str, ...], tuple[Node, ...]]:
    """Names of the recorded tensors that decide the node's output, and unrecorded operators in between."""
    reads: dict[str, None] = {}
    region: dict[str, Node] = {}
    waiting = list(node.inputs)
    while waiting:
        name = waiting.pop(0)
        if name in parted:
            reads[name] = None
        elif name not in region:
            region[name] = nodes.get(name, Node(name, "", ()))  # whose own inputs are not known
            waiting += region[name].inputs
    order = list(nodes)
    return tuple(reads), tuple(sorted(region.values(), key=lambda n: order.index(n.name) if n.name in order else -1))


def _inputs_differ(
    node: Node,
    region: Sequence[Node],
    reads: Sequence[str],
    parted: Mapping[str, torch.Tensor],
    starts: torch.Tensor,
    rows: int,
) -> torch.Tensor:
    """bool [R]: rows in which anything that the operator reads differs."""
    found = torch.zeros(rows, dtype=torch.bool)
    for name in reads:
        found |= parted[name]
    if node.kind in OVER_ROWS or any(n.kind in OVER_ROWS for n in region):
        for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist()):
            found[start:stop] = found[start:stop].cumsum(0) > 0
    return found
