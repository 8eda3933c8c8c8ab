"""What should worry people about a run that goes on: numbers that are not finite, and steps that teach nothing."""

import math
from collections.abc import Mapping
from typing import Any

FLAT = "frac_reward_zero_std"
FLAT_STEPS = 3  # steps in a row whose groups are all flat before it is said; said again after 6, 12, 24, ...


class Alarms:
    """Looks at the line of every step. Mutated by `of_step`; begins anew where a run resumes."""

    def __init__(self) -> None:
        self._flat = 0
        self._next = FLAT_STEPS

    def of_step(self, record: Mapping[str, Any]) -> list[str]:
        """Warnings about a step's line in metrics.jsonl, in words."""
        step, notes = record["step"], []
        broken = [name for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)]
        if broken:
            named = ", ".join(f"{name} {record[name]}" for name in broken)
            notes.append(f"step {step}: not finite: {named}")
        self._flat = self._flat + 1 if record.get(FLAT) == 1.0 else 0
        if not self._flat:
            self._next = FLAT_STEPS
        elif self._flat >= self._next:
            self._next *= 2
            notes.append(
                f"step {step}: in each of the last {self._flat} steps every group has equal rewards, so that nothing "
                "is learned from them: easier or harder prompts, a finer reward, or a higher rollout.temperature"
            )
        return notes
