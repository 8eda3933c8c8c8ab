"""Cases of attention over FP8 pages: codecs, given scales that clip, and pages that begin full of garbage."""

import dataclasses
import itertools

import numpy as np
import torch

from tests.ops.attention_cases import Case
from tests.ops.attention_fp8_reference import FP8Contract
from zerogap.numerics import KV_SCALES, SCALE_FORMATS, DType
from zerogap.ops.cpu import library
from zerogap.ops.kv import FP8Codec
from zerogap.types import LayerKV

NAN_CODE = 0x7F


@dataclasses.dataclass(frozen=True)
class FP8Case(Case):
    """A `Case` whose pages hold codes."""

    kv_scale: str = "per_token_head"
    scale_format: str = "fp32"
    math: DType = DType.BF16

    @property
    def codec(self) -> FP8Codec:
        return FP8Codec(self.kv_heads, self.dim, self.kv_scale, self.scale_format, self.math)

    @property
    def scales(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Calibrated: scales of keys and values, such that some unit normal elements are clipped."""
        if self.kv_scale != "calibrated":
            return None
        keys = 0.9 * torch.linspace(2.0**-8, 2.0**-7, self.kv_heads + 1)[:-1]
        if self.scale_format == "pow2":
            keys = torch.exp2(keys.log2().ceil())
        return keys, keys.flip(0).clone()

    def pages(self, permute: int | None = None, fill: float = 0.0) -> tuple[LayerKV, torch.Tensor]:
        """As `Case.pages`: codes are NaN where `fill` is, else 208, and scales that will be written are `fill`."""
        per_sequence = -(-max(self.lengths) // self.page_size)
        count = per_sequence * len(self.lengths)
        kv = self.codec.allocate(count + 3, self.page_size, self.scales)
        for codes in (kv.keys, kv.values):
            codes.fill_(NAN_CODE if np.isnan(fill) else 0x75)
        if self.scales is None:
            kv.key_scales.fill_(fill)
            kv.value_scales.fill_(fill)
        order = np.arange(count) if permute is None else np.random.default_rng(permute).permutation(count + 3)[:count]
        return kv, torch.from_numpy(order.astype(np.int32)).view(len(self.lengths), per_sequence)

    def contract(self, **changes: object) -> FP8Contract:
        """The literal contract of this case."""
        given = self.scales and tuple(x.numpy() for x in self.scales)
        fused, math = not library.backend().endswith("portable"), self.math is DType.FP8
        made = FP8Contract(
            True, fused, kv_split=self.kv_split, pow2=self.scale_format == "pow2", math=math, given=given
        )
        return dataclasses.replace(made, **changes)


MODES = [
    {"kv_scale": kv_scale, "scale_format": scale_format, "math": math}
    for kv_scale, scale_format, math in itertools.product(KV_SCALES, SCALE_FORMATS, (DType.BF16, DType.FP8))
]


def mode_name(mode: dict) -> str:
    return f"{mode['kv_scale']}-{mode['scale_format']}-{mode['math'].value}"
