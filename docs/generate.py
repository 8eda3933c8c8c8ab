"""Writes the generated pages of this folder: `python docs/generate.py`. A test compares them with what is committed.

`recipe-keys.md` comes from `zerogap.config`, `metrics.md` from `zerogap.rl.dictionary`, `how-fast.md` from the result
files of `benchmarks/`.
"""

import json
from pathlib import Path

from zerogap.config import iter_fields
from zerogap.rl import dictionary

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


def named(text: str) -> str:
    """`name: remark` as code and a remark in brackets; an empty text stays empty."""
    name, _, remark = text.partition(": ")
    return f"`{name}`" * bool(name) + f" ({remark})" * bool(remark)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table, with bars in cells escaped."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


METRICS_INTRODUCTION = """\
Primary names are TRL's. Other frameworks' names are those of TRL 1.16.0 and verl 0.9.1, and of NeMo RL, prime-rl and
slime as they stood in mid-2026 (they change theirs between releases). A name alone means the same number, a remark in
brackets how it differs.

In the formulas d = log p_trainer - log p_rollout of a drawn token, and rho = e^d. *Tokens* are completion tokens that
take part in the loss, *completions* those that have one. Figures of the gap count rejected tokens, too: what was wrong
does not look better because it was thrown away. Every mean is over all tokens of the step, summed exactly and rounded
once, in FP64; others often average the means of micro-batches, ranks or completions, which weighs short ones more.

With one contract on both sides the gap is exactly 0, every ratio exactly 1. Others report a `sampling/k3_kl` of 5e-4 to
2e-3 for healthy BF16 runs and 3e-3 to 6e-3 for FP8, and trouble above 1e-2.
"""

CORRECTIONS_INTRODUCTION = """\
`algorithm.correction.kind` sets the weight of each token's surrogate (never differentiated; KL and entropy terms are
not weighted). A *rejected* token leaves the loss and its denominators, as with verl's `rollout_rs`; one of weight 0
stays in the denominators, as with verl's `rollout_is` bounds and TRL's masks. So `token_mis` and `icepop` with equal
bounds have, under `loss_type: dapo`, gradients of one direction and of different length.

Bounds are on rho; verl's k1 is -d, so its `rollout_rs` bounds are on 1 / rho. `algorithm.correction.normalise` divides
by the mean over what is left after rejection, verl's by the mean before it. The veto of whole completions has no
counterpart in verl 0.9.1 or TRL 1.16.0.
"""


def metrics() -> str:
    """The metric dictionary."""
    parts = ["# What does each metric mean?\n", NOTICE, METRICS_INTRODUCTION]
    for title, entries in dictionary.SECTIONS.items():
        rows = [[f"`{m.name}`", m.formula, *(named(m.peers.get(p, "")) for p in dictionary.PEERS)] for m in entries]
        parts += [f"## {title}\n", table(["zerogap", "meaning", *dictionary.PEERS], rows)]
    elsewhere = [
        [peer, ", ".join(f"`{n}`" for n in names.split(", ")), text] for peer, names, text in dictionary.ELSEWHERE
    ]
    kinds = [[f"`{kind}`", *map(named, peers)] for kind, peers in dictionary.KINDS.items()]
    parts += [
        "## Numbers that zerogap does not log\n",
        table(["framework", "name", "meaning"], elsewhere),
        "## Which correction is which?\n",
        CORRECTIONS_INTRODUCTION,
        table(["kind", "verl", "TRL", "NeMo RL"], kinds),
    ]
    return "\n".join(parts)


def shown_number(value: object) -> str:
    """Three significant digits of a float; anything else as it is."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def flat(row: dict[str, object]) -> dict[str, object]:
    """A row with a column for each entry of a mapping; series (lists of mappings) stay in the file."""
    found: dict[str, object] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            found |= {f"{key} {name}": entry for name, entry in value.items()}
        elif not is_series(value):
            found[key] = value
    return found


def is_series(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(entry, dict) for entry in value)


def result_section(path: Path) -> str:
    """One result file of a benchmark: its circumstances, then its rows; tables of figures and series beneath them stay
    in the file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = [flat(row) for row in content.pop("rows")]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    plain = {
        key: value
        for key, value in content.items()
        if key != "benchmark" and not isinstance(value, dict) and not is_series(value)
    }
    facts = ", ".join(f"{key} {shown_number(value)}" for key, value in plain.items())
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


PAGES = {"recipe-keys.md": recipe_keys, "metrics.md": metrics, "how-fast.md": how_fast}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
        print(f"wrote {DOCS / name}")
