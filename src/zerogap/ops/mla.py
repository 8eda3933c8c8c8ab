"""Latent attention (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434, section 2.1), in its latent form.

A token's keys and values of all heads come from one row: c, the normed latent, and k_rope, a rotated part that the
heads share. W_uk and W_uv, the two parts of each head of `kv_b`, would expand c into the head's key [W_uk c, k_rope]
and value W_uv c. Here they move to the other side of the products instead, so that attention reads the row itself:

    c       = RMSNorm(kv_a[:latent])            rn once, as ops/norm.py
    k_rope  = rope(kv_a[latent:]), q_rope = rope of the last `rope` elements of each query head; rn once, as ops/rope.py
    q_abs   = rn(q_nope W_uk)                   per head: [nope] x [nope, latent], one leaf
    o_lat   = attention([q_abs, q_rope], keys [c, k_rope], values c)     as ops/attention.py, one KV head for all heads;
                                                a score's chain runs over the latent, ascending, then the rotated part
    o       = rn(o_lat W_uv^T)                  per head: [latent] x [latent, value], one leaf

It is one definition for training, prefill, chunks and decode. Backward, every product as ops/gemm.py has it:

    d_lat   = rn(d_o W_uv);  dW_uv = sum over tokens of d_o o_lat, in blocks of 128 rows of a pack
    delta, p, dp, ds, dq_abs, dq_rope as in ops/attention.py's backward over d_lat
    d_c     = rn(dK + dV), d_k_rope = rn(dK): each the tree over leaves of one chain per leaf, heads and for each the
              query tiles ascending; the two trees are finished before they are added
    dq_nope = rn(dq_abs W_uk^T);  dW_uk = sum over tokens of q_nope dq_abs, in the same blocks
    d_kv_a  = the gradients of norm (ops/norm.py) and rotation; dq likewise

FP8 pages (`LatentCodec`) hold codes of c with a scale per tile of 128 elements, s_jt for key j and tile t; k_rope stays
BF16. Codes are multiplied as the BF16 numbers they are:

    s       = fma(dot over tile t, s_jt, s), tiles ascending from +0, then fl(s + dot over the rotated part);
              fl(s * scale)
    PV      of the columns of tile t: over rn(fl(p_j * s_jt)) code_j;  l sums the unscaled p
    dp      = fma(dot over tile t, s_jt, dp), tiles ascending from +0
    dq_abs  of the columns of tile t: over rn(fl(ds_j * s_jt)) code_j;  dq_rope: over rn(ds_j) k_rope_j

Every dot is a chain of its own from +0. dK and dV are sums over q and d_lat themselves; d_c is straight through the
rounding, +0 where a calibrated scale clipped, |fl(c / s)| > 448. W_uk and W_uv are never quantised.

A row depends on its position, its q and the rows of its sequence up to that position; a gradient on its own sample
(weights: on rows and pack borders). Neither ever depends on other sequences, the number of rows, chunking, page size,
threads or whether a graph is recorded. The backward's memory grows with the number of rows times heads, never with its
square: scores are made again, tile by tile.

Shapes: T token rows, h heads.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from zerogap.errors import ConfigError
from zerogap.ops import tap
from zerogap.ops.attention import require_whole_samples
from zerogap.ops.cpu import gemm, grouped, library
from zerogap.ops.cpu import mla as native
from zerogap.ops.cpu import norm as norm_kernels
from zerogap.ops.cpu.grouped import GroupSegment
from zerogap.ops.cpu.rope import HeadColumns, rotate_heads
from zerogap.ops.handle import WeightHandle
from zerogap.ops.kv import calibrated_scales, require_page_size, require_scales
from zerogap.ops.latent import LatentCodec, LatentSizes
from zerogap.ops.rope import check_positions
from zerogap.ops.stack import PanelStack
from zerogap.types import ForwardContext, LayerKV


@dataclasses.dataclass(frozen=True)
class _Layer:
    """Everything that one call computes with besides its rows."""

    norm: WeightHandle
    kv_b: WeightHandle
    table: torch.Tensor
    kv: LayerKV
    context: ForwardContext
    sizes: LatentSizes
    scale: float
    norm_eps: float
    kv_split: int
    leaves: int
    interleaved: bool


def mla(
    q: torch.Tensor,
    kv_a: torch.Tensor,
    norm: WeightHandle,
    kv_b: WeightHandle,
    rope_table: torch.Tensor,
    kv: LayerKV,
    context: ForwardContext,
    *,
    sizes: LatentSizes,
    scale: float,
    norm_eps: float,
    kv_split: int,
    leaves: int,
    interleaved: bool = False,
) -> torch.Tensor:
    """Write the latent rows of T tokens into their pages, then attend over the pages.

    Args:
        q: [T, h * (nope + rope)] BF16 or FP32, before rotation; each head's unrotated part first.
        kv_a: [T, latent + rope], same dtype, before norm and rotation.
        norm: vector [latent], the weight of the latent's norm.
        kv_b: kind `heads`, [h * (nope + value), latent].
        rope_table: FP32 [P, rope] of `ops.rope.rope_table`, with P above every position.
        kv: pages of this layer, of a `LatentCodec`.
        context: as for `ops.attention.attention`; `pack_starts` where a weight is trained.
        scale: factor of the scores; rounded to FP32.
        norm_eps: of the latent's norm.
        kv_split: keys per span, a multiple of 64 (contract).
        leaves: query-head leaves (contract), for the gradient of the rows.
        interleaved: rotation turns neighbouring elements (2i, 2i + 1), not halves.

    Returns:
        [T, h * value] in the dtype of q.

    Raises:
        ConfigError: page size or span that the kernels do not implement.
        ContractError: pages of a calibrated codec without scales.
    """
    require_page_size(context.page_size)
    if kv_split < 64 or kv_split % 64:
        raise ConfigError("kv_split", kv_split, "choose a positive multiple of 64")
    assert sizes.num_heads % leaves == 0, f"{leaves} leaves do not divide {sizes.num_heads} heads"
    codec = kv.codec
    assert isinstance(codec, LatentCodec) and (codec.latent, codec.rope) == (sizes.latent, sizes.rope), codec
    assert q.shape[1] == sizes.q_width and kv_a.shape[1] == sizes.row, f"q {q.shape}, kv_a {kv_a.shape}, {sizes}"
    assert kv_b.spec.head_parts == (sizes.num_heads, sizes.nope, sizes.value), f"{kv_b.spec}, {sizes}"
    require_scales(kv)
    check_positions(context.positions, rope_table)
    layer = _Layer(norm, kv_b, rope_table, kv, context, sizes, scale, norm_eps, kv_split, leaves, interleaved)
    trained = q.requires_grad or kv_a.requires_grad or norm.trainable or kv_b.trainable
    if torch.is_grad_enabled() and trained:
        require_whole_samples(context, q.shape[0])
        out = _Latent.apply(q, kv_a, norm.anchor, kv_b.anchor, layer)
    else:
        out = _forward(q, kv_a, layer, want_lse=False).out
    tap.observe("mla", {"out": out}, {"sizes": sizes, "kv_split": kv_split})
    return out


class _Forward(NamedTuple):
    """What a forward pass made. q_abs, o_lat [T, h * latent], q_rope [T, h * rope], latent_in, latent [T, latent],
    k_rope [T, rope], lse FP32 [T, h] or None."""

    out: torch.Tensor
    latent_in: torch.Tensor
    latent: torch.Tensor
    k_rope: torch.Tensor
    q_abs: torch.Tensor
    q_rope: torch.Tensor
    o_lat: torch.Tensor
    lse: torch.Tensor | None


def _forward(q: torch.Tensor, kv_a: torch.Tensor, layer: _Layer, *, want_lse: bool) -> _Forward:
    """Native commands on buffers of the library only, so that it can be recorded."""
    sizes, context, dtype = layer.sizes, layer.context, q.dtype
    heads, latent_size = sizes.num_heads, sizes.latent
    assert layer.norm.rows is not None, f"{layer.norm.spec.name} is not a vector"
    latent_in = library.empty(kv_a, (latent_size,), dtype)
    grouped.copy_columns(kv_a, latent_in, heads=1, width=latent_size, src_head_stride=0, dst_head_stride=0)
    _, latent = norm_kernels.norm(latent_in, None, layer.norm.rows, layer.norm_eps, 1)
    q_rope = library.empty(q, (heads * sizes.rope,), dtype)
    k_rope = library.empty(kv_a, (sizes.rope,), dtype)
    _rotate(layer, (q, kv_a), (q_rope, k_rope), inverse=False)
    native.latent_write(latent, k_rope, layer.kv, context)
    if layer.kv.calibration is not None:
        layer.kv.calibration.observe(latent)
    first, second = _parts(layer.kv_b)
    to_latent = GroupSegment(q, first.transposed, latent_size, sizes.nope, x_group_stride=sizes.nope + sizes.rope)
    (q_abs,) = grouped.grouped_product([to_latent], "concatenate")
    o_lat, lse = native.latent_attention(
        q_abs, q_rope, layer.kv, context,
        num_heads=heads, scale=layer.scale, kv_split=layer.kv_split, want_lse=want_lse,
    )  # fmt: skip
    to_value = GroupSegment(o_lat, second.panels, sizes.value, latent_size)
    (out,) = grouped.grouped_product([to_value], "concatenate")
    return _Forward(out, latent_in, latent, k_rope, q_abs, q_rope, o_lat, lse)


def _parts(kv_b: WeightHandle) -> tuple[PanelStack, PanelStack]:
    """W_uk and W_uv of every head."""
    assert kv_b.first is not None and kv_b.second is not None, f"{kv_b.spec.name} is not used head by head"
    return kv_b.first, kv_b.second


class _Latent(torch.autograd.Function):
    """The inference kernels, with the log-sum-exp kept for the backward."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, kv_a: torch.Tensor, _norm: Any, _kv_b: Any, layer: _Layer) -> torch.Tensor:
        made = _forward(q, kv_a, layer, want_lse=True)
        ctx.save_for_backward(q, *made[1:])
        ctx.layer, ctx.scales = layer, calibrated_scales(layer.kv)
        return made.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        q, latent_in, latent, k_rope, q_abs, q_rope, o_lat, lse = ctx.saved_tensors
        layer: _Layer = ctx.layer
        sizes, starts, codec = layer.sizes, layer.context.sample_starts, layer.kv.codec
        assert starts is not None and isinstance(codec, LatentCodec)
        d_out = d_out.contiguous()
        first, second = _parts(layer.kv_b)
        to_latent = GroupSegment(d_out, second.transposed, sizes.latent, sizes.value)
        (d_lat,) = grouped.grouped_product([to_latent], "concatenate")
        dq_abs, dq_rope, d_latent, dk_rope = native.latent_grad(
            q_abs, q_rope, latent, k_rope, o_lat, lse, d_lat, starts, codec, ctx.scales and ctx.scales[0],
            num_heads=sizes.num_heads, scale=layer.scale, leaves=layer.leaves,
        )  # fmt: skip
        _weight_grads(layer, q, dq_abs, d_out, o_lat)
        dq, d_kv_a = torch.empty_like(q), torch.empty(q.shape[0], sizes.row, dtype=q.dtype)
        to_nope = GroupSegment(dq_abs, first.panels, sizes.nope, sizes.latent, out_group_stride=sizes.nope + sizes.rope)
        grouped.grouped_product([to_nope], "concatenate", outs=[dq])
        d_kv_a[:, : sizes.latent] = _norm_grad(layer, latent_in, d_latent)
        _rotate(layer, (dq, d_kv_a), (dq_rope, dk_rope), inverse=True)
        return dq, d_kv_a, None, None, None


