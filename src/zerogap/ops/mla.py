"""Latent attention (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434, section 2.1), in its latent form.

A token's keys and values of all heads come from one row: c, the normed latent, and k_rope, a rotated part that the
heads share. W_uk and W_uv, the two parts of each head of `kv_b`, would expand c into the head's key [W_uk c, k_rope]
and value W_uv c. Here they move to the other side of the products instead, so that attention reads the row itself:

    c       = RMSNorm(kv_a[:latent])            rn once, as ops/norm.py
    k_rope  = rope(kv_a[latent:]), q_rope = rope of the last `rope` elements of each query head; rn once, as ops/rope.py
    q_abs   = rn(q_nope W_uk)                   per head: [nope] x [nope, latent]
    o_lat   = attention([q_abs, q_rope], keys [c, k_rope], values c)     as ops/attention.py, one KV head for all heads;
                                                a score's chain runs over the latent, ascending, then the rotated part
    o       = rn(o_lat W_uv^T)                  per head: [latent] x [latent, value]

It is one definition for training, prefill, chunks and decode. Backward, every product as ops/gemm.py has it:

    d_lat   = rn(d_o W_uv);  dW_uv = sum over tokens of d_o o_lat
    attention's backward over d_lat gives d[q_abs, q_rope] (rn) and, per token, dK of the row and dV of the latent
    d_c     = rn(dK + dV), d_k_rope = rn(dK): chains per leaf over heads, tree over leaves, then the addition
    dq_nope = rn(d_q_abs W_uk^T);  dW_uk = sum over tokens of q_nope d_q_abs
    d_kv_a  = the gradients of norm and rotation; dq likewise

A row depends on its position, its q and the rows of its sequence up to that position; a gradient on its own sample
(weights: on rows and pack borders). Neither ever depends on other sequences, the number of rows, chunking, page size,
threads or whether a graph is recorded.

Shapes: T token rows, h heads.
"""

import dataclasses
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from zerogap.errors import ConfigError
from zerogap.ops import tap
from zerogap.ops.cpu import attention as native
from zerogap.ops.cpu import gemm, norm, rope
from zerogap.ops.handle import WeightHandle
from zerogap.ops.latent import LatentSizes
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
        ConfigError: a span that the kernels do not implement.
    """
    if kv_split < 64 or kv_split % 64:
        raise ConfigError("kv_split", kv_split, "choose a positive multiple of 64")
    assert sizes.num_heads % leaves == 0, f"{leaves} leaves do not divide {sizes.num_heads} heads"
    assert kv.codec.head_dim == sizes.row, f"pages of {kv.codec} for rows of {sizes.row}"
    assert q.shape[1] == sizes.q_width and kv_a.shape[1] == sizes.row, f"q {q.shape}, kv_a {kv_a.shape}, {sizes}"
    assert kv_b.spec.head_parts == (sizes.num_heads, sizes.nope, sizes.value), f"{kv_b.spec}, {sizes}"
    layer = _Layer(norm, kv_b, rope_table, kv, context, sizes, scale, norm_eps, kv_split, leaves, interleaved)
    trained = q.requires_grad or kv_a.requires_grad or norm.trainable or kv_b.trainable
    if torch.is_grad_enabled() and trained:
        _require_whole_samples(context, q.shape[0])
        out = _Latent.apply(q, kv_a, norm.anchor, kv_b.anchor, layer)
    else:
        out = _forward(q, kv_a, layer, want_lse=False).out
    tap.observe("mla", {"out": out}, {"sizes": sizes, "kv_split": kv_split})
    return out


def _require_whole_samples(context: ForwardContext, num_rows: int) -> None:
    """The backward takes the rows between two sample starts for the whole sample."""
    starts = context.sample_starts
    assert starts is not None, "training needs sample_starts"
    assert int(starts[-1]) == num_rows, f"sample_starts end at {int(starts[-1])}, there are {num_rows} rows"
    first_positions = context.positions[starts[starts < num_rows]]
    assert not first_positions.any(), f"training samples start at position 0, not {first_positions.tolist()}"


@dataclasses.dataclass(frozen=True)
class _Forward:
    """What a forward pass made: q_full [T, h * row], rows [T, row], o_lat [T, h * row], lse [T, h]."""

    out: torch.Tensor
    latent_in: torch.Tensor
    q_full: torch.Tensor
    rows: torch.Tensor
    o_lat: torch.Tensor
    lse: torch.Tensor | None


def _parts(layer: _Layer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(W_uk [nope, latent], W_uv [value, latent]) of each head."""
    heads, nope, value = layer.sizes.num_heads, layer.sizes.nope, layer.sizes.value
    whole = layer.kv_b.value().view(heads, nope + value, layer.sizes.latent)
    return [(head[:nope], head[nope:]) for head in whole]


