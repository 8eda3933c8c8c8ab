"""A harmless difference: versions, settings and the engine's parallel sizes are told by one side only.

Met whenever two programs record themselves.
"""

from zerogap.diagnose.corpus.workshop import Sides, Workshop, retold

EXPECTED = "clean"


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair(family="deepseek_v3")
    settings = {"max_tokens": 24, "seed": 9, "enable_prefix_caching": True}
    return a, retold(b, settings=settings, versions={"engine": "0.9"}, name="engine, another build")
