"""What each logged name means, and under which name other frameworks log the same or a similar number.

One table, so that the page docs/metrics.md is written from it and a test can hold every name that a run logs against
it. Formulas use d = log p_trainer - log p_rollout of a drawn token and rho = e^d; w is the weight that a correction
applies. "Tokens" are completion tokens that take part in the loss; "completions" those that have one.

Other frameworks' names are those of TRL 1.16.0 and verl 0.9.1, and of the public repositories of NeMo RL, prime-rl and
slime as they stood in mid-2026. A name alone means the same number; a difference in definition is said.
"""

import dataclasses
import re

PEERS = ("TRL", "verl", "NeMo RL", "prime-rl", "slime")


@dataclasses.dataclass(frozen=True)
class Metric:
    """One logged number.

    Attributes:
        name: as logged; `{...}` stands for a function, phase or count.
        formula: what it is.
        peers: framework -> its name, or `name: how it differs`.
    """

    name: str
    formula: str
    peers: dict[str, str] = dataclasses.field(default_factory=dict)

    def matches(self, logged: str) -> bool:
        """Whether a logged name is this metric's."""
        parts = re.split(r"\{[\w ]+\}", self.name)
        return re.fullmatch(r"[^/]+".join(re.escape(part) for part in parts), logged) is not None


def _same(*names: str) -> dict[str, str]:
    """Peers from names in the order of `PEERS`; an empty name: none."""
    assert len(names) <= len(PEERS), "one name per framework"
    return {peer: name for peer, name in zip(PEERS, names, strict=False) if name}


TRAINING = (
    Metric(
        "reward",
        "mean of completions' weighted reward sums, with the overlong punishment where there is one (never with a KL); "
        "completions without a reward left out",
        _same("reward", "critic/score/mean", "reward", "reward/{env}/mean", "rollout/raw_reward"),
    ),
    Metric(
        "reward_std",
        "mean over prompts of the standard deviation (n - 1) within the prompt's group",
        _same("reward_std: over the whole batch instead of per group"),
    ),
    Metric(
        "frac_reward_zero_std",
        "share of prompts whose completions all have one reward, so that nothing is learned from them",
        _same(
            "frac_reward_zero_std",
            "",
            "baseline_reward/pct_mixed: 100 minus it, for rewards 0 and 1 only",
            "solve_none/{env}: the all-zero part; solve_all/{env} the other",
            "rollout/zero_std/count_{reward}: a count per reward",
        ),
    ),
    Metric("rewards/{f}/mean", "mean of one reward function, None left out", _same("rewards/{f}/mean")),
    Metric(
        "reward/{data set}",
        "mean reward of one data set's completions, where several are mixed",
        _same("", "", "", "reward/{env}/mean"),
    ),
    Metric("rewards/errors", "scores that are missing because a reward function failed (reward.on_error: none)"),
    Metric("rewards/timeouts", "scores that are missing because a call took longer than it may (reward.timeout)"),
    Metric("rewards/{f}/std", "its standard deviation (n - 1) over the batch", _same("rewards/{f}/std")),
    Metric("rewards/{f}/{key}", "mean of a number that a function of verl's signature returned beside its score"),
    Metric(
        "loss",
        "the global loss, KL, entropy and balance terms included; mean over the updates of a step",
        _same("loss", "actor/pg_loss: surrogate only", "loss", "loss/mean", "train/loss"),
    ),
    Metric(
        "entropy",
        "mean over tokens of the exact entropy of the distribution the token was drawn from",
        _same(
            "entropy",
            "actor/entropy",
            "approx_entropy: estimated from the drawn tokens",
            "entropy/mean",
            "train/entropy_loss",
        ),
    ),
    Metric(
        "kl",
        "mean over tokens of algorithm.kl_estimator against the initial model (not the gap to the rollout)",
        _same(
            "kl: k3, times the ratio unless use_bias_correction_kl is off",
            "actor/kl_loss: joined like the loss",
            "kl_penalty",
            "",
            "train/kl_loss",
        ),
    ),
    Metric(
        "clip_ratio/low_mean",
        "share of tokens with ratio < 1 - epsilon and a negative advantage: no gradient; with surrogate cispo of any "
        "advantage, the weight is clipped",
        _same("clip_ratio/low_mean"),
    ),
    Metric(
        "clip_ratio/high_mean",
        "share of tokens with ratio > 1 + epsilon_high and a positive advantage: no gradient; with surrogate cispo of "
        "any advantage, the weight is clipped",
        _same("clip_ratio/high_mean: cispo_clip_ratio for cispo, positive advantages only"),
    ),
    Metric(
        "clip_ratio/region_mean",
        "the sum of both",
        _same(
            "clip_ratio/region_mean",
            "actor/pg_clipfrac: its ..._lower is something else, dual clip",
            "",
            "",
            "train/pg_clipfrac",
        ),
    ),
    Metric(
        "grad_norm",
        "global L2 norm of the gradient before clipping; mean over the updates of a step",
        _same("grad_norm", "actor/grad_norm", "grad_norm", "optim/grad_norm", "train/grad_norm"),
    ),
    Metric(
        "learning_rate",
        "of the step's last update",
        _same("learning_rate", "actor/lr", "lr", "optim/lr", "train/lr-pg_0"),
    ),
)

