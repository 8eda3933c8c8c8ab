"""What `zg.capture` costs: a forward pass of a transformers model that was never captured, after a capture, and inside
one; and whether all of them have the same bits.

    python -m benchmarks.capture_overhead [--model FOLDER] [--rows 4] [--columns 64] [--repeats 9]

`off` is the model after a capture block has ended, with a second copy that was never captured beside it: their ratio is
the noise of the machine. `on` keeps all boundaries (logits included), `on, with rope` queries and keys too.
"""

from typing import Any

import torch
import transformers

import zerogap as zg
from benchmarks import record

SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def load(folder: str | None) -> Any:
    """A model in BF16: a folder's, or random weights in the shape of SmolLM2-135M."""
    if folder is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMOLLM2)).bfloat16().eval()


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--rows", type=int, default=4, help="sequences of a pass")
    parser.add_argument("--columns", type=int, default=64, help="tokens of each")
    parser.set_defaults(repeats=9)
    args = parser.parse_args()
    untouched, model = load(args.model), load(args.model)
    ids = torch.randint(
        0, model.config.vocab_size, (args.rows, args.columns), generator=torch.Generator().manual_seed(0)
    )
    held: dict[str, torch.Tensor] = {}

    def forward(which: Any, arm: str) -> None:
        with torch.no_grad():
            held[arm] = which(input_ids=ids).logits

    def captured(arm: str, rope: bool) -> None:
        with zg.capture(model, rope=rope) as seen:
            forward(model, arm)
        held[f"{arm} rows"] = seen.forwards[0].tensors["lm_head"]

    arms = {
        "never": lambda: forward(untouched, "never"),
        "off": lambda: forward(model, "off"),
        "on": lambda: captured("on", False),
        "on, with rope": lambda: captured("on, with rope", True),
    }
    captured("before", True)
    seconds = record.median_seconds(arms, args.repeats)
    rows = []
    for arm, median in seconds.items():
        same = torch.equal(held[arm].view(torch.int16), held["never"].view(torch.int16))
        ratio = median / seconds["never"]
        rows.append({"arm": arm, "seconds": median, "ratio": ratio, "same bits": same})
        print(f"{arm:<14} {median * 1e3:8.1f} ms   {ratio:5.3f} of never captured   same bits: {same}")
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    print(f"hooks left after the blocks: {hooks}")
    facts = {"model": args.model or "random weights in the shape of SmolLM2-135M", "hooks left": hooks}
    shape = {"rows_of_a_pass": args.rows, "columns": args.columns, "transformers": transformers.__version__}
    record.write("capture_overhead", rows, repeats=args.repeats, **facts, **shape)
    raise SystemExit(0 if hooks == 0 and all(row["same bits"] for row in rows) else 1)


if __name__ == "__main__":
    main()
