"""One training step's forward and backward against transformers, on the same tokens in one interleaved run.

`--samples` sequences of `--length` tokens (equal lengths, so that transformers pads nothing) with half of each as
completion. zerogap runs them packed, BF16, gradients summed in FP32. transformers runs them as one batch: once with
BF16 weights, once with FP32 weights under BF16 autocast, as common trainers do. All tensors are trained.
"""

import numpy as np
import torch

from benchmarks.models import both
from benchmarks.record import median_seconds, parser, write
from zerogap.rl.loss import PolicyLoss
from zerogap.train.trainer import Trainer
from zerogap.types import Sample, SamplingKey, SamplingParams, TrainBatch


def make_batch(trainer: Trainer, ids: np.ndarray, prompt: int) -> TrainBatch:
    """The rows of `ids` as samples of the trainer's present version, with made-up log-probs."""
    completion = ids.shape[1] - prompt
    samples = tuple(
        Sample(
            prompt_ids=row[:prompt].astype(np.int32),
            completion_ids=row[prompt:].astype(np.int32),
            logprobs=np.full(completion, -5.0, np.float32),
            versions=np.full(completion, -1, np.int64),
            identity=trainer.decoder.identity,
            key=SamplingKey(),
            params=SamplingParams(),
            finish_reason="length",
        )
        for row in ids
    )
    advantages = np.where(np.arange(len(ids)) % 2, 1.0, -1.0)
    return TrainBatch(samples, advantages, tuple(np.ones(completion, bool) for _ in samples))


def peer_step(model: torch.nn.Module, ids: torch.Tensor, prompt: int, autocast: bool) -> None:
    """Forward, mean log-prob loss over the completions, backward."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(ids, logits_to_keep=ids.shape[1] - prompt + 1, use_cache=False).logits[:, :-1]
    logp = logits.float().log_softmax(-1).gather(2, ids[:, prompt:, None])
    model.zero_grad(set_to_none=True)
    (-logp.mean()).backward()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--samples", type=int, default=16)
    options.add_argument("--length", type=int, default=64)
    args = options.parse_args()
    decoder, peer = both(args.model)
    _, peer_fp32 = both(args.model, dtype=torch.float32)
    ids = np.random.default_rng(0).integers(0, decoder.spec.vocab_size, (args.samples, args.length))
    prompt = args.length // 2
    trainer = Trainer(decoder)
    batch, rows = make_batch(trainer, ids, prompt), torch.from_numpy(ids)
    loss = PolicyLoss()

    def ours() -> None:
        trainer.forward_backward(batch, loss)
        trainer._gradients = None  # each step starts from zero, as the peers' do

    arms = {
        "zerogap": ours,
        "transformers, BF16": lambda: peer_step(peer, rows, prompt, False),
        "transformers, autocast": lambda: peer_step(peer_fp32, rows, prompt, True),
    }
    seconds = median_seconds(arms, args.repeats)
    mine = seconds["zerogap"]
    out = []
    for name, value in seconds.items():
        out.append({"arm": name, "seconds": value, "zerogap_over_this": mine / value})
        print(f"{name:24} {value:7.3f} s   zerogap / this = {mine / value:.2f}")
    write("training_step", out, samples=args.samples, length=args.length, repeats=args.repeats)


if __name__ == "__main__":
    main()
