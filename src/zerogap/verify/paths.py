"""The ways in which one model can be asked for the same logits, so that checks can compare them bit for bit.

A trainer path runs packed sequences through the decoder while autograd records; an engine path runs requests through
the rollout engine with an op tap on the head. All return FP32 logits, never rounded.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from zerogap.models.decoder import Decoder
from zerogap.ops import tap
from zerogap.ops.gemm import head_logits
from zerogap.rollout.engine import Engine
from zerogap.train.packing import PAGE_SIZE, Pack, build_micro_batch
from zerogap.types import Sample, SamplingKey, SamplingParams

Ids = Sequence[int]


def as_sample(decoder: Decoder, ids: Ids, prompt_length: int = 1) -> Sample:
    """A sample whose completion is given instead of drawn; its log-probs are zeros."""
    values = np.asarray(ids, np.int32)
    completion = len(ids) - prompt_length
    return Sample(
        prompt_ids=values[:prompt_length],
        completion_ids=values[prompt_length:],
        logprobs=np.zeros(completion, np.float32),
        versions=np.full(completion, decoder.version, np.int64),
        identity=decoder.identity,
        key=SamplingKey(),
        params=SamplingParams(max_tokens=max(1, completion)),
        finish_reason="length",
    )


def trainer_logits(decoder: Decoder, sequences: Sequence[Ids], packs: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits of every position but the last, in one forward pass of the trainer.

    Args:
        sequences: token ids, at least two each.
        packs: indices into `sequences`: how they are packed and in which order.

    Returns:
        FP32 [len - 1, V] per sequence of `packs`, in order.
    """
    samples = [as_sample(decoder, ids) for ids in sequences]
    planned = [Pack(tuple(pack), sum(samples[i].num_tokens for i in pack)) for pack in packs]
    micro = build_micro_batch(planned, samples)
    layers = decoder.scratch_kv(decoder.codec().allocate(micro.num_pages, PAGE_SIZE))
    with torch.enable_grad():
        hidden = decoder.hidden(micro.ids, micro.context, layers)
    logits = head_logits(hidden.detach(), decoder.head)
    return list(logits.split([len(sequences[i]) - 1 for i in micro.samples]))


@dataclasses.dataclass
class HeadLogits:
    """Collects copies of what the head computed; used as a tap callback."""

    rows: list[torch.Tensor] = dataclasses.field(default_factory=list)

    def __call__(self, name: str, outputs: object, info: object) -> None:
        if name == "head_logits":
            (logits,) = outputs.values()  # type: ignore[attr-defined]
            self.rows += list(logits.detach().clone().unbind(0))


def engine_logits(decoder: Decoder, prompts: Sequence[Ids], **settings: object) -> list[torch.Tensor]:
    """Logits after the last token of each prompt, by the engine's prefill.

    Args:
        settings: of the `Engine`: page size, most tokens per pass (chunks), prefix cache, memory.

    Returns:
        FP32 [V] per prompt. Requests are served in order, so rows of the head arrive in order.
    """
    engine = Engine(decoder, **settings)  # type: ignore[arg-type]
    seen = HeadLogits()
    with tap.listen(seen):
        engine.generate([list(p) for p in prompts], SamplingParams(temperature=0.0, max_tokens=1))
    assert len(seen.rows) == len(prompts), f"{len(seen.rows)} rows of logits for {len(prompts)} prompts"
    return seen.rows


def decode_logits(decoder: Decoder, prompt: Ids, length: int, key: SamplingKey) -> tuple[Sample, list[torch.Tensor]]:
    """One request decoded alone, token by token: the sample and the FP32 [V] logits each token was drawn from."""
    engine = Engine(decoder, prefix_cache=False, max_sequences=1, max_batch_tokens=max(16, len(prompt)))
    seen = HeadLogits()
    params = SamplingParams(max_tokens=length, stop_token_ids=())
    with tap.listen(seen):
        (sample,) = engine.generate([list(prompt)], params, [key])
    return sample, seen.rows
