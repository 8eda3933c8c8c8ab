"""A routed layer in float64: its gradients by autograd, and how far FP32 or BF16 kernels may be from them.

The bound is a running error analysis: every number travels with the largest error that the roundings so far allow
(`Bounded`), through the contract's own steps, forward and backward. What the steps give in float64 must be what
autograd gives, so the analysis is about the right formula.
"""

import dataclasses
import itertools

import torch

from zerogap.ops.moe import MoEWeights, Routing

U = 2.0**-24
EXP_ERROR = 1e-7  # relative, of the kernels' exp


@dataclasses.dataclass
class Bounded:
    """float64 values, and bounds of the absolute error of what a kernel holds in their place."""

    value: torch.Tensor
    error: torch.Tensor

    @classmethod
    def exact(cls, tensor: torch.Tensor) -> "Bounded":
        return cls(tensor.double(), torch.zeros_like(tensor, dtype=torch.float64))

    def rounded(self, unit: float = U) -> "Bounded":
        return Bounded(self.value, self.error + unit * (self.value.abs() + self.error) + 2.0**-126)

    def __add__(self, other: "Bounded") -> "Bounded":
        return Bounded(self.value + other.value, self.error + other.error).rounded()

    def __sub__(self, other: "Bounded") -> "Bounded":
        return Bounded(self.value - other.value, self.error + other.error).rounded()

    def __mul__(self, other: "Bounded") -> "Bounded":
        a, b = self, other
        error = a.value.abs() * b.error + b.value.abs() * a.error + a.error * b.error
        return Bounded(a.value * b.value, error).rounded()

    def __truediv__(self, other: "Bounded") -> "Bounded":
        quotient, least = self.value / other.value, other.value.abs() - other.error
        assert bool((least > 0).all()), "divided by what may be zero"
        return Bounded(quotient, (self.error + quotient.abs() * other.error) / least).rounded()

    def __matmul__(self, other: "Bounded") -> "Bounded":
        """Sum of products in any order: as many roundings as terms."""
        a, b = self, other
        terms = a.value.shape[-1]
        gamma = terms * U / (1 - terms * U)
        largest = (a.value.abs() + a.error) @ (b.value.abs() + b.error)
        error = a.value.abs() @ b.error + a.error @ b.value.abs() + a.error @ b.error
        return Bounded(a.value @ b.value, error + gamma * largest)

    def __getitem__(self, index: object) -> "Bounded":
        return Bounded(self.value[index], self.error[index])

    @property
    def T(self) -> "Bounded":
        return Bounded(self.value.T, self.error.T)

    def sum(self, dim: int) -> "Bounded":
        ones = torch.ones(self.value.shape[dim], 1, dtype=torch.float64)
        swapped = Bounded(self.value.movedim(dim, -1), self.error.movedim(dim, -1)) @ Bounded.exact(ones)
        return Bounded(swapped.value.movedim(-1, dim), swapped.error.movedim(-1, dim))

    def placed(self, shape: tuple[int, ...], index: tuple[torch.Tensor, ...]) -> "Bounded":
        """+0 of `shape` but for these numbers at `index`."""
        out = Bounded.exact(torch.zeros(shape))
        out.value[index], out.error[index] = self.value, self.error
        return out


def sigmoid(z: Bounded) -> tuple[Bounded, Bounded]:
    """sigmoid and 1 - sigmoid: each has a slope, relative to itself, of at most 1; exp and three roundings."""
    grown = torch.expm1(z.error) + EXP_ERROR + 3 * U
    values = (torch.sigmoid(z.value), torch.sigmoid(-z.value))
    sig, rest = (Bounded(v, v * grown + 2.0**-126) for v in values)
    return sig, rest


def softmax(z: Bounded) -> Bounded:
    top = z.value.argmax(-1, keepdim=True)
    d = z - Bounded(z.value.gather(-1, top), z.error.amax(-1, keepdim=True))
    value = d.value.exp()
    e = Bounded(value, value * (torch.expm1(d.error) * (1 + EXP_ERROR) + EXP_ERROR) + 2.0**-126)
    return e / e.sum(-1)


def constant(x: float) -> Bounded:
    """A setting that the kernels hold in FP32."""
    return Bounded.exact(torch.tensor(x, dtype=torch.float64)).rounded()


