"""vLLM as a recorded side, through its public interfaces; runs inside vLLM's own environment.

    HF_HUB_OFFLINE=1 PYTHONPATH=.../zerogap/src python -m zerogap.diagnose.adapters.vllm MODEL \\
        --prompts prompts.json --out vllm-trace --temperature 0.7 --logprobs-mode processed_logprobs

Needed there: torch, numpy, safetensors, transformers and vllm. `prompts.json` is a list of texts or of lists of token
ids. Requests run one at a time, so that every row of a forward pass belongs to the one sequence in flight. The trace
holds these passes: the sampled tokens with the log-probs that vLLM reported (decode); the same requests once more; each
whole sequence scored as a prompt (whole), alone and all together.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerogap.diagnose.adapters.vllm_worker import EXTENSION
from zerogap.diagnose.trace import Definition, Pass, SequenceTrace, Trace, json_ready, save_trace
from zerogap.errors import ConfigError


def vllm_trace(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    params: Any,
    *,
    name: str = "vllm",
    capture: bool = True,
    rescore: bool = True,
) -> Trace:
    """Generate and record.

    Args:
        llm: a `vllm.LLM`, started with `worker_extension_cls=EXTENSION` if weights or boundaries are wanted; for
            boundaries also with `async_scheduling=False`, and without prefix caching if all rows are wanted.
        prompts: token ids.
        params: `vllm.SamplingParams`; log-probs of the sampled tokens are asked for here.
        name: for people.
        capture: record boundaries of the first and of the whole pass.
        rescore: record the further passes too.
    """
    config = llm.llm_engine.vllm_config
    extended = config.parallel_config.worker_extension_cls == EXTENSION
    if capture and not extended:
        raise ConfigError(
            "worker_extension_cls", config.parallel_config.worker_extension_cls, f"start vLLM with {EXTENSION}"
        )
    if config.model_config.logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
        raise ConfigError(
            "logprobs_mode", config.model_config.logprobs_mode, "choose raw_logprobs or processed_logprobs"
        )
    processed = config.model_config.logprobs_mode == "processed_logprobs"
    definition = Definition(
        params.temperature, processed, max(params.top_k, 0), params.top_p, getattr(params, "min_p", 0.0)
    )
    params = params.clone()
    params.logprobs, params.detokenize = 0, False
    recorder = _Boundaries(llm) if capture else None
    alone = tuple((i,) for i in range(len(prompts)))
    sequences, first = _generate(llm, prompts, params, recorder)
    ids = [s.ids for s in sequences]
    boundaries = {} if recorder is None else recorder.finish(ids)
    passes = [Pass(first, "decode", alone, definition, _with_logprob(boundaries, first))]
    if rescore:
        raw = dataclasses.replace(definition, processed=False)
        again, repeated = _generate(llm, prompts, params, None)
        if all(np.array_equal(s.ids, t.ids) for s, t in zip(sequences, again)):
            passes.append(Pass(repeated, "decode", alone, definition, note="the same requests again"))
        recorder = _Boundaries(llm) if capture else None
        scored = _score(llm, ids, params, recorder, together=False)
        boundaries = {} if recorder is None else recorder.finish(ids)
        passes.append(Pass(scored, "whole", alone, raw, _with_logprob(boundaries, scored), note="scored as prompts"))
        together = _score(llm, ids, params, None, together=True)
        passes.append(Pass(together, "whole", (tuple(range(len(ids))),), raw, note="scored as prompts, together"))
    single = extended and config.parallel_config.world_size == 1
    return Trace(
        name=name,
        sequences=sequences,
        passes=tuple(passes),
        weights=llm.collective_rpc("zerogap_sketches")[0] if single else {},
        buffers=llm.collective_rpc("zerogap_buffers")[0] if single else {},
        settings={n: getattr(params, n) for n in ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")},
        model=json_ready(config.model_config.hf_config.to_dict()),
        source=str(config.model_config.model),
        versions=_versions(),
        layout=_layout(config),
    )


class _Boundaries:
    """Takes over what the worker recorded, request by request."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._requests: list[list[dict[str, Any]]] = []
        llm.collective_rpc("zerogap_begin")

    def take(self) -> None:
        """After one request: fetch its forward passes."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "forwards.pt"
            self._llm.collective_rpc("zerogap_take", args=(str(path),))
            self._requests.append(torch.load(path, weights_only=True))

    def finish(self, ids: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """Remove the worker's hooks; boundaries of the requests by position. A row that was never computed (the last
        token of a request) is NaN."""
        self._llm.collective_rpc("zerogap_end")
        starts = np.cumsum([0, *(len(part) for part in ids)])
        found: dict[str, torch.Tensor] = {}
        for forwards, start, part in zip(self._requests, starts, ids):
            for forward in forwards:
                positions = forward["positions"].reshape(-1).long()
                kept = positions < len(part)  # scoring draws one token more
                given = forward["ids"].reshape(-1)[kept].numpy()
                if not np.array_equal(given, part[positions[kept].numpy()]):
                    mend = f"positions {positions.tolist()} hold tokens of another request: start vLLM without it"
                    raise ConfigError("async_scheduling", True, mend)
                for name, tensor in forward["tensors"].items():
                    if name not in found:
                        missing = torch.nan if tensor.dtype.is_floating_point else -1
                        found[name] = torch.full((int(starts[-1]), tensor.shape[1]), missing, dtype=tensor.dtype)
                    found[name][int(start) + positions[kept]] = tensor[kept]
        return found


def _with_logprob(boundaries: dict[str, torch.Tensor], logprobs: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
    if boundaries:
        following = [np.append(p[1:], np.float32(np.nan)) for p in logprobs]
        boundaries["logprob"] = torch.from_numpy(np.concatenate(following)[:, None])
    return boundaries


def _generate(
    llm: Any, prompts: Sequence[Sequence[int]], params: Any, recorder: _Boundaries | None
) -> tuple[tuple[SequenceTrace, ...], tuple[np.ndarray, ...]]:
    """One request after another: sequences and the reported log-probs of the sampled tokens."""
    sequences, logprobs = [], []
    for prompt in prompts:
        (output,) = llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
        if recorder is not None:
            recorder.take()
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        logp = np.full(len(prompt) + len(tokens), np.nan, np.float32)
        logp[len(prompt) :] = [entry[token].logprob for token, entry in zip(tokens, completion.logprobs)]
        sequences.append(
            SequenceTrace(
                np.asarray([*prompt, *tokens], np.int32),
                len(prompt),
                finish_reason=completion.finish_reason or "",
                hit_length=output.num_cached_tokens,
            )
        )
        logprobs.append(logp)
    return tuple(sequences), tuple(logprobs)


def _score(
    llm: Any, ids: Sequence[np.ndarray], params: Any, recorder: _Boundaries | None, *, together: bool
) -> tuple[np.ndarray, ...]:
    """Log-probs of whole sequences given as prompts (raw: vLLM applies no temperature to prompts)."""
    params = params.clone()
    params.prompt_logprobs, params.max_tokens = 0, 1
    batches = [list(ids)] if together else [[part] for part in ids]
    found = []
    for batch in batches:
        outputs = llm.generate([{"prompt_token_ids": part.tolist()} for part in batch], params, use_tqdm=False)
        if recorder is not None:
            recorder.take()
        for part, output in zip(batch, outputs):
            entries = zip(part.tolist(), output.prompt_logprobs)
            values = [np.nan if entry is None else entry[token].logprob for token, entry in entries]
            found.append(np.asarray(values, np.float32))
    return tuple(found)


def _versions() -> dict[str, str]:
    """Of the libraries that are loaded: whoever holds an engine has imported them."""
    names = ("vllm", "torch", "transformers")
    return {name: str(sys.modules[name].__version__) for name in names if name in sys.modules}


def _layout(config: Any) -> dict[str, Any]:
    parallel, model, scheduler = config.parallel_config, config.model_config, config.scheduler_config
    return {
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "dtype": str(model.dtype).removeprefix("torch."),
        "enforce_eager": model.enforce_eager,
        "logprobs_mode": model.logprobs_mode,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "block_size": config.cache_config.block_size,
        "enable_prefix_caching": config.cache_config.enable_prefix_caching,
    }


def _prompts(path: Path, model: str) -> list[list[int]]:
    given = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(given, list) or not given:
        raise ConfigError("prompts", str(path), "give a JSON list of texts or of lists of token ids")
    texts = [entry for entry in given if isinstance(entry, str)]
    if not texts:
        return [[int(token) for token in entry] for entry in given]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer(entry)["input_ids"] if isinstance(entry, str) else list(entry) for entry in given]


def main(arguments: Sequence[str] | None = None) -> int:
    """Start vLLM, generate, and write one trace."""
    parser = argparse.ArgumentParser(prog="python -m zerogap.diagnose.adapters.vllm", description=__doc__)
    parser.add_argument("model", help="a Hugging Face folder or name")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON list of texts or of lists of token ids")
    parser.add_argument("--out", type=Path, required=True, help="folder of the trace")
    parser.add_argument("--name", default="", help="name of the side; default: vllm and its version")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--logprobs-mode", default="raw_logprobs", choices=("raw_logprobs", "processed_logprobs"))
    parser.add_argument(
        "--reload", default="", help="folder whose weights are loaded over the model's before recording"
    )
    parser.add_argument("--no-capture", action="store_true", help="record no boundaries")
    given = parser.parse_args(arguments)
    import vllm

    prompts = _prompts(given.prompts, given.model)
    llm = vllm.LLM(
        model=given.model,
        dtype=given.dtype,
        enforce_eager=True,
        enable_prefix_caching=False,
        async_scheduling=False,
        generation_config="vllm",
        max_model_len=max(len(p) for p in prompts) + given.max_tokens + 16,
        max_num_seqs=max(2, len(prompts)),
        logprobs_mode=given.logprobs_mode,
        seed=given.seed,
        worker_extension_cls=EXTENSION,
    )
    if given.reload:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": given.reload})
    params = vllm.SamplingParams(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        max_tokens=given.max_tokens,
        seed=given.seed,
        ignore_eos=True,
    )
    name = given.name or f"vllm {vllm.__version__}"
    trace = vllm_trace(llm, prompts, params, name=name, capture=not given.no_capture)
    print(save_trace(trace, given.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
