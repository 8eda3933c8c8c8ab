"""Attention over paged keys and values: causal, grouped queries, one definition for training, prefill, chunks, decode.

Forward, for a query row at absolute position t and query head h, whose KV head is g = h // (num_heads / num_kv_heads):

    s_j  = fl(dot(q, k_j) * scale)            j = 0 .. t; one FP32 chain over the head dimension, ascending, from +0
    keys in blocks of 64 from absolute position 0, ascending; per block
    m'   = max(m, max_j s_j),  p_j = exp(s_j - m'),  alpha = exp(m - m')
    l    = fma(l, alpha, lanesum(p))          lane = j mod 16, lanes ascending over the block, then the halving tree
    acc  = fma(acc, alpha, PV)                PV: one chain over rn(p_j) v_j, ascending, from +0
    out  = rn(acc / l),  lse = fl(m + log(l))

The first block of a span copies instead (m, l, acc = block maximum, lane sum, PV). Spans are `kv_split` keys long,
from position 0; several are merged ascending: M = max(m1, m2), a_i = exp(m_i - M), acc = fma(acc1, a1, fl(acc2 * a2)),
l likewise. A chain takes BF16 elements in pairs (2i, 2i + 1), the odd product first; a last key without partner has +0
for one. FP32 storage: one fma per element, no rounding of p.

Backward, per sample, over its own rows only (delta, s, p, dp, ds in FP32):

    delta_i = lanesum(out_i * d_out_i)        fma per lane, lanes over the head dimension
    p_ij    = exp(s_ij - lse_i), s_ij by the forward's chain;  dp_ij = dot(d_out_i, v_j), the same kind of chain
    ds_ij   = fl(fl(p_ij * fl(dp_ij - delta_i)) * scale);  masked: p = ds = +0
    dq_i    = rn(sum_j rn(ds_ij) k_j)         one chain over the keys of tiles 0 .. i // 64, ascending, from +0
    dv_j    = rn(tree over leaves of sum_h sum_i rn(p_ij) d_out_i),  dk_j = the same of rn(ds_ij) q_i

Tiles are 64 rows from the sample's row 0; a chain runs over whole tiles, masked entries included, the sample's last
tile ending with its last row (an odd one is paired with +0). For dk and dv one chain belongs to one (leaf, KV head):
the query heads that both hold, ascending, and for each the query tiles from the key's own to the last, ascending. The
tree is that of all `leaves` query-head leaves, in which leaves without a head of this KV head are absent.

FP8 pages (`FP8Codec`) hold codes of k and v with scales ks, vs per token and head, or calibrated per head; the codes
are multiplied as the BF16 numbers they are, and the scales stand outside the chains:

    s_j  = fl(fl(dot(q, kcode_j) * ks_j) * scale);  p, m, l as above;  PV: over rn(fl(p_j * vs_j)) vcode_j

With FP8 operands q is quantised per row and head, too (qcode, qs), and p times vs per row and block of keys:

    s_j  = fl(fl(dot(qcode, kcode_j) * fl(qs * ks_j)) * scale)
    x_j  = fl(p_j * vs_j),  xs = the block scale of max_j x_j;  PV: over rn_e4m3(x_j / xs) vcode_j
    acc  = fma(PV, xs, fl(acc * alpha)),  the first block of a span: fl(PV * xs)

The gradient is straight through the rounding of q, k, v and p, zero where a calibrated scale clipped:

    s_ij as in the forward;  dp_ij = fl(dot(d_out_i, vcode_j) * vs_j);  delta, p, ds as above
    dq_i = rn(sum_j rn(fl(ds_ij * ks_j)) kcode_j);  dk, dv as above, over q and d_out themselves,
    +0 where |fl(k / ks)| > 448 or |fl(v / vs)| > 448 (calibrated only)

Its codes and scales are made again from k, v and q, so they are those of the forward.

BF16 or FP32 in, FP32 sums, storage dtype out. A forward row depends on its position, its q and the keys and values up
to that position; a gradient on its own sample. Neither ever depends on other sequences, the number of rows, chunking,
page size or place of pages, what unwritten slots hold, threads, or the order of samples in a pack.
"""

