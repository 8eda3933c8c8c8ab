"""Text of a completion while it grows: only whole characters are given out, and never taken back.

A character may be spread over several byte-level tokens (an emoji, a CJK sign, a curly quote). What could still change
is held back until the next token, or until `flush`. For byte-level tokenizers the pieces join to what decoding all ids
at once gives, broken byte sequences included; a byte-fallback tokenizer may show a broken sequence differently, because
it rewrites whole characters in front of it, which were given out already.
"""

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    """What is needed of `Tokenizer`."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...


class IncrementalDecoder:
    """Decodes one sequence, token by token; the cost of a token does not grow with the sequence.

    `_window` holds the ids of the last certain piece of text, as context (some tokenizers write a token differently at
    the very start), and those of what is still uncertain, from `_border` on; `_sent` counts the window's characters
    already given out.
    """

    def __init__(self, tokenizer: Decoder, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._border = self._sent = 0

    def push(self, token: int) -> str:
        """The characters that became certain with this token; often all of its text, sometimes none."""
        if token in self._skipped:
            return ""
        self._window.append(int(token))
        text = self._tokenizer.decode(self._window)
        certain = len(text.rstrip(REPLACEMENT))  # what ends in U+FFFD may be the beginning of a character
        piece = text[self._sent : certain]
        self._sent = max(self._sent, certain)
        if certain == len(text):
            context = self._window[self._border :]
            shown = self._tokenizer.decode(context)
            if shown and REPLACEMENT not in shown:  # only text that stands whole and alone can be context
                self._window, self._sent = context, len(shown)
            self._border = len(self._window)
        return piece

    def flush(self) -> str:
        """What is still held back, unfinished characters as U+FFFD. The sequence ends here."""
        piece = self._tokenizer.decode(self._window)[self._sent :]
        self._window, self._border, self._sent = [], 0, 0
        return piece
