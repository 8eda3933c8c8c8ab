"""A page that stands alone: a template with its data inside, one file that needs no network.

The data is read by the page's own script as JSON. Text in it, whatever a model wrote, stays text: nothing in it can end
the element that it stands in.
"""

import json
from pathlib import Path

PLACE_OF_DATA = "{{DATA}}"


def embedded(data: object) -> str:
    """JSON that may stand inside a <script> element: nothing in it can close the element or open a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot stand in a file


def write_page(template: Path, data: object, target: Path) -> Path:
    """Write the template with `data` in its place, replacing an older page in a single rename; returns `target`."""
    before, place, after = template.read_text(encoding="utf-8").partition(PLACE_OF_DATA)
    assert place, f"{template.name} has no {PLACE_OF_DATA}"
    draft = target.with_name(target.name + ".part")
    draft.write_text(before + embedded(data) + after, encoding="utf-8")
    draft.replace(target)
    return target
