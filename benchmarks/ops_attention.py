"""Attention against torch's scaled_dot_product_attention: prefill, training forward + backward, decode.

One interleaved run: ours and torch's take turns on the same numbers; ratios are torch's median time over ours. After a
call the other side's idle threads spin for a while, so a pause and an untimed call go before each timed one. Torch gets
contiguous [S, heads, T, D] tensors with keys and values already repeated per query head, which costs it nothing here;
ours starts from rows and includes writing the pages. Sequences of equal length, BF16. Times are wall times with all
threads, and processor times on one thread, which other work on the machine disturbs less.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.record import write
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


def interleaved(ours: Callable[[], object], theirs: Callable[[], object], repeats: int) -> dict[str, float]:
    """Median milliseconds per call: wall time with all threads, then processor time with one."""
    all_threads = library.num_threads()
    medians = {}
    for kind, clock, threads in (("wall", time.perf_counter, all_threads), ("cpu", time.process_time, 1)):
        torch.set_num_threads(threads)
        taken: tuple[list[float], list[float]] = ([], [])
        with library.use_threads(threads):
            for _ in range(repeats):
                for call, into in zip((ours, theirs), taken):
                    time.sleep(0.02)
                    call()
                    begin = clock()
                    call()
                    into.append((clock() - begin) * 1e3)
        medians |= {f"{name}_{kind}_ms": statistics.median(t) for name, t in zip(("zerogap", "torch"), taken)}
        medians[f"{kind}_ratio"] = medians[f"torch_{kind}_ms"] / medians[f"zerogap_{kind}_ms"]
    torch.set_num_threads(all_threads)
    return medians


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


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--repeats", type=int, default=15, help="interleaved repetitions; medians are reported")
    args = options.parse_args()
    rows = []
    print(f"{'what':>18} {'shape':>30} {'zerogap ms':>11} {'torch ms':>9} {'ratio':>6} {'ratio of processor time':>24}")
    for name, make, shape in CASES:
        times = interleaved(*make(shape), args.repeats)
        rows.append({"what": name, "shape": str(shape), **times})
        wall = f"{times['zerogap_wall_ms']:11.3f} {times['torch_wall_ms']:9.3f} {times['wall_ratio']:6.2f}"
        print(f"{name:>18} {shape!s:>30} {wall} {times['cpu_ratio']:24.2f}", flush=True)
    write("ops_attention", rows, repeats=args.repeats)


if __name__ == "__main__":
    main()
