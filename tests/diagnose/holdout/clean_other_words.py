"""Control: the same numbers under other words: raw against processed at temperature 1 without filters, no log-probs of
prompts on one side, other layout flags, other versions."""

import numpy as np

from zerogap.diagnose.corpus.workshop import Workshop, edited
from zerogap.diagnose.trace import Definition

EXPECTED = "clean"


def sides(workshop: Workshop):
    a = workshop.torch_side(workshop.model("qwen2"), workshop.sequences("qwen2"), definition=Definition(1.0, False))
    b = workshop.torch_side(
        workshop.model("qwen2"), workshop.sequences("qwen2"), definition=Definition(1.0, True, 0, 1.0, 0.0)
    )

    def no_prompt(p, s):
        p[: s.prompt_length] = np.nan
        return p

    return a, edited(b, no_prompt, name="server 7.1", versions={"server": "7.1"}, settings={"seed": 4})
