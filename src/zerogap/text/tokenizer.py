"""From prompts to ids and from ids to text, through the model's own tokenizer and chat template.

Promises: a prompt of a model whose tokenizer puts a beginning-of-sequence id in front has exactly one, whether it comes
as text or as chat messages; other models' prompts get none added. A prompt given as ids is taken as it is, or refused
where it begins with two. No id that was given or sampled is ever changed, and nothing here re-encodes decoded text.
Clean-up of spaces is off: decode(encode(x)) is x wherever the tokenizer itself is lossless.
"""

import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import transformers

from zerogap.errors import CheckpointError, ConfigError

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages | Sequence[int]


class Tokenizer:
    """A Hugging Face tokenizer with a chat template.

    Attributes:
        backend: the tokenizer of transformers.
        vocab_size: ids are below this (added tokens included).
        bos_token_id: id put in front of every prompt, or None if this tokenizer adds none.
    """

    def __init__(self, backend: transformers.PreTrainedTokenizerBase, chat_template: str | None = None) -> None:
        self.backend = backend
        self.chat_template = chat_template
        self.vocab_size = len(backend)
        with_special = backend("", add_special_tokens=True)["input_ids"]
        bos = backend.bos_token_id
        self.bos_token_id = bos if bos is not None and with_special[:1] == [bos] else None

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], chat_template: str | None = None) -> "Tokenizer":
        """Load from tokenizer files by name, as `ModelFiles.tokenizer_files()` gives them.

        Raises:
            ConfigError: the model has no tokenizer.
            CheckpointError: the files cannot be loaded.
        """
        if not files:
            raise ConfigError("model", "no tokenizer files", "this needs a model with a tokenizer")
        with tempfile.TemporaryDirectory(prefix="zerogap-tokenizer-") as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            try:
                backend = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"tokenizer files {sorted(files)} cannot be loaded ({error})") from error
        return cls(backend, chat_template)

    # ---- to ids ----

    def prompt_ids(self, prompt: Prompt) -> np.ndarray:
        """int32 [P] ids of a prompt given as text, as chat messages, or as ids.

        Raises:
            ConfigError: an empty prompt, ids out of range, a doubled beginning-of-sequence id, or messages without a
                chat template.
        """
        if isinstance(prompt, str):
            return self.encode(prompt)
        items: list[Any] = list(prompt)
        return self.encode_chat(items) if items and isinstance(items[0], Mapping) else self.check_ids(items)

    def encode(self, text: str) -> np.ndarray:
        """int32 [P] ids of plain text, with this tokenizer's beginning-of-sequence id exactly once."""
        ids = self.backend(text, add_special_tokens=False)["input_ids"]
        return self._finish(ids, "prompt", text)

    def encode_chat(self, messages: Messages, add_generation_prompt: bool = True) -> np.ndarray:
        """int32 [P] ids of chat messages, rendered by the model's chat template."""
        return self._finish(
            self.backend(self.render_chat(messages, add_generation_prompt), add_special_tokens=False)["input_ids"],
            "messages",
            messages,
        )

    def render_chat(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        """The text that the chat template makes of the messages (special tokens spelled out).

        Raises:
            ConfigError: no chat template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ConfigError("messages", "no chat template", "this model has none; give the prompt as text")
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                raise ConfigError("messages", message, "every message needs a role and a content")
        try:
            return self.backend.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=self.chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise ConfigError("messages", list(messages), f"the chat template refuses them: {error}") from error

    def check_ids(self, ids: Sequence[int]) -> np.ndarray:
        """The ids as int32 [P], unchanged; see `prompt_ids` for what is refused."""
        array = np.asarray(ids)
        if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
            raise ConfigError("prompt", ids, "give text, chat messages, or a non-empty list of token ids")
        if array.min() < 0 or array.max() >= self.vocab_size:
            raise ConfigError("prompt", ids, f"token ids are from 0 to {self.vocab_size - 1}")
        if self.bos_token_id is not None and array[:2].tolist() == [self.bos_token_id] * 2:
            raise ConfigError("prompt", ids, f"begins with id {self.bos_token_id} (beginning of sequence) twice")
        return array.astype(np.int32)

    def _finish(self, ids: list[int], key: str, prompt: object) -> np.ndarray:
        bos = self.bos_token_id
        if bos is not None:
            while ids[:2] == [bos, bos]:
                ids = ids[1:]
            if ids[:1] != [bos]:
                ids = [bos, *ids]
        if not ids:
            raise ConfigError(key, prompt, "is empty: there is nothing to continue from")
        return np.asarray(ids, dtype=np.int32)

    # ---- to text ----

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = False) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD."""
        return self.backend.decode(
            [int(token) for token in ids],
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        return frozenset(self.backend.all_special_ids) | {
            token for token, added in self.backend.added_tokens_decoder.items() if added.special
        }
