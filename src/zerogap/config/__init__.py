"""The run recipe: every setting of a training run, checked before anything is loaded.

A recipe is a short YAML file; `a.b=c` words on the command line override single keys. Unknown keys are refused, a value
that cannot be honoured is refused with the valid ones, and what a run used is stored complete (`RunConfig.to_yaml`), so
that nothing depends on a default that may change. Leaf names are those of TRL where TRL has the setting.

This module imports neither torch nor a model library, so that a recipe can be checked in an instant.
"""

import copy
import difflib
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import Field

from zerogap.config.correction import CorrectionConfig
from zerogap.config.moe import MoEConfig
from zerogap.config.section import Count, Fraction01, NonNegative, Positive, Section
from zerogap.errors import ConfigError
from zerogap.numerics import PRESETS, Numerics, preset


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], pydantic.BeforeValidator(_as_tuple)]


class DataConfig(Section):
    """Where prompts come from."""

    train: str = Field(
        description="what to train on: a path to a .jsonl file, `multiplication`, `largest_of_three`, or "
        "`reasoning_gym:NAME`. Paths are relative to the working directory"
    )
    eval: str | None = Field(
        default=None, description="a .jsonl file of held-out rows; null: the task's own held-out split"
    )
    task: dict[str, Any] = Field(default={}, description="settings of a reasoning-gym task, as that task names them")
    size: Positive = Field(default=2000, description="problems drawn from a reasoning-gym task, held-out ones included")
    prompt_column: str | None = Field(
        default=None, description="column with the prompt; null: recognise it by its name"
    )
    answer_column: str | None = Field(
        default=None, description="column with the answer; null: recognise it by its name"
    )
    system: str | None = Field(default=None, description="system message put before every prompt that has none")
    instruction: str | None = Field(
        default=None, description="text added, after a blank line, to the last user message"
    )
    max_prompt_length: Positive = Field(
        default=512, description="tokens; rows with a longer prompt are left out and counted"
    )
    shuffle: bool = Field(
        default=True, description="a new order of rows in each epoch, from (seed, epoch); false: file order"
    )


class RewardConfig(Section):
    """How completions are scored."""

    functions: Names = Field(
        default=("number_match",),
        min_length=1,
        description="reward functions: `number_match`, `task` (the scorer of a reasoning-gym task), "
        "`module:function` or `path/to/file.py:function`, with TRL's signature",
    )
    weights: tuple[float, ...] | None = Field(default=None, description="one factor per function; null: all 1")

    @pydantic.model_validator(mode="after")
    def _one_weight_each(self) -> "RewardConfig":
        if self.weights is not None and len(self.weights) != len(self.functions):
            raise ConfigError("reward.weights", list(self.weights), f"give {len(self.functions)}, one per function")
        return self


class RolloutConfig(Section):
    """How completions are sampled, and the memory the engine may use."""

    numerics: str | dict[str, Any] | None = Field(
        default=None,
        description="another contract for the rollout alone, such as `fp8-kv` beside training in bf16: *one-sided*, "
        "labelled not exact everywhere, corrected by algorithm.correction; null: that of training, exact",
    )
    prompts_per_step: Positive = Field(
        default=8, description="prompts per step; each is completed num_generations times"
    )
    num_generations: Positive = Field(
        default=8, description="completions per prompt: the group that advantages compare"
    )
    max_completion_length: Positive = Field(
        default=256, description="tokens; a completion that reaches it is truncated"
    )
    temperature: float = Field(default=1.0, description="logits are divided by it, in rollout and training alike")
    top_k: Count = Field(default=0, description="keep the k likeliest ids; 0: all")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=1.0, description="keep the likeliest ids of this mass"
    )
    min_p: Fraction01 = Field(
        default=0.0, description="keep ids of at least this share of the likeliest id's probability"
    )
    stop: Names = Field(default=(), description="strings that end a completion; end-of-sequence ids always do")
    page_size: Positive = Field(
        default=16, description="tokens per page of the KV cache, a multiple of 16; changes no bit"
    )
    kv_cache_memory: Annotated[float, Field(gt=0.0)] = Field(
        default=1.0, description="GiB for the KV cache; changes no bit"
    )
    max_batch_tokens: Positive = Field(default=1024, description="most tokens of one forward pass; changes no bit")
    max_sequences: Positive = Field(default=64, description="most sequences that are decoded together; changes no bit")
    prefix_cache: bool = Field(default=True, description="reuse the KV of shared prompt beginnings; changes no bit")

    @pydantic.model_validator(mode="after")
    def _can_be_honoured(self) -> "RolloutConfig":
        if self.num_generations < 2:
            raise ConfigError(
                "rollout.num_generations", self.num_generations, "choose 2 or more: advantages compare group members"
            )
        if not 1e-3 <= self.temperature < float("inf"):
            raise ConfigError(
                "rollout.temperature", self.temperature, "choose 0.001 or more: greedy groups carry no learning signal"
            )
        if self.page_size % 16:
            raise ConfigError("rollout.page_size", self.page_size, "choose a multiple of 16")
        if self.max_batch_tokens < self.max_sequences:
            raise ConfigError(
                "rollout.max_batch_tokens",
                self.max_batch_tokens,
                f"choose at least max_sequences ({self.max_sequences}): each sequence needs one token per pass",
            )
        return self


