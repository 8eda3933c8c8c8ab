"""A run in words: the facts that people should see before it starts, and in its report."""

import math
from collections.abc import Mapping, Sequence

from zerogap import env
from zerogap.config import ALGORITHMS, RunConfig
from zerogap.models.decoder import Decoder
from zerogap.models.inventory import inventory
from zerogap.models.words import sizes
from zerogap.train.trainer import Trainer
from zerogap.weights import ModelFiles, sampling_defaults_notice


def run_facts(
    config: RunConfig, trainer: Trainer, files: ModelFiles, data_summary: Sequence[str]
) -> list[tuple[str, str]]:
    """(label, text) pairs: model, contract with all its fields, identity, what is trained, data, sampling."""
    decoder, rollout = trainer.decoder, config.rollout
    spec, numerics = decoder.spec, decoder.numerics
    asked = config.rollout_contract()
    size = sum(math.prod(handle.spec.shape) for handle in decoder.weights.values())
    trained = sum(math.prod(handle.spec.shape) for handle in trainer.handles)
    contract = ", ".join(f"{key} {value}" for key, value in numerics.fields().items() if key != "name")
    filters = [f"{name} {getattr(rollout, name)}" for name in ("top_k", "top_p", "min_p")]
    facts = [
        ("model", f"{config.model} ({spec.family}, {size:,} parameters)"),
        ("sizes", ", ".join(sizes(spec))),
        ("numerics", f"{numerics.name}, contract {numerics.fingerprint()}"),
        ("contract", contract),
        ("identity", _identity(trainer)),
        ("quantised", _quantised(config, decoder)),
        ("trainable", f"{len(trainer.trainable)} of {len(decoder.weights)} tensors, {trained:,} parameters"),
        ("data", "\n".join(data_summary)),
        (
            "sampling",
            f"{rollout.prompts_per_step} prompts x {rollout.num_generations} completions of at most "
            f"{rollout.max_completion_length} tokens a step, temperature {rollout.temperature}, {', '.join(filters)}",
        ),
        ("output", config.output_dir),
    ]
    if config.algorithm.name is not None:
        facts.insert(-1, ("algorithm", _algorithm(config)))
    if config.one_sided:
        sides = f"rollout {asked.name} (contract {asked.fingerprint()}), training {numerics.name}"
        correction = f"correction {config.algorithm.correction.kind}"
        facts.insert(0, ("warning", f"ONE-SIDED, NOT EXACT: {sides}; {correction}"))
    notice = sampling_defaults_notice(files)
    return [*facts, ("notice", notice)] if notice else facts


def _algorithm(config: RunConfig) -> str:
    """The named algorithm, with the values that this run has for what the name sets."""
    chosen = config.algorithm.model_dump()
    name = str(config.algorithm.name)
    return f"{name}: " + ", ".join(f"{key} {_words(chosen[key])}" for key in ALGORITHMS[name])


def _words(value: object) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _identity(trainer: Trainer) -> str:
    ours = trainer.decoder.identity
    if trainer.one_sided:
        return f"trainer {ours}, rollout {trainer.rollout_identity}: not exact; {env.num_threads()} threads"
    return f"{ours}, the same for rollout and trainer; {env.num_threads()} threads"


def _quantised(config: RunConfig, decoder: Decoder) -> str:
    """What stands in FP8, one-sided for either side; `zerogap inspect` lists every tensor."""
    ours = _counted(decoder.quantised(), decoder)
    if not config.one_sided:
        return ours
    forms = inventory(decoder.spec, config.rollout_contract())
    theirs = _counted({form.name: form.shape for form in forms if form.quantised}, decoder)
    return f"rollout: {theirs}; training: {ours}"


def _counted(chosen: Mapping[str, tuple[int, ...]], decoder: Decoder) -> str:
    if not chosen:
        return "nothing"
    size = sum(math.prod(shape) for shape in chosen.values())
    return f"{len(chosen)} of {len(decoder.weights)} tensors, {size:,} parameters (list: zerogap inspect)"
