"""An engine whose decode kernel cuts the keys in 3 spans (flash-decoding) and whose prefill does not; the trainer
scores with the full pass. Everything else gives the same bits on every path.
"""

from zerogap.diagnose.corpus.arithmetic import online
from zerogap.diagnose.corpus.open_modules import exact
from zerogap.diagnose.corpus.workshop import Workshop, attend

EXPECTED = "attention/split"


def decoding(query, key, value, mask, scale):
    parts = 3 if query.shape[2] == 1 else 1
    return online(query, key, value, mask, scale, block=64, parts=parts)


def whole(query, key, value, mask, scale):
    return online(query, key, value, mask, scale, block=64)


def sides(workshop: Workshop):
    def engine(m):
        exact(m)
        attend(m, "ext_decode_spans", decoding)

    def trainer(m):
        exact(m)
        attend(m, "ext_one_span", whole)

    return workshop.pair(engine, trainer, path="decode")
