"""From what a caller passes to `generate` to checked requests, before any work starts.

Everything that cannot be honoured raises here: too long for the model, too large for the cache, ids that the model does
not have, parameters or keys that do not go with the prompts.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zerogap.errors import ConfigError
from zerogap.models.spec import ModelSpec
from zerogap.ops.sampling import pack_key
from zerogap.rollout.kv_cache import KVCache
from zerogap.rollout.sequence import Request
from zerogap.text import Tokenizer
from zerogap.types import SamplingKey, SamplingParams

Prompt = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, Any]]  # text, token ids, or chat messages


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """What requests are held against."""

    spec: ModelSpec
    max_positions: int
    cache: KVCache
    tokenizer: Tokenizer | None

    def requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        keys: Sequence[SamplingKey] | None,
        num_samples: int,
    ) -> list[Request]:
        """One request per prompt and sample, prompt by prompt.

        Raises:
            ConfigError: names the argument that cannot be honoured.
            CapacityError: a request does not fit the cache even when it is alone.
        """
        if isinstance(prompts, str | np.ndarray) or (
            len(prompts) and isinstance(prompts[0], int | np.integer | Mapping)
        ):
            raise ConfigError("prompts", prompts, "give a list of prompts, also for a single one")
        if num_samples < 1:
            raise ConfigError("num_samples", num_samples, "choose at least 1")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ConfigError("params", len(each), f"give one SamplingParams, or {len(prompts)}, one per prompt")
        all_keys = _keys(keys, len(prompts), num_samples)
        requests = []
        for i, (prompt, chosen) in enumerate(zip(prompts, each, strict=True)):
            ids = self.prompt_ids(prompt, f"prompts[{i}]")
            self.check_size(len(ids), chosen.max_tokens, f"prompts[{i}]")
            if chosen.stop and self.tokenizer is None:
                raise ConfigError("sampling.stop", chosen.stop, "stop strings need a tokenizer: pass one to the engine")
            stops = self.spec.eos_token_ids if chosen.stop_token_ids is None else chosen.stop_token_ids
            for key in all_keys[i * num_samples : (i + 1) * num_samples]:
                requests.append(Request(ids, chosen, key, frozenset(stops)))
        return requests

    def prompt_ids(self, prompt: Prompt, name: str) -> np.ndarray:
        """int32 [P] ids of a prompt in any form."""
        if not isinstance(prompt, Sequence | np.ndarray):
            raise ConfigError(name, prompt, "give text, chat messages, or a non-empty list of token ids")
        is_text = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], Mapping))
        if is_text and self.tokenizer is None:
            raise ConfigError(name, prompt, "this engine has no tokenizer: pass one, or give token ids")
        if self.tokenizer is not None:
            prompt = self.tokenizer.prompt_ids(prompt.tolist() if isinstance(prompt, np.ndarray) else prompt)
        return self.known_ids(prompt, name)

    def known_ids(self, ids: object, name: str) -> np.ndarray:
        """int32 [N] token ids, at least one, all of this model."""
        array = np.asarray(ids)
        if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
            raise ConfigError(name, ids, "give a non-empty list of token ids")
        if array.min() < 0 or array.max() >= self.spec.vocab_size:
            raise ConfigError(name, ids, f"this model's token ids are 0 to {self.spec.vocab_size - 1}")
        return array.astype(np.int32)

    def check_size(self, prompt_tokens: int, max_tokens: int, name: str) -> None:
        """Raise unless the model has the positions and the cache the pages."""
        if prompt_tokens + max_tokens > self.max_positions:
            raise ConfigError(
                name,
                f"{prompt_tokens} tokens + max_tokens {max_tokens}",
                f"the model has {self.max_positions} positions: shorten the prompt or choose max_tokens <= "
                f"{max(0, self.max_positions - prompt_tokens)}",
            )
        self.cache.require_room(prompt_tokens + max_tokens - 1, name)  # the last token drawn is never read


def _keys(keys: Sequence[SamplingKey] | None, num_prompts: int, num_samples: int) -> list[SamplingKey]:
    """One distinct key per request. By default a prompt's slot is its place in the list, at seed 0."""
    if keys is None:
        return [SamplingKey(prompt=i, sample=j) for i in range(num_prompts) for j in range(num_samples)]
    keys = list(keys)
    if len(keys) == num_prompts and num_samples > 1:
        keys = [dataclasses.replace(k, sample=k.sample + j) for k in keys for j in range(num_samples)]
    if len(keys) != num_prompts * num_samples:
        raise ConfigError("keys", len(keys), f"give {num_prompts}, one per prompt")
    seen: set[SamplingKey] = set()
    for key in keys:
        pack_key(key)  # refuses parts out of range
        if key in seen:
            raise ConfigError("keys", key, "two samples share it, so they would be the same draw: make keys distinct")
        seen.add(key)
    return keys
