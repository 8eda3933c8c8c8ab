"""FP8 matrix products against our own BF16 ones: forward at 1 to 1,024 rows, input gradients, weight gradients.

One interleaved run: each round times BF16, then FP8, on the same shapes; the ratio is the median over rounds of FP8 /
BF16 time. FP8 includes the quantisation of the activations (or output gradients), once per product. Up to 64 rows a
call runs over as many copies of the weight as exceed the caches, so that weights come from memory as in decoding, and
replays a recorded program as the engine does. At 1,024 rows each call is eager. `--record` writes the result file.
"""

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks import record
from zerogap.ops.cpu import gemm, library, quant

BF16 = torch.bfloat16
LARGER_THAN_CACHES = 96 << 20  # bytes
SHAPES = [(2048, 2048), (2048, 8192)]  # K, N
ROWS = (1, 2, 4, 16, 64)
BATCH = 1024
Call = Callable[[], object]


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(BF16)


def packed(weight: torch.Tensor) -> torch.Tensor:
    panels = gemm.allocate_panels(*weight.shape, BF16)
    gemm.pack(weight, panels)
    return panels


def coded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    panels, scales = quant.allocate_panels(*weight.shape), torch.empty(quant.scales_shape(*weight.shape))
    quant.quantise_weight(weight, "fp32", panels, None, scales)
    return panels, scales


def bf16_product(x: torch.Tensor, panels: torch.Tensor, n: int) -> torch.Tensor:
    return gemm.product([gemm.Segment(x, panels, n)], "concatenate")[0]


def fp8_product(x: torch.Tensor, panels: torch.Tensor, scales: torch.Tensor, n: int) -> torch.Tensor:
    grid, x_scales = quant.quantise_rows(x, "fp32")
    return gemm.product([gemm.Segment(grid, panels, n, x_scales=x_scales, panel_scales=scales)], "concatenate")[0]


def small(rows: int, k: int, n: int) -> tuple[Call, Call, float]:
    """Forward with weights from memory; the last value is the work in floating-point operations."""
    copies = max(1, LARGER_THAN_CACHES // (n * k))
    x, weight = values(rows, k), values(n, k)
    plain, codes = [packed(weight) for _ in range(copies)], [coded(weight) for _ in range(copies)]
    with library.record(rows=(x,)) as bf16:
        for panels in plain:
            bf16_product(x, panels, n)
    with library.record(rows=(x,)) as fp8:
        for panels, scales in codes:
            fp8_product(x, panels, scales, n)
    return lambda: bf16.run(rows=rows), lambda: fp8.run(rows=rows), 2.0 * rows * n * k * copies


def forward(k: int, n: int) -> tuple[Call, Call, float]:
    x, weight = values(BATCH, k), values(n, k)
    plain, (codes, scales) = packed(weight), coded(weight)
    return lambda: bf16_product(x, plain, n), lambda: fp8_product(x, codes, scales, n), 2.0 * BATCH * n * k


def weight_grad(n: int, k: int) -> tuple[Call, Call, float]:
    dy, x, acc = values(BATCH, n), values(BATCH, k), torch.zeros(n, k)
    starts = torch.tensor([0, BATCH], dtype=torch.int32)
    return (
        lambda: gemm.weight_grad(dy, x, starts, acc),
        lambda: gemm.weight_grad(dy, x, starts, acc, "fp32"),
        2.0 * BATCH * n * k,
    )


def interleaved(bf16: Call, fp8: Call, rounds: int) -> tuple[float, float, float]:
    """Median seconds of each, and the median ratio FP8 / BF16."""
    times: tuple[list[float], list[float]] = ([], [])
    for call in (bf16, fp8):
        call()
    for _ in range(rounds):
        for call, into in zip((bf16, fp8), times):
            begin = time.perf_counter()
            call()
            into.append(time.perf_counter() - begin)
    return statistics.median(times[0]), statistics.median(times[1]), statistics.median(b / a for a, b in zip(*times))


def cases() -> list[tuple[str, Callable[[], tuple[Call, Call, float]]]]:
    made: list = []
    for k, n in SHAPES:
        made += [(f"forward {rows} x {k} x {n}", lambda a=(rows, k, n): small(*a)) for rows in ROWS]
        made.append((f"forward {BATCH} x {k} x {n}", lambda a=(k, n): forward(*a)))
    # An input gradient is the same product over the transposed panels.
    made += [(f"input gradient {BATCH} x {k} x {n}", lambda a=(n, k): forward(*a)) for k, n in SHAPES]
    made += [(f"weight gradient {BATCH} x {n} x {k}", lambda a=(n, k): weight_grad(*a)) for k, n in SHAPES]
    return made


def main() -> None:
    options = record.parser("FP8 matrix products against BF16")
    options.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    options.add_argument("--only", default="", help="run the cases whose name contains this")
    options.add_argument("--record", action="store_true", help="write the result file")
    chosen = options.parse_args()
    rounds = max(7, chosen.repeats)
    print(f"products, {library.backend()}, FP8 against BF16, median of {rounds} rounds")
    results = []
    for name, make in cases():
        if chosen.only not in name:
            continue
        bf16, fp8, work = make()
        for threads in chosen.threads:
            with library.use_threads(threads):
                plain, scaled, ratio = interleaved(bf16, fp8, rounds)
            speeds = {"bf16_gflops": work / plain / 1e9, "fp8_gflops": work / scaled / 1e9, "ratio": ratio}
            results.append({"what": name, "threads": threads, **speeds})
            print(
                f"{name:38s} {threads} threads   BF16 {speeds['bf16_gflops']:6.1f} GF/s"
                f"   FP8 {speeds['fp8_gflops']:6.1f} GF/s   time FP8 / BF16 {ratio:.2f}",
                flush=True,
            )
    if chosen.record:
        record.write("ops_gemm_fp8", results)


if __name__ == "__main__":
    main()
