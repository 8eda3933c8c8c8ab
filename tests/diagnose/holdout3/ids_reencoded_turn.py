"""The trainer encodes the decoded completion again: two tokens in its middle come back as two others.

verl-project/verl#3720, NVIDIA-NeMo/Gym#1416: multi-turn rollouts go through text.
"""

import dataclasses

from zerogap.diagnose.corpus.workshop import Sides, Workshop

EXPECTED = "ids/tokens"


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.model("qwen3"), workshop.model("qwen3")
    known = workshop.sequences("qwen3")
    again = []
    for sequence in known:
        ids = sequence.ids.copy()
        middle = (sequence.prompt_length + len(ids)) // 2
        ids[middle : middle + 2] = (ids[middle : middle + 2] + 41) % 300 + 10
        again.append(dataclasses.replace(sequence, ids=ids))
    return workshop.torch_side(a, again, name="trainer"), workshop.torch_side(b, known, name="rollout")
