"""An engine derives the head size of the softmax scale as hidden_size / num_heads (16) although the config says
head_dim 32."""

from zerogap.diagnose.corpus.arithmetic import eager
from zerogap.diagnose.corpus.workshop import Workshop, attend

EXPECTED = "attention/scale"


def wrong(query, key, value, mask, scale):
    return eager(query, key, value, mask, 16**-0.5)


def sides(workshop: Workshop):
    return workshop.pair(lambda m: attend(m, "ext_scale", wrong))
