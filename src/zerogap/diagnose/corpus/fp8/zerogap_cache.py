"""zerogap with an FP8 cache against zerogap with a BF16 one.

Met as `kv_cache_dtype=fp8` in the rollout alone.
"""

from zerogap.diagnose.corpus.workshop import Sides, Workshop
from zerogap.numerics import DType

EXPECTED = "attention/operands"


def sides(workshop: Workshop) -> Sides:
    coded = workshop.decoder(contract={"kv": DType.FP8, "kv_scale": "per_token_head"})
    return (
        workshop.zerogap_side(workshop.decoder(), name="trainer"),
        workshop.zerogap_side(coded, name="rollout", path="decode"),
    )
