"""Sizes, rows, weights, pages and calls that the tests of latent attention share."""

import dataclasses
import functools

import numpy as np
import torch

from tests.bits import hard_values, unit_values
from zerogap.models.rope_spec import RopeSpec
from zerogap.numerics import DType
from zerogap.ops.handle import WeightHandle
from zerogap.ops.latent import LatentCodec, LatentSizes
from zerogap.ops.mla import mla
from zerogap.ops.rope import rope_table
from zerogap.types import ForwardContext, LayerKV, WeightSpec

DTYPES = {"bf16": (torch.bfloat16, DType.BF16), "fp32": (torch.float32, DType.FP32)}
NAN = float("nan")
NAN_CODE = 0x7F
EPS = 1e-6
MOONLIGHT = LatentSizes(16, 128, 64, 512, 128)
SMALL = LatentSizes(6, 48, 16, 64, 80)
ODD = LatentSizes(3, 16, 32, 192, 48)  # two tiles, the second one half
WIDE = LatentSizes(20, 32, 16, 80, 16)  # more heads than lanes, a latent with a rest beyond whole groups


@dataclasses.dataclass(frozen=True)
class Case:
    """A call; `leaves` and `kv_split` are the contract's. `kv` is `dense` or how an FP8 cache is scaled."""

    lengths: tuple[int, ...] = (150,)
    sizes: LatentSizes = SMALL
    dtype: str = "bf16"
    kv_split: int = 1024
    leaves: int = 1
    page_size: int = 16
    kv: str = "dense"
    scale_format: str = "fp32"
    interleaved: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype][0]

    @property
    def scale(self) -> float:
        return (self.sizes.nope + self.sizes.rope) ** -0.5

    @property
    def codec(self) -> LatentCodec:
        latent, rope = self.sizes.latent, self.sizes.rope
        if self.kv == "dense":
            return LatentCodec(latent, rope, DTYPES[self.dtype][1])
        return LatentCodec(latent, rope, DType.FP8, self.kv, self.scale_format)

    @property
    def given(self) -> torch.Tensor | None:
        """Calibrated scales such that some elements of a normed latent are clipped, others per tile."""
        if self.kv != "calibrated":
            return None
        scales = 0.9 * 2.0 ** (-8 + 0.3 * torch.arange(self.codec.tiles))
        return torch.exp2(scales.log2().ceil()) if self.scale_format == "pow2" else scales

    def rows(self, seed: int = 0, make=unit_values) -> tuple[torch.Tensor, torch.Tensor]:
        """q and kv_a, drawn per sequence so that a sequence's rows do not depend on its neighbours."""
        drawn = [
            [make((n, width), self.torch_dtype, seed=1000 * seed + 10 * n + i) for n in self.lengths]
            for i, width in enumerate((self.sizes.q_width, self.sizes.row))
        ]
        return torch.cat(drawn[0]), torch.cat(drawn[1])

    def pages(self, permute: int | None = None, fill: float = 0.0) -> tuple[LayerKV, torch.Tensor]:
        """Pages that hold garbage (`fill`; NaN codes where it is NaN), and a page table in the order of `permute`."""
        per_sequence = -(-max(self.lengths) // self.page_size)
        count = per_sequence * len(self.lengths)
        given = self.given
        kv = self.codec.allocate(count + 3, self.page_size, None if given is None else (given,))
        if self.kv == "dense":
            kv.keys.fill_(fill)
        else:
            kv.keys.fill_(NAN_CODE if np.isnan(fill) else 0x75)
        kv.values.fill_(fill)
        if self.kv == "per_token_head":
            kv.key_scales.fill_(fill)
        order = np.arange(count) if permute is None else np.random.default_rng(permute).permutation(count + 3)[:count]
        return kv, torch.from_numpy(order.astype(np.int32)).view(len(self.lengths), per_sequence)

    def weights(self, seed: int = 0) -> tuple[WeightHandle, WeightHandle]:
        """The latent's norm and the expansion, trainable, with open gradient bins."""
        s, dtype = self.sizes, self.torch_dtype
        norm = WeightHandle(WeightSpec("norm", (s.latent,), "vector"), dtype)
        shape = (s.num_heads * (s.nope + s.value), s.latent)
        kv_b = WeightHandle(WeightSpec("kv_b", shape, "heads", head_parts=(s.num_heads, s.nope, s.value)), dtype)
        norm.load(1 + 0.2 * unit_values((s.latent,), seed=seed + 1))
        kv_b.load(unit_values(shape, seed=seed + 2) * s.latent**-0.5)
        for handle in (norm, kv_b):
            handle.set_trainable(True)
            handle.open_grad()
        return norm, kv_b


@functools.cache
def table(rope: int) -> torch.Tensor:
    return rope_table(RopeSpec(theta=10000.0), rope, 4096)


def part_context(case: Case, pages: torch.Tensor, spans: list[tuple[int, int, int]]) -> ForwardContext:
    """Context over rows (sequence, first position, end position)."""
    starts = np.cumsum([0] + [end - begin for _, begin, end in spans]).astype(np.int32)
    return ForwardContext(
        positions=torch.cat([torch.arange(begin, end) for _, begin, end in spans]).int(),
        sequences=torch.cat([torch.full((end - begin,), s) for s, begin, end in spans]).int(),
        page_table=pages,
        page_size=case.page_size,
        sample_starts=torch.from_numpy(starts),
        pack_starts=torch.from_numpy(starts[[0, -1]]),
    )


def call(case: Case, q, kv_a, weights, kv: LayerKV, context: ForwardContext) -> torch.Tensor:
    return mla(
        q, kv_a, *weights, table(case.sizes.rope), kv, context,
        sizes=case.sizes, scale=case.scale, norm_eps=EPS, kv_split=case.kv_split, leaves=case.leaves,
        interleaved=case.interleaved,
    )  # fmt: skip


def whole(case: Case, q, kv_a, weights=None, permute: int | None = None, fill: float = 0.0) -> torch.Tensor:
    """All sequences in one call, without a graph where neither input wants one."""
    kv, pages = case.pages(permute, fill)
    context = part_context(case, pages, [(s, 0, n) for s, n in enumerate(case.lengths)])
    with torch.set_grad_enabled(q.requires_grad or kv_a.requires_grad):
        return call(case, q, kv_a, case.weights() if weights is None else weights, kv, context)


def chunked(case: Case, q, kv_a, borders: list[int], fill: float = NAN) -> torch.Tensor:
    """One sequence, one call per chunk."""
    kv, pages = case.pages(5, fill)
    weights, outs = case.weights(), []
    for begin, end in zip([0, *borders], [*borders, case.lengths[0]]):
        with torch.no_grad():
            context = part_context(case, pages, [(0, begin, end)])
            outs.append(call(case, q[begin:end], kv_a[begin:end], weights, kv, context))
    return torch.cat(outs)


GRADS = ("out", "dq", "dkv_a", "dnorm", "dkv_b")


def gradients(case: Case, q, kv_a, d_out) -> tuple[torch.Tensor, ...]:
    """`GRADS` of one packed call."""
    leaves = [x.clone().requires_grad_() for x in (q, kv_a)]
    norm, kv_b = case.weights()
    out = whole(case, *leaves, (norm, kv_b))
    out.backward(d_out)
    return out.detach(), leaves[0].grad, leaves[1].grad, norm.grad, kv_b.grad


def wide_rows(case: Case, seed: int) -> tuple[torch.Tensor, ...]:
    """q, kv_a, d_out with wide exponents, so that an order of summation shows."""
    q, kv_a = case.rows(seed)
    kv_a = kv_a + hard_values(kv_a.shape, kv_a.dtype, seed=seed, spread=3)
    d_out = hard_values((len(q), case.sizes.out_width), q.dtype, seed=seed + 1, spread=4)
    return q * 2, kv_a, d_out
