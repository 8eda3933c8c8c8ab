"""zerogap with FP8 linear layers against zerogap in BF16.

Met as FP8 on one side only, here with everything else equal bit for bit.
"""

from zerogap.diagnose.corpus.workshop import Sides, Workshop

EXPECTED = "linear/operands"


def sides(workshop: Workshop) -> Sides:
    return (
        workshop.zerogap_side(workshop.decoder(numerics="bf16"), name="trainer"),
        workshop.zerogap_side(workshop.decoder(numerics="fp8"), name="rollout"),
    )
