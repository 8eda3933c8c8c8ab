"""Stop strings over text that arrives in pieces: a match may begin in one token and end in another.

Only text that cannot be part of a match any more is given out. The matcher never looks at ids.
"""

from collections.abc import Sequence

from zerogap.errors import ConfigError


class StopMatcher:
    """Finds the first of several strings in a growing text.

    Attributes:
        matched: the stop string that was found, or None. The one that ends first wins, and of those the longest, so the
            result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ConfigError for an empty stop string, which would match everywhere."""
        if any(not isinstance(stop, str) or not stop for stop in stops):
            raise ConfigError("sampling.stop", tuple(stops), "give non-empty strings")
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is now certainly outside of any match. After a match nothing more comes out."""
        if self.matched is not None:
            return ""
        self._held += text
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            _, at, self.matched = min(hits)
            out, self._held = self._held[:at], ""
            return out
        keep = max((self._open_suffix(stop) for stop in self._stops), default=0)
        border = len(self._held) - keep
        out, self._held = self._held[:border], self._held[border:]
        return out

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        out, self._held = self._held, ""
        return out

    def _open_suffix(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
