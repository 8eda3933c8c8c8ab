"""How close zerogap's log-probs are to those of transformers, on a real model and real prompts.

Two questions. In FP32: the largest difference over all tokens (rounding noise, or a wrong operator?). In BF16: is the
mean error against transformers in FP32 at most the error that transformers itself makes in BF16? The texts are chat
prompts with their answers: GSM8K rows from a JSON-lines file, or procedural ones of reasoning-gym.

    python -m benchmarks.accuracy_vs_transformers [--model PATH] [--data gsm8k.jsonl] [--count 64]
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import transformers

from benchmarks import record
from zerogap.models.decoder import Decoder
from zerogap.numerics import preset
from zerogap.text import Tokenizer
from zerogap.train.trainer import Trainer
from zerogap.types import Identity, Sample, SamplingKey, SamplingParams
from zerogap.weights import ModelFiles, open_model, save_folder
from zerogap.weights.quick_start import fetch_quick_start_model

LIMIT_FP32 = 2e-4


def questions(path: Path | None, count: int) -> Iterator[tuple[str, str]]:
    """(question, answer) pairs."""
    if path is not None:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:count]]
        yield from ((row["question"], row["answer"]) for row in rows)
        return
    import reasoning_gym

    names = ("basic_arithmetic", "chain_sum", "letter_counting", "word_sorting")
    sets = [reasoning_gym.create_dataset(name, size=-(-count // len(names)), seed=7) for name in names]
    rows = [row for group in zip(*sets, strict=True) for row in group][:count]
    yield from ((row["question"], str(row["answer"])) for row in rows)


def token_rows(files: ModelFiles, path: Path | None, count: int) -> list[np.ndarray]:
    """Ids of each chat prompt followed by its answer."""
    tokenizer = Tokenizer.from_files(files.tokenizer_files(), files.chat_template)
    rows = []
    for question, answer in questions(path, count):
        prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
        rows.append(np.concatenate([prompt, tokenizer.encode(answer)]))
    return rows


def zerogap_logprobs(files: ModelFiles, rows: list[np.ndarray], numerics: str) -> np.ndarray:
    """float32 [all tokens]: log-probs of every token but the first of each row, by the trainer's forward pass."""
    trainer = Trainer(Decoder(files.spec, preset(numerics)).load(files.tensors()))
    return np.concatenate(trainer.logprobs([as_sample(ids, trainer.decoder.identity) for ids in rows]))


def as_sample(ids: np.ndarray, identity: Identity) -> Sample:
    """The row as a one-token prompt with a completion, so that every other token is scored."""
    count = len(ids) - 1
    zeros = np.zeros(count, np.float32)
    params = SamplingParams(max_tokens=count)
    versions = np.zeros(count, np.int64)
    return Sample(ids[:1], ids[1:], zeros, versions, identity, SamplingKey(), params, "length")


def transformers_logprobs(folder: Path, rows: list[np.ndarray], dtype: torch.dtype) -> np.ndarray:
    """The same by transformers, one row at a time, the softmax over its logits in FP64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    parts = []
    with torch.no_grad():
        for row in rows:
            ids = torch.from_numpy(row.astype(np.int64))
            logp = model(ids[None]).logits[0, :-1].double().log_softmax(-1)
            parts.append(logp.gather(1, ids[1:, None])[:, 0].numpy())
    return np.concatenate(parts)


def measure(model: str | Path, data: Path | None, count: int) -> dict[str, float]:
    """All figures of one run."""
    files = open_model(model)
    rows = token_rows(files, data, count)
    with tempfile.TemporaryDirectory() as scratch:
        # Both sides start from the same BF16 values.
        tensors = ((name, tensor.to(torch.bfloat16)) for name, tensor in files.tensors())
        folder = save_folder(Path(scratch) / "model", files.spec, tensors, files)
        saved = open_model(folder)
        exact = transformers_logprobs(folder, rows, torch.float32)
        half = transformers_logprobs(folder, rows, torch.bfloat16)
        ours = zerogap_logprobs(saved, rows, "fp32")
        ours_half = zerogap_logprobs(saved, rows, "bf16")
    error, error_theirs = np.abs(ours_half - exact), np.abs(half - exact)
    return {
        "texts": len(rows),
        "tokens": len(exact),
        "fp32 max |zerogap - transformers|": float(np.abs(ours - exact).max()),
        "fp32 mean |zerogap - transformers|": float(np.abs(ours - exact).mean()),
        "bf16 mean |zerogap - transformers fp32|": float(error.mean()),
        "bf16 mean |transformers - transformers fp32|": float(error_theirs.mean()),
        "bf16 ratio of the means": float(error.mean() / error_theirs.mean()),
        "bf16 max |zerogap - transformers fp32|": float(error.max()),
        "bf16 max |transformers - transformers fp32|": float(error_theirs.max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, hub id or .gguf file; default: the quick-start model")
    parser.add_argument("--data", type=Path, help="JSON lines with question and answer; default: reasoning-gym")
    parser.add_argument("--count", type=int, default=64, help="texts to score")
    args = parser.parse_args()
    model = args.model or fetch_quick_start_model()
    figures = measure(model, args.data, args.count)
    for name, value in figures.items():
        print(f"{name:<46} {value:.3g}" if isinstance(value, float) else f"{name:<46} {value}")
    facts = {"model": Path(model).stem, "data": args.data.name if args.data else "reasoning-gym"}
    rows = [{"what": name, "value": value} for name, value in figures.items()]
    record.write("accuracy_vs_transformers", rows, transformers=transformers.__version__, **facts)
    passed = figures["fp32 max |zerogap - transformers|"] <= LIMIT_FP32 and figures["bf16 ratio of the means"] <= 1.0
    print(f"FP32 within {LIMIT_FP32:g} and BF16 no further off than transformers: {'yes' if passed else 'NO'}")
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
