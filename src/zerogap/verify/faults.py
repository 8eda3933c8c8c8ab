"""Planted faults: each makes the real code path wrong in the way that its check of the ladder is for.

`zerogap verify --inject NAME` shows that a check can fail. The check a fault belongs to is the first to turn red; a
later check may follow only where it contains the faulty path. Most faults sit in one decoder layer and look at the
forward context, as a kernel that depends on batch, packing, side, chunking, decoding or paging would; the others change
what is exported or logged. Those of experts sit in the last routed layer, which is trained even where only the last
layers are.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from zerogap.errors import ConfigError
from zerogap.layers.block import Block
from zerogap.layers.latent_attention import LatentAttention
from zerogap.layers.moe import RoutedMLP
from zerogap.models.decoder import Decoder
from zerogap.ops import tap
from zerogap.rollout.engine import Engine
from zerogap.rollout.sampler import DrawnRows
from zerogap.rollout.sequence import Sequence
from zerogap.types import ForwardContext, Sample
from zerogap.verify.checks import NamedTensor, Subject
from zerogap.verify.faulty_layers import (
    FaultyBlock,
    FaultyExperts,
    FaultyLatent,
    RowChooser,
    continues_prompts,
    decodes,
    every_pass,
    higher_ties,
    kept,
    limited_experts,
    loaded,
    of_engine,
    runs,
    with_weights,
)

Layers = Callable[[Decoder], list[Block]]


@dataclasses.dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        name, check: what the command line calls it, and the check that must turn red first.
        text: what is wrong, for `--list-faults`.
        follow: later checks that contain the faulty path and may turn red too.
        layers: for faults in a layer: the decoder's blocks with the faulty one among them.
        seams: for faults outside the decoder: seams of the subject to replace.
        lacks: why a decoder cannot have this fault; empty if it can.
    """

    name: str
    check: int
    text: str
    follow: tuple[int, ...] = ()
    layers: Layers | None = None
    seams: Callable[[Subject], Subject] | None = None
    lacks: Callable[[Decoder], str] = lambda decoder: ""


# ---------------------------------------------------------------------------------------------------- rows of a block


def _many_packs(context: ForwardContext) -> list[int]:
    several = context.pack_starts is not None and len(context.pack_starts) > 2
    return context.pack_starts[:-1].tolist() if several else []  # type: ignore[index]


def _packed_neighbours(context: ForwardContext) -> list[int]:
    if context.sample_starts is None or context.pack_starts is None:
        return []
    return sorted(set(context.sample_starts.tolist()) - set(context.pack_starts.tolist()))


def _engine_rows(context: ForwardContext) -> list[int]:
    return list(range(len(context.positions))) if of_engine(context) else []


def _continued_chunks(context: ForwardContext) -> list[int]:
    return [row for row, count, at in runs(context) if of_engine(context) and count > 1 and at > 0]


def _decode_rows(context: ForwardContext) -> list[int]:
    return [row for row, count, at in runs(context) if of_engine(context) and count == 1 and at > 0]


def _guessed_rows(context: ForwardContext) -> list[int]:
    """Rows that draw in a sequence of which an earlier row draws, too."""
    outputs = set([] if context.output_rows is None else context.output_rows.tolist())
    spans = [range(row + 1, row + count) for row, count, _ in runs(context)]
    return [row for span in spans for row in span if of_engine(context) and {row - 1, row} <= outputs]


def _large_pages(context: ForwardContext) -> list[int]:
    return list(range(len(context.positions))) if of_engine(context) and context.page_size > 16 else []


def _first_block(rows: RowChooser) -> Layers:
    """The first block disturbs some rows."""
    return lambda decoder: [FaultyBlock(decoder.blocks[0], rows), *decoder.blocks[1:]]  # type: ignore[list-item]


# ---------------------------------------------------------------------------------------------------- experts, latents


def _last(blocks: list[Block], part: str, kind: type, change: Callable) -> list[Block]:
    """The blocks with `change` applied to the last part (`mlp`, `attention`) of that kind."""
    at = max(i for i, block in enumerate(blocks) if isinstance(getattr(block, part), kind))
    changed = dataclasses.replace(blocks[at], **{part: change(getattr(blocks[at], part))})
    return [*blocks[:at], changed, *blocks[at + 1 :]]


