"""Page, JSON and summary of a diagnosis say what was found, all of it, and nothing in it can break the page."""

import json
import math
import re

import numpy as np
import pytest
import torch

from zerogap.diagnose.findings import Attributed, Heat, OperatorShare, Report, Share
from zerogap.diagnose.heat import heat_of
from zerogap.diagnose.meanings import ANY_FIELD, FIELD_MEANINGS, FRAMEWORK_MEANINGS, NOT_KNOWN, meaning
from zerogap.diagnose.report import TEMPLATE, page_data, with_texts, write_json, write_report
from zerogap.diagnose.terminal import next_step, number, summary
from zerogap.diagnose.trace import Pass, SequenceTrace, Trace
from zerogap.diagnose.verdict import SUBJECTS, UNATTRIBUTED, UNKNOWN, Cause, Finding, Verdict
from zerogap.errors import ConfigError

SPLIT = Cause("attention", "split", "3.attention: A whole, B 4 parts")
FINDINGS = (
    Finding("ids", "passed", "the same ids"),
    Finding("cache", "not checked", "nothing is known of caches", needs="record hit_length"),
    Finding(
        "path", "failed", "B decodes 5 tokens otherwise", (SPLIT,), evidence={"gap": math.nan, "rows": np.int64(5)}
    ),
)
STATISTICS = {
    "count": 812,
    "different": 611,
    "missing": 3,
    "infinite": 0,
    "mean": 3.1e-3,
    "max": 0.41,
    "p999": 0.22,
    "k3": None,
    "worst_sequence": {"sequence": 2, "mean": 0.006},
    "histogram": [[-200, 201], [-9, 611]],
}
WORST = ({"sequence": 1, "position": 2, "id": 7, "a": -1.25, "b": -math.inf, "d": -math.inf},)


def report(**changes):
    facts = {
        "a_name": "engine",
        "b_name": "trainer",
        "verdict": Verdict(False, "path", SPLIT, (Cause("norm", "primitive"),), "pin the number of parts"),
        "findings": FINDINGS,
        "statistics": STATISTICS,
        "worst": WORST,
        "facts": (("torch", "2.12", "2.13"),),
        "shares": (Share("numeric", 0.9, "operators"), Share("remaining", 0.1, "")),
        "operators": (OperatorShare("attention", 0.7),),
        "attributions": (Attributed("3.attention", SPLIT, "one part", 1.0, "", 0.0, 64, 9, ("split: 2",)),),
        "heat": Heat(("embed", "lm_head"), (0, 2), ((0.0, None), (1.0, 0.5)), ((0.0, None), (0.25, 0.5))),
        "notes": ("a first pass was set aside",),
        "seconds": 1.5,
    }
    return Report(**(facts | changes))


def shown(found):
    return "\n".join(line.text for line in summary(found))


