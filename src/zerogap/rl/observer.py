"""What a run tells whoever watches it. The default says nothing; a display overrides what it shows."""

from collections.abc import Mapping, Sequence
from typing import Any

from zerogap.rollout.progress import Progress


class Observer:
    """Called by a run, in its own thread. Nothing that an observer does can change the run."""

    def started(self, facts: Sequence[tuple[str, str]], first_step: int, max_steps: int) -> None:
        """The run is ready: label and text of each fact; it begins with `first_step`."""

    def phase(self, step: int, name: str) -> None:
        """A phase of a step begins (rollout, reward, reference, train, evaluate, save)."""

    def rollout_progress(self, step: int, progress: Progress) -> None:
        """The engine made a step."""

    def step_done(self, record: Mapping[str, Any]) -> None:
        """A step ended; `record` is its line in metrics.jsonl."""

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """A held-out evaluation ended; `record` is its line in eval.jsonl."""

    def note(self, text: str) -> None:
        """Something that people should know."""

    def ended(self) -> None:
        """The run ended, well or not."""
