"""Sizes, rows, pages and calls that the attention tests share."""

import dataclasses

import numpy as np
import torch

from tests.bits import unit_values
from tests.ops.attention_reference import Contract
from zerogap.numerics import DType
from zerogap.ops.attention import attention
from zerogap.ops.cpu import library
from zerogap.ops.kv import DenseCodec
from zerogap.types import ForwardContext, LayerKV

DTYPES = {"bf16": (torch.bfloat16, DType.BF16), "fp32": (torch.float32, DType.FP32)}
NAN = float("nan")


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a call; `leaves` and `kv_split` are the contract's."""

    lengths: tuple[int, ...] = (150,)
    heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    dtype: str = "bf16"
    kv_split: int = 1024
    leaves: int = 1
    page_size: int = 16

    @property
    def sizes(self) -> dict:
        return {
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.dim,
            "scale": self.dim**-0.5,
            "kv_split": self.kv_split,
            "leaves": self.leaves,
        }

    def rows(self, seed: int = 0, make=unit_values) -> tuple[torch.Tensor, ...]:
        """q, k, v [T, heads * D], drawn per sequence so that a sequence's rows do not depend on its neighbours."""
        dtype = DTYPES[self.dtype][0]
        widths = (self.heads, self.kv_heads, self.kv_heads)
        drawn = [
            [make((n, w * self.dim), dtype, seed=1000 * seed + 10 * n + i) for n in self.lengths]
            for i, w in enumerate(widths)
        ]
        return tuple(torch.cat(parts) for parts in drawn)

    def pages(self, permute: int | None = None, fill: float = 0.0) -> tuple[LayerKV, torch.Tensor]:
        """Pages filled with `fill`, and a page table, with physical pages in the order of seed `permute`."""
        per_sequence = -(-max(self.lengths) // self.page_size)
        count = per_sequence * len(self.lengths)
        kv = DenseCodec(self.kv_heads, self.dim, DTYPES[self.dtype][1]).allocate(count + 3, self.page_size)
        kv.keys.fill_(fill)
        kv.values.fill_(fill)
        order = np.arange(count) if permute is None else np.random.default_rng(permute).permutation(count + 3)[:count]
        return kv, torch.from_numpy(order.astype(np.int32)).view(len(self.lengths), per_sequence)


def part_context(case: Case, table: torch.Tensor, spans: list[tuple[int, int, int]]) -> ForwardContext:
    """Context over rows (sequence, first position, end position)."""
    starts = np.cumsum([0] + [end - begin for _, begin, end in spans])
    return ForwardContext(
        positions=torch.cat([torch.arange(begin, end) for _, begin, end in spans]).int(),
        sequences=torch.cat([torch.full((end - begin,), s) for s, begin, end in spans]).int(),
        page_table=table,
        page_size=case.page_size,
        sample_starts=torch.from_numpy(starts.astype(np.int32)),
    )


def whole(case: Case, q, k, v, permute: int | None = None, fill: float = 0.0) -> torch.Tensor:
    """All sequences in one call."""
    kv, table = case.pages(permute, fill)
    context = part_context(case, table, [(s, 0, n) for s, n in enumerate(case.lengths)])
    return attention(q, k, v, kv, context, **case.sizes)


def chunked(case: Case, q, k, v, borders: list[int], fill: float = NAN) -> torch.Tensor:
    """One sequence, one call per chunk."""
    kv, table = case.pages(5, fill)
    outs = []
    for begin, end in zip([0, *borders], [*borders, case.lengths[0]]):
        context = part_context(case, table, [(0, begin, end)])
        outs.append(attention(q[begin:end], k[begin:end], v[begin:end], kv, context, **case.sizes))
    return torch.cat(outs)


def gradients(case: Case, q, k, v, d_out) -> tuple[torch.Tensor, ...]:
    """(out, dq, dk, dv) of one packed call."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = whole(case, *leaves)
    out.backward(d_out)
    return (out.detach(), *(x.grad for x in leaves))


def as_heads(case: Case, x: torch.Tensor) -> np.ndarray:
    return x.float().numpy().reshape(len(x), -1, case.dim)


def contract_of(case: Case, **changes) -> Contract:
    fused = not library.backend().endswith("portable")
    return dataclasses.replace(Contract(case.dtype == "bf16", fused, kv_split=case.kv_split), **changes)
