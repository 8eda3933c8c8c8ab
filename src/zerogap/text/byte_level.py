"""A tokenizer of bytes with a chat template, made on the spot: for models with random weights, which need no more.

256 ids for the bytes, then the end of a message and the beginnings of a system's, a user's and the assistant's turn.
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CONTROL = ("</s>", "<|system|>", "<|user|>", "<|assistant|>")
END = 256  # id of </s>
NUM_IDS = 256 + len(CONTROL)
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_byte_tokenizer(folder: Path) -> None:
    """Write its files into a model folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, *CONTROL])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(CONTROL))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=CONTROL[0], pad_token=CONTROL[0])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
