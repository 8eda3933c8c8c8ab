"""Attention over FP8 pages against our own BF16 ones: decode with keys and values from memory, and training.

One interleaved run: each round times every arm in turn on the same shapes; a ratio is the median over rounds of BF16
time / arm's time. Decode is one new token per sequence. Every call replays a recorded program, as the engine does, over
so many copies of the sequences, each with its own pages, that together they exceed the caches in every arm; the pages
of one sequence lie scattered, as in an engine that has run for a while. Training is the eager forward, and the forward
with its gradients, of packed samples, pages written included. Arms: scales per token and head, calibrated scales, and
FP8 operands of the products. `--record` writes the result file.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks import record
from zerogap.numerics import DType
from zerogap.ops.attention import attention
from zerogap.ops.cpu import attention as native
from zerogap.ops.cpu import library
from zerogap.ops.kv import DenseCodec, FP8Codec
from zerogap.types import ForwardContext, KVCodec, LayerKV

LARGER_THAN_CACHES = 96 << 20  # bytes of FP8 keys and values
KV_SPLIT = 1024
PAGE = 64
Call = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Heads:
    """Query heads, KV heads and head dimension of a model."""

    model: str
    heads: int
    kv_heads: int
    dim: int

    def codecs(self) -> dict[str, KVCodec]:
        sizes = (self.kv_heads, self.dim)
        return {
            "bf16": DenseCodec(*sizes, DType.BF16),
            "fp8": FP8Codec(*sizes, "per_token_head"),
            "fp8 calibrated": FP8Codec(*sizes, "calibrated"),
            "fp8 operands": FP8Codec(*sizes, "per_token_head", attention_math=DType.FP8),
        }

    def pages(self, codec: KVCodec, count: int) -> LayerKV:
        """Pages full of random numbers, the same ones in each."""
        scales = torch.full((self.kv_heads,), 0.01)
        kv = codec.allocate(count, PAGE, (scales, scales) if codec.kv_scale == "calibrated" else None)
        for pages in (kv.keys, kv.values):
            one = torch.randn(pages.shape[1:])
            pages.copy_((one * 32 + 64).clamp(0, 120) if pages.dtype == torch.uint8 else one)
        if codec.kv_scale == "per_token_head" and kv.key_scales is not None and kv.value_scales is not None:
            kv.key_scales.fill_(0.01)
            kv.value_scales.fill_(0.01)
        return kv

    def rows(self, count: int) -> list[torch.Tensor]:
        """q, k, v and the gradient of the output."""
        generator = torch.Generator().manual_seed(0)
        widths = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [torch.randn(count, w * self.dim, generator=generator).bfloat16() for w in widths]


SMOLLM2 = Heads("SmolLM2-135M", 9, 3, 64)
LLAMA_1B = Heads("Llama-3.2-1B", 32, 8, 64)
LLAMA_8B = Heads("Llama-3.1-8B", 32, 8, 128)


def decode(model: Heads, sequences: int, positions: int) -> tuple[dict[str, Call], float]:
    """Calls per arm, and attentions per call."""
    pages_each, per_copy = positions // PAGE, sequences * positions // PAGE
    token_bytes = model.codecs()["fp8 calibrated"].bytes_per_token()
    copies = max(1, -(-LARGER_THAN_CACHES // (token_bytes * sequences * positions)))
    order = torch.randperm(copies * per_copy, generator=torch.Generator().manual_seed(0)).int()
    tables = order.view(copies, sequences, pages_each)
    q, positions_T = model.rows(sequences)[0], torch.full((sequences,), positions - 1, dtype=torch.int32)
    sequences_T = torch.arange(sequences, dtype=torch.int32)
    calls: dict[str, Call] = {}
    for name, codec in model.codecs().items():
        kv = model.pages(codec, copies * per_copy)
        with library.record(rows=(q, positions_T, sequences_T)) as program:
            for table in tables:
                context = ForwardContext(positions_T, sequences_T, table, PAGE)
                native.attention(
                    q, kv, context, num_heads=model.heads, scale=model.dim**-0.5, kv_split=KV_SPLIT, want_lse=False
                )
        calls[name] = lambda program=program: program.run(rows=sequences)
    return calls, copies


def training(model: Heads, samples: int, tokens: int, backward: bool) -> tuple[dict[str, Call], float]:
    pages_each = -(-tokens // PAGE)
    context = ForwardContext(
        positions=torch.arange(tokens, dtype=torch.int32).repeat(samples),
        sequences=torch.arange(samples, dtype=torch.int32).repeat_interleave(tokens),
        page_table=torch.arange(samples * pages_each, dtype=torch.int32).view(samples, pages_each),
        page_size=PAGE,
        sample_starts=torch.arange(samples + 1, dtype=torch.int32) * tokens,
    )
    q, k, v, d_out = model.rows(samples * tokens)
    leaves = [x.requires_grad_(backward) for x in (q, k, v)]
    calls: dict[str, Call] = {}
    for name, codec in model.codecs().items():
        kv = model.pages(codec, samples * pages_each)

        def call(kv: LayerKV = kv) -> None:
            out = attention(
                *leaves,
                kv,
                context,
                num_heads=model.heads,
                num_kv_heads=model.kv_heads,
                head_dim=model.dim,
                scale=model.dim**-0.5,
                kv_split=KV_SPLIT,
                leaves=1,
            )
            if backward:
                torch.autograd.grad(out, leaves, d_out)

        calls[name] = call
    return calls, 1


def interleaved(calls: dict[str, Call], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds per arm, and per arm the median ratio BF16 time / its time."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
    ratios = {name: statistics.median(b / t for b, t in zip(times["bf16"], ts)) for name, ts in times.items()}
    return {name: statistics.median(ts) for name, ts in times.items()}, ratios


def cases() -> list[tuple[str, Callable[[], tuple[dict[str, Call], float]]]]:
    made: list = []
    for model in (SMOLLM2, LLAMA_1B, LLAMA_8B):
        for sequences in (1, 16):
            for positions in (512, 2048, 8192):
                name = f"decode {model.model} {sequences} x {positions}"
                made.append((name, lambda a=(model, sequences, positions): decode(*a)))
    for model in (SMOLLM2, LLAMA_8B):
        for samples, tokens in ((1, 1024), (8, 128)):
            for what in ("forward", "forward + backward"):
                name = f"{what} {model.model} {samples} x {tokens}"
                made.append((name, lambda a=(model, samples, tokens, what != "forward"): training(*a)))
    return made


def main() -> None:
    options = record.parser("attention over FP8 pages against BF16")
    options.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    options.add_argument("--only", default="", help="run the cases whose name contains this")
    options.add_argument("--record", action="store_true", help="write the result file")
    chosen = options.parse_args()
    rounds = max(7, chosen.repeats)
    print(f"attention, {library.backend()}, median of {rounds} rounds; x: BF16 time / FP8 time")
    results = []
    for name, make in cases():
        if chosen.only not in name:
            continue
        calls, per_call = make()
        for threads in chosen.threads:
            with library.use_threads(threads):
                seconds, ratios = interleaved(calls, rounds)
            milliseconds = {arm: value / per_call * 1e3 for arm, value in seconds.items()}
            results.append({"what": name, "threads": threads, "milliseconds": milliseconds, "times_bf16": ratios})
            arms = "   ".join(f"{arm} {ms:.3f} ms x{ratios[arm]:.2f}" for arm, ms in milliseconds.items())
            print(f"{name:44s} {threads} threads   {arms}", flush=True)
    if chosen.record:
        record.write("ops_attention_fp8", results)


if __name__ == "__main__":
    main()
