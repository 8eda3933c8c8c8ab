"""Live sides by name: a model of transformers or of zerogap, loaded as it stands, over sequences that both sides share.

Sequences come from a file of prompts, from built-in texts, or from the other side's trace. The first quarter of a text
counts as its prompt; with `complete` a completion is sampled by one side instead, and both then score the same ids.
Log-probs mean what a trainer needs unless asked otherwise: those of the distribution that tokens are drawn from.
"""

import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from zerogap.diagnose.adapters.torch_side import TorchSide
from zerogap.diagnose.side import Side
from zerogap.diagnose.trace import Definition, SequenceTrace, Trace
from zerogap.diagnose.zerogap_side import RAW, ZerogapSide
from zerogap.errors import CheckpointError, ConfigError
from zerogap.models.decoder import Decoder
from zerogap.numerics import Numerics
from zerogap.rollout.engine import Engine
from zerogap.text import Tokenizer
from zerogap.types import Sample, SamplingKey, SamplingParams
from zerogap.weights import open_model, save_folder
from zerogap.weights.source import QUICK_START, download

STACKS = ("transformers", "zerogap")
TEXTS = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did "
    "Natalia sell altogether in April and May? In May she sold 48 / 2 = 24 clips, so together 48 + 24 = 72 clips.",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n\n\nassert "
    "[fibonacci(i) for i in range(8)] == [0, 1, 1, 2, 3, 5, 8, 13]\n",
    "The tide turned a little after four. By then the two boats lay on their sides in the mud, and the children had "
    "walked out as far as the first marker, each with a bucket, to look for what the water had left behind.",
    "Zutaten: 500 g Mehl, 300 ml Wasser, 10 g Salz, 1 Wuerfel Hefe. Den Teig zehn Minuten kneten, eine Stunde gehen "
    "lassen und bei 230 Grad 35 Minuten backen.",
)
RANDOM_LENGTHS = (24, 40, 31, 48)  # of models without a tokenizer
SEED = 0

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class LiveModel:
    """What is asked for.

    Attributes:
        stack: one of `STACKS`; model: as `open_model` takes it.
        dtype, attention: of transformers (`auto`: the checkpoint's; `sdpa`, `eager`); numerics: of zerogap.
        path: how the side's answer is computed (`trace.PATHS`), or empty: whole.
        together: all sequences in one pass, or each alone.
        logprobs: `raw` or `processed`, or empty: processed where tokens are sampled at another temperature than 1.
    """

    stack: str
    model: str
    dtype: str = "auto"
    attention: str = "sdpa"
    numerics: Numerics | None = None
    path: str = ""
    together: bool = False
    logprobs: str = ""

    @property
    def name(self) -> str:
        """For people."""
        words = [self.stack, Path(self.model).name]
        if self.numerics is not None:
            words.append(self.numerics.name)
        else:
            words += [*([] if self.dtype == "auto" else [self.dtype]), self.attention]
        return " ".join([*words, *([self.path] if self.path else []), *(["batched"] if self.together else [])])


