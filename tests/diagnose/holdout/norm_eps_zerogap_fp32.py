"""rms_norm_eps 1e-6 (the library's default) on one side, 1e-5 (the config's) on the other; two zerogap decoders in
FP32. Seen in torchtune PR 152, vLLM PR 35515, candle PR 271.
"""

from zerogap.diagnose.corpus.workshop import Workshop

EXPECTED = "norm/formula"


def sides(workshop: Workshop):
    sequences = workshop.sequences(dtype="float32")
    a = workshop.decoder(numerics="fp32", norm_eps=1e-5)
    b = workshop.decoder(numerics="fp32", norm_eps=1e-6)
    return workshop.zerogap_side(a, sequences, name="trainer"), workshop.zerogap_side(b, sequences, name="engine")
