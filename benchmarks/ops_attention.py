"""Attention against torch's scaled_dot_product_attention: prefill, training forward + backward, decode.

One interleaved run: each round times ours, then torch's, on the same numbers; the ratio is the median over rounds of
ours / torch. Torch gets contiguous [S, heads, T, D] tensors with keys and values already repeated per query head, which
costs it nothing here; ours starts from rows and includes writing the pages. Sequences of equal length, BF16.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch

from zerogap.numerics import DType
from zerogap.ops.attention import attention
from zerogap.ops.cpu import library
from zerogap.ops.kv import DenseCodec
from zerogap.types import ForwardContext, LayerKV

PAGE = 16


@dataclasses.dataclass(frozen=True)
class Shape:
    """S sequences of T tokens (or T keys, for decode), query heads, KV heads, head dimension."""

    sequences: int
    tokens: int
    heads: int
    kv_heads: int
    dim: int

    def __str__(self) -> str:
        return f"{self.sequences} x {self.tokens}, {self.heads}/{self.kv_heads} heads of {self.dim}"

    @property
    def sizes(self) -> dict:
        return {
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.dim,
            "scale": self.dim**-0.5,
            "kv_split": 1024,
            "leaves": 1,
        }

    def rows(self, count: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        widths = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [torch.randn(self.sequences * count, w * self.dim, generator=generator).bfloat16() for w in widths]

    def context(self, first: int, count: int) -> tuple[LayerKV, ForwardContext]:
        """Pages for all, and `count` rows per sequence from position `first`."""
        pages = -(-self.tokens // PAGE)
        kv = DenseCodec(self.kv_heads, self.dim, DType.BF16).allocate(self.sequences * pages, PAGE)
        context = ForwardContext(
            positions=torch.arange(first, first + count, dtype=torch.int32).repeat(self.sequences),
            sequences=torch.arange(self.sequences, dtype=torch.int32).repeat_interleave(count),
            page_table=torch.arange(self.sequences * pages, dtype=torch.int32).view(self.sequences, pages),
            page_size=PAGE,
            sample_starts=torch.arange(self.sequences + 1, dtype=torch.int32) * count,
        )
        return kv, context

    def torch_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [S * T, heads * D] -> contiguous [S, query heads, T, D]."""
        heads = x.shape[1] // self.dim
        by_head = x.view(self.sequences, -1, heads, self.dim).transpose(1, 2)
        return by_head.repeat_interleave(self.heads // heads, 1).contiguous()


def interleaved(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Median milliseconds of each and the median ratio; a pause lets the other side's threads go to sleep."""
    times: tuple[list[float], list[float]] = ([], [])
    for round_number in range(rounds + 1):
        for call, into in zip((ours, theirs), times):
            time.sleep(0.02)
            call()
            begin = time.perf_counter()
            call()
            if round_number:
                into.append((time.perf_counter() - begin) * 1e3)
    ratios = [a / b for a, b in zip(*times)]
    return statistics.median(times[0]), statistics.median(times[1]), statistics.median(ratios)


def forward(shape: Shape) -> tuple[Callable, Callable]:
    q, k, v, _ = shape.rows(shape.tokens)
    kv, context = shape.context(0, shape.tokens)
    heads = [shape.torch_heads(x) for x in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(q, k, v, kv, context, **shape.sizes), lambda: sdpa(*heads, is_causal=True)


def forward_backward(shape: Shape) -> tuple[Callable, Callable]:
    q, k, v, d_out = shape.rows(shape.tokens)
    kv, context = shape.context(0, shape.tokens)
    heads = [shape.torch_heads(x).requires_grad_() for x in (q, k, v)]
    d_heads = shape.torch_heads(d_out)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def ours() -> None:
        out = attention(*leaves, kv, context, **shape.sizes)
        torch.autograd.grad(out, leaves, d_out)

    def theirs() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        torch.autograd.grad(out, heads, d_heads)

    return ours, theirs


def decode(shape: Shape) -> tuple[Callable, Callable]:
    """One new token per sequence over `tokens` keys."""
    q, k, v, _ = shape.rows(1)
    kv, context = shape.context(shape.tokens - 1, 1)
    _, old_k, old_v, _ = shape.rows(shape.tokens)
    heads = [shape.torch_heads(x) for x in (q, old_k, old_v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(q, k, v, kv, context, **shape.sizes), lambda: sdpa(*heads)


CASES = [
    ("forward", forward, Shape(1, 1024, 9, 3, 64)),
    ("forward", forward, Shape(8, 128, 9, 3, 64)),
    ("forward", forward, Shape(1, 1024, 16, 8, 128)),
    ("forward + backward", forward_backward, Shape(1, 1024, 9, 3, 64)),
    ("forward + backward", forward_backward, Shape(8, 128, 9, 3, 64)),
    ("forward + backward", forward_backward, Shape(1, 1024, 16, 8, 128)),
    ("decode", decode, Shape(16, 128, 9, 3, 64)),
    ("decode", decode, Shape(16, 512, 9, 3, 64)),
    ("decode", decode, Shape(1, 1024, 9, 3, 64)),
]


def main(rounds: int = 15) -> list[dict[str, object]]:
    """Print one line per case; returns them."""
    torch.set_num_threads(library.num_threads())
    print(
        f"attention, {library.backend()}, {library.num_threads()} threads, BF16, median of {rounds} interleaved rounds"
    )
    results = []
    for name, make, shape in CASES:
        ours, theirs, ratio = interleaved(*make(shape), rounds)
        results.append({"what": name, "shape": str(shape), "ours_ms": ours, "torch_ms": theirs, "ratio": ratio})
        print(f"{name:20s} {shape!s:32s} ours {ours:8.3f} ms   torch {theirs:8.3f} ms   ratio {ratio:.2f}", flush=True)
    return results


if __name__ == "__main__":
    main()
