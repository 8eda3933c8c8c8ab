"""Block scales of FP8 linear layers: FP32 on one side, rounded up to powers of two (UE8M0, DeepGEMM on Blackwell) on
the other. Two zerogap decoders.
"""

from zerogap.diagnose.corpus.workshop import Workshop

EXPECTED = "linear/scale"


def sides(workshop: Workshop):
    a = workshop.decoder(numerics="fp8", contract={"scale_format": "fp32"})
    b = workshop.decoder(numerics="fp8", contract={"scale_format": "pow2"})
    return workshop.zerogap_side(a, name="trainer"), workshop.zerogap_side(b, name="engine")
