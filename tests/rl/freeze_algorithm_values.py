"""Writes algorithm_values.json: advantages, policy losses and gradients of verl 0.9.1 and of TRL 1.16.0.

Neither is a dependency of the tests; run this in an environment of each when the cases change. It replaces the part of
the file that the named one computes (verl's environment: see freeze_verl_values.py):

    verl-env/bin/python tests/rl/freeze_algorithm_values.py verl
    python -m venv trl-env && trl-env/bin/pip install torch==2.13.0 trl==1.16.0
    trl-env/bin/python tests/rl/freeze_algorithm_values.py trl

Everything runs in float64, where definitions show without rounding. TRL's loss is a method of its trainer; it is called
on an object that has the fields that it reads and no model.
"""

import collections
import importlib.metadata
import json
import sys
import types
from pathlib import Path

import numpy as np
import torch

SPREADS = {"close": 0.05, "wide": 0.5, "extreme": 14.0}
LENGTHS = (6, 1, 4, 5, 2, 6, 3, 6)
GROUPS = (0, 0, 0, 0, 1, 1, 1, 1)
REWARDS = {
    "mixed": (1.0, 0.0, 0.5, 0.0, -1.0, 2.25, 0.0, 1.0),
    "one group equal": (0.3, 0.3, 0.3, 0.3, 0.0, 1.0, 0.0, 0.0),
}
MAX_LENGTH, BETA = 6, 0.07
AGGREGATION = {
    "dapo": "token-mean",
    "grpo": "seq-mean-token-mean",
    "sequence_sum": "seq-mean-token-sum",
    "dr_grpo": "seq-mean-token-sum-norm",
}
KL = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
CLIPS = {"clip": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (0.3, 1.5)}
PATH = Path(__file__).with_name("algorithm_values.json")


def make_batch(spread: float, seed: int) -> dict[str, np.ndarray]:
    """float32 log-probs [8, 6] of policy, old policy and reference, advantages [8]; a row's length is its mask."""
    rng = np.random.default_rng(seed)
    shape = (len(LENGTHS), MAX_LENGTH)
    old = -rng.exponential(1.0, shape).astype(np.float32)
    logp = (old + spread * rng.standard_normal(shape)).astype(np.float32)
    reference = (old + 0.3 * rng.standard_normal(shape)).astype(np.float32)
    return {"old": old, "logp": logp, "ref": reference, "advantages": rng.standard_normal(len(LENGTHS)).round(3)}


def mask() -> torch.Tensor:
    return torch.tensor([[float(t < n) for t in range(MAX_LENGTH)] for n in LENGTHS], dtype=torch.float64)


def wide(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float64))


def live(values: torch.Tensor) -> list[list[float]]:
    return [row[:n] for row, n in zip(values.tolist(), LENGTHS, strict=True)]


# ---------------------------------------------------------------------------------------------------- verl


def verl_values(batches: dict[str, dict[str, np.ndarray]]) -> dict:
    """Advantages and losses by verl's functions."""
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos as verl
    from verl.workers.config import FSDPActorConfig

    index, old, ref = np.array(GROUPS), wide(batches["close"]["old"]), wide(batches["close"]["ref"])
    estimators = {
        "grpo": lambda r: verl.compute_grpo_outcome_advantage(r, mask(), index, epsilon=1e-4),
        "dr_grpo": lambda r: verl.compute_grpo_outcome_advantage(r, mask(), index, norm_adv_by_std_in_grpo=False),
        "rloo": lambda r: verl.compute_rloo_outcome_advantage(r, mask(), index),
        "reinforce_pp": lambda r: verl.compute_reinforce_plus_plus_outcome_advantage(r, mask(), AlgoConfig(gamma=1.0)),
        "reinforce_pp_baseline": lambda r: verl.compute_reinforce_plus_plus_baseline_outcome_advantage(
            r, mask(), index
        ),
    }
    advantages = []
    for rewards, scores in REWARDS.items():
        at_the_end = torch.zeros_like(mask())
        at_the_end[torch.arange(len(LENGTHS)), torch.tensor(LENGTHS) - 1] = torch.tensor(scores, dtype=torch.float64)
        for estimator in (None, *KL):
            kl = 0.0 if estimator is None else BETA * verl.kl_penalty(old, ref, KL[estimator]) * mask()
            for name, function in estimators.items():
                case = {"rewards": rewards, "kl": estimator, "name": name}
                advantages.append({**case, "advantages": live(function(at_the_end - kl)[0])})
    losses = []
    functions = {
        "clip": verl.compute_policy_loss_vanilla,
        "gspo": verl.compute_policy_loss_gspo,
        "cispo": verl.compute_policy_loss_cispo,
    }
    for batch, content in batches.items():
        for surrogate, function in functions.items():
            if (batch, surrogate) == ("extreme", "gspo"):  # its ratio is cut at e^10, ours at e^20
                continue
            for loss_type, mode in AGGREGATION.items():
                low, high = CLIPS[surrogate]
                config = FSDPActorConfig(
                    rollout_n=1, use_dynamic_bsz=True, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=1e30
                )
                config.global_batch_info["loss_scale_factor"] = MAX_LENGTH
                logp = wide(content["logp"]).requires_grad_()
                advantage = wide(content["advantages"]).unsqueeze(-1) * mask()
                loss, _ = function(wide(content["old"]), logp, advantage, mask(), mode, config)
                (slope,) = torch.autograd.grad(loss, logp)
                case = {"batch": batch, "surrogate": surrogate, "loss_type": loss_type}
                losses.append({**case, "loss": loss.item(), "dlogp": live(slope)})
    return {"version": importlib.metadata.version("verl"), "advantages": advantages, "losses": losses}


