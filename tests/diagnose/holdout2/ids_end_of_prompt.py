"""The tokenizer of one side ends prompts with the end-of-sequence token; completions follow it.

Met with tokenizers that have `add_eos_token`.
"""

import dataclasses

import numpy as np

from zerogap.diagnose.corpus.workshop import EOS, Sides, Workshop

EXPECTED = "ids/special_tokens"


def sides(workshop: Workshop) -> Sides:
    plain = workshop.sequences()
    ended = tuple(
        dataclasses.replace(s, ids=np.insert(s.ids, s.prompt_length, EOS), prompt_length=s.prompt_length + 1)
        for s in plain
    )
    trainer = workshop.torch_side(workshop.model(), plain, name="trainer")
    return trainer, workshop.torch_side(workshop.model(), ended, name="rollout")
