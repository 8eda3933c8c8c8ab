"""As `raw`, between two stacks whose numerics differ too: what is left after rescoring is the smaller part.

Met between vLLM and any trainer; a tool that looks at operators first blames the attention.
"""

from zerogap.diagnose.corpus.workshop import Sides, Workshop
from zerogap.diagnose.trace import Definition

EXPECTED = "definition/processed"


def sides(workshop: Workshop) -> Sides:
    trainer = workshop.zerogap_side(workshop.decoder(), name="trainer", definition=Definition(0.7, True))
    return trainer, workshop.torch_side(workshop.model(), name="rollout", definition=Definition(0.7, False))
