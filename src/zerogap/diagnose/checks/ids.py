"""Check 1: both sides have read the same tokens. Log-probs of different ids, or after different ones, say nothing.

What was inserted, removed or replaced tells the kinds apart: single special ids, the same chunk in every prompt (a chat
template), or anything else (text that was decoded and encoded again).
"""

import difflib
from collections.abc import Iterable

import numpy as np

from zerogap.diagnose.compare import same_prefix
from zerogap.diagnose.facts import Facts
from zerogap.diagnose.side import Side
from zerogap.diagnose.trace import Trace
from zerogap.diagnose.verdict import Cause, Finding

Change = tuple[tuple[int, ...], tuple[int, ...]]  # ids of A, ids of B in its place
Edit = tuple[int, Change]  # at which token of A


def check(a: Side, b: Side, facts: Facts) -> Finding:
    """See the module."""
    one, other = a.trace, b.trace
    if len(one.sequences) != len(other.sequences):
        text = f"A has {len(one.sequences)} sequences, B {len(other.sequences)}"
        cause = Cause("ids", "tokens", text)
        return Finding("ids", "failed", text, (cause,), evidence={"accounts": True})
    unequal = [
        i
        for i, (x, y) in enumerate(zip(one.sequences, other.sequences, strict=True))
        if not np.array_equal(x.ids, y.ids)
    ]
    count = sum(len(s.ids) for s in one.sequences)
    if not unequal:
        return Finding("ids", "passed", f"{count} token ids of {len(one.sequences)} sequences are the same")
    edits = [_edits(one.sequences[i].ids, other.sequences[i].ids) for i in unequal]
    field, why = _classify(one, unequal, edits, _special_ids(one) | _special_ids(other))
    first = unequal[0]
    at = same_prefix(one.sequences[first].ids, other.sequences[first].ids)
    text = (
        f"{len(unequal)} of {len(one.sequences)} sequences differ in their token ids, sequence {first} from token {at}"
    )
    evidence = {
        "accounts": True,
        "sequences": unequal[:20],
        "edits": [[at, list(x), list(y)] for at, (x, y) in edits[0][:10]],
    }
    return Finding("ids", "failed", f"{text}: {why}", (Cause("ids", field, why),), evidence=evidence)


def _edits(x: np.ndarray, y: np.ndarray) -> list[Edit]:
    """What turns x into y."""
    matcher = difflib.SequenceMatcher(None, x.tolist(), y.tolist(), autojunk=False)
    return [
        (i, (tuple(x[i:j].tolist()), tuple(y[k:n].tolist())))
        for tag, i, j, k, n in matcher.get_opcodes()
        if tag != "equal"
    ]


def _special_ids(trace: Trace) -> set[int]:
    """Begin, end and pad ids of the model's config."""
    found: set[int] = set()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        value = trace.model.get(key)
        found |= {v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, int)}
    return found


def _classify(one: Trace, unequal: list[int], edits: list[list[Edit]], special: set[int]) -> tuple[str, str]:
    changes = [[change for _, change in found] for found in edits]
    ids = set(_ids(c for found in changes for c in found))
    pure = all(not x or not y for found in changes for x, y in found)  # only inserted or only removed
    if ids <= special:
        return "special_tokens", f"only special ids differ: {_words(changes[0])}"
    at_ends = all(
        at == 0 or at + len(x) >= len(one.sequences[i].ids) for i, found in zip(unequal, edits) for at, (x, _) in found
    )
    if pure and at_ends and len(ids) == 1:
        return (
            "special_tokens",
            f"id {min(ids)} stands at an end of the sequence on one side only: {_words(changes[0])}",
        )
    in_prompt = all(
        at + len(x) <= max(one.sequences[i].prompt_length, 1)
        for i, found in zip(unequal, edits)
        for at, (x, _) in found
    )
    alike = all(set(found) == set(changes[0]) for found in changes)
    size = max(max(len(x), len(y)) for found in changes for x, y in found)
    whole = len(unequal) == len(one.sequences)
    if in_prompt and whole and alike and (len(unequal) > 1 or size > 1):
        return "template", f"every prompt differs in the same way, as two chat templates do: {_words(changes[0])}"
    return "tokens", f"the ids themselves differ, as after decoding and encoding text again: {_words(changes[0])}"


def _ids(changes: Iterable[Change]) -> list[int]:
    return [i for x, y in changes for i in (*x, *y)]


def _words(changes: list[Change]) -> str:
    shown = [f"{list(x)[:6]} in A, {list(y)[:6]} in B" for x, y in changes[:2]]
    return "; ".join(shown) + (f"; {len(changes) - 2} more" if len(changes) > 2 else "")