def _all_tied(mlp: RoutedMLP) -> FaultyExperts:
    """Both sides have a router of equal rows and without a bias; the engine breaks ties the other way."""
    router = mlp.weights.router
    tied = loaded(router, router.value()[:1].expand(router.spec.shape))
    layer = with_weights(mlp, router=tied, bias=None)
    return FaultyExperts(layer, layer, of_engine, higher_ties)


def _limited(mlp: RoutedMLP) -> FaultyExperts:
    return FaultyExperts(mlp, mlp, every_pass, limited_experts)


def _raw_weights(mlp: RoutedMLP) -> FaultyExperts:
    raw = dataclasses.replace(mlp, routing=dataclasses.replace(mlp.routing, normalise=False))
    return FaultyExperts(mlp, raw, of_engine)


def _stale_experts(mlp: RoutedMLP) -> FaultyExperts:
    return FaultyExperts(mlp, with_weights(mlp, down=kept(mlp.weights.down)), of_engine)


def _stale_biases(decoder: Decoder) -> list[Block]:
    """In all layers: a bias decides for few tokens."""

    def stale(block: Block) -> Block:
        if not isinstance(block.mlp, RoutedMLP) or block.mlp.weights.bias is None:
            return block
        old = loaded(block.mlp.weights.bias, block.mlp.weights.bias.value())
        faulty = FaultyExperts(block.mlp, with_weights(block.mlp, bias=old), of_engine)
        return dataclasses.replace(block, mlp=faulty)  # type: ignore[arg-type]

    return [stale(block) for block in decoder.blocks]


def _plain_norm(attention: LatentAttention) -> FaultyLatent:
    norm = attention.norm
    plain = dataclasses.replace(attention, norm=loaded(norm, torch.ones_like(norm.value())))
    return FaultyLatent(attention, plain, continues_prompts)


def _turned_further(attention: LatentAttention) -> FaultyLatent:
    return FaultyLatent(attention, attention, decodes, shift=1)


def _no_experts(decoder: Decoder) -> str:
    return "" if decoder.spec.moe is not None else "only a model with routed experts can have it"


def _no_normalising(decoder: Decoder) -> str:
    normalised = decoder.spec.moe is not None and decoder.spec.moe.routing.normalise
    return "" if normalised else "only a model that normalises its routers' weights (norm_topk_prob) can have it"


def _no_bias(decoder: Decoder) -> str:
    biased = decoder.spec.moe is not None and decoder.spec.moe.has_bias
    return "" if biased else "only a model whose routers have a correction bias (deepseek_v3) can have it"


def _no_latents(decoder: Decoder) -> str:
    return "" if decoder.spec.mla is not None else "only a model with latent attention (deepseek_v3) can have it"


def _no_scales(decoder: Decoder) -> str:
    return "" if decoder.calibrated else "only numerics.kv_scale: calibrated has a scale set"


# ---------------------------------------------------------------------------------------------------- exports, logs