class AlgorithmConfig(Section):
    """How rewards become a loss."""

    loss_type: Literal["dapo", "grpo", "dr_grpo", "sequence_sum"] = Field(
        default="dapo",
        description="how per-token losses are joined: `dapo` mean over the batch's tokens; `grpo` mean of each "
        "sequence's mean; `dr_grpo` sum over sequences x max_completion_length; `sequence_sum` mean of sequence sums",
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        default="group",
        description="divide centred rewards by the standard deviation of their group, of the batch, or not",
    )
    epsilon: NonNegative = Field(default=0.2, description="the probability ratio is clipped below at 1 - epsilon")
    epsilon_high: NonNegative | None = Field(
        default=None, description="... and above at 1 + epsilon_high; null: epsilon"
    )
    beta: NonNegative = Field(
        default=0.0, description="weight of the KL to the initial model; 0: no reference model is kept"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="per-token KL estimate that beta multiplies"
    )
    entropy_coef: float = Field(default=0.0, description="weight of the entropy, subtracted from the loss")
    num_iterations: Positive = Field(default=1, description="optimizer updates on each batch of completions")
    mask_truncated_completions: bool = Field(
        default=False, description="leave completions that reached max_completion_length out of the loss"
    )
    correction: CorrectionConfig = CorrectionConfig()

    @pydantic.model_validator(mode="after")
    def _clip_range(self) -> "AlgorithmConfig":
        if self.epsilon >= 1.0:
            raise ConfigError("algorithm.epsilon", self.epsilon, "choose a number from 0 to below 1")
        return self

    @property
    def clip_high(self) -> float:
        """`epsilon_high`, or `epsilon` where it is not given."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


class OptimizerConfig(Section):
    """AdamW, its schedule, and how a step is cut into passes."""

    max_steps: Positive = Field(description="steps of the run; each step samples once and updates num_iterations times")
    learning_rate: NonNegative = Field(default=1e-6, description="peak learning rate")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="course after warm-up: constant, or falling to 0 at the last update"
    )
    warmup_steps: Count = Field(default=0, description="updates over which the learning rate rises linearly from 0")
    weight_decay: NonNegative = Field(default=0.0, description="decoupled weight decay (matrices only)")
    max_grad_norm: NonNegative = Field(
        default=1.0, description="gradients are scaled down to this global norm; 0: never"
    )
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = Field(
        default=(0.9, 0.999), description="decay of AdamW's first and second moments"
    )
    eps: Annotated[float, Field(gt=0.0)] = Field(default=1e-8, description="added to AdamW's denominator")
    micro_batch_tokens: Positive = Field(
        default=4096, description="most tokens of one forward and backward pass; bounds memory, changes no bit"
    )
    activation_recompute: bool = Field(
        default=False, description="recompute activations in the backward pass; saves memory, changes no bit"
    )


class ParityConfig(Section):
    """What happens when log-probs of rollout and trainer differ although they must not."""

    on_mismatch: Literal["abort", "warn"] = Field(
        default="abort", description="end the run before the update, or go on"
    )


class EvalConfig(Section):
    """Held-out evaluation."""

    every: Count = Field(
        default=0, description="steps between evaluations; 0: only before the first and after the last step"
    )
    num_prompts: Count = Field(
        default=64, description="held-out prompts per evaluation, the first ones; 0: no evaluation"
    )
    num_samples: Positive = Field(default=1, description="completions per prompt (n of mean@n and pass@k)")
    temperature: Annotated[float, Field(ge=0.0)] = Field(default=0.0, description="0: greedy")
    pass_k: tuple[Positive, ...] = Field(default=(1,), description="report pass@k for these k")

    @pydantic.model_validator(mode="after")
    def _enough_samples(self) -> "EvalConfig":
        if self.pass_k and max(self.pass_k) > self.num_samples:
            raise ConfigError("eval.pass_k", list(self.pass_k), f"choose at most num_samples ({self.num_samples})")
        if self.num_samples > 1 and self.temperature == 0.0:
            raise ConfigError(
                "eval.num_samples", self.num_samples, "choose 1, or a temperature above 0: greedy ones are all equal"
            )
        return self


class CheckpointConfig(Section):
    """What is kept on disk to resume from."""

    every: Count = Field(default=0, description="steps between checkpoints; 0: only the final model is saved")
    keep: Positive = Field(default=2, description="most checkpoints kept; the oldest are deleted")


class LoggingConfig(Section):
    """What a run writes besides checkpoints."""

    tensorboard: bool = Field(default=True, description="write TensorBoard event files")
    completions: Count = Field(
        default=4, description="completions per step that go into the completions file and the report"
    )
    audit_every: Count = Field(
        default=0,
        description="steps between saved weights that `zerogap audit` recomputes from; 0: the first and last step",
    )


def contract_of(asked: str | dict[str, Any]) -> Numerics:
    """The numerics contract that a preset's name, or {preset: NAME, field: value}, asks for.

    `bf16_layers: {first: n, last: n, tensors: [patterns]}` is the short form of `bf16_first`, `bf16_last` and
    `bf16_tensors`.

    Raises:
        ConfigError: unknown preset or field, or a value the contract cannot have.
    """
    fields: dict[str, Any] = {"preset": asked} if isinstance(asked, str) else dict(asked)
    name, kept = fields.pop("preset", "bf16"), fields.pop("bf16_layers", {})
    if not isinstance(name, str):
        raise ConfigError("numerics.preset", name, f"choose one of {', '.join(PRESETS)}")
    if "name" in fields:
        raise ConfigError("numerics.name", fields["name"], "leave it out: a contract has its preset's name")
    if not isinstance(kept, dict) or set(kept) - {"first", "last", "tensors"}:
        raise ConfigError("numerics.bf16_layers", kept, "give first, last (layers) or tensors (patterns)")
    short = {f"bf16_{key}": value for key, value in kept.items()}
    for key in short:
        if key in fields:
            raise ConfigError(f"numerics.{key}", fields[key], "bf16_layers says it, too: give it once")
    return preset(name, **fields, **short)


class RunConfig(Section):
    """A whole recipe."""

    model: str = Field(description="a Hugging Face folder, hub id or .gguf file, or `smollm2-135m-instruct`")
    trainable: Names = Field(
        default=("all",), min_length=1, description="tensors to train: `all`, `last:N` decoder layers, or name patterns"
    )
    numerics: str | dict[str, Any] = Field(
        default="bf16",
        description="a preset (`fp32`, `bf16`; `fp8`: linear layers; `fp8-kv`: linear layers, KV cache and attention), "
        "or {preset: NAME, field: value} to replace single fields, such as kv_scale: calibrated, scale_format: pow2, "
        "bf16_layers: {first: 1, last: 1}; docs/numerics.md lists all fields",
    )
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig
    moe: MoEConfig = MoEConfig()
    parity: ParityConfig = ParityConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    seed: Count = Field(default=0, description="every random stream of the run is keyed by it")
    output_dir: str = Field(
        default="runs/zerogap", description="folder for logs, checkpoints, the model and the report"
    )

    @pydantic.model_validator(mode="after")
    def _sections_agree(self) -> "RunConfig":
        contract = self.contract()
        tokens = self.optimizer.micro_batch_tokens
        if tokens < contract.pack_tokens:
            raise ConfigError(
                "optimizer.micro_batch_tokens", tokens, f"choose at least numerics.pack_tokens ({contract.pack_tokens})"
            )
        updates = self.optimizer.max_steps * self.algorithm.num_iterations
        if self.optimizer.warmup_steps > updates:
            raise ConfigError(
                "optimizer.warmup_steps", self.optimizer.warmup_steps, f"choose at most the run's {updates} updates"
            )
        rollout = self.rollout
        if self.algorithm.beta and (rollout.top_k or rollout.top_p < 1.0 or rollout.min_p):
            raise ConfigError(
                "algorithm.beta",
                self.algorithm.beta,
                "choose 0, or switch rollout.top_k, top_p and min_p off: an id that the reference model's filters "
                "exclude has no KL",
            )
        if self.one_sided and (rollout.top_k or rollout.top_p < 1.0 or rollout.min_p):
            raise ConfigError(
                "rollout.numerics",
                rollout.numerics,
                "switch rollout.top_k, top_p and min_p off: an id that one side keeps may be excluded on the other",
            )
        if self.algorithm.correction.active and not self.one_sided:
            raise ConfigError(
                "algorithm.correction.kind",
                self.algorithm.correction.kind,
                "choose none: rollout and trainer compute the same bits, so every ratio is 1; corrections are for "
                "rollout.numerics of another contract",
            )
        if "task" in self.reward.functions and not self.data.train.startswith("reasoning_gym:"):
            raise ConfigError("reward.functions", "task", "only reasoning_gym:NAME data has a scorer of its own")
        return self

    def contract(self) -> Numerics:
        """The numerics contract that `numerics` asks for (`contract_of`)."""
        return contract_of(self.numerics)

    def rollout_contract(self) -> Numerics:
        """The contract of the rollout: that of training, or the one that `rollout.numerics` asks for."""
        if self.rollout.numerics is None:
            return self.contract()
        try:
            return contract_of(self.rollout.numerics)
        except ConfigError as error:
            raise ConfigError(f"rollout.{error.key}", error.value, error.mend) from None

    @property
    def one_sided(self) -> bool:
        """True if rollout and training are asked to compute different bits."""
        return self.rollout_contract().fingerprint() != self.contract().fingerprint()

    def to_yaml(self) -> str:
        """The complete recipe, defaults included; `load_config` reads it back to an equal object."""
        return yaml.safe_dump(json.loads(self.model_dump_json()), sort_keys=False, allow_unicode=True)


# ---------------------------------------------------------------------------------------------------- reading


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not a word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def iter_fields(section: type[Section] = RunConfig, prefix: str = "") -> Iterator[tuple[str, object, str]]:
    """(dotted key, default, description) of every leaf, in declaration order; a required key has `...` as default."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from iter_fields(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, ... if field.is_required() else field.default, field.description or ""


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of a recipe's tree with `a.b=c` words applied in order; `c` is read as YAML.

    Raises:
        ConfigError: a word without `=`, or a path through something that is not a section.
    """
    tree = copy.deepcopy(tree)
    for word in overrides:
        path, equals, text = word.partition("=")
        if not equals or not path:
            raise ConfigError("override", word, "write it as section.key=value")
        *sections, leaf = path.split(".")
        node = tree
        for depth, name in enumerate(sections):
            contract = sections[: depth + 1] in (["numerics"], ["rollout", "numerics"])
            if contract and isinstance(node.get(name), str):
                node[name] = {"preset": node[name]}
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                raise ConfigError(path, text, f"{'.'.join(sections[: depth + 1])} is a value, not a section")
        node[leaf] = _read_yaml(text, path)
    return tree


def load_config(source: str | pathlib.Path | dict[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a recipe.

    Args:
        source: path of a YAML file, or its tree.
        overrides: `a.b=c` words.

    Raises:
        ConfigError: names the key, the value and the mend; also for a missing or malformed file.
    """
    if isinstance(source, dict):
        tree = source
    else:
        path = pathlib.Path(source)
        if not path.is_file():
            raise ConfigError("recipe", str(source), "no such file")
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError("recipe", str(source), f"not UTF-8 text: {error}") from None
        tree = _read_yaml(text, str(source))
    if not isinstance(tree, dict):
        raise ConfigError("recipe", tree, "a recipe is a mapping of keys to values")
    try:
        return RunConfig.model_validate(apply_overrides(tree, overrides))
    except pydantic.ValidationError as error:
        raise _translate(error) from None