from typing import Any

import torch

from zerogap.errors import ConfigError
from zerogap.ops import tap
from zerogap.ops.cpu import attention as native
from zerogap.ops.kv import calibrated_scales, require_page_size, require_scales
from zerogap.types import ForwardContext, LayerKV


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv: LayerKV,
    context: ForwardContext,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    kv_split: int,
    leaves: int,
) -> torch.Tensor:
    """Write k and v of the T rows into their pages, then attend over the pages.

    Args:
        q: [T, num_heads * head_dim] BF16 or FP32, after query norm and RoPE.
        k, v: [T, num_kv_heads * head_dim], same dtype.
        kv: pages of this layer, of a `DenseCodec` of that dtype, or of an `FP8Codec` (BF16 rows).
        context: rows of one sequence adjacent and ascending; training needs `sample_starts`, each sample whole, from
            position 0.
        scale: factor of the scores; rounded to FP32.
        kv_split: keys per span, a multiple of 64 (contract).
        leaves: query-head leaves (contract), for dk and dv.

    Returns:
        [T, num_heads * head_dim] in the dtype of q.

    Raises:
        ConfigError: page size or span that the kernels do not implement, or heads that do not divide.
        ContractError: pages of a calibrated codec without scales.
    """
    require_page_size(context.page_size)
    if kv_split < 64 or kv_split % 64:
        raise ConfigError("kv_split", kv_split, "choose a positive multiple of 64")
    if num_heads % num_kv_heads:
        raise ConfigError("num_kv_heads", num_kv_heads, f"choose a divisor of num_heads ({num_heads})")
    assert num_heads % leaves == 0, f"{leaves} leaves do not divide {num_heads} heads"
    assert (kv.codec.num_kv_heads, kv.codec.head_dim) == (num_kv_heads, head_dim), kv.codec
    require_scales(kv)
    if kv.calibration is not None:
        kv.calibration.observe(k, v)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        require_whole_samples(context, q.shape[0])
        out = _Attention.apply(q, k, v, kv, context, num_heads, scale, kv_split, leaves)
    else:
        native.kv_write(k, v, kv, context)
        out, _ = native.attention(q, kv, context, num_heads=num_heads, scale=scale, kv_split=kv_split, want_lse=False)
    tap.observe(
        "attention",
        {"out": out},
        {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "kv_split": kv_split},
    )
    return out


def require_whole_samples(context: ForwardContext, num_rows: int) -> None:
    """The backward takes the rows between two sample starts for the whole sample."""
    starts = context.sample_starts
    assert starts is not None, "training needs sample_starts"
    assert int(starts[-1]) == num_rows, f"sample_starts end at {int(starts[-1])}, there are {num_rows} rows"
    first_positions = context.positions[starts[starts < num_rows]]
    assert not first_positions.any(), f"training samples start at position 0, not {first_positions.tolist()}"


class _Attention(torch.autograd.Function):
    """The inference kernels, with the log-sum-exp kept for the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: LayerKV,
        context: ForwardContext,
        num_heads: int,
        scale: float,
        kv_split: int,
        leaves: int,
    ) -> torch.Tensor:
        native.kv_write(k, v, kv, context)
        out, lse = native.attention(q, kv, context, num_heads=num_heads, scale=scale, kv_split=kv_split, want_lse=True)
        ctx.save_for_backward(q, k, v, out, lse, context.sample_starts)
        ctx.codec, ctx.scales = kv.codec, calibrated_scales(kv)
        ctx.sizes = {"num_heads": num_heads, "scale": scale, "leaves": leaves}
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, sample_starts = ctx.saved_tensors
        dq, dk, dv = native.attention_grad(
            q, k, v, out, lse, grads[0].contiguous(), sample_starts, ctx.codec, ctx.scales, **ctx.sizes
        )
        return dq, dk, dv, None, None, None, None, None, None
