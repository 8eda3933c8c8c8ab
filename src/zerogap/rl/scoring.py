"""A run's completions on their way to its reward functions, and what comes back besides scores: prints, faults."""

from collections.abc import Sequence

from zerogap.rl.data_rows import Row
from zerogap.rl.observer import Observer
from zerogap.rl.reward import RewardFunctions, RewardScores
from zerogap.rl.reward_values import RewardError
from zerogap.rl.run_folder import RunFolder
from zerogap.types import Sample


def score_samples(
    rewards: RewardFunctions,
    folder: RunFolder,
    observer: Observer,
    step: int,
    rows: Sequence[Row],
    samples: Sequence[Sample],
) -> RewardScores:
    """Rewards of completions. What functions printed goes to `rewards.log`, what failed and was let pass is told.

    Args:
        rows: the data row of each sample.

    Raises:
        RewardError: a fault that is not let pass; what was printed is written down first.
    """
    ids = [sample.completion_ids.tolist() for sample in samples]
    try:
        scores = rewards.score(rows, [sample.text for sample in samples], ids, step)
    except RewardError as error:
        folder.log_output(step, error.output)
        raise
    folder.log_output(step, scores.output)
    if scores.notes:
        more = f" ({len(scores.notes) - 1} more such faults)" if len(scores.notes) > 1 else ""
        observer.note(f"step {step}: {scores.notes[0]}{more}")
    return scores
