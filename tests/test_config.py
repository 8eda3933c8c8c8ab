"""The recipe: what is refused, in which words, and that every field is documented and changeable."""

import json
import pathlib
import re
import subprocess
import sys

import pytest
import yaml

from zerogap.config import ALGORITHMS, RunConfig, apply_overrides, iter_fields, load_config
from zerogap.errors import ConfigError
from zerogap.numerics import DType, Numerics, names_tensor, preset

MINIMAL = {"model": "m", "data": {"train": "multiplication"}, "optimizer": {"max_steps": 10}}


def test_importable_without_torch():
    code = "import zerogap.config, sys; assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_field_is_documented_and_there_are_fewer_than_100():
    fields = list(iter_fields())
    assert all(len(text) > 3 for _, _, text in fields), [k for k, _, t in fields if len(t) <= 3]
    assert len(fields) < 100


CHANGED = {
    "model": "x", "trainable": ["last:2"], "numerics": "fp32", "data.train": "a.jsonl", "data.eval": "b.jsonl",
    "data.task": {"a": 1}, "data.size": 7, "data.prompt_column": "p", "data.answer_column": "a", "data.system": "s",
    "data.instruction": "i", "data.max_prompt_length": 9, "data.shuffle": False, "reward.functions": ["m:f"],
    "reward.weights": [2.0], "reward.timeout": 9.0, "reward.on_error": "none",
    "rollout.numerics": "fp8", "rollout.prompts_per_step": 2, "rollout.num_generations": 3,
    "rollout.max_completion_length": 5, "rollout.temperature": 0.6, "rollout.top_k": 5, "rollout.top_p": 0.9,
    "rollout.min_p": 0.1, "rollout.stop": ["\n"], "rollout.page_size": 64, "rollout.kv_cache_memory": 0.5,
    "rollout.max_batch_tokens": 100, "rollout.max_sequences": 4, "rollout.prefix_cache": False,
    "rollout.speculation.draft_tokens": 8, "rollout.speculation.min_match": 3,
    "algorithm.loss_type": "grpo", "algorithm.scale_rewards": "none", "algorithm.epsilon": 0.1,
    "algorithm.epsilon_high": 0.28, "algorithm.beta": 0.04, "algorithm.kl_estimator": "k1",
    "algorithm.name": "gspo", "algorithm.baseline": "leave_one_out", "algorithm.surrogate": "cispo",
    "algorithm.importance_sampling_level": "sequence", "algorithm.kl_in_reward": True, "algorithm.overlong_share": 0.2,
    "algorithm.group_filter.equal_rewards": True, "algorithm.group_filter.mean_reward": [0.1, 0.9],
    "algorithm.dynamic_sampling.max_rounds": 3,
    "algorithm.entropy_coef": 0.01, "algorithm.num_iterations": 2, "algorithm.mask_truncated_completions": True,
    "algorithm.correction.kind": "sequence_mask", "algorithm.correction.lower": 0.25, "algorithm.correction.upper": 4.0,
    "algorithm.correction.reject": {"sequence_mean_k3": 0.01}, "algorithm.correction.veto": 0.001,
    "algorithm.correction.normalise": True,
    "optimizer.max_steps": 3, "optimizer.learning_rate": 1e-5, "optimizer.lr_scheduler_type": "cosine",
    "optimizer.warmup_steps": 2, "optimizer.weight_decay": 0.1, "optimizer.max_grad_norm": 0.0,
    "optimizer.betas": [0.8, 0.95], "optimizer.eps": 1e-6, "optimizer.micro_batch_tokens": 2048,
    "optimizer.activation_recompute": True, "moe.record_routing": True, "moe.balance_loss": 1e-3,
    "moe.router_bias_rate": 1e-3, "parity.on_mismatch": "warn", "eval.every": 5, "eval.num_prompts": 3,
    "eval.num_samples": 4, "eval.temperature": 0.7, "eval.pass_k": [1, 2], "checkpoint.every": 4, "checkpoint.keep": 1,
    "logging.wandb": "mine",
    "logging.tensorboard": False, "logging.completions": 1, "logging.audit_every": 2, "seed": 3, "output_dir": "o",
}  # fmt: skip


def test_every_field_is_read():
    assert set(CHANGED) == {key for key, _, _ in iter_fields()}
    filters = {"rollout.top_k", "rollout.top_p", "rollout.min_p"}
    no_filters = {key for key in CHANGED if key in ("algorithm.beta", "rollout.numerics") or ".correction." in key}
    with_filters, without_filters = (
        load_config(MINIMAL, [f"{key}={json.dumps(value)}" for key, value in CHANGED.items() if key not in left_out])
        for left_out in (no_filters, filters)
    )
    for key, value in CHANGED.items():
        node = without_filters if key in no_filters else with_filters
        for part in key.split("."):
            node = getattr(node, part)
        assert (list(node) if isinstance(node, tuple) else node) == value, key


