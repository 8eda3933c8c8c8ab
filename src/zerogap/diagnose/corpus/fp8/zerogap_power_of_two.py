"""zerogap with FP8 linear layers on both sides, with FP32 scales on one and powers of two on the other.

Met between generations of hardware.
"""

from zerogap.diagnose.corpus.workshop import Sides, Workshop

EXPECTED = "linear/scale"


def sides(workshop: Workshop) -> Sides:
    other = workshop.decoder(numerics="fp8", contract={"scale_format": "pow2"})
    return (
        workshop.zerogap_side(workshop.decoder(numerics="fp8"), name="trainer"),
        workshop.zerogap_side(other, name="rollout"),
    )
