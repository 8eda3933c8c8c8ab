"""Held-out completions through transformers: an opinion on a saved model that shares no code with zerogap's engine.

Prompts are rendered and tokenised by the saved folder's own tokenizer and chat template. Draws use a generator of their
own (Gumbel noise added to the logits of a greedy search, which is sampling at temperature 1), so that the figure is the
same every time and no global random state is touched.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from zerogap.rl.data import Row

BATCH = 48  # sequences generated together


class _GumbelNoise(transformers.LogitsProcessor):
    """argmax(logits + Gumbel noise) is a draw from softmax(logits)."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        noise = torch.empty(scores.shape, dtype=torch.float64).exponential_(generator=self._generator)
        return scores.double() - noise.log()


def complete(
    folder: Path, rows: Sequence[Row], max_tokens: int, num_samples: int = 1, seed: int | None = None
) -> list[list[str]]:
    """Completions of chat prompts by a saved model, in the dtype it was saved in.

    Args:
        folder: a Hugging Face folder with tokenizer and chat template.
        rows: whose prompts are completed.
        max_tokens: most completion tokens.
        num_samples: completions per prompt.
        seed: of the draws at temperature 1; None: greedy.

    Returns:
        [rows][num_samples] texts without special tokens.
    """
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
    ends = model.generation_config.eos_token_id
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0] if isinstance(ends, list) else ends
    # Its own object: nothing of the folder's sampling defaults takes part.
    settings = transformers.GenerationConfig(
        max_new_tokens=max_tokens, do_sample=False, eos_token_id=ends, pad_token_id=pad
    )
    noise = [] if seed is None else [_GumbelNoise(seed)]
    prompts = [
        tokenizer.apply_chat_template(list(row.prompt), tokenize=False, add_generation_prompt=True)
        for row in rows
        for _ in range(num_samples)
    ]
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = pad
    texts: list[str] = []
    for first in range(0, len(prompts), BATCH):
        batch = prompts[first : first + BATCH]
        inputs = tokenizer(batch, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.no_grad():
            ids = model.generate(
                **inputs, generation_config=settings, logits_processor=transformers.LogitsProcessorList(noise)
            )
        new = ids[:, inputs["input_ids"].shape[1] :]
        texts += tokenizer.batch_decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return [texts[i : i + num_samples] for i in range(0, len(texts), num_samples)]
