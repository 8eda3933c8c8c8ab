"""Latent attention against its expanded form, at Moonlight's sizes: decode, and training with its gradients.

The expanded form makes keys and values of every head from the latent (`kv_b` as one projection) and attends with
`ops.attention` over heads of nope + rope elements, values padded to that width; its cache holds both. Decode is one new
token per sequence, a recorded program over pages that are full of random numbers; training is the eager op over packed
samples, with the gradients of queries, rows and weights. One interleaved run; a ratio is the median over rounds of
expanded time / latent time, in processor seconds of this process (one thread), so that other work on the machine does
not count. `--record` writes the result file.
"""

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks import record
from zerogap.models.rope_spec import RopeSpec
from zerogap.numerics import DType
from zerogap.ops.attention import attention
from zerogap.ops.cpu import attention as dense
from zerogap.ops.cpu import library
from zerogap.ops.gemm import linear
from zerogap.ops.handle import WeightHandle
from zerogap.ops.kv import DenseCodec
from zerogap.ops.latent import LatentCodec, LatentSizes
from zerogap.ops.mla import mla
from zerogap.ops.norm import rms_norm
from zerogap.ops.rope import rope, rope_table
from zerogap.types import ForwardContext, LayerKV, WeightSpec

SIZES = LatentSizes(num_heads=16, nope=128, rope=64, latent=512, value=128)
HEAD = SIZES.nope + SIZES.rope
CALL = {"scale": HEAD**-0.5, "kv_split": 1024, "leaves": 8}
LARGER_THAN_CACHES, PAGE = 64 << 20, 64
CODECS = {
    "expanded": DenseCodec(SIZES.num_heads, HEAD, DType.BF16),
    "latent": LatentCodec(SIZES.latent, SIZES.rope, DType.BF16),
    "latent fp8": LatentCodec(SIZES.latent, SIZES.rope, DType.FP8, "per_token_head"),
}
Calls = dict[str, Callable[[], object]]


def handle(kind: str, shape: tuple[int, ...], parts: tuple[int, int, int] | None = None) -> WeightHandle:
    """A random trainable weight with an open gradient bin."""
    made = WeightHandle(WeightSpec(kind, shape, kind, head_parts=parts), torch.bfloat16)
    made.load(torch.randn(shape) * shape[-1] ** -0.5)
    made.set_trainable(True)
    made.enable_input_grad()
    made.open_grad()
    return made


EXPANDED_SHAPE = (SIZES.num_heads * (SIZES.nope + SIZES.value), SIZES.latent)


def filled(codec: DenseCodec | LatentCodec, count: int) -> LayerKV:
    """Pages full of random numbers, the same ones in each."""
    kv = codec.allocate(count, PAGE)
    for pages in (kv.keys, kv.values):
        one = torch.randn(pages.shape[1:])
        pages.copy_((one * 32 + 64).clamp(0, 120) if pages.dtype == torch.uint8 else one)
    if kv.key_scales is not None:
        kv.key_scales.fill_(0.01)
    return kv


