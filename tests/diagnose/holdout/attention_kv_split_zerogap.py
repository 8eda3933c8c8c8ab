"""Two zerogap decoders whose contracts differ in kv_split (64 against 128 keys per span), on sequences of 150 and 97
tokens."""

import numpy as np

from zerogap.diagnose.corpus.workshop import Workshop
from zerogap.diagnose.trace import SequenceTrace

EXPECTED = "attention/split"


def sides(workshop: Workshop):
    random = np.random.default_rng(11)
    sequences = [SequenceTrace(random.integers(3, 320, n).astype(np.int32), p) for n, p in ((150, 40), (97, 20))]
    found = []
    for split in (64, 128):
        decoder = workshop.decoder(contract={"kv_split": split})
        found.append(workshop.zerogap_side(decoder, sequences, name=f"spans of {split}"))
    return found[0], found[1]
