"""The loop: prompts, completions, rewards, advantages, updates, new weights, and again.

One process, one copy of the weights: the engine samples from the decoder that the trainer updates in place. A `Run` is
built from a recipe; `train()` does the steps, each phase one small method:

    prompts -> engine.generate -> rewards -> which groups stay -> advantages -> batch
            -> trainer.forward_backward (compares bits before the backward) -> optim_step -> engine.update_weights

A step is a pure function of the weights before it, the recipe, its number and its place in the order of prompts: rows
come from (seed, epoch, index), draws from (seed, step, prompt slot, round, sample, position), the learning rate from
the number of updates. So a run that was killed and resumed has the bits of one that was not. A rollout is on disk
before it is trained on.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from zerogap.config import RunConfig
from zerogap.errors import CheckpointError, ZerogapError
from zerogap.moments import Moments, pool
from zerogap.rl import completions, setup
from zerogap.rl.advantage import Advantages, build_batch, step_advantages
from zerogap.rl.alarms import Alarms
from zerogap.rl.correction import correct
from zerogap.rl.describe import run_facts
from zerogap.rl.filters import GroupFilter, Round, StepGroups, fill_slots
from zerogap.rl.held_out import evaluate
from zerogap.rl.loss import PolicyLoss
from zerogap.rl.metrics import (
    ONE_SIDED,
    completion_metrics,
    flatten,
    reward_metrics,
    source_metrics,
    speculation_metrics,
)
from zerogap.rl.observer import Observer
from zerogap.rl.process_memory import process_memory
from zerogap.rl.report import read_lines, write_report
from zerogap.rl.resume import require_same_prompts, require_same_run, starting_point
from zerogap.rl.reward import RewardScores
from zerogap.rl.reward_values import RewardError
from zerogap.rl.rollout_log import LoggedRollout, logged_steps, read_rollout, write_rollout
from zerogap.rl.run_folder import RunFolder, side_facts, weight_facts
from zerogap.rl.scoring import score_samples
from zerogap.rl.setup import Prompt
from zerogap.rl.tensorboard import EventWriter
from zerogap.rl.wandb_writer import WandbWriter, require_installed
from zerogap.rollout.progress import Progress
from zerogap.text import Tokenizer
from zerogap.train.checkpoint import load_checkpoint, save_checkpoint
from zerogap.train.routing import RoutingResult
from zerogap.train.trainer import BackwardResult
from zerogap.types import Sample, SamplingKey, TrainBatch
from zerogap.weights import save_folder

COUNTS = ("mismatched_tokens", "compared_tokens")  # of a run, kept in its checkpoints
REPORT_SECONDS = 20.0  # the report is rewritten at most this often, and at the end


class _StopAsked(Exception):
    """Ends a rollout early: its completions are not trained on, so nothing is lost but them."""


class Run:
    """A training run. Building it reads data, rewards and weights, and puts a checkpoint in place where there is one.

    Attributes:
        config, folder: the recipe and where the run lies.
        files, tokenizer, decoder, trainer, engine: the model and its two sides.
        sampled: the decoder that the engine samples from: `decoder`, or a copy under the rollout's own contract.
        data, rewards: rows and reward functions.
        step, position: steps done, and prompts taken for them.
        mismatched_tokens, compared_tokens: sums over all steps of the run, those before a resume, too.
        stop_asked: set by `ask_to_stop`.
    """

    def __init__(
        self, config: RunConfig, resume: str = "auto", observer: Observer | None = None, *, finished: bool = False
    ) -> None:
        """
        Args:
            resume: `auto` (the newest checkpoint in `output_dir`, if there is one), `never` (begin anew; an earlier
                run's files in `output_dir` go), or the path of a checkpoint.
            finished: that may be the last one of a finished run.

        Raises:
            ConfigError: anything in the recipe that cannot be honoured, or a finished run where `auto` was asked.
            CheckpointError: model or checkpoint files are missing or damaged.
        """
        self.config, self.observer = config, observer or Observer()
        self.folder = RunFolder(config.output_dir)
        self.folder.require_ours()
        require_installed(config.logging.wandb)
        start = starting_point(self.folder, config, resume, finished=finished)
        self.data, self.rewards = setup.load_data(config)
        self.files, self._fixed_source = setup.open_source(config)
        self.tokenizer = Tokenizer.from_files(self.files.tokenizer_files(), self.files.chat_template)
        limit = config.data.max_prompt_length
        self.prompts, lengths = setup.tokenize(self.data.train, self.tokenizer, limit)
        held_out, more = setup.tokenize(self.data.held_out, self.tokenizer, limit, "held-out prompts")
        self._data_summary = [*self.data.summary, *lengths, *more]
        self.held_out = held_out[: config.eval.num_prompts]
        self.order = self.data.order([prompt.row for prompt in self.prompts], config.seed, config.data.shuffle)
        self.decoder = setup.load_decoder(config, self.files)
        self.trainer = setup.build_trainer(config, self.decoder)
        self.reference = self._load_reference() if config.algorithm.beta else None
        self.step = self.position = self.num_tokens = self.mismatched_tokens = self.compared_tokens = 0
        self._continues_here = start is not None and start.resolve().parent == self.folder.checkpoints.resolve()
        if start is not None:
            self._resume(start)
        self.sampled = setup.rollout_decoder(config, self.decoder)
        self._calibrate()
        self.engine = setup.build_engine(config, self.sampled, self.tokenizer)
        self.loss = PolicyLoss.from_config(config.algorithm, config.rollout.max_completion_length)
        if self._continues_here and config.rollout.speculation.draft_tokens:
            self._remember_rollouts()
        self.stop_asked = False
        self._alarms = Alarms()
        self._seconds: dict[str, float] = {}
        self._report_at = 0.0
        self._writers: list[EventWriter | WandbWriter] = []

    def _load_reference(self) -> setup.Trainer:
        """The model as it was before the first step, for the KL; never trained."""
        decoder = setup.load_decoder(self.config, self.files)
        return setup.scoring_trainer(decoder, self.config.optimizer.micro_batch_tokens)

    def _resume(self, checkpoint: Path) -> None:
        facts = load_checkpoint(checkpoint, self.trainer)
        extra = facts["extra"]
        if not isinstance(extra.get("config"), dict) or not isinstance(extra.get("num_tokens"), int):
            raise CheckpointError(f"{checkpoint}: state.json does not say of which run it is (extra.config)")
        require_same_run(self.config, extra["config"], checkpoint)
        require_same_prompts(setup.prompts_digest(self.prompts), extra.get("prompts"), checkpoint)
        self.step, self.num_tokens = facts["step"], extra["num_tokens"]
        self.position = extra.get("position", self.step * self.config.rollout.prompts_per_step)
        self.mismatched_tokens, self.compared_tokens = (extra.get(name, 0) for name in COUNTS)

    def _remember_rollouts(self) -> None:
        """Completions of the last two passes over the prompts, in which each came at least once, for speculation."""
        steps = 2 * -(-len(self.prompts) // self.config.rollout.prompts_per_step)
        for step in logged_steps(self.folder.rollouts):
            if self.step - steps < step <= self.step:
                self.engine.remember(read_rollout(self.folder.rollouts, step).samples)

    # ---- the run

    def ask_to_stop(self) -> None:
        """End after the phase at hand; `train` then saves a checkpoint and returns. Safe in a signal handler."""
        self.stop_asked = True

    def train(self) -> bool:
        """Do the steps that are left.

        Returns:
            True if the run is finished, False if it was asked to stop; a checkpoint is there then.

        Raises:
            ParityError: by policy, where log-probs differ; the step's update was not made.
            NonFiniteError, ConfigError: a step that cannot be honoured (a reward's result, a NaN); named in
                errors.jsonl, too.
            OutputError: a file could not be written; what was whole before still is.
        """
        with self.folder.writing():
            return self._train()

    def _train(self) -> bool:
        config = self.config
        self.folder.begin(config, self.step if self._continues_here else 0)
        if config.logging.tensorboard:
            self._writers.append(EventWriter(self.folder.tensorboard, self.step))
        if config.logging.wandb:
            self._writers.append(WandbWriter(self.folder.path, config.logging.wandb, config.model_dump(mode="json")))
        facts = run_facts(config, self.trainer, self.files, self._data_summary)
        self.observer.started(facts, self.step + 1, config.optimizer.max_steps)
        begun, finished = self.step, False
        try:
            self._evaluate_if_due()
            while self.step < config.optimizer.max_steps and not self.stop_asked:
                self._do_step(self.step + 1)
                self._after_step()
            finished = self.step >= config.optimizer.max_steps
        except _StopAsked:
            self.observer.note(f"stopped after step {self.step}")
        except ZerogapError as error:
            self.folder.append("errors", {"step": self.step + 1, "error": f"{type(error).__name__}: {error}"})
            if isinstance(error, RewardError) and self.step > begun:
                self._save_checkpoint()  # the step at hand has changed no weight
            raise
        finally:
            self.rewards.close()
            self.observer.ended()
            self._write_report()
            for writer in self._writers:
                writer.close()
        if finished:
            self._save_model()
        elif self.step > begun:
            self._save_checkpoint()
        return finished

    def _do_step(self, step: int) -> None:
        """One step of RL."""
        began = time.perf_counter()
        self._seconds = {}
        if self._is_audited(step):
            self._save_weights()
        before = self.engine.statistics
        groups = self._draw(step)
        prompts, samples, scores = groups.chosen.prompts, groups.chosen.samples, groups.chosen.scores
        old, reference = self._other_logprobs(samples)
        advantages = self._advantages(groups, old, reference)
        self._log_rollout(step, samples, scores, advantages)
        batch, corrected = self._batch(samples, advantages, old, reference)
        metrics = self._update(step, batch) | flatten(corrected)
        with self._phase(step, "update_weights"):
            self._update_rollout(step, groups.position)
        self.step, self.position = step, groups.position
        self.num_tokens += groups.all_tokens
        metrics |= flatten(dict(advantages.metrics) | completion_metrics(samples))
        metrics |= reward_metrics(self.rewards.names, scores) | groups.metrics()
        metrics |= source_metrics([prompt.row for prompt in prompts], scores)
        if self.config.rollout.speculation.draft_tokens:
            metrics |= speculation_metrics(before, self.engine.statistics)
        self._log_step(step, groups.drawn_tokens, metrics, time.perf_counter() - began)
        shown = completions.chosen(len(samples), self.config.rollout.num_generations, self.config.logging.completions)
        for record in completions.records(step, prompts, samples, scores, shown, self.tokenizer):
            self.folder.append("completions", record)

    def _after_step(self) -> None:
        """What is due between steps: evaluation, checkpoint, report."""
        self._evaluate_if_due()
        every, last = self.config.checkpoint.every, self.step == self.config.optimizer.max_steps
        if every and (last or self.step % every == 0):
            self._save_checkpoint()
        if time.monotonic() - self._report_at > REPORT_SECONDS:
            self._write_report()

    # ---- phases of a step

    @contextlib.contextmanager
    def _phase(self, step: int, name: str) -> Iterator[None]:
        self.observer.phase(step, name)
        began = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def _draw(self, step: int) -> StepGroups:
        """The step's groups, scored; those that the recipe filters out are replaced, where it asks for that."""
        algorithm = self.config.algorithm

        def draw(slots: list[int], attempt: int, position: int) -> Round:
            prompts = self._prompts_at(position, len(slots))
            samples = self._roll_out(step, prompts, slots, attempt)
            return Round(prompts, samples, self._score(step, prompts, samples))

        num_slots, rounds = self.config.rollout.prompts_per_step, algorithm.dynamic_sampling.max_rounds
        return fill_slots(draw, GroupFilter.from_config(algorithm), num_slots, rounds, self.position)

    def _prompts_at(self, position: int, count: int) -> list[Prompt]:
        """One entry per sample: the prompts of the run's order from `position` on, each `num_generations` times."""
        chosen = [self.prompts[row] for row in self.order.take(position, count)]
        return [prompt for prompt in chosen for _ in range(self.config.rollout.num_generations)]

    def _roll_out(self, step: int, prompts: Sequence[Prompt], slots: Sequence[int], attempt: int) -> list[Sample]:
        size = self.config.rollout.num_generations
        keys = [SamplingKey(self.config.seed, step, slot, attempt) for slot in slots]
        with self._phase(step, "rollout"):
            return self.engine.generate(
                [prompt.ids for prompt in prompts[::size]],
                setup.sampling_params(self.config),
                keys,
                num_samples=size,
                progress=lambda progress: self._watch(step, progress),
            )

    def _watch(self, step: int, progress: Progress) -> None:
        self.observer.rollout_progress(step, progress)
        if self.stop_asked:
            raise _StopAsked

    def _score(self, step: int, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardScores:
        with self._phase(step, "reward"):
            return self._scores(step, prompts, samples)

    def _scores(self, step: int, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardScores:
        rows = [prompt.row for prompt in prompts]
        return score_samples(self.rewards, self.folder, self.observer, step, rows, samples)

    def _other_logprobs(self, samples: Sequence[Sample]) -> tuple[Sequence[np.ndarray] | None, ...]:
        """Log-probs besides the rollout's, where they are needed: the trainer's own before the update, and the
        reference's. One-sided, the ratio of the loss divides by the former; the gap to the rollout's is left to the
        correction."""
        reference = old = None
        if self.reference is not None:
            with self._phase(self.step + 1, "reference"):
                reference = self.reference.logprobs(samples)
        if self.trainer.one_sided:
            with self._phase(self.step + 1, "old_logprobs"):
                old = self.trainer.logprobs(samples)
        return old, reference

    def _advantages(
        self, groups: StepGroups, old: Sequence[np.ndarray] | None, reference: Sequence[np.ndarray] | None
    ) -> Advantages:
        rollout, samples = self.config.rollout, groups.chosen.samples
        return step_advantages(
            self.config.algorithm,
            rollout.max_completion_length,
            samples,
            groups.chosen.scores.totals,
            [i // rollout.num_generations for i in range(len(samples))],
            groups.kept,
            old,
            reference,
        )

    def _batch(
        self,
        samples: Sequence[Sample],
        advantages: Advantages,
        old: Sequence[np.ndarray] | None,
        reference: Sequence[np.ndarray] | None,
    ) -> tuple[TrainBatch, Mapping[str, Moments]]:
        """What the trainer gets, and the figures of its correction."""
        algorithm = self.config.algorithm
        batch = build_batch(samples, advantages, algorithm.mask_truncated_completions, reference, old)
        return correct(batch, algorithm.correction)

    def _update(self, step: int, batch: TrainBatch) -> dict[str, float]:
        """The updates on one batch. On the first one every token's bits are compared; later ones train at newer
        weights than the rollout's, where nothing can be compared."""
        results: list[BackwardResult] = []
        norms: list[float] = []
        rate = 0.0
        calibrating = self.trainer.calibration_seconds
        with self._phase(step, "train"):
            for _ in range(self.config.algorithm.num_iterations):
                results.append(self.trainer.forward_backward(batch, self.loss))
                done = self.trainer.optim_step()
                norms.append(done.grad_norm)
                rate = done.learning_rate
        if self.decoder.calibrated:
            self._seconds["recalibrate"] = self.trainer.calibration_seconds - calibrating
        compared, mismatched = (sum(getattr(r, f"{n}_tokens") for r in results) for n in ("compared", "mismatched"))
        self.compared_tokens += compared
        self.mismatched_tokens += mismatched
        if mismatched and not self.trainer.one_sided:
            self.observer.note(f"step {step}: {mismatched} of {compared} log-probs differ from the rollout's")
        metrics = flatten(pool(r.metrics for r in results)) | self._routing(step, [r.routing for r in results])
        return metrics | {
            "loss": sum(r.loss for r in results) / len(results),
            "grad_norm": sum(norms) / len(norms),
            "learning_rate": rate,
            "bit_wise/compared_tokens": compared,
            "bit_wise/mismatched_tokens": mismatched,
        }

    def _routing(self, step: int, results: Sequence[RoutingResult]) -> dict[str, float]:
        """What the routers chose: loads of the step's first update, whose weights drew the samples."""
        different = sum(r.mismatched_tokens for r in results)
        if different and not self.trainer.one_sided:
            compared = sum(r.compared_tokens for r in results)
            self.observer.note(
                f"step {step}: {different} of {compared} tokens went to other experts than in the rollout"
            )
        return dict(results[0].metrics)

    def _update_rollout(self, step: int, position: int) -> None:
        """The engine takes over the new weights; a decoder of its own gets a copy of them first.

        Args:
            position: where the next step's prompts begin.
        """
        if self.sampled is not self.decoder:
            self.sampled.copy_from(self.decoder)
            if self.sampled.needs_calibration and step < self.config.optimizer.max_steps:
                began = time.perf_counter()
                self.sampled.calibrate(self._calibration_ids(position))
                self._seconds["recalibrate"] = time.perf_counter() - began
        self.engine.update_weights(self.sampled)

    def _calibrate(self) -> None:
        """KV scales for weights that have none: those of version 0, from the prompts of the first step; one-sided,
        those of the rollout's copy, from the prompts of the step to come."""
        positions = {self.sampled: self.position, self.decoder: 0}
        if self.reference is not None:
            positions[self.reference.decoder] = 0
        for decoder, position in positions.items():
            if decoder.needs_calibration:
                decoder.calibrate(self._calibration_ids(position))

    def _calibration_ids(self, position: int) -> list[list[int]]:
        """Prompts that KV scales are calibrated on: those of a step that begins at `position`, one per sample."""
        return [prompt.ids.tolist() for prompt in self._prompts_at(position, self.config.rollout.prompts_per_step)]

    # ---- evaluation

    def _evaluate_if_due(self) -> None:
        """Before the first step, every `eval.every` steps, and after the last; once, also where a run resumes."""
        every, lines = self.config.eval.every, self.folder.path / "eval.jsonl"
        due = self.step in (0, self.config.optimizer.max_steps) or bool(every and self.step % every == 0)
        done = lines.is_file() and any(record["step"] == self.step for record in read_lines(lines))
        if self.held_out and due and not done:
            self._evaluate()

    def _evaluate(self) -> None:
        """Held-out figures and completions at the current weights."""
        config, step = self.config, self.step
        self.observer.phase(step, "evaluate")
        first = config.rollout.prompts_per_step  # slots of their own: no draw of a training step is repeated
        held_out = evaluate(
            self.engine,
            config,
            self.held_out,
            lambda prompts, samples: self._scores(step, prompts, samples),
            step,
            first,
            lambda progress: self._watch(step, progress),
        )
        record = {"step": step, **held_out.figures, ONE_SIDED: float(self.trainer.one_sided)}
        self.folder.write_evaluation(step, held_out.table)
        self.folder.append("eval", record)
        for writer in self._writers:
            writer.add(step, record)
        self.observer.evaluated(record)

    # ---- what is written

    def _is_audited(self, step: int) -> bool:
        every = self.config.logging.audit_every
        return step in (1, self.config.optimizer.max_steps) or bool(every and step % every == 0)

    def _save_weights(self) -> None:
        with self._phase(self.step + 1, "save"):
            source = self._fixed_source if self.decoder.version == 0 else None
            self.folder.save_version(self.decoder, self.files, source, self.sampled.numerics)

    def _log_rollout(self, step: int, samples: Sequence[Sample], scores: RewardScores, advantages: Advantages) -> None:
        with self._phase(step, "save"):
            values = tuple(advantages.values.tolist())
            write_rollout(self.folder.rollouts, LoggedRollout(step, tuple(samples), tuple(scores.totals), values))

    def _log_step(self, step: int, drawn: int, metrics: Mapping[str, float], seconds: float) -> None:
        """
        Args:
            drawn: completion tokens that were sampled for the step.
        """
        record = {
            "step": step,
            "epoch": self.position / len(self.prompts),
            **metrics,
            "num_tokens": self.num_tokens,
            "tokens_per_second": drawn / self._seconds["rollout"],
            "step_time": seconds,
            **{f"time/{name}": value for name, value in self._seconds.items()},
            "version": self.decoder.version,
            "kv_bytes_per_token": self.sampled.codec().bytes_per_token() * len(self.sampled.blocks),
            **process_memory(),
            ONE_SIDED: float(self.trainer.one_sided),
        }
        self.folder.append("metrics", record)
        for writer in self._writers:
            writer.add(step, record)
        self.observer.step_done(record)
        for warning in self._alarms.of_step(record):
            self.observer.note(warning)

    def _save_checkpoint(self) -> None:
        self.observer.phase(self.step, "checkpoint")
        extra = {"config": self.config.model_dump(mode="json"), "num_tokens": self.num_tokens}
        extra |= {"position": self.position, "prompts": setup.prompts_digest(self.prompts)}
        extra |= {name: getattr(self, name) for name in COUNTS}
        extra |= side_facts(self.decoder.numerics, self.sampled.numerics)
        keep = self.config.checkpoint.keep
        save_checkpoint(self.folder.checkpoints, self.step, self.trainer, extra, keep)

    def _save_model(self) -> None:
        self.observer.phase(self.step, "save")
        tensors = ((name, handle.stored()) for name, handle in self.decoder.weights.items())
        facts = {**weight_facts(self.decoder, self.sampled.numerics), "step": self.step}
        save_folder(self.folder.model, self.decoder.spec, tensors, files=self.files, numerics_meta=facts)

    def _write_report(self) -> None:
        if (self.folder.path / "metrics.jsonl").is_file():
            write_report(self.folder.path, dict(run_facts(self.config, self.trainer, self.files, self._data_summary)))
            self._report_at = time.monotonic()
