"""Keys and values go through an FP8 cache on both sides; the engine found no calibrated scale and takes 1.0.

vllm-project/vllm#12076 and #4893: scales that are not in the checkpoint default to 1.0 without an error.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import e4m3, eager
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, attend

EXPECTED = "attention/scale"
CALIBRATED = 0.0137


def cached(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (e4m3(x.float() / scale) * scale).to(x.dtype)


def calibrated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, s: float) -> torch.Tensor:
    return eager(q, cached(k, CALIBRATED), cached(v, CALIBRATED), mask, s)


def uncalibrated(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, s: float
) -> torch.Tensor:
    return eager(q, cached(k, 1.0), cached(v, 1.0), mask, s)


def plant(model: Model) -> None:
    attend(model, "holdout3_scale_one", uncalibrated)


def usual(model: Model) -> None:
    attend(model, "holdout3_scale_calibrated", calibrated)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, usual)
