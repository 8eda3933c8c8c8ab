"""Writes verl_values.json: what verl 0.9.1's rollout correction makes of random batches.

verl is no dependency of the tests; run this in an environment of its own when the cases change:

    python -m venv verl-env
    verl-env/bin/pip install torch==2.13.0 numpy packaging transformers
    verl-env/bin/pip install --no-deps verl==0.9.1 tensordict==0.10.0 ray omegaconf hydra-core codetiming \
        torchdata pyvers cloudpickle orjson msgpack jsonschema attrs referencing rpds-py jsonschema-specifications
    verl-env/bin/python tests/rl/freeze_verl_values.py

Every case is run twice: in float32, as verl runs, and in float64, where its definition shows without its rounding.
"""

import importlib.metadata
import json
from pathlib import Path

import numpy as np
import torch
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

ROWS, LENGTH = 6, 8
SPREADS = {"close": 0.05, "wide": 0.5, "extreme": 14.0}
BATCH_METRICS = ("kl", "k3_kl", "chi2_token", "chi2_seq")
CASE_METRICS = ("rollout_is_eff_sample_size", "rollout_is_mean", "rollout_rs_masked_fraction")
DTYPES = {"float32": torch.float32, "float64": torch.float64}
LEVELS = {"sequence_sum": "seq_sum", "sequence_mean": "seq_mean", "sequence_max": "seq_max", "token": "token"}


def make_batch(spread: float, seed: int) -> dict:
    """Log-probs of a trainer and a rollout; the last row has no live token."""
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(1.0, (ROWS, LENGTH)).astype(np.float32)
    old = (rollout + spread * rng.standard_normal((ROWS, LENGTH))).astype(np.float32)
    mask = (rng.random((ROWS, LENGTH)) > 0.2).astype(int)
    mask[-1] = 0
    return {"old": old, "rollout": rollout, "mask": mask}


def statistics(batch: dict) -> dict[str, np.ndarray]:
    """float64 values that a rejection judges by, to choose limits that split a batch."""
    live = batch["mask"].astype(bool)
    d = np.clip(batch["old"].astype(np.float64) - batch["rollout"], -20, 20)
    per_token = {"k1": d, "k2": 0.5 * d * d, "k3": np.expm1(d) - d}
    found = {}
    for name, values in per_token.items():
        rows = [row[m] for row, m in zip(values, live, strict=True) if m.any()]
        found[f"token_{name}"] = values[live]
        found[f"sequence_sum_{name}"] = np.array([row.sum() for row in rows])
        found[f"sequence_mean_{name}"] = np.array([row.mean() for row in rows])
        found[f"sequence_max_{name}"] = np.array([row.max() for row in rows])
    del found["sequence_max_k1"]
    return found


