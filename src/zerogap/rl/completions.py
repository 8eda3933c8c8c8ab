"""Which completions of a step are kept for people, and what is told of each: text, reward, tokens with log-probs.

Log-probs are those of the rollout, written with as many digits as name the FP32 number. The pieces of text of a
completion's tokens join to its text, special tokens included; a character that several tokens share stands with the
last of them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from zerogap.rl.reward import RewardScores
from zerogap.rl.setup import Prompt
from zerogap.text import IncrementalDecoder, Tokenizer
from zerogap.types import Sample


def chosen(num_samples: int, group_size: int, count: int) -> list[int]:
    """At most `count` samples, of as many different groups as there are."""
    spread = sorted(range(num_samples), key=lambda i: (i % group_size, i))
    return sorted(spread[:count])


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token."""
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=False)
    found = [decoder.push(int(token)) for token in ids]
    if found:
        found[-1] += decoder.flush()
    return found


def short(values: np.ndarray) -> list[float]:
    """FP32 numbers as the shortest decimals that name them."""
    assert values.dtype == np.float32, "digits are chosen for FP32"
    return [float(str(value)) for value in values]


def records(
    step: int,
    prompts: Sequence[Prompt],
    samples: Sequence[Sample],
    scores: RewardScores,
    indices: Sequence[int],
    tokenizer: Tokenizer,
) -> Iterator[dict[str, Any]]:
    """Lines of the completions file for the samples `indices`.

    Args:
        prompts: one per sample.
    """
    extra = {name: values for name, values in scores.extra.items() if len(values) == len(samples)}
    for i in indices:
        row, sample = prompts[i].row, samples[i]
        record = {
            "step": step,
            "prompt": list(row.prompt),
            "completion": sample.text,
            "answer": row.columns.get("answer"),
            "reward": scores.totals[i],
            "finish_reason": sample.finish_reason,
            "length": len(sample.completion_ids),
            "tokens": pieces(tokenizer, sample.completion_ids.tolist()),
            "logprobs": short(sample.logprobs),
        }
        yield record | {name: values[i] for name, values in extra.items() if name not in record}
