"""Two traces from the file that NeMo RL writes at each step: `train_data_step*.jsonl`.

One sample per line. `token_ids`, `token_loss_mask`, `generation_logprobs` (what the generation engine said) and
`prev_logprobs` (what the policy computed before its update) are right-padded to the longest sample; `input_lengths` is
the true length; `sample_loss_mask` is 0 for samples left out of the loss. Entry i is the log-prob of token i, 0 for the
first token and wherever none was recorded. Each value is a list of one sample, [[...]], as the logger slices batches.
The file does not say the temperature: give a `Definition` if it was not 1.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zerogap.diagnose.adapters.arrays import as_mask, pair_of_traces, read_jsonl, whole
from zerogap.diagnose.trace import Definition, Trace
from zerogap.errors import ConfigError

_TOKENS = ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")


def load_nemo_rl(path: Path, definition: Definition | None = None) -> tuple[Trace, Trace]:
    """Read one step's file.

    Returns:
        The generation's trace and the policy's. Tokens outside the loss mask and samples left out of the loss do not
        count.

    Raises:
        CheckpointError: not JSON lines.
        ConfigError: a field that is needed is missing; versions that wrote only `content` recorded no token ids.
    """
    rows = [_row(row, i) for i, row in enumerate(read_jsonl(path))]
    settings = {"format": "NeMo RL train_data_step", "samples": len(rows)}
    names = "NeMo RL generation", "NeMo RL policy"
    return pair_of_traces(rows, name=path.name, names=names, definition=definition, settings=settings)


def _row(row: Mapping[str, Any], index: int) -> dict[str, Any]:
    lacking = [n for n in (*_TOKENS, "input_lengths") if n not in row]
    if lacking:
        mend = f"add {', '.join(lacking)}: log them beside {', '.join(sorted(row))}"
        raise ConfigError(f"line {index + 1}", sorted(row), mend)
    where, size = f"line {index + 1}", len(_tokens(row, "token_ids", index))
    length = whole(_one(row["input_lengths"]), f"{where}.input_lengths")
    if not 0 <= length <= size:
        raise ConfigError(f"{where}.input_lengths", length, f"the row has {size} token ids")
    found = {name: np.asarray(_tokens(row, name, index))[:length] for name in _TOKENS}
    counts = as_mask([_one(row.get("sample_loss_mask", 1))], f"{where}.sample_loss_mask")
    mask = as_mask(found["token_loss_mask"], f"{where}.token_loss_mask") & counts[0]
    mask[:1] = False  # the first token has no log-prob
    return {**found, "token_loss_mask": mask, "prompt_length": _prompt_length(found["token_loss_mask"])}


def _tokens(row: Mapping[str, Any], name: str, index: int) -> list[Any]:
    value = _one(row[name])
    if not isinstance(value, list) or any(isinstance(v, list | dict | str) or v is None for v in value):
        raise ConfigError(f"line {index + 1}.{name}", str(value)[:60], "give one list of numbers, one per token")
    return value


def _one(value: Any) -> Any:
    """A sample's value out of a batch of one; values written without the batch are taken as they are."""
    if isinstance(value, list) and len(value) == 1:
        return value[0]
    return value


def _prompt_length(mask: np.ndarray) -> int:
    counted = np.flatnonzero(mask)
    return int(counted[0]) if len(counted) else len(mask)