def middle(values: np.ndarray) -> float:
    """A short number between the two middle values."""
    ordered = np.sort(values)
    low, high = ordered[len(ordered) // 2 - 1 : len(ordered) // 2 + 1]
    for digits in range(2, 17):
        limit = float(f"{(low + high) / 2:.{digits}g}")
        if low < limit < high:
            return limit
    raise AssertionError("equal middle values")


def ratio_bounds(values: np.ndarray) -> list[float]:
    """Bounds on the ratio that let about half of the log-ratios through."""
    limit = middle(np.abs(values))
    return [float(np.exp(-limit)), float(np.exp(limit))]


def cases_of(batch: dict) -> list[dict]:
    """Settings of zerogap's correction."""
    found = statistics(batch)
    limits = {name: ratio_bounds(v) if name.endswith("k1") else middle(v) for name, v in found.items()}
    cases = [
        {"kind": "token_tis"},
        {"kind": "sequence_tis"},
        {"kind": "token_mis"},
        {"kind": "sequence_mis"},
        {"kind": "geometric_mis"},
        {"kind": "geometric_mis", "lower": 0.97, "upper": 1.02},
        {"kind": "icepop"},
        {"kind": "sequence_mask"},
        {"kind": "token_tis", "upper": 1.1, "normalise": True},
        {"kind": "sequence_tis", "normalise": True},
        {"kind": "icepop", "lower": 0.1, "upper": 9.0, "normalise": True},
        *({"kind": "none", "reject": {name: limit}} for name, limit in limits.items()),
        {"kind": "token_tis", "reject": {n: limits[n] for n in ("token_k1", "sequence_mean_k3")}},
    ]
    if np.abs(found["token_k1"]).max() < 20.0:  # where no completion is inside the bounds, verl divides by zero
        cases.append({"kind": "sequence_mask", "lower": 0.6, "upper": 2.1})
    return cases


def verl_settings(case: dict) -> dict:
    """The same in verl's words. Its k1 is -log rho, so that bounds on the ratio become their reciprocals."""
    kind, reject = case["kind"], dict(case.get("reject", {}))
    lower, upper = case.get("lower"), case.get("upper")
    settings: dict = {"rollout_is": None, "rollout_is_threshold": None}
    if kind in ("token_tis", "sequence_tis"):
        settings = {"rollout_is": kind[:-4], "rollout_is_threshold": upper or 2.0}
    elif kind in ("token_mis", "sequence_mis"):
        settings = {"rollout_is": kind[:-4], "rollout_is_threshold": upper or 2.0}
        reject["token_k1" if kind == "token_mis" else "sequence_sum_k1"] = [lower or 0.5, upper or 2.0]
    elif kind == "geometric_mis":
        reject["sequence_mean_k1"] = [lower or 0.999, upper or 1.001]
    elif kind == "icepop":
        settings = {"rollout_is": "token", "rollout_is_threshold": f"{lower or 0.5}_{upper or 5.0}"}
    elif kind == "sequence_mask":
        settings = {"rollout_is": "sequence", "rollout_is_threshold": f"{lower or 1e-30}_{upper or 3.0}"}
    settings["rollout_is_batch_normalize"] = case.get("normalise", False)
    if reject:
        levels = {name: name.rpartition("_") for name in reject}
        settings["rollout_rs"] = ",".join(f"{LEVELS[level]}_{kl}" for level, _, kl in levels.values())
        settings["rollout_rs_threshold"] = ",".join(
            f"{1 / limit[1]!r}_{1 / limit[0]!r}" if isinstance(limit, list) else repr(limit)
            for limit in reject.values()
        )
    return settings


def run(batch: dict, settings: dict, dtype: torch.dtype) -> dict:
    """verl's weights at live positions, its mask, and the metrics that both sides have."""
    old, rollout = (torch.from_numpy(batch[name]).to(dtype) for name in ("old", "rollout"))
    mask = torch.from_numpy(batch["mask"])
    weights, kept, metrics = compute_rollout_correction_and_rejection_mask(old, rollout, mask, **settings)
    shortest = (lambda v: float(str(np.float32(v)))) if dtype == torch.float32 else float
    return {
        "weights": None
        if weights is None
        else [shortest(v) for v in weights.batch["rollout_is_weights"][mask.bool()].tolist()],
        "mask": ["".join(map(str, row)) for row in kept.tolist()],
        "metrics": chosen_metrics(metrics, CASE_METRICS),
    }


def chosen_metrics(metrics: dict, names: tuple[str, ...]) -> dict[str, float]:
    """Those of the named metrics that verl reports."""
    return {name: metrics[f"rollout_corr/{name}"] for name in names if f"rollout_corr/{name}" in metrics}


def batch_metrics(batch: dict, dtype: torch.dtype) -> dict[str, float]:
    """verl's figures of the gap itself, which no setting changes."""
    old, rollout = (torch.from_numpy(batch[name]).to(dtype) for name in ("old", "rollout"))
    _, _, metrics = compute_rollout_correction_and_rejection_mask(old, rollout, torch.from_numpy(batch["mask"]))
    return chosen_metrics(metrics, BATCH_METRICS)


def main() -> None:
    batches = {name: make_batch(spread, seed) for seed, (name, spread) in enumerate(SPREADS.items())}
    cases = [
        {
            "batch": name,
            "correction": case,
            "verl": verl_settings(case),
            **{key: run(batch, verl_settings(case), dtype) for key, dtype in DTYPES.items()},
        }
        for name, batch in batches.items()
        for case in cases_of(batch)
    ]
    frozen = {
        "verl": importlib.metadata.version("verl"),
        "torch": torch.__version__,
        "batches": {
            name: {
                "old": [[float(str(v)) for v in row] for row in batch["old"]],
                "rollout": [[float(str(v)) for v in row] for row in batch["rollout"]],
                "mask": ["".join(map(str, row)) for row in batch["mask"].tolist()],
                **{key: batch_metrics(batch, dtype) for key, dtype in DTYPES.items()},
            }
            for name, batch in batches.items()
        },
        "cases": cases,
    }
    path = Path(__file__).with_name("verl_values.json")
    lines = ",\n".join(json.dumps(case) for case in frozen.pop("cases"))
    head = json.dumps(frozen)
    path.write_text(f'{head[:-1]}, "cases": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"wrote {len(cases)} cases to {path}")


if __name__ == "__main__":
    main()