def _read_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(where, text if len(text) < 80 else "...", f"not valid YAML: {error}") from None


def _translate(error: pydantic.ValidationError) -> ConfigError:
    """The first finding of pydantic as one of ours, with the number of others."""
    findings = error.errors(include_url=False)
    first = findings[0]
    original = first.get("ctx", {}).get("error")
    if isinstance(original, ConfigError):
        return original
    known = [key for key, _, _ in iter_fields()]
    names = [str(part) for part in first["loc"] if part not in ("str", "dict[str,any]")]
    key = ".".join(names)
    mend = first["msg"].replace("Input should be", "it should be")
    if first["type"] == "extra_forbidden":
        leaf = names[-1]
        near = [k for k in known if k.rsplit(".", 1)[-1] == leaf] or difflib.get_close_matches(key, known, 1)
        siblings = [k for k in known if k.rpartition(".")[0] == key.rpartition(".")[0]]
        mend = f"unknown key; did you mean {near[0]}?" if near else f"unknown key; known here: {', '.join(siblings)}"
    elif first["type"] == "missing":
        return ConfigError(key, None, "this key must be given")
    if len(findings) > 1:
        mend += f" ({len(findings) - 1} more wrong: {', '.join('.'.join(map(str, f['loc'])) for f in findings[1:4])})"
    return ConfigError(key, first["input"], mend)
