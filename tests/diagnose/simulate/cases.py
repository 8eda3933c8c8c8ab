"""Problems of every kind, small, with rows as models have them: what the tests of simulators and attribution share."""

import dataclasses

import torch

from zerogap.diagnose.simulate.variant import Problem

BF16, FP32 = torch.bfloat16, torch.float32
LENGTHS = [21, 27]
ROWS = sum(LENGTHS)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 7 * sum(shape)))


@dataclasses.dataclass(frozen=True)
class Given:
    """What `explain` is given, but for the outputs."""

    kind: str
    inputs: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    parameters: dict[str, object]

    def problem(self, out: torch.Tensor) -> Problem:
        rows, columns = torch.arange(len(out)), torch.arange(out.shape[1])
        return Problem(self.kind, tuple(self.inputs.values()), self.weights, self.parameters, out, rows, columns)


def cancelling(rows: int, columns: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, width] and w [columns, width] whose products nearly cancel, so that an order of summation shows in BF16
    too: on mild data two orders agree in all but a few elements of a thousand."""
    half = width // 2
    x, w = randn(rows, half, seed=3), randn(columns, half, seed=1).to(dtype).float()
    noise = torch.randint(-1, 2, w.shape, generator=torch.Generator().manual_seed(4))
    places = torch.randperm(2 * half, generator=torch.Generator().manual_seed(5))
    joined = torch.cat([w, -w * (1 + 2.0**-7 * noise)], 1)
    return torch.cat([x, x], 1)[:, places].to(dtype), joined[:, places].to(dtype)


def linear(
    dtype: torch.dtype = BF16, width: int = 256, columns: int = 48, kind: str = "linear", large: bool = False
) -> Given:
    name = "lm_head" if kind == "head" else "model.layers.0.self_attn.q_proj"
    x, w = cancelling(ROWS, columns, width, dtype)
    if large:  # products of a few units, as logits are
        x, w = randn(ROWS, width, seed=3).to(dtype), (randn(columns, width, seed=1) / 3).to(dtype)
    weights = {f"{name}.weight": w}
    if kind == "linear":
        weights[f"{name}.bias"] = (randn(columns, seed=2) / 64).to(dtype)
    return Given(kind, {"x": x}, weights, {"lengths": LENGTHS})


def norm(dtype: torch.dtype = BF16, width: int = 576) -> Given:
    weights = {"model.norm.weight": (1 + randn(width) / 4).to(dtype)}
    return Given("norm", {"x": randn(ROWS, width, seed=1).to(dtype)}, weights, {"eps": 1e-5})


def activation(dtype: torch.dtype = BF16) -> Given:
    return Given("activation", {"gate": randn(ROWS, 160).to(dtype), "up": randn(ROWS, 160, seed=1).to(dtype)}, {}, {})


def residual(dtype: torch.dtype = BF16) -> Given:
    return Given("residual", {"x": randn(ROWS, 160).to(dtype), "y": randn(ROWS, 160, seed=1).to(dtype)}, {}, {})


def rope(dtype: torch.dtype = BF16) -> Given:
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    facts = {"head_dim": 64, "theta": 1e4, "positions": positions, "lengths": LENGTHS}
    return Given("rope", {"q": randn(ROWS, 128).to(dtype)}, {}, facts)


def attention(dtype: torch.dtype = BF16, lengths: list[int] | None = None) -> Given:
    rows = sum(lengths or LENGTHS)
    parts = {name: (1.5 * randn(rows, heads * 64, seed=heads)).to(dtype) for name, heads in (("q", 4), ("k", 2))}
    parts["v"] = randn(rows, 128, seed=9).to(dtype)
    facts = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "lengths": lengths or LENGTHS}
    return Given("attention", parts, {}, facts)


def logprob() -> Given:
    targets = torch.arange(ROWS) * 7 % 500
    return Given("logprob", {"logits": 3 * randn(ROWS, 500)}, {}, {"targets": targets})


def embedding(dtype: torch.dtype = BF16) -> Given:
    weights = {"model.embed_tokens.weight": randn(50, 96).to(dtype)}
    return Given("embedding", {}, weights, {"ids": torch.arange(ROWS) % 50})


def experts(dtype: torch.dtype = BF16, shared: bool = False) -> Given:
    layer, hidden, inner, count = "model.layers.0.mlp.", 64, 32, 6
    weights = {}
    sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    for i, (part, size) in enumerate(sizes.items()):
        for e in range(count):
            weights[f"{layer}experts.{e}.{part}_proj.weight"] = (randn(*size, seed=10 * e + i) / 8).to(dtype)
        if shared:
            weights[f"{layer}shared_experts.{part}_proj.weight"] = (randn(*size, seed=90 + i) / 8).to(dtype)
    inputs = {"x": randn(ROWS, hidden).to(dtype), "router": randn(ROWS, count, seed=1)}
    return Given("experts", inputs, weights, {"top_k": 3, "num_experts": count, "normalise": True})
