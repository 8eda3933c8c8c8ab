"""The engine samples at 1.3 and returns raw log-probs, its default; the trainer divides its logits by 1.3.

vllm-project/vime#64, allenai/open-instruct#1678: vLLM's `logprobs_mode` is `raw_logprobs` unless asked otherwise.
"""

from zerogap.diagnose.corpus.workshop import Sides, Workshop
from zerogap.diagnose.trace import Definition

EXPECTED = "definition/processed"


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.model("qwen3"), workshop.model("qwen3")
    known = workshop.sequences("qwen3")
    trainer = workshop.torch_side(a, known, name="trainer", definition=Definition(1.3, True))
    return trainer, workshop.torch_side(b, known, name="rollout", definition=Definition(1.3, False))
