"""Who computes: the identity that a side declares, and the dtype table."""

import torch

from zerogap.numerics import DType, Numerics
from zerogap.ops.cpu import library
from zerogap.types import Identity

TORCH_DTYPES = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16}


def identity(numerics: Numerics) -> Identity:
    """Contract, backend class and kernel build of the ops that this process runs on CPU."""
    return Identity(numerics.fingerprint(), library.backend(), library.build_id())
