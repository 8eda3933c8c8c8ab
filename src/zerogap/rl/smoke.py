"""A smoke run: does a recipe work, and is it exact? Seconds, no network, and neither its model nor its data.

The recipe is shrunk to a model of two layers with random weights and a tokenizer of bytes, two steps, a few short
completions of a built-in task, and a reward that differs between random completions, so that every step updates every
trained tensor. Numerics (one-sided ones included), algorithm, correction, schedule and what is trained stay the
recipe's; what had to give way is said. Two steps, because the worst faults appear only after the first update.
"""

import dataclasses
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from zerogap.config import RunConfig, contract_of, load_config
from zerogap.errors import ConfigError
from zerogap.models.moe_spec import MoESpec
from zerogap.models.rope_spec import RopeSpec
from zerogap.models.spec import ModelSpec
from zerogap.models.trainable import select_trainable
from zerogap.numerics import PRESETS, names_tensor
from zerogap.ops.moe import Routing
from zerogap.rl.loop import Run
from zerogap.rl.observer import Observer
from zerogap.text.byte_level import END, NUM_IDS, write_byte_tokenizer
from zerogap.weights.random_model import write_random_model
from zerogap.weights.source import spec_at_hand

LAYERS = 2
STEPS = 2
PROMPTS = 2
MOST_GENERATIONS = 4
COMPLETION_TOKENS = 16  # with the task's prompts of about 50 bytes, sequences cross the border of a KV block of 64
LEARNING_RATE = 2e-4  # at least: the first update must change the bits that the second step computes with
KV_GIB = 0.01


@dataclasses.dataclass(frozen=True)
class SmokeResult:
    """What a smoke run showed.

    Attributes:
        config: the shrunk recipe.
        family: of the random model.
        notes: what of the recipe had to give way.
        completions: drawn over all steps.
        compared, mismatched: tokens compared between rollout and trainer, and those that differ in any bit.
        seconds: of all of it.
    """

    config: RunConfig
    family: str
    notes: tuple[str, ...]
    completions: int
    compared: int
    mismatched: int
    seconds: float

    @property
    def one_sided(self) -> bool:
        """True if the recipe asks both sides to compute different bits."""
        return self.config.one_sided

    @property
    def exact(self) -> bool:
        """True if both sides promise the same bits, something was compared, and nothing differs."""
        return not self.one_sided and self.compared > 0 and self.mismatched == 0


def run_smoke(config: RunConfig, observer: Observer | None = None) -> SmokeResult:
    """Run the shrunk recipe in a temporary folder, which is removed afterwards.

    Log-probs that differ are counted, whatever `parity.on_mismatch` says.

    Raises:
        ConfigError: the recipe cannot be honoured.
        NonFiniteError: a step produced a NaN or an infinity.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="zerogap-smoke-") as folder:
        small, spec, notes = small_recipe(config, Path(folder))
        write_random_model(small.model, spec, seed=config.seed, peak=2.0)
        write_byte_tokenizer(Path(small.model))
        run = Run(small, "never", observer)
        finished = run.train()
        assert finished or run.stop_asked, "only a request to stop ends a run before its last step"
        drawn = run.step * small.rollout.prompts_per_step * small.rollout.num_generations
        counts = (drawn, run.compared_tokens, run.mismatched_tokens)
    return SmokeResult(small, spec.family, tuple(notes), *counts, time.perf_counter() - began)


def share_of_even_ids(completion_ids: list, **columns: Any) -> list[float]:
    """The reward of a smoke run: between 0 and 1, and different for nearly all random completions."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


# ---------------------------------------------------------------------------------------------------- shrinking


def small_recipe(config: RunConfig, folder: Path) -> tuple[RunConfig, ModelSpec, list[str]]:
    """The shrunk recipe, whose model and output lie in `folder`; the model's spec; what had to give way."""
    own = spec_at_hand(config.model)
    routed = any(config.moe.model_dump().values())  # a recipe that says something of experts is for a model with them
    spec = small_spec(own, routed)
    notes = [f"model: {config.model} stands aside for {LAYERS} random layers"]
    if own is None:
        notes.append(f"model: its config is not on this machine, so its family is unknown; this is {spec.family}")
    named = ", ".join(source.path for source in config.data.train_sources())
    notes.append(f"data: {named} stands aside for a few prompts of the built-in multiplication task")
    rewards = ", ".join(entry.function for entry in config.reward.entries())
    notes.append(f"reward: {rewards} stands aside for one that differs between random completions")
    tree = config.model_dump(mode="json")
    names = list(spec.weight_specs(PRESETS["bf16"]))
    tree["numerics"], more = small_numerics(config.numerics, names)
    notes += [f"numerics: {note}" for note in more]
    if config.rollout.numerics is not None:
        tree["rollout"]["numerics"], more = small_numerics(config.rollout.numerics, names)
        notes += [f"rollout.numerics: {note}" for note in more]
        if config.one_sided and _fingerprint(tree["numerics"]) == _fingerprint(tree["rollout"]["numerics"]):
            tree["numerics"] = _keeping(tree["numerics"], 0, 0, ())
            tree["rollout"]["numerics"] = _keeping(tree["rollout"]["numerics"], 1, 0, ())
            notes.append("rollout.numerics: the sides differ in their BF16 layers only; here the rollout keeps layer 0")
    tree["trainable"], more = small_trainable(config.trainable, names)
    notes += [f"trainable: {note}" for note in more]
    tree |= {"model": str(folder / "model"), "output_dir": str(folder / "run")}
    tree["data"] = {"train": "multiplication", "max_prompt_length": 64, "shuffle": config.data.shuffle}
    tree["reward"] = {"functions": [f"{__name__}:{share_of_even_ids.__name__}"], "timeout": None}
    tree["parity"]["on_mismatch"] = "warn"
    tree["logging"]["wandb"] = False  # two random steps are nobody's run
    tree["algorithm"]["group_filter"]["mean_reward"] = None  # it was chosen for another reward
    _shrink_sizes(tree)
    return load_config(tree), spec, notes


