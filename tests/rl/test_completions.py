"""Which completions are shown, and that a token's text and log-prob are its own."""

import numpy as np

from zerogap.rl.completions import chosen, pieces, short


def test_different_groups_come_first():
    assert chosen(6, 2, 2) == [0, 2]
    assert chosen(6, 2, 4) == [0, 1, 2, 4]
    assert chosen(6, 2, 9) == [0, 1, 2, 3, 4, 5]
    assert chosen(6, 2, 0) == []


def test_shortest_decimals_name_every_bit():
    values = -np.random.default_rng(0).exponential(1.0, 1000).astype(np.float32)
    values[:3] = [0.0, -1e-45, -3.4e38]
    assert np.array(short(values), np.float32).tobytes() == values.tobytes()
    assert short(np.array([-0.1], np.float32)) == [-0.1]


class Bytes:
    """A tokenizer of single bytes, 0 special."""

    special_ids = frozenset({0})

    def decode(self, ids, skip_special_tokens=False):
        return b"".join(b"<end>" if i == 0 else bytes([i]) for i in ids).decode(errors="replace")


def test_pieces_join_to_the_text_with_special_tokens_and_broken_characters():
    ids = [*"a\N{FIRE}".encode(), 0, *"\N{FIRE}".encode()[:2]]
    found = pieces(Bytes(), ids)
    assert found[:6] == ["a", "", "", "", "\N{FIRE}", "<end>"]
    assert "".join(found) == Bytes().decode(ids)
    assert pieces(Bytes(), []) == []
