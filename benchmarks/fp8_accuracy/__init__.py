"""Does FP8 cost accuracy? Paired training runs of a small model under several contracts, and what they show.

`python -m benchmarks.fp8_accuracy` trains the quick-start model on its task once per arm and seed, evaluates every
trained model on held-out prompts, and writes tables, verdicts and a plot. An arm is a choice of numerics for rollout
and trainer (arms.py); runs of one seed see the same prompts and draw with the same keys, so differences are paired. A
killed benchmark goes on where it was. Whatever the figures say, they are written down; "not resolved" is a verdict.
"""
