"""A reward with the signature of verl's `compute_score`, as `recipes/smollm2-verl-parquet.yaml` names it.

verl calls it once per completion, with the row's `data_source`, `reward_model.ground_truth` and `extra_info`. Whatever
stands beside `score` in the result becomes a column of `completions.jsonl` and, if it is a number, a metric.
"""

import re
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """1.0 for the right final number after `####`, 0.1 for a final number in that form, else 0.0."""
    said = re.findall(r"#### *(-?[0-9][0-9.,]*)", solution_str)
    final = said[-1].replace(",", "").rstrip(".") if said else None
    right = final == ground_truth.replace(",", "")
    return {"score": 1.0 if right else 0.1 * (final is not None), "acc": right, "said": final}
