"""Rollout throughput against transformers: prefill and decode apart, with log-probs, in one interleaved run.

Both sides draw `--new-tokens` tokens at temperature 1 for 1, 16 and 32 random prompts of `--prompt-tokens`, in BF16,
and return the log-prob of each. Decode time is the time of the whole call less that of a call for one token (prefill).
"""

import numpy as np
import torch

from benchmarks.models import both
from benchmarks.record import median_seconds, parser, write
from zerogap.rollout.engine import Engine
from zerogap.types import SamplingParams


def transformers_generate(model: torch.nn.Module, ids: torch.Tensor, tokens: int) -> None:
    """Sample `tokens` tokens per row and gather their log-probs, as rollout code over transformers does."""
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
    )
    drawn = out.sequences[:, ids.shape[1] :]
    for step, logits in enumerate(out.logits):
        logits.float().log_softmax(-1).gather(1, drawn[:, step : step + 1])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 32])
    options.add_argument("--prompt-tokens", type=int, default=64)
    options.add_argument("--new-tokens", type=int, default=128)
    args = options.parse_args()
    decoder, peer = both(args.model)
    generator = np.random.default_rng(0)
    rows = []
    print(f"{'sequences':>9} {'phase':>8} {'zerogap tok/s':>14} {'transformers':>13} {'ratio':>6}")
    for count in args.sequences:
        engine = Engine(decoder, prefix_cache=False, max_sequences=count, max_batch_tokens=1024)
        ids = generator.integers(0, decoder.spec.vocab_size, (count, args.prompt_tokens))
        prompts, batch = ids.tolist(), torch.from_numpy(ids)

        def ours(tokens: int, engine=engine, prompts=prompts) -> None:
            engine.generate(prompts, SamplingParams(max_tokens=tokens, stop_token_ids=()))

        def theirs(tokens: int, batch=batch) -> None:
            with torch.no_grad():
                transformers_generate(peer, batch, tokens)

        arms = {
            "ours, one": lambda ours=ours: ours(1),
            "theirs, one": lambda theirs=theirs: theirs(1),
            "ours": lambda ours=ours: ours(args.new_tokens),
            "theirs": lambda theirs=theirs: theirs(args.new_tokens),
        }
        seconds = median_seconds(arms, args.repeats)
        phases = {
            "prefill": (count * args.prompt_tokens, seconds["ours, one"], seconds["theirs, one"]),
            "decode": (
                count * (args.new_tokens - 1),
                seconds["ours"] - seconds["ours, one"],
                seconds["theirs"] - seconds["theirs, one"],
            ),
        }
        for phase, (tokens, mine, other) in phases.items():
            row = {
                "sequences": count,
                "phase": phase,
                "zerogap_tokens_per_second": tokens / mine,
                "transformers_tokens_per_second": tokens / other,
                "ratio": other / mine,
            }
            rows.append(row)
            print(f"{count:9d} {phase:>8} {tokens / mine:14.0f} {tokens / other:13.0f} {other / mine:6.2f}", flush=True)
    write("engine", rows, prompt_tokens=args.prompt_tokens, new_tokens=args.new_tokens, repeats=args.repeats)


if __name__ == "__main__":
    main()
