"""Hooks that write two traces, the rollout's and the trainer's, from a TRL or verl loop. docs/trace-format.md.

The loop stays as it is: TRL through a mixin over public methods and a forward hook that only listens, verl through one
call where both log-probs are in the batch. The numbers are those that the loop used: nothing is computed again, except
that TRL without vLLM keeps no log-probs of its generation; they are then taken from the logits that `generate` saw.
"""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerogap.diagnose.adapters.arrays import pair_of_traces
from zerogap.diagnose.adapters.capture import RESIDUAL_MEANING, Capture, Forward, capture, plain_name
from zerogap.diagnose.adapters.logprobs import defined_logprobs
from zerogap.diagnose.sketch import sketch
from zerogap.diagnose.trace import Definition, Trace, save_trace
from zerogap.errors import ConfigError

_log = logging.getLogger(__name__)
_KEPT_ROWS = 4096  # generated sequences that are remembered until the trainer scores them


def write_pair(folder: Path, label: str, pair: tuple[Trace, Trace]) -> tuple[Path, Path]:
    """Write `{label}-rollout` and `{label}-trainer` under the folder."""
    rollout, trainer = pair
    return save_trace(rollout, folder / f"{label}-rollout"), save_trace(trainer, folder / f"{label}-trainer")


def padded_rows(
    prompts: torch.Tensor,
    prompt_mask: torch.Tensor,
    completions: torch.Tensor,
    completion_mask: torch.Tensor,
    counted: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor,
) -> list[dict[str, Any]]:
    """Rows for `pair_of_traces` from a padded batch: prompts [B, P], completions and their log-probs a, b [B, C].

    Args:
        prompt_mask, completion_mask: which entries are tokens and no padding.
        counted: [B, C] which completion tokens the loss takes.
        a, b: the rollout's log-probs, None where not recorded, and the trainer's.
    """
    rows = []
    for i in range(len(prompts)):
        keep = completion_mask[i].bool().cpu()
        prompt = prompts[i].cpu()[prompt_mask[i].bool().cpu()]
        answer = completions[i].cpu()[keep]
        none = torch.full((len(answer),), torch.nan)
        rows.append(
            {
                "ids": torch.cat([prompt, answer]).numpy(),
                "prompt_length": len(prompt),
                "mask": torch.cat([torch.zeros(len(prompt), dtype=torch.bool), counted[i].bool().cpu()[keep]]).numpy(),
                "logprobs_a": (none if a is None else a[i].detach().float().cpu()[keep]).numpy(),
                "logprobs_b": b[i].detach().float().cpu()[keep].numpy(),
            }
        )
    return rows


def verl_traces(
    batch: Any, folder: str | Path, label: str, old_log_probs: torch.Tensor | None = None
) -> tuple[Path, Path]:
    """Write both traces of a verl batch; the batch is only read.

    Args:
        batch: `DataProto` with `prompts`, `responses`, `attention_mask`, `response_mask`, and `rollout_log_probs`
            (`actor_rollout_ref.rollout.calculate_log_probs=True` keeps them).
        label: names the step, e.g. `step12`.
        old_log_probs: [B, responses] as the actor computed them; by default the batch's own.
    """
    tensors, facts = batch.batch, batch.meta_info
    split = tensors["prompts"].shape[1]
    attention = tensors["attention_mask"]
    rows = padded_rows(
        tensors["prompts"],
        attention[:, :split],
        tensors["responses"],
        attention[:, split:],
        tensors["response_mask"],
        tensors["rollout_log_probs"] if "rollout_log_probs" in tensors.keys() else None,  # noqa: SIM118 (TensorDict)
        tensors["old_log_probs"] if old_log_probs is None else old_log_probs,
    )
    temperature = facts.get("temperature")
    names = "verl rollout", "verl actor"
    settings = {"temperature": temperature, "loop": "verl"}
    definition = Definition(temperature=None if temperature is None else float(temperature))
    pair = pair_of_traces(rows, name=label, names=names, definition=definition, settings=settings)
    return write_pair(Path(folder), label, pair)


