"""From a recipe to the parts of a run: prompts, rewards, model, trainer, engine. Nothing here trains.

What cannot be honoured raises before the costly things begin: data and reward functions are read before the model, the
model's header before its weights.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zerogap.config import RunConfig
from zerogap.errors import ConfigError
from zerogap.models.decoder import Decoder
from zerogap.models.spec import ModelSpec
from zerogap.ops.backend import identity
from zerogap.rl.data import PromptSet, Row, keep_short, length_notes, load_prompts
from zerogap.rl.reward import RewardFunctions, load_rewards
from zerogap.rl.reward_loading import FunctionSpec
from zerogap.rollout.engine import Engine
from zerogap.rollout.speculate import Speculation
from zerogap.text import Tokenizer
from zerogap.train.optimizer import OptimizerSettings
from zerogap.train.trainer import Trainer
from zerogap.types import SamplingParams
from zerogap.weights import ModelFiles, open_model


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """A data row with the ids of its prompt, int32 [P]."""

    row: Row
    ids: np.ndarray


def load_data(config: RunConfig) -> tuple[PromptSet, RewardFunctions]:
    """Rows and reward functions, checked against each other."""
    entries = config.reward.entries()
    reading = [entry for entry in entries if FunctionSpec(entry.function).needs_answer]
    data = load_prompts(config.data, config.seed, lambda path: any(entry.scores(path) for entry in reading))
    rewards = load_rewards(config.reward, data.tasks)
    rows = (*data.train, *data.held_out)
    rewards.check(list(dict.fromkeys(key for row in rows for key in row.columns)))
    rewards.check_rows(rows)
    return data, rewards


def tokenize(
    rows: Sequence[Row], tokenizer: Tokenizer, limit: int, what: str = "prompts"
) -> tuple[list[Prompt], list[str]]:
    """Prompts of at most `limit` tokens, and what is told of their lengths and of those that are left out."""
    ids = {id(row): tokenizer.encode_chat(row.prompt) for row in rows}
    kept, _ = keep_short(rows, lambda row: len(ids[id(row)]), limit)
    return [Prompt(row, ids[id(row)]) for row in kept], length_notes([len(i) for i in ids.values()], limit, what)


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """SHA-256 over the ids and the answer of every prompt, in order: what a position of the run's order stands for."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{len(prompt.ids)} {prompt.row.columns.get('answer')!r}\n".encode())
        digest.update(prompt.ids.tobytes())
    return digest.hexdigest()


def open_source(config: RunConfig) -> tuple[ModelFiles, str | None]:
    """The recipe's model, opened, and its name where nobody can change it in place (hub id, quick start), else None."""
    files = open_model(config.model)
    return files, None if Path(config.model).expanduser().exists() else config.model


def positions(config: RunConfig) -> int:
    """Longest sequence of a run, in tokens."""
    return config.data.max_prompt_length + config.rollout.max_completion_length


def load_decoder(config: RunConfig, files: ModelFiles) -> Decoder:
    """The model under the recipe's contract, with room for its longest sequence.

    Raises:
        ConfigError: see `check_model`.
    """
    check_model(config, files.spec)
    decoder = Decoder(files.spec, config.contract(), max_positions=positions(config))
    return decoder.load(files.tensors())


def check_model(config: RunConfig, spec: ModelSpec) -> None:
    """Raise `ConfigError` for what this model cannot honour: a length beyond its positions, a setting of `moe`."""
    if positions(config) > spec.max_position:
        raise ConfigError(
            "data.max_prompt_length",
            config.data.max_prompt_length,
            f"with rollout.max_completion_length ({config.rollout.max_completion_length}) it exceeds the model's "
            f"{spec.max_position} positions: lower one of them",
        )
    if spec.moe is None:
        for key, value in config.moe.model_dump().items():
            if value:
                mend = f"this {spec.family} model has no routed experts: leave the moe section out"
                raise ConfigError(f"moe.{key}", value, mend)
    elif config.moe.router_bias_rate and not spec.moe.has_bias:
        mend = f"routers of {spec.family} have no correction bias: choose 0, or balance with moe.balance_loss"
        raise ConfigError("moe.router_bias_rate", config.moe.router_bias_rate, mend)


def rollout_decoder(config: RunConfig, trained: Decoder) -> Decoder:
    """What the engine samples from: the trained decoder itself, or, one-sided, a copy under the rollout's contract."""
    if not config.one_sided:
        return trained
    decoder = Decoder(trained.spec, config.rollout_contract(), max_positions=trained.max_positions)
    decoder.copy_from(trained)
    return decoder


def build_trainer(config: RunConfig, decoder: Decoder) -> Trainer:
    """The trainer that the recipe asks for."""
    chosen = config.optimizer
    settings = OptimizerSettings(
        learning_rate=chosen.learning_rate,
        schedule=chosen.lr_scheduler_type,
        warmup_updates=chosen.warmup_steps,
        total_updates=chosen.max_steps * config.algorithm.num_iterations,
        betas=chosen.betas,
        eps=chosen.eps,
        weight_decay=chosen.weight_decay,
        max_grad_norm=chosen.max_grad_norm,
    )
    return Trainer(
        decoder,
        optimizer=settings,
        trainable=config.trainable,
        micro_batch_tokens=chosen.micro_batch_tokens,
        activation_recompute=chosen.activation_recompute,
        on_mismatch=config.parity.on_mismatch,
        rollout_identity=identity(config.rollout_contract()),
        balance_loss=config.moe.balance_loss,
        router_bias_rate=config.moe.router_bias_rate,
    )


def scoring_trainer(decoder: Decoder, micro_batch_tokens: int) -> Trainer:
    """A trainer with nothing to train, for log-probs of a fixed model (a reference, an audit)."""
    return Trainer(decoder, trainable=(), micro_batch_tokens=micro_batch_tokens)


def build_engine(config: RunConfig, decoder: Decoder, tokenizer: Tokenizer, page_size: int | None = None) -> Engine:
    """The engine that the recipe asks for; `page_size` may replace the recipe's, which changes no bit."""
    rollout = config.rollout
    return Engine(
        decoder,
        tokenizer,
        page_size=page_size or rollout.page_size,
        kv_cache_bytes=int(rollout.kv_cache_memory * 2**30),
        max_batch_tokens=rollout.max_batch_tokens,
        max_sequences=rollout.max_sequences,
        prefix_cache=rollout.prefix_cache,
        record_routing=config.moe.record_routing,
        speculation=Speculation(rollout.speculation.draft_tokens, rollout.speculation.min_match),
    )


def sampling_params(config: RunConfig) -> SamplingParams:
    """How training completions are sampled."""
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        max_tokens=rollout.max_completion_length,
        stop=rollout.stop,
    )


def evaluation_params(config: RunConfig) -> SamplingParams:
    """How held-out completions are sampled: no filters, the evaluation's own temperature."""
    rollout = config.rollout
    return SamplingParams(
        temperature=config.eval.temperature, max_tokens=rollout.max_completion_length, stop=rollout.stop
    )