def decode(sequences: int, positions: int) -> tuple[Calls, dict[str, int]]:
    """Calls per arm, and how many attentions each makes. Expanded: attention alone, its new row written."""
    each = positions // PAGE
    q, kv_a = (torch.randn(sequences, w).bfloat16() for w in (SIZES.q_width, SIZES.row))
    rows_T, table = torch.full((sequences,), positions - 1).int(), rope_table(RopeSpec(10000.0), SIZES.rope, positions)
    sequences_T = torch.arange(sequences).int()
    norm, kv_b = handle("vector", (SIZES.latent,)), heads_handle()
    calls: Calls = {}
    copies: dict[str, int] = {}
    for name, codec in CODECS.items():
        copies[name] = max(1, LARGER_THAN_CACHES // (codec.bytes_per_token() * sequences * positions))
        kv = filled(codec, copies[name] * sequences * each)
        tables = torch.randperm(copies[name] * sequences * each).int().view(copies[name], sequences, each)
        with torch.no_grad(), library.record(rows=(q, kv_a, rows_T, sequences_T)) as program:
            for pages in tables:
                context = ForwardContext(rows_T, sequences_T, pages, PAGE)
                if isinstance(codec, LatentCodec):
                    mla(q, kv_a, norm, kv_b, table, kv, context, sizes=SIZES, norm_eps=1e-6, **CALL)
                else:
                    dense.kv_write(q, q, kv, context)
                    sizes = {"num_heads": SIZES.num_heads, "scale": CALL["scale"], "kv_split": CALL["kv_split"]}
                    dense.attention(q, kv, context, want_lse=False, **sizes)
        calls[name] = lambda program=program: program.run(rows=sequences)
    return calls, copies


def heads_handle() -> WeightHandle:
    return handle("heads", EXPANDED_SHAPE, (SIZES.num_heads, SIZES.nope, SIZES.value))


def expanded(q, kv_a, norm, kv_b, table, kv, context) -> torch.Tensor:
    """Norm, rotation, expansion, attention; [T, heads * value]."""
    count, heads = len(q), SIZES.num_heads
    _, latent = rms_norm(kv_a[:, : SIZES.latent].contiguous(), None, norm, 1e-6, context)
    (both,) = linear(latent, (kv_b,), (None,), context, gradient="chain")
    q_heads, both = q.view(count, heads, HEAD), both.view(count, heads, -1)
    q_rope, k_rope = rope(
        q_heads[..., SIZES.nope :].reshape(count, -1), kv_a[:, SIZES.latent :].contiguous(), table, SIZES.rope, context
    )
    rotated = k_rope[:, None].expand(count, heads, SIZES.rope)
    k = torch.cat([both[..., : SIZES.nope], rotated], -1).view(count, -1)
    v = torch.nn.functional.pad(both[..., SIZES.nope :], (0, HEAD - SIZES.value)).view(count, -1)
    q = torch.cat([q_heads[..., : SIZES.nope], q_rope.view(count, heads, -1)], -1).view(count, -1)
    out = attention(q, k, v, kv, context, num_heads=heads, num_kv_heads=heads, head_dim=HEAD, **CALL)
    return out.view(count, heads, HEAD)[..., : SIZES.value].reshape(count, -1)


def training(samples: int, tokens: int, backward: bool) -> tuple[Calls, dict[str, int]]:
    count, each = samples * tokens, -(-tokens // PAGE)
    starts = torch.arange(samples + 1).int() * tokens
    context = ForwardContext(
        positions=torch.arange(tokens).int().repeat(samples),
        sequences=torch.arange(samples).int().repeat_interleave(tokens),
        page_table=torch.arange(samples * each).int().view(samples, each),
        page_size=PAGE,
        sample_starts=starts,
        pack_starts=starts[[0, -1]],
    )
    q, kv_a = (torch.randn(count, w).bfloat16().requires_grad_(backward) for w in (SIZES.q_width, SIZES.row))
    d_out = torch.randn(count, SIZES.out_width).bfloat16()
    table, norm = rope_table(RopeSpec(10000.0), SIZES.rope, tokens), handle("vector", (SIZES.latent,))
    weights = {"expanded": handle("matrix", EXPANDED_SHAPE), "latent": heads_handle()}
    calls: Calls = {}
    for name, codec in CODECS.items():

        def call(name: str = name, kv: LayerKV = codec.allocate(samples * each, PAGE)) -> None:
            with torch.set_grad_enabled(backward):
                if name == "expanded":
                    out = expanded(q, kv_a, norm, weights[name], table, kv, context)
                else:
                    out = mla(q, kv_a, norm, weights["latent"], table, kv, context, sizes=SIZES, norm_eps=1e-6, **CALL)
                if backward:
                    out.backward(d_out)

        calls[name] = call
    return calls, dict.fromkeys(CODECS, 1)


def interleaved(calls: Calls, copies: dict[str, int], rounds: int) -> dict[str, list[float]]:
    """Processor seconds per attention of each arm and round."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.process_time()
            call()
            seconds[name].append((time.process_time() - began) / copies[name])
    return seconds


def main() -> None:
    options = record.parser("latent attention against its expanded form")
    options.add_argument("--only", default="", help="run the cases whose name contains this")
    options.add_argument("--record", action="store_true", help="write the result file")
    chosen = options.parse_args()
    cases = {f"decode {s} x {p}": (decode, (s, p)) for s in (1, 16) for p in (1024, 4096)}
    for what in ("forward", "forward + backward"):
        cases |= {f"{what} {s} x {t}": (training, (s, t, what != "forward")) for s, t in ((1, 1024), (4, 256))}
    torch.set_num_threads(1)
    results = []
    for name, (make, arguments) in cases.items():
        if chosen.only not in name:
            continue
        with library.use_threads(1):
            seconds = interleaved(*make(*arguments), max(3, chosen.repeats))
        ratios = {
            arm: statistics.median(b / t for b, t in zip(seconds["expanded"], ts, strict=True))
            for arm, ts in seconds.items()
        }
        milliseconds = {arm: statistics.median(ts) * 1e3 for arm, ts in seconds.items()}
        results.append({"what": name, "milliseconds": milliseconds, "times_expanded": ratios})
        arms = "   ".join(f"{arm} {ms:.3f} ms x{ratios[arm]:.2f}" for arm, ms in milliseconds.items())
        print(f"{name:30s} {arms}", flush=True)
    if chosen.record:
        record.write("ops_mla", results)


if __name__ == "__main__":
    main()
