"""The engine's FP8 cache has the KV scales that were calibrated before the update.

Met with calibrated scales that are computed once at start; the names of the two scale sets differ.
"""

import torch

from zerogap.diagnose.corpus.workshop import Sides, Workshop
from zerogap.numerics import DType
from zerogap.ops.kv_scales import KVScales

EXPECTED = "cache/scales"
CONTRACT = {"kv": DType.FP8, "kv_scale": "calibrated"}


def sides(workshop: Workshop) -> Sides:
    prompts = [s.ids.tolist() for s in workshop.sequences()]
    trainer, engine = (workshop.decoder(contract=CONTRACT) for _ in range(2))
    scales = trainer.calibrate(prompts)
    old = torch.Generator().manual_seed(6)
    factors = 1.0 + 0.5 * torch.rand(scales.values.shape, generator=old)
    engine.set_kv_scales(KVScales(scales.values * factors))
    return workshop.zerogap_side(trainer, name="trainer"), workshop.zerogap_side(engine, name="rollout", path="decode")
