"""Diagnosis of a logdiff: two recorded or live sides in, the first real cause out, with the evidence for it.

What is cheap and common is ruled out first (ids, what a log-prob means, weights, cache, determinism, neighbours, path,
layout); only then may an operator be blamed, and a field of its numerics only if the simulator reproduced the bits of
both sides from captured inputs. What is not known is called unattributed.
"""

import sys
import types
from typing import Any


class _Diagnose(types.ModuleType):
    """This package is also the public function `zg.diagnose`: calling it is calling `run.diagnose`."""

    def __call__(self, a: Any, b: Any, **options: Any) -> Any:
        from zerogap.diagnose.run import diagnose

        return diagnose(a, b, **options)


sys.modules[__name__].__class__ = _Diagnose