def read_prompts(path: Path) -> list[Row]:
    """Rows of a file of prompts: JSON objects with `prompt` (text, chat messages or token ids) and perhaps `completion`
    (text or ids), or `ids` and `prompt_length`; of any other file, one prompt per line.

    Raises:
        ConfigError: no such file, none in it, or a line that is not such a row.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--prompts", str(path), f"cannot be read as UTF-8 text: {error}") from None
    if not lines:
        raise ConfigError("--prompts", str(path), "the file is empty: one prompt per line, or JSONL")
    if path.suffix != ".jsonl":
        return [{"prompt": line} for line in lines]
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--prompts, line {number}", line[:60], f"is not JSON: {error}") from None
        if not isinstance(row, dict) or not ("prompt" in row or "ids" in row):
            raise ConfigError(f"--prompts, line {number}", line[:60], "give an object with `prompt`, or with `ids`")
        rows.append(row)
    return rows


def sequences_of(
    rows: Sequence[Row], tokenizer: Tokenizer | None, vocabulary: int, *, complete: bool = False
) -> list[SequenceTrace]:
    """Token sequences with prompts; no rows: the built-in texts, or random ids where there is no tokenizer.

    Args:
        complete: completions are still to be sampled: a row is its prompt alone, of a built-in text the first quarter.

    Raises:
        ConfigError: text without a tokenizer, ids out of range, or a sequence that is too short.
    """
    if not rows and tokenizer is None:
        generator = np.random.default_rng(SEED)
        found = [SequenceTrace(generator.integers(0, vocabulary, n, np.int32), n // 4) for n in RANDOM_LENGTHS]
    else:
        found = [_sequence(row, tokenizer, complete and bool(rows)) for row in rows or [{"prompt": t} for t in TEXTS]]
    if complete:
        found = [SequenceTrace(s.ids[: s.prompt_length], s.prompt_length) for s in found]
    for i, sequence in enumerate(found):
        if len(sequence.ids) < (1 if complete else 2):
            raise ConfigError(f"prompt {i + 1}", sequence.ids.tolist(), "give at least two tokens")
        if sequence.ids.min() < 0 or sequence.ids.max() >= vocabulary:
            raise ConfigError(f"prompt {i + 1}", sequence.ids.tolist()[:8], f"token ids are 0 to {vocabulary - 1}")
    return found


def _sequence(row: Row, tokenizer: Tokenizer | None, complete: bool) -> SequenceTrace:
    if "ids" in row:
        ids = np.asarray(row["ids"], np.int32)
        return SequenceTrace(ids, int(row.get("prompt_length", len(ids) if complete else max(1, len(ids) // 4))))
    prompt = _ids(row["prompt"], tokenizer, first=True)
    if complete:
        return SequenceTrace(prompt, len(prompt))
    if "completion" in row:
        completion = _ids(row["completion"], tokenizer, first=False)
        return SequenceTrace(np.concatenate([prompt, completion]), len(prompt))
    return SequenceTrace(prompt, max(1, len(prompt) // 4))


def _ids(given: Any, tokenizer: Tokenizer | None, first: bool) -> np.ndarray:
    """Ids of text, messages or ids; special tokens only at the beginning of a sequence."""
    if isinstance(given, list) and given and isinstance(given[0], int):
        return np.asarray(given, np.int32)
    if tokenizer is None:
        raise ConfigError("--prompts", given, "the model has no tokenizer: give token ids (JSONL rows with `ids`)")
    if first:
        return tokenizer.prompt_ids(given)
    return np.asarray(tokenizer.backend(given, add_special_tokens=False)["input_ids"], np.int32)


class Loaded:
    """A live model at hand: its tokenizer, completions, and sides over sequences.

    Raises (when made):
        ConfigError, CheckpointError: it cannot be found, read or computed with.
    """

    def __init__(self, asked: LiveModel, folder: Path | None = None) -> None:
        """
        Args:
            folder: where a model that transformers cannot read itself (a .gguf file) is written as a folder.
        """
        self.asked = asked
        self._model: Any = None
        self._decoder: Decoder | None = None
        if asked.stack == "transformers":
            self.source = _folder_of(asked.model, folder)
            self._model = _transformers_model(self.source, asked)
            self.vocabulary = int(self._model.get_input_embeddings().num_embeddings)
            self.max_positions = int(getattr(self._model.config, "max_position_embeddings", 0) or 1 << 20)
            self.tokenizer = _folder_tokenizer(self.source)
        else:
            files = open_model(asked.model)
            assert asked.numerics is not None, "a side of zerogap has numerics"
            self.source, self.vocabulary = Path(asked.model), files.spec.vocab_size
            self.max_positions = min(files.spec.max_position, 4096)
            self._decoder = Decoder(files.spec, asked.numerics, max_positions=self.max_positions).load(files.tensors())
            names = files.tokenizer_files()
            self.tokenizer = Tokenizer.from_files(names, files.chat_template) if names else None

    def side(self, sequences: Sequence[SequenceTrace], definition: Definition, path: str = "") -> Side:
        """This model over the sequences; `path` where the asked one does not say."""
        longest = max(len(s.ids) for s in sequences)
        if longest > self.max_positions:
            raise ConfigError(
                "sequence", f"{longest} tokens", f"{self.asked.name} takes {self.max_positions} positions"
            )
        if self.asked.logprobs:
            definition = dataclasses.replace(definition, processed=self.asked.logprobs == "processed")
        path = self.asked.path or path or "whole"
        batches = (tuple(range(len(sequences))),) if self.asked.together else None
        if self._decoder is None:
            source = str(self.source)
            return TorchSide(self._model, sequences, self.asked.name, definition, source, path=path, batches=batches)
        prompts = [max(1, s.prompt_length) for s in sequences]
        ids = [s.ids.tolist() for s in sequences]
        return ZerogapSide(
            self._decoder,
            ids,
            prompt_lengths=prompts,
            path=path,
            batches=batches,
            definition=definition,
            name=self.asked.name,
            source=self.asked.model,
        )

    def complete(
        self, prompts: Sequence[np.ndarray], max_tokens: int, temperature: float, seed: int
    ) -> list[SequenceTrace]:
        """Sample one completion for each prompt; they end with an end-of-sequence token or full."""
        if self._decoder is not None:
            engine = Engine(self._decoder, self.tokenizer)
            params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
            keys = [SamplingKey(seed=seed, prompt=i) for i in range(len(prompts))]
            samples: list[Sample] = engine.generate([p.tolist() for p in prompts], params, keys)
            pairs = [(s.completion_ids, s.finish_reason) for s in samples]
        else:
            pairs = [self._generated(p, max_tokens, temperature, seed + i) for i, p in enumerate(prompts)]
        return [
            SequenceTrace(np.concatenate([p, np.asarray(c, np.int32)]), len(p), finish_reason=why)
            for p, (c, why) in zip(prompts, pairs)
        ]

    def _generated(self, prompt: np.ndarray, max_tokens: int, temperature: float, seed: int) -> tuple[np.ndarray, str]:
        """`generate` of transformers, without the folder's sampling defaults."""
        ends = self._model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        settings = transformers.GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0
        )
        noise: list[Any] = [] if temperature == 0.0 else [_Draw(temperature, seed)]
        ids = torch.from_numpy(prompt.astype(np.int64))[None].to(self._model.device)
        with torch.no_grad():
            done = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=settings,
                logits_processor=transformers.LogitsProcessorList(noise),
            )
        completion = done[0, len(prompt) :].cpu().numpy().astype(np.int32)
        return completion, "stop" if len(completion) and int(completion[-1]) in ends else "length"


