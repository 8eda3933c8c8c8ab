"""Stop strings across token borders, characters across tokens, and what `min_tokens` ignores."""

import pytest

from zerogap.rollout.completion_text import CompletionText
from zerogap.types import SamplingParams


class Bytes:
    """A tokenizer whose ids are UTF-8 bytes."""

    special_ids = frozenset()

    def decode(self, ids, skip_special_tokens=False):
        return bytes(ids).decode("utf-8", errors="replace")


class Words:
    """A tokenizer whose ids index a list of pieces of text."""

    special_ids = frozenset()

    def __init__(self, *pieces):
        self.pieces = pieces

    def decode(self, ids, skip_special_tokens=False):
        return "".join(self.pieces[i] for i in ids)


def run(tokenizer, ids, **params):
    """Tokens read until a stop string came up, and the text."""
    text = CompletionText(tokenizer, SamplingParams(**params))
    count = 0
    for token in ids:
        text.push(token)
        count += 1
        if text.stopped:
            break
    stopped = text.stopped
    text.finish()
    assert len(text.pieces) == count
    return count, stopped, text.text


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (("a", "b</", "s", ">c"), "</s>", (4, True, "ab")),  # over three tokens, with text after it
        (("a\n", "\nb"), "\n\n", (2, True, "a")),
        (("a", "\n", "b", "\n"), "\n\n", (4, False, "a\nb\n")),  # held back, then given out after all
        (("END",), "END", (1, True, "")),
        (("aEN", "Db"), "END", (2, True, "a")),
    ],
)
def test_a_stop_string_is_found_across_token_borders(pieces, stop, expected):
    assert run(Words(*pieces), range(len(pieces)), stop=(stop,)) == expected


def test_the_stop_string_that_ends_first_wins():
    assert run(Words("ab", "cd", "ef"), range(3), stop=("cdef", "bc")) == (2, True, "a")


@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [
        (0, (2, True, "a")),
        (2, (2, True, "a")),
        (3, (4, True, "a.;b")),  # the first one is complete too early, and stays in the text
        (4, (4, True, "a.;b")),
        (5, (5, False, "a.;b.;c")),
    ],
)
def test_a_stop_string_before_min_tokens_does_not_count(min_tokens, expected):
    pieces = ("a", ".;", "b", ".;", "c")
    assert run(Words(*pieces), range(5), stop=(".;",), min_tokens=min_tokens, max_tokens=8) == expected


def test_a_stop_string_that_begins_before_min_tokens_and_ends_after_it_counts():
    count, stopped, text = run(Words("a", "E", "N", "D", "x"), range(5), stop=("END",), min_tokens=4, max_tokens=8)
    assert (count, stopped) == (4, True)
    assert text == "aEN"  # what was given out is not taken back


def test_the_text_before_min_tokens_is_given_out_once():
    assert run(Words("a", "E", "E", "b", "x"), range(5), stop=("END",), min_tokens=3, max_tokens=8)[2] == "aEEbx"


def test_a_character_spread_over_tokens_comes_out_whole():
    ids = list("é€🙂”".encode())
    text = CompletionText(Bytes(), SamplingParams())
    for token in ids:
        text.push(token)
    text.finish()
    assert text.text == "é€🙂”"
    assert [p for p in text.pieces if p] == ["é", "€", "🙂", "”"]


def test_an_unfinished_character_is_shown_at_the_end():
    assert run(Bytes(), list("a€".encode())[:3])[2].startswith("a\N{REPLACEMENT CHARACTER}")