class TrlTraces:
    """Mixin for a TRL trainer: `class Traced(TrlTraces, GRPOTrainer): trace_folder = "traces"`.

    For the first `trace_steps` optimizer steps every call of the loss writes `step{N}-{call}-rollout` and `-trainer`.
    Afterwards, and while evaluating, the hook is off.

    Attributes:
        trace_weights: sketch all weights and buffers before each of these steps.
        trace_boundaries: record what every layer computed, for short batches of small models: the trainer's forward
            pass, and the rollout's unless an engine made it.
    """

    trace_folder: str | Path = "traces"
    trace_steps: int = 3
    trace_weights: bool = False
    trace_boundaries: bool = False
    _trl_listener: "_Listener | None" = None

    def training_step(self, *args: Any, **options: Any) -> Any:
        trainer: Any = self
        step = trainer.state.global_step
        if step >= self.trace_steps:
            self._trl_listener = None
            return super().training_step(*args, **options)  # type: ignore[misc]
        if self._trl_listener is None:
            self._trl_listener = _Listener(trainer.args.temperature)
        listener = self._trl_listener
        listener.at(step)
        if self.trace_weights and step not in listener.sketches:
            listener.sketches[step] = _sketches(trainer.model)
        with contextlib.ExitStack() as undo:
            if self.trace_boundaries:
                listener.seen = undo.enter_context(capture(trainer.model, rope=True))
            hook = trainer.model.register_forward_hook(listener, with_kwargs=True)
            undo.callback(hook.remove)
            return super().training_step(*args, **options)  # type: ignore[misc]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **options)  # type: ignore[misc]
        listener = self._trl_listener
        if listener is not None and model.training:
            pair = _trl_pair(self, inputs, listener)
            write_pair(Path(self.trace_folder), f"step{listener.step}-{listener.calls}", pair)
            listener.calls += 1
        return loss


def _trl_pair(trainer: Any, inputs: Mapping[str, Any], listener: "_Listener") -> tuple[Trace, Trace]:
    arguments = trainer.args
    completion_mask = inputs["completion_mask"]
    counted = completion_mask * inputs["tool_mask"] if "tool_mask" in inputs else completion_mask
    prompts, completions = inputs["prompt_ids"], inputs["completion_ids"]
    recorded = inputs.get("sampling_per_token_logps")
    batch = prompts, inputs["prompt_mask"], completions, completion_mask, counted
    if listener.scored is None:
        mend = "take TRL 1.16 or later: its loss shows per-token log-probs (log_probs of the model's output)"
        raise ConfigError("trl", version("trl"), mend)
    rows = padded_rows(*batch, recorded, listener.scored[:, -completions.shape[1] :])
    made, rollout_rows, lost, rotary = -1, [], 0, _is_rotary(trainer.model.config)
    if recorded is None:
        for row in rows:
            row["logprobs_a"], made, start, found = listener.recall(row["ids"], row["prompt_length"])
            row["positions"] = np.arange(len(row["ids"]), dtype=np.int32) + start if rotary and made >= 0 else None
            row["versions"] = None if made < 0 else np.full(len(row["ids"]), made, np.int64)
            rollout_rows.append(found)
            lost += made < 0
    positions = _trained_positions(inputs, listener.positions) if rotary else None
    sampling = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "use_vllm", "bf16", "fp16")
    settings = {n: getattr(arguments, n, None) for n in sampling} | {"loop": "TRL", "step": listener.step}
    if lost:
        _log.warning("the hook did not hear how %d of %d sequences were generated: no log-probs", lost, len(rows))
    definition = Definition(float(arguments.temperature), True, 0, 1.0, 0.0)
    names = "TRL generation", "TRL trainer"
    pair = pair_of_traces(rows, name=f"step {listener.step}", names=names, definition=definition, settings=settings)
    stored = str(trainer.model.dtype).removeprefix("torch.")
    wide = "bfloat16" if arguments.bf16 else "float16" if arguments.fp16 else ""
    dtype = f"{stored} under {wide} autocast" if wide else stored  # accelerate wraps forward: generate's, too
    engine = recorded is not None
    lengths = [len(row["ids"]) for row in rows]
    rollout = _with_facts(
        pair[0],
        trainer,
        "decode",
        "as the engine was started" if engine else dtype,
        _joined(rollout_rows, lengths),
        listener.sketches.get(made),
    )
    scored = _with_facts(
        pair[1],
        trainer,
        "whole",
        dtype,
        _joined([_rows_of([listener.forward], i) for i in range(len(rows))], lengths),
        listener.sketches.get(listener.step),
    )
    sequences = list(scored.sequences)
    for i, one in enumerate(sequences):
        now = np.full(len(one.ids), listener.step, np.int64)
        sequences[i] = dataclasses.replace(one, versions=now, positions=positions[i] if positions else None)
    return rollout, dataclasses.replace(scored, sequences=tuple(sequences))


Rows = Mapping[str, torch.Tensor]  # boundary -> rows of one sequence


