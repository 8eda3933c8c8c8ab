"""Stop strings: found across borders of pieces, text up to the match kept, nothing given out too early."""

import itertools

import pytest

from zerogap.errors import ConfigError
from zerogap.text import StopMatcher


def run(stops, pieces):
    matcher = StopMatcher(stops)
    out = ""
    for piece in pieces:
        out += matcher.push(piece)
        if matcher.matched is not None:
            break
    return out + ("" if matcher.matched else matcher.flush()), matcher.matched


def cuts(text):
    """Every way to cut the text into pieces."""
    for borders in itertools.product([False, True], repeat=len(text) - 1):
        pieces, last = [], 0
        for at, border in enumerate(borders, 1):
            if border:
                pieces.append(text[last:at])
                last = at
        yield [*pieces, text[last:]]


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["\n\n"], "ab\n\ncd", ("ab", "\n\n")),
        (["abc", "b"], "xabc", ("xa", "b")),
        (["abc", "bc"], "xxabc", ("xx", "abc")),
        (["aab"], "aaaab", ("aa", "aab")),
        (["END"], "the EN", ("the EN", None)),
        (["EN", "END"], "xEND", ("x", "EN")),
        ([], "anything", ("anything", None)),
        (["\u201d"], "\u201chi\u201d!", ("\u201chi", "\u201d")),
    ],
)
def test_the_result_does_not_depend_on_how_the_text_is_cut(stops, text, expected):
    for pieces in cuts(text):
        assert run(stops, pieces) == expected, pieces


def test_only_a_possible_beginning_is_held_back():
    matcher = StopMatcher(["STOP"])
    assert [matcher.push(p) for p in ("go S", "T", "x", "ST", "OP more")] == ["go ", "", "STx", "", ""]
    assert matcher.matched == "STOP" and matcher.push("later") == "" and matcher.flush() == ""


@pytest.mark.parametrize("stops", [[""], ["a", ""], [3]])
def test_an_empty_stop_string_is_refused(stops):
    with pytest.raises(ConfigError, match=r"sampling\.stop"):
        StopMatcher(stops)