@pytest.mark.parametrize("given", ["rollout.top_k=5", "rollout.top_p=0.9", "rollout.min_p=0.1"])
def test_a_reference_model_and_filters_are_refused_together(given):
    with pytest.raises(ConfigError, match=r"algorithm\.beta = 0\.1: choose 0, or switch rollout"):
        load_config(MINIMAL, ["algorithm.beta=0.1", given])


def test_a_correction_needs_a_rollout_that_differs():
    with pytest.raises(ConfigError, match=r"correction\.kind = 'token_tis': choose none: .* the same bits"):
        load_config(MINIMAL, ["algorithm.correction.kind=token_tis"])
    with pytest.raises(ConfigError, match="the same bits"):
        load_config(MINIMAL, ["algorithm.correction.kind=token_tis", "rollout.numerics=bf16"])
    config = load_config(MINIMAL, ["algorithm.correction.kind=token_tis", "rollout.numerics=fp8-kv"])
    assert config.one_sided and config.rollout_contract().name == "fp8-kv" and config.contract().name == "bf16"


@pytest.mark.parametrize("given", ["rollout.top_k=5", "rollout.top_p=0.9", "rollout.min_p=0.1"])
def test_one_sided_rollouts_and_filters_are_refused_together(given):
    with pytest.raises(ConfigError, match=r"rollout\.numerics = 'fp8': switch rollout"):
        load_config(MINIMAL, ["rollout.numerics=fp8", given])


def test_single_fields_of_either_contract_can_be_overridden():
    fields = {"numerics": "fp8", "rollout": {"numerics": "fp8-kv"}}
    given = ["kv_scale=calibrated", "bf16_layers.first=1"]
    config = load_config(
        MINIMAL | fields, ["numerics.linear_grad=bf16", *[f"rollout.numerics.{word}" for word in given]]
    )
    assert config.contract() == preset("fp8", linear_grad="bf16")
    assert config.rollout_contract() == preset("fp8-kv", kv_scale="calibrated", bf16_first=1)


def test_round_trip_and_frozen():
    config = load_config(MINIMAL, ["numerics.max_leaves=4", "optimizer.learning_rate=2e-5", "rollout.stop=[a, b]"])
    assert load_config(yaml.safe_load(config.to_yaml())) == config
    assert config.optimizer.learning_rate == 2e-5
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 1  # type: ignore[misc]


def test_a_named_algorithm_sets_defaults_and_leaves_win():
    named = load_config(MINIMAL, ["algorithm.name=dapo"]).algorithm
    assert (named.loss_type, named.epsilon, named.clip_high, named.overlong_share) == ("dapo", 0.2, 0.28, 0.2)
    assert (named.dynamic_sampling.max_rounds, named.drops_equal_rewards) == (10, True)
    own = ["algorithm.name=dapo", "algorithm.epsilon_high=0.3", "algorithm.dynamic_sampling.max_rounds=0"]
    config = load_config(MINIMAL, own)
    assert (config.algorithm.clip_high, config.algorithm.dynamic_sampling.max_rounds) == (0.3, 0)
    assert (config.algorithm.overlong_share, config.algorithm.drops_equal_rewards) == (0.2, False)
    assert load_config(yaml.safe_load(config.to_yaml())) == config
    plain, grpo = load_config(MINIMAL).algorithm, load_config(MINIMAL, ["algorithm.name=grpo"]).algorithm
    assert plain.loss_type == "dapo" and grpo == plain.model_copy(update={"name": "grpo", "loss_type": "grpo"})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_differs_and_its_leaves_exist(name):
    chosen, plain = (load_config(MINIMAL, words).algorithm for words in ([f"algorithm.name={name}"], []))
    different = {key for key in type(plain).model_fields if getattr(chosen, key) != getattr(plain, key)}
    assert different <= {"name", *ALGORITHMS[name]}, "what a name sets is listed"
    assert different > {"name"}
    assert chosen.beta == 0.0, "a reference model costs memory: no name asks for one"


def test_groups_of_one_need_an_algorithm_without_groups():
    alone = "rollout.num_generations=1"
    assert load_config(MINIMAL, [alone, "algorithm.name=reinforce_pp"]).rollout.num_generations == 1
    with pytest.raises(ConfigError, match="2 or more: the rewards of a group of 1"):
        load_config(MINIMAL, [alone, "algorithm.name=reinforce_pp", "algorithm.dynamic_sampling.max_rounds=2"])
    with pytest.raises(ConfigError, match=r"num_generations = 1: choose 2 or more: advantages compare"):
        load_config(MINIMAL, [alone, "algorithm.name=rloo"])


