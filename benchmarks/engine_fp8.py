"""Decode in FP8 against BF16: the engine on a random Llama of about 1B parameters, all arms interleaved in one run.

Short prompts go through `Engine.generate`; decode time is the time of the whole call less that of a call for one token.
Long contexts (`--context` tokens already cached) run the engine's forward pass over pages that hold random keys and
values, distinct ones for each sequence: what they hold does not change the time, and to prefill 32 prompts of 4,096
tokens would take long. The head is at most 10 % of the weight bytes in every arm. `ceiling` is the ratio of the bytes
that a step reads (weights once, every sequence's keys and values): the best that a memory-bound step can reach.
"""

import numpy as np
import torch

from benchmarks.record import median_seconds, parser, write
from zerogap.models.decoder import Decoder
from zerogap.models.rope_spec import RopeSpec
from zerogap.models.spec import ModelSpec
from zerogap.numerics import preset
from zerogap.ops.cpu import library
from zerogap.rollout.engine import Engine
from zerogap.types import ForwardContext, LayerKV, SamplingParams
from zerogap.weights.random_model import random_tensors

ARMS = ("bf16", "fp8", "fp8-kv")
PAGE_SIZE = 64


def one_billion(num_layers: int) -> ModelSpec:
    """The shape of Llama-3.2-1B with a vocabulary small enough that the head is at most 10 % of the FP8 bytes."""
    return ModelSpec(
        family="llama",
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=num_layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=24_576 * num_layers // 16,
        norm_eps=1e-5,
        rope=RopeSpec(500000.0),
        tied=False,
        qkv_bias=False,
        o_bias=False,
        qk_norm=False,
        max_position=8192,
    )


def weight_bytes(decoder: Decoder) -> tuple[int, int]:
    """(all bytes of weights that a decode step reads, those of the head)."""
    total = 0
    for handle in decoder.weights.values():
        if handle is not decoder.embed and handle.panels is not None:
            scales = handle.scales.nbytes if handle.spec.fp8 is not None and handle.scales is not None else 0
            total += handle.panels.nbytes + scales
    assert decoder.head.panels is not None
    return total, decoder.head.panels.nbytes


def random_pages(decoder: Decoder, num_pages: int) -> list[LayerKV]:
    """Pages full of random keys and values; in FP8 random codes that are no NaN, with scales of one size."""
    generator = torch.Generator().manual_seed(0)
    layers = decoder.new_kv(num_pages, PAGE_SIZE)
    for kv in layers:
        for pages in (kv.keys, kv.values):
            if pages.dtype == torch.uint8:
                pages.copy_(torch.randint(0, 120, pages.shape, generator=generator, dtype=torch.uint8))
            else:
                pages.normal_(generator=generator)
        for scales in (kv.key_scales, kv.value_scales):
            if scales is not None:
                scales.fill_(0.01)
    return layers


def decode_pass(decoder: Decoder, sequences: int, context_tokens: int) -> library.Program:
    """The recorded forward pass of one decode step over `context_tokens` cached tokens per sequence."""
    pages_each = context_tokens // PAGE_SIZE + 1
    layers = random_pages(decoder, sequences * pages_each)
    ids = torch.arange(sequences, dtype=torch.int64)
    context = ForwardContext(
        positions=torch.full((sequences,), context_tokens, dtype=torch.int32),
        sequences=torch.arange(sequences, dtype=torch.int32),
        page_table=torch.arange(sequences * pages_each, dtype=torch.int32).reshape(sequences, pages_each),
        page_size=PAGE_SIZE,
        output_rows=torch.arange(sequences, dtype=torch.int64),
    )
    tokens = (ids, context.positions, context.sequences)
    with torch.no_grad(), library.record(tokens=tokens, outputs=(context.output_rows,)) as program:
        decoder.logits(ids, context, layers)
    return program


def short_prompts(decoders: dict[str, Decoder], count: int, new_tokens: int, repeats: int) -> dict[str, float]:
    """Seconds of one decode step per arm, from prompts of 16 tokens."""
    spec = next(iter(decoders.values())).spec
    prompts = np.random.default_rng(0).integers(0, spec.vocab_size, (count, 16)).tolist()
    calls = {}
    for name, decoder in decoders.items():
        engine = Engine(decoder, prefix_cache=False, max_sequences=count, max_batch_tokens=512, kv_cache_bytes=1 << 28)

        def call(tokens: int, engine: Engine = engine) -> None:
            engine.generate(prompts, SamplingParams(max_tokens=tokens, stop_token_ids=()))

        calls[f"{name}, one"] = lambda call=call: call(1)
        calls[name] = lambda call=call: call(1 + new_tokens)
    seconds = median_seconds(calls, repeats)
    return {name: (seconds[name] - seconds[f"{name}, one"]) / new_tokens for name in decoders}


def long_contexts(decoders: dict[str, Decoder], count: int, context: int, repeats: int) -> dict[str, float]:
    """Seconds of one decode step per arm over `context` cached tokens per sequence."""
    programs = {name: decode_pass(decoder, count, context) for name, decoder in decoders.items()}
    calls = {name: lambda p=program: p.run(tokens=count, outputs=count) for name, program in programs.items()}
    return median_seconds(calls, max(repeats, 5))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16, 32])
    options.add_argument("--new-tokens", type=int, default=16)
    options.add_argument("--context", type=int, default=4096, help="cached tokens of the long-context rows")
    options.add_argument("--layers", type=int, default=16, help="decoder layers; 16 make about 1B parameters")
    args = options.parse_args()
    spec = one_billion(args.layers)
    decoders: dict[str, Decoder] = {}
    for name in ARMS:
        decoders[name] = Decoder(spec, preset(name), max_positions=args.context + 256).load(random_tensors(spec))
        for handle in decoders[name].weights.values():
            handle.published = None  # a decode step does not read it
    sizes = {name: weight_bytes(decoder) for name, decoder in decoders.items()}
    for name, (total, head) in sizes.items():
        print(f"{name:8} {total / 1e9:.3f} GB of weights per step, head {head / total:.1%}")
    rows = []
    print(f"{'context':>7} {'sequences':>9} {'arm':>8} {'ms/step':>8} {'tokens/s':>9} {'x bf16':>7} {'ceiling':>8}")
    for context in (16, args.context):
        for count in args.sequences:
            if context == 16:
                seconds = short_prompts(decoders, count, args.new_tokens, args.repeats)
            else:
                seconds = long_contexts(decoders, count, context, args.repeats)
            bytes_read = {
                name: sizes[name][0] + count * context * decoder.codec().bytes_per_token() * spec.num_layers
                for name, decoder in decoders.items()
            }
            for name, value in seconds.items():
                row = {
                    "context": context,
                    "sequences": count,
                    "arm": name,
                    "milliseconds_per_step": value * 1e3,
                    "tokens_per_second": count / value,
                    "times_bf16": seconds["bf16"] / value,
                    "ceiling": bytes_read["bf16"] / bytes_read[name],
                }
                rows.append(row)
                print(
                    f"{context:7d} {count:9d} {name:>8} {value * 1e3:8.1f} {count / value:9.1f} "
                    f"{row['times_bf16']:7.2f} {row['ceiling']:8.2f}",
                    flush=True,
                )
    parameters = sum(int(np.prod(handle.spec.shape)) for handle in decoders["bf16"].weights.values())
    facts = {"parameters": parameters, "repeats": args.repeats, "new_tokens": args.new_tokens}
    write("engine_fp8", rows, **facts, **{f"head_share_{n}": head / total for n, (total, head) in sizes.items()})


if __name__ == "__main__":
    main()