# ------------------------------------------------------------------------------------------------ the analysis


class Analysis:
    """One layer's forward and backward with error bounds, for the experts that the kernel chose."""

    def __init__(self, x: torch.Tensor, weights: MoEWeights, routing: Routing, experts: torch.Tensor) -> None:
        self.unit = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}[x.dtype]
        self.x, self.routing, self.experts = Bounded.exact(x), routing, experts.long()
        self.router = Bounded.exact(weights.router.value())
        stacks = (weights.gate, weights.up, weights.down)
        self.parts = [[Bounded.exact(s.handles[e].value()) for s in stacks] for e in range(routing.num_experts)]
        self.shared = None if weights.shared is None else [Bounded.exact(h.value()) for h in weights.shared]

    def rn(self, x: Bounded) -> Bounded:
        return x.rounded(self.unit) if self.unit else x

    def mlp(self, x: Bounded, weights: list[Bounded]) -> tuple[Bounded, ...]:
        """(out, gate, up, inner)."""
        gate, up = self.rn(x @ weights[0].T), self.rn(x @ weights[1].T)
        inner = self.rn((gate * sigmoid(gate)[0]) * up)
        return self.rn(inner @ weights[2].T), gate, up, inner

    def mlp_grad(self, x: Bounded, dy: Bounded, weights: list[Bounded], kept: tuple[Bounded, ...]):
        """Gradients of gate, up and down, and of x before its rounding."""
        _, gate, up, inner = kept
        d_inner = self.rn(dy @ weights[2])
        sig, rest = sigmoid(gate)
        slope = sig * (gate * rest + constant(1.0))
        d_gate, d_up = self.rn((d_inner * up) * slope), self.rn(d_inner * (gate * sig))
        dx = Bounded(torch.cat([d_gate.value, d_up.value], 1), torch.cat([d_gate.error, d_up.error], 1)) @ Bounded(
            torch.cat([weights[0].value, weights[1].value]), torch.cat([weights[0].error, weights[1].error])
        )
        return (d_gate.T @ x, d_up.T @ x, dy.T @ inner), dx

    def forward(self) -> Bounded:
        rows, k, hidden = len(self.experts), self.routing.top_k, self.x.value.shape[1]
        z = self.x @ self.router.T
        if self.routing.scoring == "sigmoid":
            self.score, self.rest = sigmoid(z)
        else:
            self.score = softmax(z)
        at = torch.arange(rows)[:, None]
        self.chosen = self.score[at, self.experts]
        self.divisor = self.chosen.sum(-1) + constant(1e-20) if self.routing.normalise else constant(1.0)
        self.weights = self.chosen / self.divisor * constant(self.routing.scaling)
        self.kept, self.rows = {}, Bounded.exact(torch.zeros(rows, k, hidden))
        for e, weights in enumerate(self.parts):
            t, j = (self.experts == e).nonzero(as_tuple=True)
            self.kept[e] = (t, j, self.mlp(self.x[t], weights))
            out = self.kept[e][2][0]
            self.rows.value[t, j], self.rows.error[t, j] = out.value, out.error
        total = (self.rows * self.weights[:, :, None]).sum(1)[:, 0]
        if self.shared is not None:
            self.shared_kept = self.mlp(self.x, self.shared)
            total = total + self.shared_kept[0]
        return self.rn(total)

    def backward(self, dy_tensor: torch.Tensor, balance: float, sample_starts: list[int]) -> dict[str, Bounded]:
        """dx and the gradients of all weights, by name."""
        dy, results = Bounded.exact(dy_tensor), {}
        parts = Bounded.exact(torch.zeros(*self.rows.value.shape))
        for e, (t, j, kept) in self.kept.items():
            d_rows = self.rn(self.weights[t, j][:, None] * dy[t])
            grads, part = self.mlp_grad(self.x[t], d_rows, self.parts[e], kept)
            parts.value[t, j], parts.error[t, j] = part.value, part.error
            results |= {f"{name} {e}": grad for name, grad in zip(("gate", "up", "down"), grads, strict=True)}
        dx = parts.sum(1)[:, 0]
        if self.shared is not None:
            grads, part = self.mlp_grad(self.x, dy, self.shared, self.shared_kept)
            results |= {f"shared {name}": grad for name, grad in zip(("gate", "up", "down"), grads, strict=True)}
            dx = dx + part
        d_logits = self.rn(self.route_grad(dy, balance, sample_starts))
        results["router"] = d_logits.T @ self.x
        results["x"] = self.rn(dx + d_logits @ self.router)
        return results

    def route_grad(self, dy: Bounded, balance: float, sample_starts: list[int]) -> Bounded:
        d_weights = (self.rows * dy[:, None, :]).sum(2)[:, :, 0]
        g = d_weights * constant(self.routing.scaling)
        if self.routing.normalise:
            g = (g - (g * (self.chosen / self.divisor)).sum(-1)) / self.divisor
        at = torch.arange(len(self.experts))[:, None].expand_as(self.experts)
        d_score = g.placed(tuple(self.score.value.shape), (at, self.experts))
        if balance:
            slopes = Bounded.exact(balance_factors(self.experts, self.routing, balance, sample_starts)).rounded()
            if self.routing.scoring == "sigmoid":
                total = self.score.sum(-1)
                slopes = (slopes - (slopes * (self.score / total)).sum(-1)) / total
            d_score = d_score + slopes
        if self.routing.scoring == "sigmoid":
            return d_score * (self.score * self.rest)
        return self.score * (d_score - (self.score * d_score).sum(-1))


