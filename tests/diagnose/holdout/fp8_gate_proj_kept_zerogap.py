"""An ignore rule meant for the router (`mlp.gate*`) also keeps every gate_proj in BF16 on one side (case 31 of the
public list). Two zerogap decoders in FP8.
"""

from zerogap.diagnose.corpus.workshop import Workshop

EXPECTED = "linear/operands"


def sides(workshop: Workshop):
    a = workshop.decoder(numerics="fp8")
    b = workshop.decoder(numerics="fp8", contract={"bf16_tensors": ("mlp.gate*",)})
    return workshop.zerogap_side(a, name="trainer"), workshop.zerogap_side(b, name="engine")