GROUPS = (
    Metric("groups/kept_ratio", "share of the step's groups that take part in the loss"),
    Metric(
        "groups/rounds",
        "rounds of sampling until no group had to be replaced, or algorithm.dynamic_sampling.max_rounds",
    ),
    Metric("groups/prompts", "prompts that the step took, replaced ones included"),
    Metric("groups/position", "prompts taken so far: where the next step begins in the order of prompts"),
)

COMPLETIONS = (
    Metric(
        "completions/mean_length",
        "tokens per completion",
        _same(
            "completions/mean_length",
            "response_length/mean",
            "mean_gen_tokens_per_sample",
            "decode_len/{env}/mean",
            "rollout/response_len/mean",
        ),
    ),
    Metric(
        "completions/min_length",
        "shortest",
        _same(
            "completions/min_length",
            "response_length/min",
            "min_gen_tokens_per_sample",
            "decode_len/{env}/min",
            "rollout/response_len/min",
        ),
    ),
    Metric(
        "completions/max_length",
        "longest",
        _same(
            "completions/max_length",
            "response_length/max",
            "max_gen_tokens_per_sample",
            "decode_len/{env}/max",
            "rollout/response_len/max",
        ),
    ),
    Metric(
        "completions/mean_terminated_length",
        "of those that ended by themselves; absent where none did",
        _same("completions/mean_terminated_length: 0 where none did"),
    ),
    Metric(
        "completions/clipped_ratio",
        "share of completions cut at max_completion_length",
        _same(
            "completions/clipped_ratio",
            "response_length/clip_ratio: share as long as the padded batch",
            "truncation_rate",
            "is_truncated/{env}/mean",
            "rollout/truncated_ratio",
        ),
    ),
)

GAP = (
    Metric("one_sided", "1 where the rollout has a contract of its own, so that the run is not exact; else 0"),
    Metric(
        "bit_wise/compared_tokens",
        "drawn at the trainer's own weight version, so that bits must be equal (in a one-sided run they are not)",
    ),
    Metric("bit_wise/mismatched_tokens", "those whose FP32 log-prob differs in any bit"),
    Metric("bit_wise/ratio_tokens_different/mean", "share of live compared tokens that differ in any bit"),
    Metric("bit_wise/logprob_diff/mean", "mean of abs(d)"),
    Metric("bit_wise/logprob_diff/max", "largest abs(d)"),
    Metric(
        "sampling/sampling_logp_difference/mean",
        "mean of abs(d)",
        _same(
            "sampling/sampling_logp_difference/mean",
            "",
            "",
            "",
            "train/train_rollout_logprob_abs_diff: mean per completion first",
        ),
    ),
    Metric("sampling/sampling_logp_difference/max", "largest abs(d)", _same("sampling/sampling_logp_difference/max")),
    Metric(
        "sampling/kl",
        "mean of -d: KL(rollout || trainer), unbiased, may be negative",
        _same("", "rollout_corr/kl"),
    ),
    Metric(
        "sampling/k3_kl",
        "mean of rho - 1 - d, never negative: the usual mismatch KL",
        _same(
            "",
            "rollout_corr/k3_kl: not clamped at abs(d) = 20",
            "gen_kl_error: by the estimator of its reference KL, k3 unless set",
            "mismatch_kl/mean: mean per completion first",
        ),
    ),
    Metric("sampling/chi2_token", "mean of rho^2 - 1", _same("", "rollout_corr/chi2_token")),
    Metric(
        "sampling/chi2_seq",
        "mean over completions of (product of rho)^2 - 1",
        _same("", "rollout_corr/chi2_seq: completions without a live token count as 0"),
    ),
)

EXPERTS = (
    Metric(
        "moe/load_max",
        "largest load of an expert, in mean loads of its layer; the worst layer",
    ),
    Metric("moe/idle_experts", "experts that no token of the batch went to, all layers together"),
    Metric(
        "moe/margin_min",
        "smallest lead, in score (plus correction bias), of a token's last chosen expert over the next one",
    ),
    Metric("moe/margin_p01", "first percentile of these leads, over tokens and layers"),
    Metric(
        "moe/different_experts",
        "share of compared tokens that any layer of the trainer sends to other experts than the rollout's; "
        "0 in an exact run; needs moe.record_routing",
    ),
    Metric(
        "moe/balance_loss",
        "mean over completions and layers of sum_i f_i P_i, prompts included: 1 where loads are even; "
        "moe.balance_loss times its sum over layers is part of the loss",
    ),
)