class _Draw(transformers.LogitsProcessor):
    """Gumbel noise on logits / temperature: the largest is then a draw at that temperature. It has its own seed."""

    def __init__(self, temperature: float, seed: int) -> None:
        self._temperature, self._generator = temperature, torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        uniform = torch.rand(scores.shape, generator=self._generator, dtype=torch.float64).clamp_min(1e-300)
        return (scores.double().cpu() / self._temperature - (-uniform.log()).log()).to(scores.device)


def definition_for(temperature: float | None, other: Trace | None = None) -> Definition:
    """What a live side's log-probs mean: processed at the temperature that is given or that the other side's trace
    states; raw where that is 1 or not known."""
    if temperature is None and other is not None:
        recorded = other.recorded.definition
        if recorded.temperature not in (None, 1.0) or recorded.processed:
            kept = recorded.top_k or 0, recorded.top_p or 1.0, recorded.min_p or 0.0
            return Definition(recorded.temperature or 1.0, True, *kept)
    if temperature is None or temperature == 1.0:
        return RAW
    return Definition(temperature, True, 0, 1.0, 0.0)


def _folder_of(model: str, folder: Path | None) -> Path:
    """A folder that transformers reads."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.suffix != ".gguf" and model != QUICK_START and not path.exists():
        return download(model) if "/" in model else _not_there(model)
    files = open_model(model)
    target = folder or Path(tempfile.mkdtemp(prefix="zerogap-diagnose-"))
    tensors = ((name, t.bfloat16() if isinstance(t, torch.Tensor) else t) for name, t in files.tensors())
    return save_folder(target / "model", files.spec, tensors, files)


def _not_there(model: str) -> Path:
    raise ConfigError("model", model, "no such folder or file, and not a hub id (owner/name)")


def _transformers_model(folder: Path, asked: LiveModel) -> Any:
    transformers.utils.logging.disable_progress_bar()
    dtype = "auto" if asked.dtype == "auto" else getattr(torch, asked.dtype)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=asked.attention, local_files_only=True
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError("transformers", asked.model, f"transformers cannot load it: {reason}") from error
    return model.eval()


def _folder_tokenizer(folder: Path) -> Tokenizer | None:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    try:
        backend = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"the tokenizer of {folder} cannot be loaded: {error}") from error
    return Tokenizer(backend, backend.chat_template)


def trace_tokenizer(trace: Trace) -> Tokenizer | None:
    """The tokenizer beside a trace's weights, where that folder is on this machine."""
    folder = Path(trace.source) if trace.source else None
    return _folder_tokenizer(folder) if folder is not None and folder.is_dir() else None
