"""Text of a completion while it grows: only whole characters are given out, and never taken back.

A character may be spread over several byte-level tokens (an emoji, a CJK sign, a curly quote). What could still change
is held back until the next token, or until `flush`. The pieces join to what `Tokenizer.decode` makes of all ids.
"""

from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_HELD_AT_MOST = 3  # an unfinished UTF-8 sequence has at most 3 bytes, each shown as one U+FFFD at most


class Decoder(Protocol):
    """What is needed of `Tokenizer`."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str: ...


class IncrementalDecoder:
    """Decodes one sequence, token by token, in constant time per token.

    `_window` holds the ids since the last certain character border, and one token of context before them, because some
    tokenizers write a token differently at the very start; `_sent` counts the window's characters already given out.
    """

    def __init__(self, tokenizer: Decoder, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._window: list[int] = []
        self._sent = 0

    def push(self, token: int) -> str:
        """The characters that became certain with this token; often all of its text, sometimes none."""
        self._window.append(int(token))
        text = self._decode(self._window)
        certain = len(text) - _trailing_replacements(text)
        piece = text[self._sent : certain]
        self._sent = max(self._sent, certain)
        if certain == len(text) and len(self._window) > 1:
            context = self._decode(self._window[-1:])
            # Only a token that shows itself whole and alone can stand in for everything before it.
            if context and REPLACEMENT not in context:
                self._window, self._sent = self._window[-1:], len(context)
        return piece

    def flush(self) -> str:
        """What is still held back, unfinished characters as U+FFFD. The sequence ends here."""
        text = self._decode(self._window)
        piece = text[self._sent :]
        self._window, self._sent = [], 0
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


def _trailing_replacements(text: str) -> int:
    return min(_HELD_AT_MOST, len(text) - len(text.rstrip(REPLACEMENT)))
