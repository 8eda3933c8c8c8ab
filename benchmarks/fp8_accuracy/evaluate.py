"""Greedy accuracy on the held-out prompts, by zerogap's own engine under the contract that the decoder follows."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from benchmarks.fp8_accuracy.held_out import PARTS, HeldOutPrompt, digest
from zerogap.config import RewardConfig
from zerogap.models.decoder import Decoder
from zerogap.rl.data import Row
from zerogap.rl.reward import load_rewards
from zerogap.rollout.engine import Engine
from zerogap.text import Tokenizer
from zerogap.types import SamplingParams

MAX_SEQUENCES = 64


class Evaluator:
    """Evaluates decoders of one model on the same prompts.

    Attributes:
        digest: of the prompts and the longest completion.
    """

    def __init__(self, prompts: tuple[HeldOutPrompt, ...], tokenizer: Tokenizer, max_tokens: int) -> None:
        self.digest = f"{digest(prompts)}x{max_tokens}"
        self._prompts, self._tokenizer, self._max_tokens = prompts, tokenizer, max_tokens
        self._rows = [
            Row(f"held-out:{i}", ({"role": "user", "content": p.prompt},), {"answer": p.answer})
            for i, p in enumerate(prompts)
        ]
        self._ids = [tokenizer.encode_chat(row.prompt) for row in self._rows]
        self._rewards = load_rewards(RewardConfig())

    def evaluate(self, decoder: Decoder) -> dict[str, Any]:
        """Figures of the decoder's current weights: accuracies, mean length, seconds, and which answers are right."""
        began = perf_counter()
        engine = Engine(
            decoder,
            self._tokenizer,
            kv_cache_bytes=1 << 28,
            max_batch_tokens=1024,
            max_sequences=MAX_SEQUENCES,
        )
        samples = engine.generate(self._ids, SamplingParams(temperature=0.0, max_tokens=self._max_tokens))
        ids = [s.completion_ids.tolist() for s in samples]
        scores = self._rewards.score(self._rows, [s.text for s in samples], ids, 0).totals
        correct = [score is not None and score >= 1.0 for score in scores]
        return {
            "contract": str(decoder.identity),
            **accuracies(self._prompts, correct),
            "mean_length": sum(len(row) for row in ids) / len(ids),
            "seconds": perf_counter() - began,
            "correct": "".join(str(int(right)) for right in correct),
        }


def accuracies(prompts: Sequence[HeldOutPrompt], correct: Sequence[bool]) -> dict[str, Any]:
    """`num_prompts`, `accuracy`, and the accuracy of each part."""
    assert len(prompts) == len(correct), "one answer per prompt"
    parts = {}
    for part in PARTS:
        of_part = [right for prompt, right in zip(prompts, correct, strict=True) if prompt.part == part]
        parts[part] = sum(of_part) / len(of_part)
    return {"num_prompts": len(correct), "accuracy": sum(correct) / len(correct), "parts": parts}