def embedded(path):
    (text,) = re.findall(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return json.loads(text)


def test_json_holds_every_field_and_is_plain(tmp_path):
    data = json.loads(write_json(report(), tmp_path / "x.json").read_text())
    assert data["format"] == "zerogap-diagnosis"
    assert data["verdict"]["cause"] == {"name": "attention/split", **vars(SPLIT)}
    assert data["findings"][2]["evidence"] == {"gap": None, "rows": 5}
    assert data["worst"][0]["b"] is None
    assert data["heat"]["differing"] == [[0.0, None], [1.0, 0.5]]
    assert data["attributions"][0]["alternatives"] == ["split: 2"]


def test_page_stands_alone_and_holds_the_report(tmp_path):
    page = write_report(report(), tmp_path / "a" / "why")
    html = page.read_text(encoding="utf-8")
    data = embedded(page)
    assert (
        data
        == page_data(report())
        == json.loads((page.parent / "report.json").read_text()) | {"meanings": data["meanings"]}
    )
    assert set(data["meanings"]) == {"attention/split", "norm/primitive"}
    assert "default-src 'none'" in html
    assert not re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org/)""", html)


def test_text_of_a_model_cannot_leave_its_place(tmp_path):
    hostile = "</script><script>alert(1)</script><!--\u2028\ud800"
    worst = ({**WORST[0], "text": hostile, "before": hostile},)
    page = write_report(report(worst=worst, a_name=hostile), tmp_path)
    html = page.read_text(encoding="utf-8")
    assert html.count("</script>") == TEMPLATE.read_text(encoding="utf-8").count("</script>")
    assert "innerHTML" not in html
    assert embedded(page)["worst"][0]["text"].startswith("</script>")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can be written"):
        write_report(report(), tmp_path / "file" / "why")


def test_summary_shows_verdict_evidence_and_next_step():
    text = shown(report())
    for words in (
        "DIFFERENT: attention/split (check: path)",
        "3.attention: A whole, B 4 parts",
        "also: norm/primitive",
        "812 compared, 611 different, 3 recorded on one side only",
        "worst sequence: 2",
        "ok   ids",
        "?    cache",
        "to check it: record hit_length",
        "FAIL path",
        "note: a first pass was set aside",
        "90.0%",
        "B: not reproduced by any known form",
        "Next: pin the number of parts",
    ):
        assert words in text, words


def test_what_is_not_known_is_not_called_anything_else():
    text = shown(report(verdict=Verdict(False, "", UNKNOWN)))
    assert "DIFFERENT: unattributed" in text
    assert "attention/split (check" not in text
    assert f"Next: {NOT_KNOWN.mend}" in text


def test_same_bits_are_said_only_by_the_verdict():
    same = report(verdict=Verdict(True, "", None), statistics=STATISTICS | {"different": 0})
    assert "SAME: all 812 compared log-probs are equal" in shown(same)
    assert next_step(same).startswith("nothing")
    assert "SAME" not in shown(report(statistics=STATISTICS | {"different": 0}))


def test_passes_of_one_side_are_not_called_a_and_b():
    text = shown(
        report(attributions=(Attributed("0.norm", SPLIT, "x", 1.0, "y", 1.0, between="two passes of side A"),))
    )
    assert "two passes of side A" in text
    assert "one: x" in text
    assert "A: x" not in text


def test_replays_of_one_form_blame_nothing():
    text = shown(report(attributions=(Attributed("0.q_proj", UNKNOWN, "x", 1.0, "x", 1.0, elements=64),)))
    assert "0.q_proj: the same form on both sides  (each side on its own inputs, 64 elements)" in text


def test_operators_show_what_they_add_alone():
    text = shown(report(operators=(OperatorShare("head", 0.25, 0.125), OperatorShare("norm", -0.07))))
    assert re.search(r"head +25\.0% +12\.5%\n +norm +-7\.0%\n", text)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (1e-12, "1e-12"), (12345, "12,345"), (None, "-"), (math.inf, "inf"), (True, "-")]
)
def test_numbers(value, text):
    assert number(value) == text


def test_every_cause_has_words():
    for subject, fields in SUBJECTS.items():
        for field in fields:
            found = meaning(Cause(subject, field))
            assert found.text and found.mend
            known = FRAMEWORK_MEANINGS.get(f"{subject}/{field}") or FIELD_MEANINGS[field]
            assert known.text in found.text
        unknown = meaning(Cause(subject, UNATTRIBUTED))
        assert (ANY_FIELD.mend if subject not in {n.split("/")[0] for n in FRAMEWORK_MEANINGS} else NOT_KNOWN.mend) == (
            unknown.mend
        )
    assert meaning(UNKNOWN) == NOT_KNOWN


def test_worst_tokens_get_the_text_in_front_of_them():
    ids = np.arange(40, dtype=np.int32)
    sequences = (SequenceTrace(ids[:3], 1), SequenceTrace(ids, 1))
    trace = Trace("t", sequences, (Pass(tuple(np.zeros(len(s.ids), np.float32) for s in sequences)),))
    worst = ({**WORST[0], "position": 30, "id": 30},)
    (token,) = with_texts(report(worst=worst), trace, lambda given: " ".join(map(str, given))).worst
    assert token["text"] == "30"
    assert token["before"].split() == [str(i) for i in range(6, 30)]


def test_map_gathers_rows_by_position():
    nan = math.nan
    distance = {"embed": torch.tensor([0.0, 0.0, nan, 0.5, 0.0]), "lm_head": torch.tensor([0.0, 1.0, 2.0, nan, nan])}
    found = heat_of(distance, [3, 2], columns=2)  # positions 0 1 2 | 0 1, two per column
    assert found.nodes == ("embed", "lm_head")
    assert found.positions == (0, 2)
    assert found.differing == ((0.25, None), (0.5, 1.0))
    assert found.distance == ((0.5, None), (1.0, 2.0))
    assert heat_of({}, [3]) is None
