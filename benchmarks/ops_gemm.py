"""Matrix products against torch's: forward at 1 to 1,024 rows, input gradients with leaves, weight gradients.

One interleaved run: each round times ours, then torch's, on the same shapes; the ratio is the median over rounds of
ours / torch. Up to 96 rows a call runs over as many copies of the weight as exceed the caches, so that weights come
from memory as in decoding; ours then replays a recorded program, as the engine does. At 1,024 rows each call is eager.
Shapes are SmolLM2-135M's, BF16. Torch's weight gradient is rounded to BF16, ours is an FP32 sum over blocks of rows.
On a machine that is busy with other work use `--threads 1`: torch's threads wait for each other by spinning.
"""

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks import record
from zerogap.ops.cpu import gemm, library

BF16 = torch.bfloat16
LARGER_THAN_CACHES = 96 << 20  # bytes
FORWARD = [(576, 576, 0), (576, 192, 0), (576, 1536, 0), (1536, 576, 384), (576, 49152, 0)]  # K, N, elements per leaf
ROWS = (1, 4, 16, 32, 96)
BATCH = 1024


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(BF16)


def packed(weight: torch.Tensor) -> torch.Tensor:
    panels = gemm.allocate_panels(*weight.shape, BF16)
    gemm.pack(weight, panels)
    return panels


def interleaved(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Median seconds of each and the median ratio; a pause and an untimed call let the other side's threads sleep."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for call, into in zip((ours, theirs), times):
            time.sleep(0.02)
            call()
            begin = time.perf_counter()
            call()
            into.append(time.perf_counter() - begin)
    return *map(statistics.median, times), statistics.median(a / b for a, b in zip(*times))


def small(rows: int, k: int, n: int, leaf: int) -> tuple[Callable, Callable, float]:
    """Forward with weights from memory; the last value is the work in floating-point operations."""
    copies = max(1, LARGER_THAN_CACHES // (2 * n * k))
    x, weight = values(rows, k), values(n, k)
    weights = [weight.clone() for _ in range(copies)]
    panels = [packed(w) for w in weights]
    with library.record(rows=(x,)) as program:
        for p in panels:
            gemm.product([gemm.Segment(x, p, n, leaf)], "concatenate")

    def theirs() -> None:
        for w in weights:
            torch.nn.functional.linear(x, w)

    return lambda: program.run(rows=rows), theirs, 2.0 * rows * n * k * copies


def forward(k: int, n: int, leaf: int) -> tuple[Callable, Callable, float]:
    x, weight = values(BATCH, k), values(n, k)
    segment = gemm.Segment(x, packed(weight), n, leaf)
    ours, theirs = lambda: gemm.product([segment], "concatenate"), lambda: torch.nn.functional.linear(x, weight)
    return ours, theirs, 2.0 * BATCH * n * k


def input_grad(widths: tuple[int, ...], k: int, leaves: int, mode: str) -> tuple[Callable, Callable, float]:
    """Over several projections of one input; torch adds its parts in BF16."""
    dys, weights = [values(BATCH, n) for n in widths], [values(n, k) for n in widths]
    panels = [packed(w.T.contiguous()) for w in weights]
    segments = [gemm.Segment(dy, p, k, n // leaves if leaves > 1 else 0) for dy, p, n in zip(dys, panels, widths)]

    def theirs() -> torch.Tensor:
        return sum(dy @ w for dy, w in zip(dys, weights))

    return lambda: gemm.product(segments, mode), theirs, 2.0 * BATCH * sum(widths) * k


def weight_grad(rows: int, n: int, k: int) -> tuple[Callable, Callable, float]:
    dy, x, acc = values(rows, n), values(rows, k), torch.zeros(n, k)
    starts = torch.tensor([0, rows], dtype=torch.int32)
    return lambda: gemm.weight_grad(dy, x, starts, acc), lambda: dy.T @ x, 2.0 * rows * n * k


def cases() -> list[tuple[str, Callable[[], tuple[Callable, Callable, float]]]]:
    made: list = []
    for k, n, leaf in FORWARD:
        for rows in ROWS:
            made.append((f"forward {rows} x {k} x {n}", lambda a=(rows, k, n, leaf): small(*a)))
    for k, n, leaf in FORWARD[:-1]:
        made.append((f"forward {BATCH} x {k} x {n}", lambda a=(k, n, leaf): forward(*a)))
    made += [
        ("input gradient, gate + up, 4 leaves", lambda: input_grad((1536, 1536), 576, 4, "chain")),
        ("input gradient, gate + up, 1 leaf", lambda: input_grad((1536, 1536), 576, 1, "chain")),
        ("input gradient, q + k + v, 1 leaf", lambda: input_grad((576, 192, 192), 576, 1, "trees")),
        ("input gradient, 4096 -> 1024, 8 leaves", lambda: input_grad((4096,), 1024, 8, "chain")),
        ("input gradient, 4096 -> 1024, 1 leaf", lambda: input_grad((4096,), 1024, 1, "chain")),
    ]
    for rows, n, k in [(BATCH, 576, 576), (BATCH, 192, 576), (BATCH, 1536, 576), (BATCH, 576, 1536), (128, 49152, 576)]:
        made.append((f"weight gradient {rows} x {n} x {k}", lambda a=(rows, n, k): weight_grad(*a)))
    return made


def main() -> None:
    options = record.parser("matrix products against torch")
    options.add_argument("--threads", type=int, default=library.num_threads())
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    rounds = max(7, chosen.repeats)
    print(f"products, {library.backend()}, {chosen.threads} threads, BF16, median of {rounds} rounds")
    results = []
    with torch.no_grad(), library.use_threads(chosen.threads):
        for name, make in cases():
            ours, theirs, work = make()
            mine, other, ratio = interleaved(ours, theirs, rounds)
            speeds = {"zerogap_gflops": work / mine / 1e9, "torch_gflops": work / other / 1e9, "ratio": ratio}
            results.append({"what": name, **speeds})
            print(
                f"{name:42s} zerogap {speeds['zerogap_gflops']:6.0f} GF/s   torch {speeds['torch_gflops']:6.0f} GF/s"
                f"   ratio {ratio:.2f}",
                flush=True,
            )
        record.write("ops_gemm", results)


if __name__ == "__main__":
    main()
