"""Diagnosis of a logdiff: two recorded or live sides in, the first real cause out, with the evidence for it.

What is cheap and common is ruled out first (ids, what a log-prob means, weights, cache, determinism, neighbours, path,
layout); only then may an operator be blamed, and a field of its numerics only if the simulator reproduced the bits of
both sides from captured inputs. What is not known is called unattributed.
"""