def test_cispo_may_leave_the_ratio_without_a_lower_bound():
    assert load_config(MINIMAL, ["algorithm.name=cispo"]).algorithm.epsilon == 1.0
    with pytest.raises(ConfigError, match=r"algorithm\.epsilon = 1\.0"):
        load_config(MINIMAL, ["algorithm.name=cispo", "algorithm.surrogate=clip"])


def test_numerics_overrides():
    config = load_config({**MINIMAL, "numerics": {"preset": "bf16", "max_leaves": 4, "grad_bins": 8}})
    assert (config.contract().max_leaves, config.contract().grad_bins) == (4, 8)
    assert load_config(MINIMAL).contract().name == "bf16"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.num_generations=1", ["rollout.num_generations", "1", "2 or more"]),
        ("rollout.temperature=0", ["rollout.temperature", "0.0", "0.001 or more"]),
        ("rollout.temperature=.nan", ["rollout.temperature", "nan", "finite"]),
        ("rollout.page_size=20", ["rollout.page_size", "20", "multiple of 16"]),
        ("rollout.max_batch_tokens=8", ["rollout.max_batch_tokens", "8", "max_sequences (64)"]),
        ("rollout.top_p=0", ["rollout.top_p", "0", "greater than 0"]),
        ("algorithm.loss_type=ppo", ["algorithm.loss_type", "ppo", "'dapo', 'grpo', 'dr_grpo'"]),
        ("algorithm.epsilon=1", ["algorithm.epsilon", "1.0", "below 1"]),
        ("algorithm.name=ppo", ["algorithm.name", "ppo", "'grpo', 'dr_grpo', 'dapo'"]),
        ("algorithm.surrogate=none", ["algorithm.surrogate", "none", "'clip' or 'cispo'"]),
        ("algorithm.baseline=none", ["algorithm.scale_rewards", "group", "whiten or none"]),
        ("algorithm.overlong_share=1.5", ["algorithm.overlong_share", "1.5", "less than or equal to 1"]),
        ("algorithm.group_filter.mean_reward=[1, 0]", ["algorithm.group_filter.mean_reward", "smaller number first"]),
        ("algorithm.dynamic_sampling.max_rounds=-1", ["algorithm.dynamic_sampling.max_rounds", "-1"]),
        ("algorithm.dynamic_sampling=5", ["algorithm.dynamic_sampling", "5"]),
        ("algorithm.beta=-1", ["algorithm.beta", "-1", "greater than or equal to 0"]),
        ("learning_rate=1", ["learning_rate", "did you mean optimizer.learning_rate?"]),
        ("optimizer.learnin_rate=1", ["optimizer.learnin_rate", "did you mean optimizer.learning_rate?"]),
        ("optimizer.max_steps=1.5", ["optimizer.max_steps", "1.5", "integer"]),
        ("optimizer.warmup_steps=11", ["optimizer.warmup_steps", "11", "10 updates"]),
        ("optimizer.micro_batch_tokens=100", ["optimizer.micro_batch_tokens", "numerics.pack_tokens (1024)"]),
        ("reward.weights=[1, 2]", ["reward.weights", "[1.0, 2.0]", "give 1, one per function"]),
        ("reward.functions=task", ["reward.functions", "task", "reasoning_gym"]),
        ("eval.pass_k=[4]", ["eval.pass_k", "[4]", "num_samples (1)"]),
        ("eval.num_samples=2", ["eval.num_samples", "2", "temperature above 0"]),
        ("numerics=int3", ["numerics", "int3", "fp32, bf16"]),
        ("numerics.kv=fp7", ["numerics.kv", "fp7", "fp32, bf16"]),
        ("numerics.storage=fp8", ["numerics.storage", "fp8", "fp32 or bf16"]),
        ("numerics.kv=fp32", ["numerics.kv", "fp32", "bf16 (the storage dtype) or fp8"]),
        ("numerics.kv=fp8", ["numerics.kv_scale", "per_token_head or calibrated"]),
        ("numerics.kv_scale=calibrated", ["numerics.kv_scale", "preset: fp8-kv, or none"]),
        ("numerics.linear_grad=fp8", ["numerics.linear_grad", "numerics.linear: fp8"]),
        ("numerics.attention_math=fp8", ["numerics.attention_math", "numerics.kv: fp8"]),
        ("numerics.scale_format=e8", ["numerics.scale_format", "e8", "fp32 or pow2"]),
        ("numerics.kv_margin=0.5", ["numerics.kv_margin", "0.5", "1 to 64"]),
        ("numerics.bf16_layers={first: 1}", ["numerics.bf16_layers", "numerics.linear: fp8"]),
        ("numerics.bf16_layers={middle: 1}", ["numerics.bf16_layers", "first, last"]),
        ("numerics={preset: [fp8]}", ["numerics.preset", "['fp8']", "fp32, bf16"]),
        ("numerics={preset: fp8, name: bf16}", ["numerics.name", "bf16", "leave it out"]),
        (
            "numerics={preset: fp8, bf16_first: 2, bf16_layers: {first: 1}}",
            ["numerics.bf16_first", "2", "give it once"],
        ),
        ("rollout.numerics=int3", ["rollout.numerics", "int3", "fp32, bf16"]),
        ("rollout.numerics={preset: fp8, kv: fp7}", ["rollout.numerics.kv", "fp7", "fp32, bf16"]),
        ("numerics.max_leaves=3", ["numerics.max_leaves", "3", "1, 2, 4 or 8"]),
        ("numerics.kv_split=a", ["numerics.kv_split", "a", "whole number"]),
        ("numerics.colour=1", ["numerics.colour", "no such field"]),
        ("seed=-1", ["seed", "-1"]),
        ("seed", ["override", "section.key=value"]),
        ("model.name=a", ["model.name", "model is a value"]),
        ("rollout.stop=[a", ["rollout.stop", "not valid YAML"]),
    ],
)
def test_refused_with_key_value_and_mend(override, words):
    with pytest.raises(ConfigError) as error:
        load_config(MINIMAL, [override])
    assert not [word for word in words if word not in str(error.value)], str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: m\nmodel: n\n", ["'model' twice"]),
        ("- a\n", ["a recipe is a mapping"]),
        ("", ["a recipe is a mapping"]),
        ("model: m\noptimizer: {max_steps: 1}\n", ["data", "must be given"]),
        ("1: m\n", ["key 1 is not a word"]),
        ("model: m\ndata: {train: d.jsonl}\noptimizer: {max_steps: 1}\noutput_dir: 2026-11-30\n", ["output_dir"]),
    ],
)
def test_malformed_files_are_named(tmp_path, text, words):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert not [word for word in words if word not in str(error.value)], str(error.value)
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "absent.yaml")
    path.write_bytes(b"GGUF\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(path)


def test_overrides_leave_the_tree_alone():
    tree = {"a": {"b": 1}}
    assert apply_overrides(tree, ["a.b=2", "a.c=null"]) == {"a": {"b": 2, "c": None}}
    assert tree == {"a": {"b": 1}}


def test_schema_has_no_free_sections():
    assert RunConfig.model_json_schema()["additionalProperties"] is False


@pytest.mark.parametrize("path", sorted((pathlib.Path(__file__).parent.parent / "recipes").glob("*.yaml")), ids=str)
def test_recipes_are_valid_and_comment_their_choices(path):
    config = load_config(path)
    assert load_config(yaml.safe_load(config.to_yaml())) == config
    text = path.read_text()
    explained = re.search(r"those of (\S+\.yaml), where each is explained", text)
    if explained:  # it differs from that recipe in its mode alone (tests/test_recipes.py)
        assert text.startswith("#") and text.count("#") >= 4
        text = (path.parent / explained[1]).read_text()
    assert text.startswith("#") and text.count("#") >= 10


def test_fp8_contracts():
    kept = {"preset": "fp8-kv", "kv_scale": "calibrated", "bf16_layers": {"first": 1, "last": 2, "tensors": "mlp.gate"}}
    contract = load_config({**MINIMAL, "numerics": kept}).contract()
    assert (contract.kv, contract.kv_scale, contract.linear, contract.storage) == (
        DType.FP8,
        "calibrated",
        DType.FP8,
        DType.BF16,
    )
    assert (contract.bf16_first, contract.bf16_last, contract.bf16_tensors) == (1, 2, ("mlp.gate",))
    assert Numerics.from_fields(json.loads(json.dumps(contract.fields()))) == contract


@pytest.mark.parametrize(
    ("pattern", "name", "means"),
    [
        ("mlp.gate", "model.layers.0.mlp.gate.weight", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj.weight", False),
        ("mlp.gate", "model.layers.0.mlp.gate_up_proj.weight", False),
        ("layers.1", "model.layers.11.mlp.up_proj.weight", False),
        ("layers.*.mlp.down_proj", "model.layers.11.mlp.down_proj.weight", True),
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight", True),
        ("q_proj", "model.layers.0.self_attn.q_proj.bias", True),
    ],
)
def test_patterns_mean_whole_parts_of_names(pattern: str, name: str, means: bool):
    assert names_tensor(pattern, name) is means