def _rotate(
    layer: _Layer,
    whole: tuple[torch.Tensor, torch.Tensor],
    alone: tuple[torch.Tensor, torch.Tensor],
    *,
    inverse: bool,
) -> None:
    """Rotate query heads and the shared key out of the rows of q and kv_a (`whole`) into rows of rotated parts `alone`;
    `inverse`: turned back, the other way."""
    s = layer.sizes
    places = ((s.num_heads, s.nope, s.nope + s.rope), (1, s.latent, s.row))  # heads, offset and stride in whole rows
    parts = []
    for (heads, offset, stride), inside, outside in zip(places, whole, alone, strict=True):
        one, other = HeadColumns(inside, offset, stride), HeadColumns(outside, 0, s.rope)
        parts.append((other, one, heads) if inverse else (one, other, heads))
    positions = layer.context.positions
    rotate_heads(parts, layer.table, positions, s.rope, inverse=inverse, interleaved=layer.interleaved)


def _weight_grads(
    layer: _Layer, q: torch.Tensor, dq_abs: torch.Tensor, d_out: torch.Tensor, o_lat: torch.Tensor
) -> None:
    """dW_uk and dW_uv, head by head."""
    kv_b, sizes, packs = layer.kv_b, layer.sizes, layer.context.pack_starts
    if not kv_b.trainable:
        return
    assert kv_b.grad is not None and packs is not None, f"{kv_b.spec.name}: needs an open gradient bin and pack borders"
    heads = sizes.num_heads
    sums = kv_b.grad.view(heads, sizes.nope + sizes.value, sizes.latent)
    by_head = [x.flatten(1).unflatten(1, (heads, -1)).transpose(0, 1) for x in (q, dq_abs, d_out, o_lat)]
    for head_sums, head_q, head_abs, head_out, head_lat in zip(sums, *by_head, strict=True):
        q_nope = head_q[:, : sizes.nope].contiguous()
        gemm.weight_grad(q_nope, head_abs.contiguous(), packs, head_sums[: sizes.nope])
        gemm.weight_grad(head_out.contiguous(), head_lat.contiguous(), packs, head_sums[sizes.nope :])


def _norm_grad(layer: _Layer, latent_in: torch.Tensor, d_latent: torch.Tensor) -> torch.Tensor:
    weight, packs = layer.norm, layer.context.pack_starts
    acc = weight.grad if weight.trainable else None
    assert weight.rows is not None and (not weight.trainable or (acc is not None and packs is not None)), (
        f"{weight.spec.name}: a backward pass needs an open gradient bin and pack borders"
    )
    made = norm_kernels.norm_grad(
        latent_in, weight.rows, None, d_latent, layer.norm_eps, 1, input_grad=True, acc=acc, pack_starts=packs
    )
    assert made is not None
    return made
