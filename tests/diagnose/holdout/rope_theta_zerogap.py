"""rope_theta 500000 is in the config; one side reads another key of it and rotates with the default 10000. Two zerogap
decoders over the same weights."""

from zerogap.diagnose.corpus.workshop import Workshop
from zerogap.models.rope_spec import RopeSpec

EXPECTED = "rope/formula"


def sides(workshop: Workshop):
    a = workshop.decoder(rope=RopeSpec(500000.0))
    b = workshop.decoder(rope=RopeSpec(10000.0))
    return workshop.zerogap_side(a, name="trainer"), workshop.zerogap_side(b, name="engine")
