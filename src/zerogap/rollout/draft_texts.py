"""Texts that began with one prompt, and where the last tokens of another such text stand in them.

These are what drafts are copied from: the prompt itself, the group's other samples as they grow, and earlier samples of
the same prompt. Texts of a prompt that is being decoded are lists with an index of n-grams; those of a prompt out of
use are two packed arrays each, and the least recently used prompts go when there are too many tokens.

A text can be a bad guess, never a wrong result: whatever is guessed is verified by a forward pass.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

PROMPT_CHANCE = 0.5  # that a token copied from a prompt is the next one: nothing is recorded, so a guess
MOST_COMPARED = 16  # tokens by which a match is measured; a longer one counts as this long
MOST_PLACES = 32  # of one n-gram, the newest
TEXTS_PER_PROMPT = 32  # kept when a prompt goes out of use, the newest
STORED_TOKENS = 4 << 20  # of all prompts out of use, 8 bytes each

Stored = tuple[np.ndarray, np.ndarray]  # a completion's ids, int32, and chances, float32


class Text:
    """A prompt with what has been drawn after it. Grows through `PromptTexts.grow` alone.

    Attributes:
        ids: all token ids.
        chances: for each, the probability it was drawn with.
    """

    __slots__ = ("chances", "ids")

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.chances = [PROMPT_CHANCE] * len(ids)


Place = tuple[Text, int]  # the token with this index follows what was looked for


class PromptTexts:
    """All texts of one prompt that is in use.

    Attributes:
        prompt_length: in tokens.
        texts: in order of arrival; earlier samples first.
        users: running sequences that follow these texts; counted by the store.
    """

    def __init__(self, prompt_ids: np.ndarray, min_match: int, earlier: Iterable[Stored] = ()) -> None:
        """
        Args:
            prompt_ids: int32 [P].
            min_match: fewest equal tokens that make a match.
            earlier: completions of the prompt.
        """
        self.prompt_length, self.users = len(prompt_ids), 0
        self.texts: list[Text] = []
        self._min_match = min_match
        self._places: dict[tuple[int, ...], list[Place]] = {}
        prompt = Text(prompt_ids.tolist())
        for end in range(min_match, self.prompt_length):
            self._index(prompt, end)
        self._prompt = prompt.ids
        for ids, chances in earlier:
            text = self.new_text()
            for token, chance in zip(ids.tolist(), chances.tolist(), strict=True):
                self.grow(text, token, chance)

    def new_text(self) -> Text:
        """One more text, of the prompt alone so far."""
        text = Text(list(self._prompt))
        self.texts.append(text)
        self._index(text, self.prompt_length)
        return text

    def grow(self, text: Text, token: int, chance: float) -> None:
        """Append a drawn token."""
        text.ids.append(token)
        text.chances.append(chance)
        self._index(text, len(text.ids))

    def _index(self, text: Text, end: int) -> None:
        if end < self._min_match:
            return
        places = self._places.setdefault(tuple(text.ids[end - self._min_match : end]), [])
        places.append((text, end))
        if len(places) > 2 * MOST_PLACES:
            del places[:-MOST_PLACES]

    def matches(self, text: Text) -> tuple[list[Place], int]:
        """Places that share the longest run of tokens with the end of `text` and are followed by something, and how
        many tokens that is (`MOST_COMPARED` at most; 0 with no place)."""
        found: list[Place] = []
        longest, ids = 0, text.ids
        for other, end in self._places.get(tuple(ids[-self._min_match :]), ())[-MOST_PLACES:]:
            if end >= len(other.ids):
                continue
            length = _common_end(ids, other.ids, end, self._min_match)
            if length > longest:
                found, longest = [], length
            if length == longest:
                found.append((other, end))
        return found, longest

    def stored(self) -> list[Stored]:
        """The newest different completions, packed, oldest first."""
        kept: dict[tuple[int, ...], Stored] = {}
        for text in reversed(self.texts):
            ids, chances = text.ids[self.prompt_length :], text.chances[self.prompt_length :]
            if ids and len(kept) < TEXTS_PER_PROMPT:
                kept.setdefault(tuple(ids), (np.array(ids, np.int32), np.array(chances, np.float32)))
        return list(reversed(kept.values()))


def _common_end(ids: Sequence[int], others: Sequence[int], end: int, known: int) -> int:
    """Equal tokens before the end of `ids` and before `end`; the last `known` are."""
    length, most = known, min(MOST_COMPARED, len(ids), end)
    while length < most and ids[-1 - length] == others[end - 1 - length]:
        length += 1
    return length


class TextStore:
    """The texts of all prompts, by the prompt's ids.

    Attributes:
        num_tokens: of prompts out of use, prompts and completions together; at most `stored_tokens`.
    """

    def __init__(self, min_match: int, stored_tokens: int = STORED_TOKENS) -> None:
        self.num_tokens = 0
        self._min_match, self._limit = min_match, stored_tokens
        self._in_use: dict[bytes, PromptTexts] = {}
        self._stored: OrderedDict[bytes, list[Stored]] = OrderedDict()  # least recently used first

    def open(self, prompt_ids: np.ndarray) -> PromptTexts:
        """The texts of a prompt (int32 [P]), used by one sequence more until `close`."""
        key = prompt_ids.tobytes()
        texts = self._in_use.get(key)
        if texts is None:
            texts = self._in_use[key] = PromptTexts(prompt_ids, self._min_match, self._take(key))
        texts.users += 1
        return texts

    def close(self, prompt_ids: np.ndarray) -> None:
        """One sequence does not use them any more; after the last one they are packed."""
        key = prompt_ids.tobytes()
        texts = self._in_use[key]
        texts.users -= 1
        if not texts.users:
            del self._in_use[key]
            self._put(key, [*self._take(key), *texts.stored()])

    def add(self, prompt_ids: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """A completion that somebody else has kept, int32 [C] and float32 [C]; found when the prompt is next opened."""
        key = prompt_ids.tobytes()
        self._put(key, [*self._take(key), (ids, np.exp(logprobs))])

    def _take(self, key: bytes) -> list[Stored]:
        texts = self._stored.pop(key, [])
        self.num_tokens -= _num_tokens(key, texts)
        return texts

    def _put(self, key: bytes, texts: list[Stored]) -> None:
        """Keep the newest of these texts; this prompt is now the one most recently used."""
        assert key not in self._stored, "what was stored is taken out first"
        if texts := texts[-TEXTS_PER_PROMPT:]:
            self._stored[key] = texts
            self.num_tokens += _num_tokens(key, texts)
        while self.num_tokens > self._limit:
            self._take(next(iter(self._stored)))


def _num_tokens(key: bytes, texts: Sequence[Stored]) -> int:
    return len(key) // 4 + sum(len(ids) for ids, _ in texts) if texts else 0
