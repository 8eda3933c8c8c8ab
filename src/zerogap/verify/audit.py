"""The audit of a run: its logged log-probs, computed again from its saved weights under other conditions.

For every step whose weights were saved, the digests of all tensors are checked first. Then the log-probs of the step's
samples are computed along three paths and compared as bits with what the rollout recorded:

- *trainer*: the trainer's packed forward, samples in reverse order, one pack at a time;
- *engine*: the engine's prefill over the known tokens, in chunks, one sample after the other;
- *redrawn*: the samples drawn again with their keys, tokens and log-probs alike, in reverse order.

Where the run recorded which experts its tokens went to, the trainer's and the redrawn samples' choices, and the margins
of these choices, are held against the record, too; a token that must have a record and has none counts as different.

Page size, number of threads, batch composition and prefix cache differ from the run's on purpose: a result that
depended on one of them would differ. A wrong weight does not stop the audit: what it changes is counted, too.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zerogap import env
from zerogap.config import RunConfig
from zerogap.errors import CheckpointError, ConfigError, ContractError
from zerogap.models.decoder import Decoder
from zerogap.models.inventory import require_same_list
from zerogap.numerics import Numerics, require_equal
from zerogap.ops.cpu.library import use_threads
from zerogap.ops.kv_scales import KVScales
from zerogap.rl import setup
from zerogap.rl.rollout_log import logged_steps, read_rollout
from zerogap.rl.run_folder import FACTS, RunFolder
from zerogap.rollout.engine import Engine
from zerogap.routing import RoutingTrace
from zerogap.text import Tokenizer
from zerogap.train.routing import DIFFERENT_EXPERTS
from zerogap.train.trainer import Trainer
from zerogap.types import Sample
from zerogap.weights import open_model

PATHS = ("trainer", "engine", "redrawn")
CHUNK_TOKENS = 37  # of the engine's prefill: no multiple of a page, a block or a lane


@dataclasses.dataclass(frozen=True)
class AuditSettings:
    """Conditions of an audit; None: other ones than the run's.

    Attributes:
        page_size: tokens per page of the engine's cache.
        threads: native threads.
    """

    page_size: int | None = None
    threads: int | None = None


@dataclasses.dataclass(frozen=True)
class WeightAudit:
    """Saved weights: tensors whose digest was checked, names of those that differ, or why they cannot be read."""

    version: int
    tensors: int
    changed: tuple[str, ...] = ()
    damaged: str = ""


@dataclasses.dataclass(frozen=True)
class StepAudit:
    """One step: tokens compared per path, tokens that differ per path (`PATHS`), the first difference in words.

    Attributes:
        routed: prompt and completion tokens whose recorded experts were compared, along the trainer's path.
        experts: tokens with other experts or margins, the trainer's and the redrawn ones together, and tokens whose
            record is missing.
    """

    step: int
    version: int
    tokens: int
    trainer: int
    engine: int
    redrawn: int
    first: str = ""
    routed: int = 0
    experts: int = 0

    @property
    def differences(self) -> int:
        return self.trainer + self.engine + self.redrawn + self.experts


@dataclasses.dataclass
class AuditResult:
    """What an audit found. Grows while it runs.

    Attributes:
        weights, steps: what was checked.
        not_covered: (step, why) of logged steps that were asked for and cannot be audited.
        notes: what people should know.
    """

    weights: list[WeightAudit] = dataclasses.field(default_factory=list)
    steps: list[StepAudit] = dataclasses.field(default_factory=list)
    not_covered: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(step.tokens for step in self.steps)

    @property
    def differences(self) -> int:
        return sum(step.differences for step in self.steps)

    @property
    def exact(self) -> bool:
        """True if something was compared and neither a weight nor a log-prob differs."""
        sound = not any(w.changed or w.damaged for w in self.weights)
        return self.tokens > 0 and self.differences == 0 and sound

    def as_json(self) -> dict[str, Any]:
        """Plain facts, `exact` included."""
        return {"exact": self.exact, "tokens": self.tokens, "differences": self.differences} | dataclasses.asdict(self)


def audit_run(
    path: str | Path,
    steps: Sequence[int] | None = None,
    settings: AuditSettings = AuditSettings(),
    progress: Callable[[WeightAudit | StepAudit], None] | None = None,
) -> AuditResult:
    """Audit a run.

    Args:
        path: the run's folder.
        steps: which of the logged steps; None: every one whose weights were saved.
        progress: called with each result as it is there.

    Raises:
        CheckpointError: not a run's folder, or a rollout file is damaged.
        ConfigError: a step that was not logged, a page size that cannot be honoured, or a one-sided run.
        ContractError: the run was made under another contract or on another backend class.
    """
    folder = RunFolder(path)
    config = folder.config()
    if config.one_sided:
        mend = "rollout and trainer were asked to compute different bits, so there is nothing to audit: not exact"
        raise ConfigError("rollout.numerics", config.rollout.numerics, mend)
    logged = logged_steps(folder.rollouts)
    if missing := sorted(set(steps or ()) - set(logged)):
        raise ConfigError("steps", missing, f"the run logged {_ranges(logged)}")
    result, saved = AuditResult(), folder.saved_versions()
    by_version: dict[int, list[int]] = {}
    for step in logged if steps is None else sorted(set(steps)):
        version = _version_of(folder, step)
        if version in saved:
            by_version.setdefault(version, []).append(step)
        elif version is None:
            result.not_covered.append((step, "its samples were drawn at several weight versions"))
        else:
            result.not_covered.append((step, f"the weights of version {version} were not saved"))
    page_size = settings.page_size or (64 if config.rollout.page_size < 64 else 16)
    threads = settings.threads or (1 if env.num_threads() > 1 else 2)
    result.notes.append(
        f"page size {page_size} (run: {config.rollout.page_size}), {threads} threads, reverse order, prefix cache "
        f"{'off' if config.rollout.prefix_cache else 'on'} (run: {'on' if config.rollout.prefix_cache else 'off'})"
    )
    with use_threads(threads):
        for version, chosen in by_version.items():
            for found in _audit_version(folder, config, saved[version], version, chosen, page_size, result):
                if isinstance(found, WeightAudit):
                    result.weights.append(found)
                else:
                    result.steps.append(found)
                if progress is not None:
                    progress(found)
    return result


def _version_of(folder: RunFolder, step: int) -> int | None:
    """The weight version that drew all tokens of a step, or None if there are several."""
    versions = {int(v) for sample in read_rollout(folder.rollouts, step).samples for v in np.unique(sample.versions)}
    return versions.pop() if len(versions) == 1 else None


def _audit_version(
    folder: RunFolder,
    config: RunConfig,
    weights: Path,
    version: int,
    steps: Sequence[int],
    page_size: int,
    result: AuditResult,
) -> Iterator[WeightAudit | StepAudit]:
    """The weights of one version, then the steps that were drawn with them."""
    try:
        facts = json.loads((weights / FACTS).read_text(encoding="utf-8"))
        digests, source = facts["digests"], facts["source"]
        require_equal(config.contract(), Numerics.from_fields(facts["numerics"]), str(weights))
        files = open_model(weights if source is None else source)
        decoder = setup.load_decoder(config, files)
        require_same_list(decoder.quantised(), facts.get("quantised"), str(weights))
        if decoder.calibrated:
            decoder.set_kv_scales(KVScales.from_list(facts["kv_scales"]))
    except ConfigError as error:
        result.not_covered += [(step, f"its model cannot be opened ({error})") for step in steps]
        return
    except (CheckpointError, OSError, ValueError, KeyError) as error:
        result.not_covered += [(step, f"the weights of version {version} are damaged") for step in steps]
        yield WeightAudit(version, 0, damaged=f"{type(error).__name__}: {error}")
        return
    decoder.version = version
    ours = decoder.digests()
    changed = tuple(name for name in sorted({*ours, *digests}) if ours.get(name) != digests.get(name))
    yield WeightAudit(version, len(digests), changed)
    tokenizer = Tokenizer.from_files(files.tokenizer_files(), files.chat_template)
    trainer = setup.scoring_trainer(decoder, config.contract().pack_tokens)
    engine = _other_engine(config, decoder, tokenizer, page_size)
    with_experts = _steps_with_experts(folder)
    for step in steps:
        samples = read_rollout(folder.rollouts, step).samples
        _check_identity(decoder, samples, step, result)
        _check_scales(decoder, samples, step)
        yield _audit_step(step, version, samples, trainer, engine, step in with_experts)


def _steps_with_experts(folder: RunFolder) -> set[int]:
    """Steps at which the run itself compared recorded experts."""
    path = folder.path / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    whole = [line for line in lines if DIFFERENT_EXPERTS in line and line.endswith("}")]  # a killed run tears its last
    return {json.loads(line)["step"] for line in whole}


def _other_engine(config: RunConfig, decoder: Decoder, tokenizer: Tokenizer, page_size: int) -> Engine:
    """An engine that batches in another way than the run's."""
    rollout = config.rollout
    sequences = max(1, rollout.max_sequences // 2 - 1)
    other = {
        "page_size": page_size,
        "max_sequences": sequences,
        "max_batch_tokens": max(sequences, rollout.max_batch_tokens // 3),
        "prefix_cache": not rollout.prefix_cache,
    }
    changed = config.model_copy(update={"rollout": rollout.model_copy(update=other)})
    return setup.build_engine(changed, decoder, tokenizer)


def _check_identity(decoder: Decoder, samples: Sequence[Sample], step: int, result: AuditResult) -> None:
    """Other contract or backend class: refused. Another build of the same kernels: said, since bits should agree."""
    ours = decoder.identity
    for theirs in {sample.identity for sample in samples}:
        if (theirs.contract, theirs.backend) != (ours.contract, ours.backend):
            raise ContractError(
                f"step {step} was drawn by {theirs}, this machine computes as {ours}: their log-probs cannot be "
                "compared; audit on a machine of the same backend class"
            )
        note = f"the run's kernels are build {theirs.build}, these are {ours.build}"
        if theirs != ours and note not in result.notes:
            result.notes.append(note)


def _check_scales(decoder: Decoder, samples: Sequence[Sample], step: int) -> None:
    """Samples that were drawn with other KV scales than those saved with the weights: refused."""
    ours = None if decoder.kv_scales is None else decoder.kv_scales.name
    if wrong := {str(sample.scale_set) for sample in samples} - {str(ours)}:
        raise ContractError(f"step {step} was drawn with KV scale set {min(wrong)}, its weights carry {ours}")


def _audit_step(
    step: int, version: int, samples: Sequence[Sample], trainer: Trainer, engine: Engine, with_experts: bool
) -> StepAudit:
    """Compare one step along the three paths."""
    reverse = [s for s in samples if len(s.completion_ids)][::-1]
    with_experts |= any(s.routing is not None for s in samples)
    logprobs, traces = trainer.logprobs_and_routing(reverse)
    drawn = _draw(engine, reverse)
    found = {
        "trainer": [_differs(s, ours) for s, ours in zip(reverse, logprobs, strict=True)],
        "engine": [_differs(s, _scored(engine, s)) for s in reverse],
        "redrawn": [_redrawn(s, d) for s, d in zip(reverse, drawn, strict=True)],
    }
    counts = {name: sum(int(d.sum()) for d in found[name]) for name in PATHS}
    routed = [
        (name, [_other_experts(s.routing, t) for s, t in zip(reverse, theirs, strict=True)])
        for name, theirs in (("trainer", traces), ("redrawn", [d.routing for d in drawn]))
    ]
    routed += [("record", [_unrecorded(s) for s in reverse])] if with_experts else []
    first = ""
    places = [*((f"{name}: ", "completion token", d) for name, d in found.items())]
    for prefix, word, differs in [*places, *((f"experts, {name}: ", "token", d) for name, d in routed)]:
        where = next(((i, int(np.flatnonzero(d)[0])) for i, d in enumerate(differs[::-1]) if d.any()), None)
        if where is not None and not first:
            first = f"{prefix}sample {where[0]}, {word} {where[1]}"
    return StepAudit(
        step,
        version,
        sum(len(s.completion_ids) for s in reverse),
        **counts,
        first=first,
        routed=sum(int(s.routing.recorded.sum()) for s in reverse if s.routing is not None),
        experts=sum(int(d.sum()) for _, differs in routed for d in differs),
    )


def _other_experts(logged: RoutingTrace | None, found: RoutingTrace | None) -> np.ndarray:
    """bool: tokens of both traces that went to other experts, or by another margin; none without a record."""
    if logged is None or found is None:
        return np.zeros(0, bool)
    tokens = min(len(logged.experts), len(found.experts))
    if logged.experts.shape[1:] != found.experts.shape[1:]:
        return np.ones(tokens, bool)
    return logged.first(tokens).different(found.first(tokens), margins=True)


def _unrecorded(sample: Sample) -> np.ndarray:
    """bool [N - 1]: tokens that must have a record and have none. Keys and values of a beginning of the prompt may have
    come from the prefix cache; what follows was computed."""
    count, prompt = sample.num_tokens - 1, len(sample.prompt_ids) - 1
    missing = np.ones(count, bool) if sample.routing is None else ~sample.routing.recorded
    cached = next((i for i in range(prompt) if not missing[i]), prompt)
    missing[:cached] = False
    return missing


def _differs(sample: Sample, logprobs: np.ndarray) -> np.ndarray:
    """bool [C]: log-probs that are not the recorded bits."""
    return logprobs.view(np.int32) != sample.logprobs.view(np.int32)


def _scored(engine: Engine, sample: Sample) -> np.ndarray:
    ids = (sample.prompt_ids.tolist(), sample.completion_ids.tolist())
    return engine.score(*ids, sample.params, chunk_tokens=CHUNK_TOKENS)


def _draw(engine: Engine, samples: Sequence[Sample]) -> list[Sample]:
    return engine.generate([s.prompt_ids for s in samples], [s.params for s in samples], [s.key for s in samples])


def _redrawn(sample: Sample, drawn: Sample) -> np.ndarray:
    """bool [C]: tokens whose id, log-prob or kept set is another one, or that were not drawn any more."""
    tokens = len(sample.completion_ids)
    same = min(tokens, len(drawn.completion_ids))
    differs = np.ones(tokens, bool)
    differs[:same] = sample.completion_ids[:same] != drawn.completion_ids[:same]
    differs[:same] |= sample.logprobs.view(np.int32)[:same] != drawn.logprobs.view(np.int32)[:same]
    if sample.kept_counts is not None and sample.kept_digests is not None:
        assert drawn.kept_counts is not None and drawn.kept_digests is not None, "the same parameters record kept sets"
        differs[:same] |= sample.kept_counts[:same] != drawn.kept_counts[:same]
        differs[:same] |= sample.kept_digests[:same] != drawn.kept_digests[:same]
    if len(drawn.completion_ids) > tokens:
        differs[-1] = True  # it went on where the logged one ended
    return differs


def _ranges(steps: Sequence[int]) -> str:
    """Steps in words: `no steps`, `step 3`, `steps 1 to 24`."""
    if not steps:
        return "no steps"
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