def _stale(tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    for name, tensor in tensors:
        if name == "model.norm.weight" and isinstance(tensor, torch.Tensor):
            tensor = tensor.clone()
            tensor[0] += 1.0
        yield name, tensor


def _rescaled(scales: list) -> list:
    scales[0][0][0] *= 1.5
    return scales


class _Credulous(Engine):
    """An engine that takes every guess for what its row drew."""

    def _take_over(self, sequence: Sequence, drawn: DrawnRows, row: int, drafts: int) -> int:
        guesses = sequence.ids[sequence.length : sequence.length + drafts].tolist()
        ids = [*drawn.ids[:row], *guesses, *drawn.ids[row + drafts :]]
        return super()._take_over(sequence, dataclasses.replace(drawn, ids=ids), row, drafts)


def _shifted(samples: list[Sample]) -> list[Sample]:
    return [dataclasses.replace(s, logprobs=np.roll(s.logprobs, 1)) for s in samples]


def _seams(**replaced: Callable) -> Callable[[Subject], Subject]:
    return lambda subject: dataclasses.replace(subject, **replaced)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- the table


def _experts(change: Callable[[RoutedMLP], FaultyExperts]) -> Layers:
    return lambda decoder: _last(decoder.blocks, "mlp", RoutedMLP, change)


def _latents(change: Callable[[LatentAttention], FaultyLatent]) -> Layers:
    return lambda decoder: _last(decoder.blocks, "attention", LatentAttention, change)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            "batch-size", 1, "a result depends on how many packs one pass computes", (8, 10), _first_block(_many_packs)
        ),
        Fault(
            "expert-capacity",
            1,
            "an expert drops rows beyond its even share of a pass (experts)",
            (2, 3, 4, 5, 6, 7, 8, 10),
            _experts(_limited),
            lacks=_no_experts,
        ),
        Fault("packing", 2, "a sample sees its neighbour in the pack", (8, 10), _first_block(_packed_neighbours)),
        Fault(
            "other-side",
            3,
            "the engine computes a block differently from the trainer",
            (8, 10),
            _first_block(_engine_rows),
        ),
        Fault(
            "router-ties",
            3,
            "between experts with equal logits (planted, too) the engine takes the higher index (experts)",
            (8, 10),
            _experts(_all_tied),
            lacks=_no_experts,
        ),
        Fault(
            "raw-router-weights",
            3,
            "the engine does not normalise its routers' weights (experts)",
            (8, 10),
            _experts(_raw_weights),
            lacks=_no_normalising,
        ),
        Fault(
            "chunk-border",
            4,
            "the first row after a chunk border is wrong",
            (6, 7, 8, 10),
            _first_block(_continued_chunks),
        ),
        Fault(
            "latent-norm",
            4,
            "chunks that continue a prompt store latents without their norm's weight (latent attention)",
            (6, 7, 8, 10),
            _latents(_plain_norm),
            lacks=_no_latents,
        ),
        Fault(
            "decode-row",
            5,
            "a row decoded alone differs from the same row in a prefill",
            (6, 7, 8, 10),
            _first_block(_decode_rows),
        ),
        Fault(
            "latent-rope",
            5,
            "a decoded row is rotated, and its key stored, for the next position (latent attention)",
            (6, 7, 8, 10),
            _latents(_turned_further),
            lacks=_no_latents,
        ),
        Fault("page-size", 6, "results depend on the page size of the cache", (8,), _first_block(_large_pages)),
        Fault(
            "draft-row",
            7,
            "a row that verifies a guess differs from the same row decoded alone",
            (8,),
            _first_block(_guessed_rows),
        ),
        Fault("unverified-draft", 7, "guesses are taken for what was drawn", (8,), seams=_seams(guessing=_Credulous)),
        Fault("stale-weight", 8, "one tensor of the export is not the updated one", seams=_seams(reload=_stale)),
        Fault(
            "stale-scales",
            8,
            "the KV scales of the export are not those of its weights (calibrated only)",
            seams=_seams(rescale=_rescaled),
            lacks=_no_scales,
        ),
        Fault(
            "stale-experts",
            8,
            "after an update the engine still reads the old down projections of one layer (experts)",
            (10,),
            _experts(_stale_experts),
            lacks=_no_experts,
        ),
        Fault(
            "stale-router-bias",
            8,
            "after an update the engine still reads its routers' old correction biases (experts)",
            (10,),
            _stale_biases,
            lacks=_no_bias,
        ),
        Fault("log-shift", 10, "the log-prob logged for a token is its neighbour's", seams=_seams(logged=_shifted)),
    )
}


def fault(name: str) -> Fault:
    """The named fault.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in FAULTS:
        raise ConfigError("inject", name, f"choose one of {', '.join(FAULTS)}")
    return FAULTS[name]


@contextmanager
def planted(fault: Fault, subject: Subject) -> Iterator[Subject]:
    """The subject with the fault in it, inside the block. Passes run op by op there (no recorded programs).

    Raises:
        ConfigError: the subject's model or contract cannot have the fault.
    """
    decoder = subject.decoder
    if why := fault.lacks(decoder):
        raise ConfigError("inject", fault.name, why)
    blocks = decoder.blocks
    if fault.layers is not None:
        decoder.blocks = fault.layers(decoder)
    try:
        with tap.listen(lambda name, outputs, info: None):
            yield subject if fault.seams is None else fault.seams(subject)
    finally:
        decoder.blocks = blocks