def balance_factors(experts: torch.Tensor, routing: Routing, balance: float, sample_starts: list[int]) -> torch.Tensor:
    """[T, E]: balance * E / (k n) * count / n of each token's sequence of n tokens."""
    out = torch.zeros(len(experts), routing.num_experts, dtype=torch.float64)
    for first, last in itertools.pairwise(sample_starts):
        counts = torch.bincount(experts[first:last].flatten().long(), minlength=routing.num_experts).double()
        out[first:last] = balance * routing.num_experts / routing.top_k * counts / (last - first) ** 2
    return out


# ------------------------------------------------------------------------------------------------ autograd


def autograd(
    x: torch.Tensor,
    weights: MoEWeights,
    routing: Routing,
    experts: torch.Tensor,
    dy: torch.Tensor,
    balance: float,
    sample_starts: list[int],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(out, gradients by name) of the formulas of the papers, in float64."""
    leaves: dict[str, torch.Tensor] = {"x": x, "router": weights.router.value()}
    for name, stack in (("gate", weights.gate), ("up", weights.up), ("down", weights.down)):
        leaves |= {f"{name} {e}": handle.value() for e, handle in enumerate(stack.handles)}
    if weights.shared is not None:
        leaves |= {f"shared {n}": h.value() for n, h in zip(("gate", "up", "down"), weights.shared, strict=True)}
    leaves = {name: tensor.double().requires_grad_() for name, tensor in leaves.items()}

    def mlp(rows: torch.Tensor, gate: str, up: str, down: str) -> torch.Tensor:
        silu = torch.nn.functional.silu(rows @ leaves[gate].T)
        return (silu * (rows @ leaves[up].T)) @ leaves[down].T

    z = leaves["x"] @ leaves["router"].T
    score = z.sigmoid() if routing.scoring == "sigmoid" else z.softmax(-1)
    chosen = score.gather(1, experts.long())
    if routing.normalise:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + (1e-20 if routing.scoring == "sigmoid" else 0.0))
    dense = torch.zeros_like(score).scatter(1, experts.long(), chosen * routing.scaling)
    out = sum(dense[:, e, None] * mlp(leaves["x"], f"gate {e}", f"up {e}", f"down {e}") for e in range(dense.shape[1]))
    if weights.shared is not None:
        out = out + mlp(leaves["x"], "shared gate", "shared up", "shared down")
    loss = (out * dy.double()).sum()
    for first, last in itertools.pairwise(sample_starts):
        counts = torch.bincount(experts[first:last].flatten().long(), minlength=routing.num_experts).double()
        share = counts * routing.num_experts / (routing.top_k * (last - first))
        probability = score[first:last] / score[first:last].sum(-1, keepdim=True)
        loss = loss + balance * (share * probability.mean(0)).sum()
    names = list(leaves)
    grads = torch.autograd.grad(loss, [leaves[n] for n in names], allow_unused=True)
    zeros = {n: torch.zeros_like(leaves[n]) for n in names}
    return out.detach(), {n: zeros[n] if g is None else g for n, g in zip(names, grads, strict=True)}
