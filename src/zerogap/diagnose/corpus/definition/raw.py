"""Both sides sample at 0.7; the rollout records the model's own log-probs, the trainer those of the tempered ones.

Met with vLLM, whose default `logprobs_mode` is `raw_logprobs`.
"""

from zerogap.diagnose.corpus.workshop import Sides, Workshop
from zerogap.diagnose.trace import Definition

EXPECTED = "definition/processed"


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.model(), workshop.model()
    trainer = workshop.torch_side(a, name="trainer", definition=Definition(0.7, True))
    return trainer, workshop.torch_side(b, name="rollout", definition=Definition(0.7, False))
