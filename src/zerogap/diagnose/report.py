"""The report of a diagnosis: one HTML file with verdict, evidence and maps, readable anywhere with no network, and the
same as JSON. Every number on the page is one of `Report`'s; the page adds words from `meanings` and nothing else.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zerogap.diagnose.findings import Report
from zerogap.diagnose.meanings import meaning
from zerogap.diagnose.trace import Trace
from zerogap.errors import ConfigError
from zerogap.text.html_page import write_page

TEMPLATE = Path(__file__).parent / "report_template.html"
BEFORE = 24  # tokens in front of a worst token that are shown with it


def with_texts(report: Report, trace: Trace, decode: Callable[[Sequence[int]], str]) -> Report:
    """The report with the text of its worst tokens and of what stands in front of them.

    Args:
        trace: a side whose ids the worst tokens are counted in.
        decode: from token ids to text.
    """
    worst = []
    for token in report.worst:
        ids = trace.sequences[token["sequence"]].ids
        before = ids[max(0, token["position"] - BEFORE) : token["position"]]
        worst.append({**token, "text": decode([int(token["id"])]), "before": decode([int(i) for i in before])})
    return dataclasses.replace(report, worst=tuple(worst))


def write_report(report: Report, folder: Path) -> Path:
    """Write `report.html` and `report.json` into a folder, which is made if it is not there; returns the page.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(report, folder / "report.json")
        return write_page(TEMPLATE, page_data(report), folder / "report.html")
    except OSError as error:
        raise ConfigError("report", str(folder), f"choose a folder that can be written: {error}") from error


def write_json(report: Report, path: Path) -> Path:
    """Write the report as JSON, in a single rename."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(report.as_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8", errors="replace")
    draft.replace(path)
    return path


def page_data(report: Report) -> dict[str, Any]:
    """What stands in the page: the report's JSON, and the words of every cause in it."""
    causes = [cause for finding in report.findings for cause in finding.causes]
    causes += [found.cause for found in report.attributions]
    causes += [*([report.verdict.cause] if report.verdict.cause else []), *report.verdict.further]
    return report.as_json() | {"meanings": {c.name: dataclasses.asdict(meaning(c)) for c in causes}}
