"""The text of one completion while it is drawn, and whether a stop string has come up in it.

Text never decides anything but that: ids go to the model and the trainer as they were drawn. A stop string may begin in
one token and end in another; one that is complete before `min_tokens` tokens does not count.
"""

from zerogap.text import IncrementalDecoder, StopMatcher, Tokenizer
from zerogap.types import SamplingParams


class CompletionText:
    """Grows by `push`, ends with `finish`.

    Attributes:
        pieces: text that became certain with each token. They join to the completion's text, without the stop string
            that ended it.
        stopped: True once a stop string was found.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._params = params
        self._decoder = IncrementalDecoder(tokenizer)
        self._matcher = StopMatcher(params.stop) if params.stop else None
        self._early = ""  # end of the text before min_tokens, in which a stop string may begin
        self._repeated = 0  # characters of it that the matcher has yet to let pass; they were given out already
        self.pieces: list[str] = []

    @property
    def stopped(self) -> bool:
        return self._matcher is not None and self._matcher.matched is not None

    def push(self, token: int) -> None:
        """Take over the next drawn token."""
        piece, count = self._decoder.push(token), len(self.pieces) + 1
        if self._matcher is not None and count < self._params.min_tokens:
            self._remember(piece)
        elif self._matcher is not None:
            self._repeated += len(self._early)
            passed = self._matcher.push(self._early + piece)
            self._early, piece = "", self._only_new(passed)
        self.pieces.append(piece)

    def finish(self) -> None:
        """No more tokens: what was held back becomes part of the last piece, unless a stop string was found."""
        rest = self._decoder.flush()
        if self._matcher is not None and len(self.pieces) >= self._params.min_tokens:
            rest = self._only_new(self._matcher.push(rest) + self._matcher.flush())
        if self.pieces:
            self.pieces[-1] += rest

    def _remember(self, piece: str) -> None:
        """Keep the longest end of the text in which a stop string can have begun but none is complete."""
        self._early += piece
        longest = max(map(len, self._params.stop))
        self._early = self._early[max(0, len(self._early) - longest + 1) :]
        while any(stop in self._early for stop in self._params.stop):
            self._early = self._early[1:]

    def _only_new(self, passed: str) -> str:
        known = min(self._repeated, len(passed))
        self._repeated -= known
        return passed[known:]

    @property
    def text(self) -> str:
        return "".join(self.pieces)
