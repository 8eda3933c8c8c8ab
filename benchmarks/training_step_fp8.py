"""One training step in FP8 against BF16: forward, backward, update and publish, all arms interleaved in one run.

`--samples` sequences of `--length` tokens, half of each as completion; all tensors are trained. The update quantises
the published weights anew, and with calibrated scales the forward takes their maxima along. `recalibration` is the
share of the step that this costs.
"""

import dataclasses

import numpy as np

from benchmarks.record import median_seconds, parser, write
from benchmarks.training_step import make_batch
from zerogap.models.decoder import Decoder
from zerogap.numerics import preset
from zerogap.rl.loss import PolicyLoss
from zerogap.train.trainer import Trainer
from zerogap.types import TrainBatch
from zerogap.weights import open_model
from zerogap.weights.quick_start import fetch_quick_start_model

ARMS = {
    "bf16": ("bf16", {}),
    "fp8": ("fp8", {}),
    "fp8, bf16 backward": ("fp8", {"linear_grad": "bf16"}),
    "fp8-kv": ("fp8-kv", {}),
    "fp8-kv calibrated": ("fp8-kv", {"kv_scale": "calibrated"}),
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--samples", type=int, default=16)
    options.add_argument("--length", type=int, default=64)
    args = options.parse_args()
    files = open_model(args.model or fetch_quick_start_model())
    ids = np.random.default_rng(0).integers(0, files.spec.vocab_size, (args.samples, args.length))
    trainers: dict[str, Trainer] = {}
    calls = {}
    for name, (numerics, changes) in ARMS.items():
        decoder = Decoder(files.spec, preset(numerics, **changes), max_positions=2048).load(files.tensors())
        if decoder.calibrated:
            decoder.calibrate(ids.tolist())
        trainers[name] = trainer = Trainer(decoder)

        def step(trainer: Trainer = trainer) -> None:
            batch = make_batch(trainer, ids, args.length // 2)
            trainer.forward_backward(_with_scales(trainer, batch), PolicyLoss())
            trainer.optim_step(0.0)

        calls[name] = step
    seconds = median_seconds(calls, args.repeats)
    steps = args.repeats + 1
    rows = []
    for name, value in seconds.items():
        share = trainers[name].calibration_seconds / steps / value
        rows.append({"arm": name, "seconds": value, "over_bf16": value / seconds["bf16"], "recalibration": share})
        print(f"{name:20} {value:7.3f} s   x bf16 {value / seconds['bf16']:.2f}   recalibration {share:.2%}")
    write("training_step_fp8", rows, samples=args.samples, length=args.length, repeats=args.repeats)


def _with_scales(trainer: Trainer, batch: TrainBatch) -> TrainBatch:
    """The samples as if drawn with the trainer's present KV scale set."""
    scales = trainer.decoder.kv_scales
    name = None if scales is None else scales.name
    return dataclasses.replace(batch, samples=tuple(dataclasses.replace(s, scale_set=name) for s in batch.samples))


if __name__ == "__main__":
    main()
