"""What to change where a run does not fit: settings of the recipe, each with what the run takes then.

Changes that alter no bit come first (recomputed activations, smaller micro-batches, a smaller cache), then those that
alter what is computed or trained, then more devices. Only changes that help are named.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from zerogap.config import RunConfig, load_config
from zerogap.models.inventory import kv_bytes
from zerogap.models.layout import Layout
from zerogap.models.memory import memory_plan, sequence_tokens
from zerogap.models.spec import ModelSpec

MOST_DEVICES = 64


@dataclasses.dataclass(frozen=True)
class Change:
    """Settings to change, and what a device holds then.

    Attributes:
        words: `key=value` words for the command line.
        total: bytes on each device with these changes.
        fits: True if that is no more than there is.
    """

    words: tuple[str, ...]
    total: int
    fits: bool


def advice(spec: ModelSpec, config: RunConfig, layout: Layout, room: int) -> list[Change]:
    """Single changes that save memory, then the fewest of them together (in this order) that make the run fit.

    Args:
        room: bytes that a device has for the run.
    """
    base = memory_plan(spec, config, layout).total
    changes = []
    for words in _settings(spec, config):
        total = memory_plan(spec, with_words(config, words), layout).total
        if total < base:
            changes.append(Change(words, total, total <= room))
    if any(change.fits for change in changes):
        return changes
    together: dict[str, str] = {}
    for change in changes:
        together |= {word.partition("=")[0]: word for word in change.words}  # a later change of a key takes its place
        words = tuple(together.values())
        total = memory_plan(spec, with_words(config, words), layout).total
        if total <= room:
            return [*changes, Change(words, total, True)]
    return [*changes, *_devices(spec, config, layout, room)]


def with_words(config: RunConfig, words: Sequence[str]) -> RunConfig:
    """The recipe with single keys replaced."""
    return load_config(config.model_dump(mode="json"), words)


def _settings(spec: ModelSpec, config: RunConfig) -> Iterator[tuple[str, ...]]:
    """Each a change of one setting."""
    contract, rollout = config.contract(), config.rollout
    if not config.optimizer.activation_recompute:
        yield ("optimizer.activation_recompute=true",)
    if config.optimizer.micro_batch_tokens > contract.pack_tokens:
        yield (f"optimizer.micro_batch_tokens={contract.pack_tokens}",)
    pages = -(-sequence_tokens(config) // rollout.page_size) * rollout.page_size
    needed = pages * sum(kv_bytes(spec, config.rollout_contract())) * rollout.max_sequences / 2**30
    if needed < rollout.kv_cache_memory:
        yield (f"rollout.kv_cache_memory={needed * 1.01:.3g}",)
    if config.algorithm.beta:
        yield ("algorithm.beta=0",)
    count = spec.num_layers // 4
    if config.trainable != ("last:1",):
        yield (f"trainable=last:{max(1, count)}",)
        if count > 1:
            yield ("trainable=last:1",)


def _devices(spec: ModelSpec, config: RunConfig, layout: Layout, room: int) -> Iterator[Change]:
    """The fewest devices, a power of two, that have room for the recipe as it is."""
    count = 2 * layout.devices
    while count <= MOST_DEVICES:
        experts = spec.moe is not None and spec.moe.num_experts % count == 0
        wider = Layout(tp=1, ep=count, dp=count) if experts else Layout(tp=count, ep=layout.ep, dp=1)
        total = memory_plan(spec, config, wider).total
        if total <= room:
            yield Change((f"--devices {count} --layout {wider}",), total, True)
            return
        count *= 2