# ---------------------------------------------------------------------------------------------------- TRL


def trl_trainer(loss_type: str, level: str, low: float, high: float, logp: torch.Tensor) -> types.SimpleNamespace:
    """What `GRPOTrainer._compute_loss` reads of its trainer; the forward pass returns `logp`."""
    same = lambda value, **_: value  # noqa: E731
    return types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
        args=types.SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        accelerator=types.SimpleNamespace(num_processes=1, gather=same, reduce=same),
        model=types.SimpleNamespace(training=True),
        _metrics={"train": collections.defaultdict(list)},
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=low,
        epsilon_high=high,
        beta=BETA,
        max_completion_length=MAX_LENGTH,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
    )


def trl_values(batches: dict[str, dict[str, np.ndarray]]) -> dict:
    """Losses with a KL by TRL's GRPO trainer, and its punishment of long completions."""
    from trl import GRPOTrainer
    from trl.rewards import get_soft_overlong_punishment

    ids = torch.zeros(mask().shape, dtype=torch.long)
    losses = []
    for batch in ("close", "wide"):  # nothing is clamped there
        for loss_type in ("dapo", "grpo", "dr_grpo", "cispo"):
            for level in ("token", "sequence"):
                surrogate = "cispo" if loss_type == "cispo" else "gspo" if level == "sequence" else "clip"
                low, high = CLIPS[surrogate]
                logp = wide(batches[batch]["logp"]).requires_grad_()
                inputs = {
                    **dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids"), ids),
                    "completion_mask": mask(),
                    "advantages": wide(batches[batch]["advantages"]),
                    "old_per_token_logps": wide(batches[batch]["old"]),
                    "ref_per_token_logps": wide(batches[batch]["ref"]),
                    "num_items_in_batch": mask().sum(),
                }
                # its bound for cispo is on the ratio itself
                trainer = trl_trainer(loss_type, level, low, 1.0 + high if surrogate == "cispo" else high, logp)
                loss = GRPOTrainer._compute_loss(trainer, None, inputs)
                (slope,) = torch.autograd.grad(loss, logp)
                case = {"batch": batch, "loss_type": loss_type, "level": level}
                losses.append({**case, "loss": loss.item(), "dlogp": live(slope)})
    punish = get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=8)
    lengths = list(range(22))
    overlong = {"lengths": lengths, "values": punish(completion_ids=[[0] * n for n in lengths])}
    return {"version": importlib.metadata.version("trl"), "losses": losses, "overlong": overlong}


def lines(content: dict) -> list[str]:
    """The entries of a mapping as JSON, a case to a line."""
    found = []
    for key, value in content.items():
        if isinstance(value, dict):
            text = "{\n" + ",\n".join(lines(value)) + "\n}"
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(json.dumps(case) for case in value) + "\n]"
        else:
            text = json.dumps(value)
        found.append(f"{json.dumps(key)}: {text}")
    return found


def main(part: str) -> None:
    batches = {name: make_batch(spread, seed) for seed, (name, spread) in enumerate(SPREADS.items())}
    frozen = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
    frozen["inputs"] = {
        "groups": GROUPS,
        "rewards": REWARDS,
        "beta": BETA,
        "max_length": MAX_LENGTH,
        "clips": CLIPS,
        "batches": {
            name: {
                key: values.tolist() if key == "advantages" else live(values.astype(np.float64))
                for key, values in content.items()
            }
            for name, content in batches.items()
        },
    }
    frozen[part] = {"verl": verl_values, "trl": trl_values}[part](batches)
    PATH.write_text("{\n" + ",\n".join(lines(dict(sorted(frozen.items())))) + "\n}\n", encoding="utf-8")
    print(f"wrote {part} {frozen[part]['version']} to {PATH}")


if __name__ == "__main__":
    main(*sys.argv[1:])
