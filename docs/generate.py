"""Writes the generated pages of this folder: `python docs/generate.py`. A test compares them with what is committed.

`recipe-keys.md` comes from `zerogap.config`, `how-fast.md` from the result files of `benchmarks/`.
"""

import json
from pathlib import Path

from zerogap.config import iter_fields

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"
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


def shown_number(value: object) -> str:
    """Three significant digits of a float; anything else as it is."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def result_section(path: Path) -> str:
    """One result file of a benchmark: its circumstances, then its rows as they were written."""
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = content.pop("rows")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    facts = ", ".join(f"{key} {shown_number(value)}" for key, value in content.items() if key != "benchmark")
    head = "| " + " | ".join(name.replace("_", " ") for name in columns) + " |"
    body = [
        "| " + " | ".join(shown_number(row.get(key, "")).replace("|", "\\|") for key in columns) + " |" for row in rows
    ]
    return "\n".join([f"## `{content['benchmark']}`", "", facts, "", head, "| --- " * len(columns) + "|", *body]) + "\n"


def how_fast() -> str:
    """The page of benchmark results: the newest result file of each benchmark."""
    newest = {path.stem[: -len("-2000-01-01")]: path for path in sorted(RESULTS.glob("*.json"))}
    parts = [
        "# How fast is it?\n",
        NOTICE,
        "`make bench` measures it on your machine: each benchmark takes turns with its peer in one run on the same\n"
        "inputs, and quotes medians. Timings on shared machines are noisy; the ratios are what to read. These are the\n"
        "newest results in `benchmarks/results/`, as the benchmarks wrote them.\n",
        *(result_section(path) for path in newest.values()),
    ]
    return "\n".join(parts)


PAGES = {"recipe-keys.md": recipe_keys, "how-fast.md": how_fast}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
        print(f"wrote {DOCS / name}")