def _shrink_sizes(tree: dict[str, Any]) -> None:
    """Fewer and shorter completions, steps and evaluations; in place."""
    rollout, optimizer, evaluation = tree["rollout"], tree["optimizer"], tree["eval"]
    rollout |= {
        "prompts_per_step": PROMPTS,
        "num_generations": min(rollout["num_generations"], MOST_GENERATIONS),
        "max_completion_length": COMPLETION_TOKENS,
        "kv_cache_memory": KV_GIB,
        "max_sequences": min(rollout["max_sequences"], 8),
        "max_batch_tokens": min(rollout["max_batch_tokens"], 256),
    }
    optimizer |= {"max_steps": STEPS, "warmup_steps": 0}
    optimizer["learning_rate"] = max(optimizer["learning_rate"], LEARNING_RATE)
    samples = min(evaluation["num_samples"], 2)
    evaluation |= {
        "every": min(evaluation["every"], STEPS),
        "num_prompts": min(evaluation["num_prompts"], 2),
        "num_samples": samples,
        "pass_k": [k for k in evaluation["pass_k"] if k <= samples],
    }
    tree["checkpoint"]["every"] = min(tree["checkpoint"]["every"], 1)


def small_spec(own: ModelSpec | None, routed: bool = False) -> ModelSpec:
    """A model of two layers, of the recipe's own family and head size where they are known.

    Experts become few and small, chosen by the model's own rule; of dense layers before routed ones one is left.

    Args:
        routed: where the family is unknown: it has experts.
    """
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_layers": LAYERS,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": NUM_IDS + 4,  # the model may draw ids that the tokenizer does not have
        "max_position": 1024,
        "eos_token_ids": (END,),
        "bos_token_id": None,
        "pad_token_id": None,
    }
    if own is None:
        features: dict[str, Any] = dict.fromkeys(("tied", "qkv_bias", "o_bias"), False) | {"qk_norm": routed}
        if routed:
            features["moe"] = MoESpec(Routing(8, 3), expert_size=128)
        family = "qwen3_moe" if routed else "llama"
        return ModelSpec(family=family, head_dim=64, norm_eps=1e-5, rope=RopeSpec(10000.0), **features, **sizes)
    if own.moe is not None:
        sizes["moe"] = small_moe(own.moe)
    if own.mla is not None:
        latent = dataclasses.replace(own.mla.sizes, num_heads=sizes["num_heads"], latent=256)
        rank = None if own.mla.q_rank is None else 128
        sizes |= {"num_kv_heads": sizes["num_heads"], "mla": dataclasses.replace(own.mla, sizes=latent, q_rank=rank)}
    return dataclasses.replace(own, **sizes)


def small_moe(own: MoESpec) -> MoESpec:
    """8 experts of 128, up to 3 per token, by the same rule; shared experts and a dense first layer where there are."""
    rule = own.routing
    groups, top_groups = (4, 2) if rule.groups > 1 else (1, 1)
    top_k = min(rule.top_k, 3)
    return dataclasses.replace(
        own,
        routing=dataclasses.replace(rule, num_experts=8, top_k=top_k, groups=groups, top_groups=top_groups),
        expert_size=128,
        shared_size=256 if own.shared_size else 0,
        dense_layers=(0,) if own.dense_layers else (),
    )


def small_numerics(asked: str | dict[str, Any], names: Sequence[str]) -> tuple[str | dict[str, Any], list[str]]:
    """The recipe's numerics for two layers of these tensors: what would leave no layer quantised, and patterns that
    mean none of the tensors, give way."""
    contract, notes = contract_of(asked), []
    first, last = contract.bf16_first, contract.bf16_last
    if first + last >= LAYERS:
        notes.append(f"the first {first} and last {last} layers stay BF16, which would be all {LAYERS}; here one does")
        first, last = (1, 0) if first else (0, 1)
    tensors = tuple(p for p in contract.bf16_tensors if any(names_tensor(p, name) for name in names))
    if lost := sorted(set(contract.bf16_tensors) - set(tensors)):
        notes.append(f"bf16_layers.tensors {', '.join(lost)} means none of the two layers, and is left out")
    return (_keeping(asked, first, last, tensors) if notes else asked), notes


def _keeping(asked: str | dict[str, Any], first: int, last: int, tensors: Iterable[str]) -> dict[str, Any]:
    """`asked` with other layers and tensors that stay BF16."""
    fields = {"preset": asked} if isinstance(asked, str) else dict(asked)
    for key in ("bf16_layers", "bf16_first", "bf16_last", "bf16_tensors"):
        fields.pop(key, None)
    return fields | {"bf16_layers": {"first": first, "last": last, "tensors": list(tensors)}}


def _fingerprint(asked: str | dict[str, Any]) -> str:
    return contract_of(asked).fingerprint()


def small_trainable(patterns: Sequence[str], names: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is trained of two layers: `last:N` of more than two, and patterns that match nothing, mean the last one."""
    chosen, notes = [], []
    for pattern in patterns:
        try:
            select_trainable(names, [pattern], LAYERS)
            chosen.append(pattern)
        except ConfigError:
            chosen.append("last:1")
            notes.append(f"{pattern} is last:1 here")
    return list(dict.fromkeys(chosen)), notes