CORRECTION = (
    *(
        Metric(
            f"sampling/importance_sampling_ratio/{statistic}",
            f"{words} of w, the weight that is applied, 0 for a rejected token; without a correction, of rho",
            _same(
                f"sampling/importance_sampling_ratio/{statistic}: a sequence weight counts once per completion",
                f"rollout_corr/rollout_is_{statistic}: before rejection and normalisation",
                nemo,
            ),
        )
        for statistic, words, nemo in (
            ("min", "smallest", ""),
            ("mean", "mean", "sampling_importance_ratio"),
            ("max", "largest", ""),
        )
    ),
    *(
        Metric(
            f"sampling/raw_importance_sampling_ratio/{statistic}",
            f"{words} of the ratio before any bound: rho, its product or its geometric mean, as the kind judges",
            _same("", "", "", "", slime),
        )
        for statistic, words, slime in (("min", "smallest", ""), ("mean", "mean", "train/tis"), ("max", "largest", ""))
    ),
    Metric(
        "sampling/frac_modified_importance_sampling_ratio",
        "share of tokens whose weight was cut or set to 0, or that were rejected",
        _same(
            "",
            "rollout_corr/rollout_is_oob_ratio: IcePop only; else rollout_is_ratio_fraction_high plus ..._low",
            "is_oob_ratio",
            "is_masked/mean",
            "train/tis_clipfrac",
        ),
    ),
    Metric(
        "sampling/frac_rejected_tokens",
        "share of tokens taken out of the loss and its denominators",
        _same("", "rollout_corr/rollout_rs_masked_fraction"),
    ),
    Metric(
        "sampling/frac_rejected_sequences",
        "share of completions with no token left",
        _same("", "rollout_corr/rollout_rs_seq_masked_fraction: with any token rejected"),
    ),
    Metric(
        "sampling/frac_vetoed_sequences",
        "share of completions with a token of a ratio below algorithm.correction.veto",
        _same("", "", "", "sequence_masked_low/mean"),
    ),
    Metric(
        "sampling/effective_sample_size",
        "(sum w)^2 / (n sum w^2) over n tokens, rejected ones with w = 0; 1: all count alike",
        _same("", "rollout_corr/rollout_is_eff_sample_size: before rejection"),
    ),
)

SPECULATION = (
    Metric(
        "speculation/acceptance_rate",
        "share of guessed tokens that were drawn; the row of any other was computed for nothing",
        _same("", "", "", "", "rollout/spec_accept_rate"),
    ),
    Metric(
        "speculation/tokens_per_pass",
        "tokens that a sequence gets from one forward pass of decoding, 1 without speculation",
        _same("", "", "", "", "rollout/spec_accept_length"),
    ),
    Metric(
        "speculation/speed_up",
        "estimate: cost of decoding without guesses over the cost with them, counted in rows "
        "(`zerogap.rollout.speculate.PassCost`)",
    ),
)

PROGRESS = (
    Metric("step", "steps done"),
    Metric("epoch", "passes over the prompts", _same("epoch", "training/epoch: whole ones")),
    Metric("version", "weight version after the step: updates made"),
    Metric(
        "num_tokens",
        "prompt and completion tokens so far",
        _same("num_tokens", "perf/total_num_tokens: of this step", "", "progress/total_tokens"),
    ),
    Metric(
        "tokens_per_second",
        "completion tokens per second of the rollout phase",
        _same(
            "", "perf/throughput: all tokens, per second of the step and device", "", "perf/throughput: trained tokens"
        ),
    ),
    Metric(
        "step_time",
        "seconds",
        _same("step_time", "perf/time_per_step", "timing/train/total_step_time", "time/step", "perf/step_time"),
    ),
    Metric(
        "time/rollout",
        "seconds of sampling",
        _same("", "timing_s/gen", "timing/train/generation", "time/generate_completions", "perf/rollout_time"),
    ),
    Metric(
        "time/train",
        "seconds of forward, backward and optimizer",
        _same(
            "",
            "timing_s/update_actor",
            "timing/train/policy_training",
            "time/forward_backward: no optimizer",
            "perf/actor_train_time",
        ),
    ),
    Metric(
        "time/update_weights",
        "seconds until the engine has the new weights",
        _same("", "timing_s/update_weights", "", "time/broadcast_weights", "perf/update_weights_time"),
    ),
    Metric(
        "time/old_logprobs",
        "seconds of the trainer's own log-probs, computed again; one-sided runs only",
        _same("", "timing_s/old_log_prob", "timing/train/policy_and_reference_logprobs", "", "perf/log_probs_time"),
    ),
    Metric("time/recalibrate", "seconds spent on new KV scales; part of another phase"),
    Metric("time/{phase}", "seconds of another phase: reward, reference, save, ..."),
    Metric(
        "memory/resident",
        "GiB that this process holds after the step (Linux); reward functions in processes of their own not counted",
        _same("", "perf/cpu_memory_used_gb: of the machine"),
    ),
    Metric("memory/peak", "the most it has held so far, GiB"),
    Metric("kv_bytes_per_token", "bytes that one token takes in the KV cache, all layers, scales included"),
)

