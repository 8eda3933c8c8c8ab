"""The worked example of docs/diagnose.md ends as the page says."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "diagnose.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_row_that_changes_with_an_unrelated_neighbour():
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if "Workshop" in b)
    scope = {}
    exec(compile(block, "diagnose.md", "exec"), scope)
    report = scope["report"]
    assert (report.verdict.check, report.verdict.cause.name) == ("neighbours", "attention/block")
    within = [found for found in report.attributions if found.between]
    assert within and {w.node for w in within} == {"0.attention"}
    assert "block: 16 keys" in within[0].variant_a + within[0].variant_b
    different, compared = report.statistics["different"], report.statistics["count"]
    assert f"Only {different} of {compared} tokens differ, by {report.statistics['max']:.3f} at most" in " ".join(
        PAGE.split()
    )