def _rows_of(forwards: Sequence[Forward | None], row: int) -> dict[str, torch.Tensor]:
    """Rows of one sequence through forward passes that follow each other, padding left out; NaN where a pass did not
    record a boundary that another one did."""
    known = [f for f in forwards if f is not None]
    found: dict[str, list[torch.Tensor]] = {name: [] for forward in known for name in forward.tensors}
    for forward in known:
        length = forward.shape[1]
        keep = slice(None) if forward.mask is None else forward.mask[row]
        count = len(torch.arange(length)[keep])
        for name, parts in found.items():
            tensor = forward.tensors.get(name)
            if tensor is None:
                like = next(f.tensors[name] for f in known if name in f.tensors)
                parts.append(_unknown(count, like))
            else:
                parts.append(tensor[row * length : (row + 1) * length][keep])
    return {name: torch.cat(parts) for name, parts in found.items()}


def _unknown(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.full((count, like.shape[1]), torch.nan if like.is_floating_point() else -1, dtype=like.dtype)


def _joined(sequences: Sequence[Rows], lengths: Sequence[int]) -> dict[str, torch.Tensor]:
    """Boundaries of a pass from those of its sequences; rows that no pass computed (the last token's) stay NaN."""
    likes = {name: tensor for rows in sequences for name, tensor in rows.items()}
    joined = {}
    for name, like in likes.items():
        parts = []
        for rows, length in zip(sequences, lengths):
            part = rows.get(name, like[:0])[:length]
            parts += [part, _unknown(length - len(part), like)]
        joined[name] = torch.cat(parts)
    return joined


def _sketches(model: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sketches of weights and buffers by their plain names."""
    weights = {}
    for raw, parameter in model.named_parameters(remove_duplicate=False):
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        weights[plain_name(raw)] = sketch(full)
    return weights, {plain_name(raw): sketch(buffer) for raw, buffer in model.named_buffers()}


def _is_rotary(config: Any) -> bool:
    return any(getattr(config, name, None) is not None for name in ("rope_parameters", "rope_theta"))


def _trained_positions(inputs: Mapping[str, Any], given: torch.Tensor | None) -> list[np.ndarray]:
    """Positions of each row's tokens in the trainer's forward. Without `position_ids`, models of transformers with
    rotary embeddings count from the start of the padded row."""
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1).bool().cpu()
    places = torch.arange(mask.shape[1]).expand_as(mask) if given is None else given.cpu().expand_as(mask)
    return [row[keep].int().numpy() for row, keep in zip(places, mask)]


def _with_facts(
    trace: Trace,
    trainer: Any,
    path: str,
    dtype: str,
    boundaries: dict[str, torch.Tensor],
    sketches: tuple[dict[str, Any], dict[str, Any]] | None,
) -> Trace:
    """The trace with its path and the facts of the stack."""
    batch = tuple(range(len(trace.sequences)))
    meaning = {name: RESIDUAL_MEANING for name in boundaries if ".residual_" in name}
    found = dataclasses.replace(
        trace.recorded,
        path=path,
        batches=(batch,) if path == "whole" else None,
        boundaries=boundaries,
        meaning=meaning,
    )
    known = [n for n in ("torch", "transformers", "trl", "accelerate", "vllm") if find_spec(n) is not None]
    engine = path == "decode" and trainer.args.use_vllm
    ranks = getattr(trainer.args, "vllm_tensor_parallel_size", 1) if engine else 1
    weights, buffers = sketches or ({}, {})
    return dataclasses.replace(
        trace,
        passes=(found,),
        weights=weights,
        buffers=buffers,
        settings={**trace.settings, "dtype": dtype},
        model=json.loads(trainer.model.config.to_json_string(use_diff=False)),
        source=str(getattr(trainer.model.config, "_name_or_path", "")),
        versions={n: version(n) for n in known},
        layout={
            "data_parallel_size": trainer.accelerator.num_processes,
            "tensor_parallel_size": ranks,
            "rank": trainer.accelerator.process_index,
        },
    )


@dataclasses.dataclass
class _Heard:
    """One call of `generate` as its forward passes show it; grows by a token per pass.

    Attributes:
        prompts: token ids per row, without padding.
        starts: position of each row's first token; without `position_ids` its place in the padded row.
        pending: [B, V] logits for the next token.
        length: tokens per row that the model has seen, padding included.
        made: optimizer step of the weights.
        whole: [B, T] ids of the last pass that read more than one token per row.
        tokens: completion so far per row, with whatever follows its end.
        logprobs: of `tokens`.
        forwards: what each pass computed, if that is recorded.
    """

    prompts: list[tuple[int, ...]]
    starts: list[int]
    pending: torch.Tensor
    length: int
    made: int
    whole: torch.Tensor
    tokens: list[list[int]] = dataclasses.field(default_factory=list)
    logprobs: list[list[float]] = dataclasses.field(default_factory=list)
    forwards: list[Forward] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens, self.logprobs = [[] for _ in self.prompts], [[] for _ in self.prompts]

    def goes_on(self, ids: torch.Tensor) -> bool:
        """Whether a pass over one token more reads the next token: alone, or without a cache behind all others."""
        return ids.shape[1] == 1 or torch.equal(ids[:, :-1], self.whole)


def _length(ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> int:
    """Tokens per row after a pass, padding included; transformers leaves out a mask of ones."""
    if mask is not None:
        return mask.shape[1]
    return ids.shape[1] if positions is None else int(positions.max()) + 1


def _last_column(forward: Forward) -> Forward:
    length = forward.shape[1]
    tensors = {name: rows[length - 1 :: length] for name, rows in forward.tensors.items()}
    return Forward((forward.shape[0], 1), tensors)


class _Listener:
    """Forward hook of the policy: keeps what the loss scored, and the log-probs of tokens that `generate` sampled."""

    def __init__(self, temperature: float) -> None:
        self.definition = Definition(temperature=temperature, processed=True)
        self.step, self.calls = 0, 0
        self.scored: torch.Tensor | None = None
        self.positions: torch.Tensor | None = None
        self.sketches: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self.seen: Capture | None = None
        self.forward: Forward | None = None
        self.heard: list[_Heard] = []

    def at(self, step: int) -> None:
        """Begin a micro-batch of this optimizer step."""
        self.calls = self.calls if step == self.step else 0
        self.step = step

    def __call__(self, module: Any, args: Any, options: Mapping[str, Any], output: Any) -> None:
        forward = self.seen.forwards.pop() if self.seen is not None and self.seen.forwards else None
        if getattr(output, "log_probs", None) is not None:
            self.forward = forward
            self.scored = output.log_probs.detach()
            self.positions = options.get("position_ids")
            return
        ids, mask, logits = options.get("input_ids"), options.get("attention_mask"), getattr(output, "logits", None)
        usual = mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2)
        if torch.is_grad_enabled() or not isinstance(ids, torch.Tensor) or logits is None or not usual:
            return
        last = self.heard[-1] if self.heard else None
        pending, length = logits[:, -1].detach().clone(), _length(ids, mask, options.get("position_ids"))
        if last is not None and len(ids) == len(last.prompts) and length == last.length + 1 and last.goes_on(ids):
            for row, token in enumerate(ids[:, -1].tolist()):
                last.tokens[row].append(token)
                last.logprobs[row].append(self._logprob(last.pending[row], token))
            last.pending, last.length = pending, length
            last.whole = ids.detach().clone() if ids.shape[1] > 1 else last.whole
            last.forwards += [] if forward is None else [_last_column(forward)]
        elif ids.shape[1] == length:
            keep = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
            prompts = [tuple(row[kept].tolist()) for row, kept in zip(ids, keep)]
            places = options.get("position_ids")
            places = torch.arange(length, device=ids.device).expand_as(ids) if places is None else places.expand_as(ids)
            starts = [int(row[kept][0]) if len(row[kept]) else 0 for row, kept in zip(places, keep)]
            heard = _Heard(prompts, starts, pending, length, self.step, ids.detach().clone())
            heard.forwards += [] if forward is None else [forward]
            self.heard.append(heard)
        while len(self.heard) > 1 and sum(len(h.prompts) for h in self.heard) > _KEPT_ROWS:
            self.heard.pop(0)

    def _logprob(self, logits: torch.Tensor, token: int) -> float:
        pair = np.array([token, token])  # the row scores the second
        return float(defined_logprobs(pair, logits[None].cpu(), self.definition)[1])

    def recall(self, ids: np.ndarray, prompt_length: int) -> tuple[np.ndarray, int, int, Rows]:
        """Log-probs of a completion as it was sampled, NaN if it was not heard; the weights' optimizer step; the first
        token's position; rows of what was computed."""
        prompt, answer = tuple(ids[:prompt_length].tolist()), ids[prompt_length:].tolist()
        for heard in reversed(self.heard):
            for row, start in enumerate(heard.prompts):
                tokens = heard.tokens[row]
                if start != prompt or tokens[: len(answer)] != answer[: len(tokens)] or len(tokens) < len(answer) - 1:
                    continue
                found = heard.logprobs[row][: len(answer)]
                if len(found) < len(answer):  # no pass read the last token
                    found = [*found, self._logprob(heard.pending[row], answer[-1])]
                return np.array(found, np.float32), heard.made, heard.starts[row], _rows_of(heard.forwards, row)
        return np.full(len(answer), np.nan, np.float32), -1, 0, {}
