"""The contract of a routed layer written out literally: router, combination and their gradients in numpy FP32, experts
one by one through `ops.gemm` (whose own contract tests/ops/test_gemm.py and test_linear_fp8.py pin down).

Every operation rounds once; `fma` is the loaded library's; results below 2^-126 are zero.
"""

import dataclasses
import itertools

import numpy as np
import torch

from tests.ops import elementwise_reference as elementwise
from tests.ops.elementwise_reference import F32, array, flush, fma, lane_sum, stored
from zerogap.ops import gemm
from zerogap.ops.cpu import activation
from zerogap.ops.cpu import gemm as native
from zerogap.ops.moe import MoEWeights, Routing
from zerogap.types import LOCAL

EPSILON = F32(1e-20)


# ------------------------------------------------------------------------------------------------ router


def scores(logits: np.ndarray, routing: Routing) -> tuple[np.ndarray, np.ndarray]:
    """Scores FP32 [T, E] of finite logits, and 1 - score where they are sigmoids."""
    if routing.scoring == "sigmoid":
        return elementwise.sigmoid(logits)
    e = elementwise.exp(flush(logits - logits.max(axis=1, keepdims=True)))
    total = lane_sum(e, np.ones_like(e))[:, None]
    return flush(e / total), np.zeros_like(e)


def chosen_sum(s: np.ndarray, routing: Routing) -> np.ndarray:
    """What the chosen scores s [k], ascending by expert, are divided by."""
    total = F32(0)
    for value in s:
        total = F32(total + value)
    return F32(total + EPSILON) if routing.scoring == "sigmoid" else total


def eligible(choice: np.ndarray, routing: Routing) -> list[int]:
    """Experts of the best groups for one token's choices [E]."""
    size = routing.num_experts // routing.groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(routing.groups)]
    if routing.groups == 1:
        return groups[0]
    best_two = [sorted((choice[e] for e in group), reverse=True)[:2] for group in groups]
    order = sorted(range(routing.groups), key=lambda g: (-F32(best_two[g][0] + best_two[g][1]), g))
    return sorted(e for g in order[: routing.top_groups] for e in groups[g])


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """experts int32 [T, k], weights and margins FP32, of finite logits."""
    s, _ = scores(array(logits), routing)
    choices = s if bias is None else flush(s + array(bias))
    experts, weights, margins = [], [], []
    for row, choice in zip(s, choices, strict=True):
        ranked = sorted(eligible(choice, routing), key=lambda e: (-choice[e], e))
        best, others = ranked[: routing.top_k], ranked[routing.top_k :]
        chosen = sorted(best)
        divisor = chosen_sum(row[chosen], routing) if routing.normalise else F32(1)
        experts.append(chosen)
        weights.append(flush(flush(row[chosen] / divisor) * F32(routing.scaling)))
        margins.append(flush(F32(choice[best[-1]] - choice[others[0]])) if others else F32(np.inf))
    as_tensor = torch.from_numpy
    return (
        torch.tensor(experts, dtype=torch.int32),
        as_tensor(np.array(weights, F32)),
        as_tensor(np.array(margins, F32)),
    )


def order(experts: torch.Tensor, num_experts: int) -> tuple[list[int], list[int], list[list[int]]]:
    """starts, tokens and slots of the sorted rows, by sorting."""
    pairs = sorted((int(e), t, j) for t, row in enumerate(experts) for j, e in enumerate(row))
    slots = [[0] * experts.shape[1] for _ in experts]
    for slot, (_, t, j) in enumerate(pairs):
        slots[t][j] = slot
    starts = [sum(p[0] < e for p in pairs) for e in range(num_experts + 1)]
    return starts, [p[1] for p in pairs], slots


def route_grad(
    logits: torch.Tensor,
    experts: torch.Tensor,
    d_weights: np.ndarray,
    routing: Routing,
    balance: float = 0.0,
    sample_starts: list[int] | None = None,
) -> np.ndarray:
    """Unrounded gradient FP32 [T, E] of the logits."""
    s, rest = scores(array(logits), routing)
    d_scores = np.zeros_like(s)
    scaling = F32(routing.scaling)
    for t, chosen in enumerate(experts.tolist()):
        g, divisor, mean = flush(d_weights[t] * scaling), F32(1), F32(0)
        if routing.normalise:
            divisor = chosen_sum(s[t, chosen], routing)
            for dw, score in zip(g, s[t, chosen], strict=True):
                mean = flush(mean + flush(dw * flush(score / divisor)))
        d_scores[t, chosen] = flush(flush(g - mean) / divisor)
    if balance:
        slopes = balance_slopes(experts, routing, balance, sample_starts or [])
        if routing.scoring == "sigmoid":
            total = flush(lane_sum(s, np.ones_like(s)) + EPSILON)[:, None]
            level = lane_sum(slopes, flush(s / total))[:, None]
            slopes = flush(flush(slopes - level) / total)
        d_scores = flush(d_scores + slopes)
    if routing.scoring == "sigmoid":
        return flush(d_scores * flush(s * rest))
    return flush(s * flush(d_scores - lane_sum(s, d_scores)[:, None]))


