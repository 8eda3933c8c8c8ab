"""Writes the generated pages of this folder: `python docs/generate.py`. A test compares them with what is committed.

`recipe-keys.md` comes from `zerogap.config`, `how-fast.md` from the result files of `benchmarks/`.
"""

import json
from pathlib import Path

from zerogap.config import iter_fields

DOCS = Path(__file__).resolve().parent
NOTICE = "<!-- Written by docs/generate.py; do not edit. -->\n"


def shown_default(default: object) -> str:
    """A default as it would stand in a recipe; `required` where there is none."""
    if default is ...:
        return "**required**"
    if isinstance(default, tuple):
        default = list(default)
    return f"`{json.dumps(default)}`".replace('"', "") if not isinstance(default, str) else f"`{default}`"


def recipe_keys() -> str:
    """The page of recipe keys, a table per section in the order of the config."""
    sections: dict[str, list[str]] = {}
    for key, default, description in iter_fields():
        section = key.rpartition(".")[0] or "top level"
        cells = (f"`{key}`", shown_default(default), description.replace("|", "\\|"))
        sections.setdefault(section, []).append("| " + " | ".join(cells) + " |")
    parts = [
        "# Which recipe keys exist?\n",
        NOTICE,
        "A recipe is a YAML file; `a.b=c` words on the command line override single keys:\n",
        "```\nzerogap train recipe.yaml optimizer.max_steps=50 rollout.temperature=0.8\n```\n",
        "Unknown keys are refused, and so is a value that cannot be honoured. A run stores its complete recipe, "
        "with all defaults, in its folder. Descriptions that end in *changes no bit* are limits of memory and speed.\n",
    ]
    for section in sorted(sections, key=lambda name: name != "top level"):
        head = "## Top level" if section == "top level" else f"## `{section}`"
        parts.append(
            "\n".join([head, "", "| key | default | meaning |", "| --- | --- | --- |", *sections[section]]) + "\n"
        )
    return "\n".join(parts)


PAGES = {"recipe-keys.md": recipe_keys}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
        print(f"wrote {DOCS / name}")