EVALUATION = (
    Metric(
        "eval/accuracy",
        "share of held-out completions with a reward of 1 or more",
        _same("", "", "validation/accuracy"),
    ),
    Metric("eval/mean@{n}", "mean reward over n completions per prompt", _same("", "", "", "eval/{env}/avg@{k}")),
    Metric(
        "eval/maj@{n}",
        "chance that the answer most of a prompt's n completions give is correct; ties count alike",
        _same("", "val-core/{set}/{reward}/maj@{n}/mean: bootstrapped"),
    ),
    Metric(
        "eval/pass@{k}",
        "unbiased estimate that one of k completions is correct",
        _same("", "", "", "eval/{env}/pass@{k}"),
    ),
    Metric("eval/num_prompts", "held-out prompts"),
    Metric("eval/completions/{length}", "lengths as above, of the held-out completions"),
    Metric("eval/time", "seconds", _same("", "timing_s/testing", "", "eval/{env}/time")),
)

SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Rewards and loss": TRAINING,
    "Groups that are filtered": GROUPS,
    "Completions": COMPLETIONS,
    "The gap between rollout and trainer": GAP,
    "Experts": EXPERTS,
    "Corrections": CORRECTION,
    "Speculation": SPECULATION,
    "Progress and time": PROGRESS,
    "Evaluation": EVALUATION,
}

KINDS: dict[str, tuple[str, str, str]] = {
    "token_tis": ("rollout_is=token, rollout_is_threshold=2.0", "token_truncate", "tis"),
    "sequence_tis": ("rollout_is=sequence, rollout_is_threshold=2.0", "sequence_truncate", ""),
    "token_mis": ("rollout_is=token, rollout_rs=token_k1, rollout_rs_threshold=0.5_2.0", "", ""),
    "sequence_mis": ("rollout_is=sequence, rollout_rs=seq_sum_k1, rollout_rs_threshold=0.5_2.0", "", ""),
    "sequence_mask": ("rollout_is=sequence, rollout_is_threshold=1e-30_3.0", "sequence_mask: the default, cap 3", ""),
    "geometric_mis": (
        "rollout_rs=seq_mean_k1, rollout_rs_threshold=0.999_1.001",
        "",
        "seq-mask-tis: weighs by rho, too",
    ),
    "icepop": ("rollout_is=token, rollout_is_threshold=0.5_5.0", "token_mask", "icepop"),
}
"""Kind of correction -> how verl, TRL (vllm_importance_sampling_mode) and NeMo RL (truncated_importance_sampling_type)
ask for it."""

ELSEWHERE: tuple[tuple[str, str, str], ...] = (
    (
        "verl",
        "training/rollout_probs_diff_mean, _max, _std",
        "abs(p_trainer - p_rollout): of probabilities, not of logs",
    ),
    (
        "verl",
        "rollout_corr/training_ppl, rollout_ppl, ppl_ratio, log_ppl_diff",
        "perplexities of a completion: e^(-mean log p)",
    ),
    ("verl", "actor/ppo_kl", "mean of log p_old - log p_now: how far the updates of one batch have gone"),
    ("NeMo RL", "token_mult_prob_error", "mean of e^abs(d), 1 where nothing differs"),
    ("NeMo RL", "policy_kl_error", "mean of 1 / rho - 1 + d: k3 the other way round, KL(trainer || rollout)"),
    ("NeMo RL", "js_divergence_error", "Jensen-Shannon divergence, each half estimated by k3"),
    (
        "prime-rl",
        "masked_mismatch_kl/mean, unmasked_mismatch_kl/mean",
        "mismatch_kl of the tokens its mask drops, and keeps",
    ),
    ("slime", "train/tis_abs", "mean of abs(rho - 1)"),
)
"""(framework, name, formula) of numbers that measure the same gap and that zerogap does not log."""


def find(logged: str) -> Metric | None:
    """The entry of a logged name; where several match, the one with the fewest placeholders."""
    found = [m for metrics in SECTIONS.values() for m in metrics if m.matches(logged)]
    return min(found, key=lambda m: m.name.count("{"), default=None)