def _times(x: torch.Tensor, weight: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    """rn(x W^T) for x [T, K], W [N, K]; `transposed`: rn(x W) for x [T, N]."""
    n, k = weight.shape
    width, reduce = (k, n) if transposed else (n, k)
    panels = gemm.allocate_panels(width, reduce, x.dtype)
    gemm.pack(weight.contiguous(), *((None, panels) if transposed else (panels, None)))
    return gemm.product([gemm.Segment(x.contiguous(), panels, width)], "concatenate")[0]


def _forward(q: torch.Tensor, kv_a: torch.Tensor, layer: _Layer, *, want_lse: bool) -> _Forward:
    sizes, context = layer.sizes, layer.context
    rows, heads = q.shape[0], sizes.num_heads
    latent_in = kv_a[:, : sizes.latent].contiguous()
    assert layer.norm.rows is not None, f"{layer.norm.spec.name} is not a vector"
    _, latent = norm.norm(latent_in, None, layer.norm.rows, layer.norm_eps, 1)
    q_heads = q.view(rows, heads, sizes.nope + sizes.rope)
    q_rope = q_heads[..., sizes.nope :].contiguous().view(rows, -1)
    q_rope, k_rope = _rotate(q_rope, kv_a[:, sizes.latent :].contiguous(), layer, inverse=False)
    latent_rows = torch.cat([latent, k_rope], 1)
    q_full = torch.empty(rows, heads, sizes.row, dtype=q.dtype)
    q_full[..., sizes.latent :] = q_rope.view(rows, heads, sizes.rope)
    parts = _parts(layer)
    for h, (up_k, _) in enumerate(parts):
        q_full[:, h, : sizes.latent] = _times(q_heads[:, h, : sizes.nope], up_k, transposed=True)
    native.kv_write(latent_rows, latent_rows, layer.kv, context)
    flat = q_full.view(rows, -1)
    o_lat, lse = native.attention(
        flat, layer.kv, context, num_heads=heads, scale=layer.scale, kv_split=layer.kv_split, want_lse=want_lse
    )
    by_head = o_lat.view(rows, heads, sizes.row)[..., : sizes.latent]
    out = torch.cat([_times(by_head[:, h], up_v, transposed=False) for h, (_, up_v) in enumerate(parts)], 1)
    return _Forward(out, latent_in, flat, latent_rows, o_lat, lse)


def _rotate(
    q_rope: torch.Tensor, k_rope: torch.Tensor, layer: _Layer, *, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    assert not layer.interleaved, "rotation of neighbouring elements"
    positions = layer.context.positions
    return rope.rotate(q_rope, k_rope, layer.table, positions, layer.sizes.rope, inverse=inverse)


class _Latent(torch.autograd.Function):
    """The inference kernels, with the log-sum-exp kept for the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        kv_a: torch.Tensor,
        norm_anchor: torch.Tensor,
        kv_b_anchor: torch.Tensor,
        layer: _Layer,
    ) -> torch.Tensor:
        made = _forward(q, kv_a, layer, want_lse=True)
        ctx.save_for_backward(q, made.latent_in, made.q_full, made.rows, made.o_lat, made.lse)
        ctx.layer = layer
        return made.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        q, latent_in, q_full, latent_rows, o_lat, lse = ctx.saved_tensors
        layer: _Layer = ctx.layer
        sizes, packs, kv_b, starts = layer.sizes, layer.context.pack_starts, layer.kv_b, layer.context.sample_starts
        rows, heads, latent, nope = q.shape[0], sizes.num_heads, sizes.latent, sizes.nope
        acc = kv_b.grad.view(heads, -1, latent) if kv_b.trainable and kv_b.grad is not None else None
        assert acc is None or packs is not None, "training weights needs pack_starts"
        assert not kv_b.trainable or acc is not None, f"{kv_b.spec.name}: no open gradient bin"
        assert starts is not None
        parts = _parts(layer)
        d_out = d_out.contiguous().view(rows, heads, sizes.value)
        by_head = o_lat.view(rows, heads, sizes.row)[..., :latent]
        d_lat = torch.zeros(rows, heads, sizes.row, dtype=q.dtype)
        for h, (_, up_v) in enumerate(parts):
            d_head = d_out[:, h].contiguous()
            d_lat[:, h, :latent] = _times(d_head, up_v, transposed=True)
            if acc is not None and packs is not None:
                gemm.weight_grad(d_head, by_head[:, h].contiguous(), packs, acc[h, nope:])
        dq_full, d_key, d_value = native.attention_grad(
            q_full, latent_rows, latent_rows, o_lat, lse, d_lat.view(rows, -1), starts, layer.kv.codec, None,
            num_heads=heads, scale=layer.scale, leaves=layer.leaves,
        )  # fmt: skip
        d_latent = (d_key[:, :latent].float() + d_value[:, :latent].float()).to(q.dtype)
        dq_full = dq_full.view(rows, heads, sizes.row)
        q_heads = q.view(rows, heads, -1)
        dq = torch.empty_like(q_heads)
        for h, (up_k, _) in enumerate(parts):
            d_abs = dq_full[:, h, :latent].contiguous()
            dq[:, h, :nope] = _times(d_abs, up_k, transposed=False)
            if acc is not None and packs is not None:
                gemm.weight_grad(q_heads[:, h, :nope].contiguous(), d_abs, packs, acc[h, :nope])
        d_q_rope, d_k_rope = _rotate(
            dq_full[..., latent:].contiguous().view(rows, -1), d_key[:, latent:].contiguous(), layer, inverse=True
        )
        dq[..., nope:] = d_q_rope.view(rows, heads, sizes.rope)
        d_latent_in = _norm_grad(layer, latent_in, d_latent)
        return dq.view(rows, -1), torch.cat([d_latent_in, d_k_rope], 1), None, None, None


def _norm_grad(layer: _Layer, latent_in: torch.Tensor, d_latent: torch.Tensor) -> torch.Tensor:
    weight = layer.norm
    assert weight.rows is not None and (weight.grad is not None or not weight.trainable), weight.spec.name
    acc = weight.grad if weight.trainable else None
    made = norm.norm_grad(
        latent_in, weight.rows, None, d_latent, layer.norm_eps, 1,
        input_grad=True, acc=acc, pack_starts=layer.context.pack_starts,
    )  # fmt: skip
    assert made is not None
    return made