def balance_slopes(experts: torch.Tensor, routing: Routing, balance: float, sample_starts: list[int]) -> np.ndarray:
    """Derivative FP32 [T, E] of the balance loss by each token's normalised scores."""
    slopes = np.zeros((len(experts), routing.num_experts), F32)
    for first, last in itertools.pairwise(sample_starts):
        counts = np.bincount(experts[first:last].flatten().numpy(), minlength=routing.num_experts)
        n = float(last - first)
        slopes[first:last] = F32(balance * routing.num_experts / (routing.top_k * n * n)) * counts.astype(F32)
    return slopes


# ------------------------------------------------------------------------------------------------ the whole layer


@dataclasses.dataclass
class Pass:
    """Forward and, once `backward` ran, gradients of one routed layer, expert by expert."""

    x: torch.Tensor
    weights: MoEWeights
    routing: Routing

    def forward(self) -> torch.Tensor:
        """[T, H] storage dtype."""
        x, w, k = self.x, self.weights, self.routing.top_k
        segment = native.Segment(x, w.router.panels, self.routing.num_experts)
        (self.logits,) = native.product([segment], "concatenate", fp32=True)
        bias = None if w.bias is None else w.bias.rows
        self.experts, self.expert_weights, self.margins = route(self.logits, bias, self.routing)
        self.rows = torch.zeros((len(x), k, x.shape[1]), dtype=x.dtype)
        self.inner: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for e in range(self.routing.num_experts):
            t, j = (self.experts == e).nonzero(as_tuple=True)
            if len(t):
                handles = (w.gate.handles[e], w.up.handles[e])
                self.inner[e] = gemm.project(x[t].contiguous(), handles, (None, None), LOCAL)
                inner = activation.silu_mul(*self.inner[e])
                (self.rows[t, j],) = gemm.project(inner, (w.down.handles[e],), (None,), LOCAL)
        total = np.zeros(x.shape, F32)
        for i in range(k):
            total = fma(array(self.expert_weights)[:, i, None], array(self.rows[:, i]), total)
        if w.shared is not None:
            self.shared_inner = gemm.project(x, w.shared[:2], (None, None), LOCAL)
            (shared,) = gemm.project(activation.silu_mul(*self.shared_inner), w.shared[2:], (None,), LOCAL)
            total = flush(total + array(shared))
        return stored(total, x.dtype)

    def backward(
        self, dy: torch.Tensor, pack_starts: list[int], balance: float = 0.0, sample_starts: list[int] | None = None
    ) -> torch.Tensor:
        """Adds weight gradients to the handles' accumulators; returns dx."""
        x, w, k, dtype = self.x, self.weights, self.routing.top_k, self.x.dtype
        d_weights = np.stack([lane_sum(array(self.rows[:, j]), array(dy)) for j in range(k)], 1)
        d_logits = route_grad(self.logits, self.experts, d_weights, self.routing, balance, sample_starts)
        rounded = stored(d_logits, dtype)
        packs = torch.tensor(pack_starts, dtype=torch.int32)
        gemm.weight_grads([rounded], x, (w.router,), packs)
        parts = np.zeros((len(x), k, x.shape[1]), F32)
        for e, (gate, up) in self.inner.items():
            t, j = (self.experts == e).nonzero(as_tuple=True)
            mine = torch.searchsorted(t, packs.long()).to(torch.int32)
            weighted = flush(array(self.expert_weights)[t, j, None] * array(dy[t]))
            handles = tuple(stack.handles[e] for stack in (w.gate, w.up, w.down))
            part = expert_grad(x[t].contiguous(), stored(weighted, dtype), gate, up, handles, mine)
            parts[t, j] = part.numpy()
        total = np.zeros(x.shape, F32)
        for i in range(k):
            total = flush(total + parts[:, i])
        if w.shared is not None:
            total = flush(total + expert_grad(x, dy, *self.shared_inner, w.shared, packs).numpy())
        router = gemm.input_grad([rounded], (w.router,), "chain", LOCAL, fp32=True)
        return stored(flush(total + router.numpy()), dtype)


def expert_grad(x, dy, gate, up, handles, packs) -> torch.Tensor:
    """Gradients of one MLP: weights into their handles; returns the FP32 input gradient."""
    gemm.weight_grads([dy], activation.silu_mul(gate, up), handles[2:], packs)
    d_inner = gemm.input_grad([dy], handles[2:], "chain", LOCAL)
    d_gate, d_up = activation.silu_mul_grad(gate, up, d_inner)
    gemm.weight_grads([d_gate, d_up], x, handles[:2], packs)
    return gemm.input_grad([d_gate, d_up], handles[:2], "chain", LOCAL, fp32=True)
