"""A held-out evaluation: completions of prompts, their scores, the figures, and a table with every completion.

The same function serves a run between its steps and `zerogap eval`. Draws are keyed by (seed, step, slot, sample), so
an evaluation of the same weights gives the same completions, whatever else was sampled.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zerogap.config import RunConfig
from zerogap.rl import setup
from zerogap.rl.evaluate import is_correct, summarise, vote_of
from zerogap.rl.metrics import completion_metrics, flatten
from zerogap.rl.reward import RewardScores
from zerogap.rl.setup import Prompt
from zerogap.rollout.engine import Engine
from zerogap.rollout.progress import Progress
from zerogap.types import Sample, SamplingKey

Score = Callable[[Sequence[Prompt], Sequence[Sample]], RewardScores]


@dataclasses.dataclass(frozen=True, eq=False)
class HeldOut:
    """An evaluation's outcome.

    Attributes:
        figures: `eval/...` names of the dictionary of metrics.
        table: one row per completion, prompt by prompt: prompt, completion, answer, vote, reward, correct,
            finish_reason, length, and the numbers of prompt and sample.
    """

    figures: Mapping[str, float]
    table: tuple[dict[str, Any], ...]


def evaluate(
    engine: Engine,
    config: RunConfig,
    prompts: Sequence[Prompt],
    score: Score,
    step: int = 0,
    first_slot: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> HeldOut:
    """Complete every prompt `eval.num_samples` times, score and summarise.

    Args:
        prompts: the held-out prompts, at least one.
        score: (prompt of each completion, completions) -> their scores.
        step: the run's step, part of the sampling keys.
        first_slot: slot of the first prompt in the keys; a run takes those that no training prompt has.
    """
    began, count = time.perf_counter(), config.eval.num_samples
    samples = engine.generate(
        [prompt.ids for prompt in prompts],
        setup.evaluation_params(config),
        [SamplingKey(config.seed, step, first_slot + i) for i in range(len(prompts))],
        num_samples=count,
        progress=progress,
    )
    of_sample = [prompt for prompt in prompts for _ in range(count)]
    totals = score(of_sample, samples).totals
    votes = [vote_of(sample.text) for sample in samples]
    groups = range(0, len(samples), count)
    figures = summarise(
        [totals[i : i + count] for i in groups], config.eval.pass_k, votes=[votes[i : i + count] for i in groups]
    )
    figures |= {f"eval/{name}": value for name, value in flatten(completion_metrics(samples)).items()}
    seconds = time.perf_counter() - began
    table = tuple(
        {
            "prompt_number": i // count,
            "sample": i % count,
            "prompt": list(of_sample[i].row.prompt),
            "completion": sample.text,
            "answer": of_sample[i].row.columns.get("answer"),
            "vote": None if votes[i] is None else str(votes[i]),
            "reward": totals[i],
            "correct": is_correct(totals[i]),
            "finish_reason": sample.finish_reason,
            "length": len(sample.completion_ids),
        }
        for i, sample in enumerate(samples)
    )
    return HeldOut(figures | {"eval/time": seconds}, table)
