"""The documentation describes what exists: paths, links, targets, commands, settings and names are looked up."""

import ast
import importlib
import importlib.util
import itertools
import re
from pathlib import Path

import pytest
import typer.main
import yaml

import zerogap
from tests.models_on_disk import small_tokenizer, tiny_spec, write_gguf
from zerogap import cli
from zerogap.config import iter_fields
from zerogap.diagnose.meanings import FIELD_MEANINGS, FRAMEWORK_MEANINGS, OPERATOR_MEANINGS
from zerogap.diagnose.verdict import SUBJECTS, UNATTRIBUTED
from zerogap.rl import dictionary
from zerogap.rl.data import Row
from zerogap.rl.reward import RewardFunctions
from zerogap.verify.faults import FAULTS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "skills").glob("*/*.md")])
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
# Folders that a page names because they are planned, or made by a command.
NOT_HERE = {
    "parallel/",
    "cluster/",
    "serve/",
    ".venv",
    ".venv/",
    "build/",
    "benchmarks/results/",
    "report.html",
    "report.json",
}
# Names of metrics look like paths.
METRICS = {name for m in itertools.chain(*dictionary.SECTIONS.values()) for name in (m.name, *m.peers.values())}
METRICS |= {name for _, names, _ in dictionary.ELSEWHERE for name in names.split(", ")}
NOT_HERE |= {name.partition(": ")[0] for name in METRICS}
# And so do causes of a diagnosis.
NOT_HERE |= {f"{s}/{field}" for s in (*SUBJECTS, UNATTRIBUTED) for field in (*SUBJECTS.get(s, ()), UNATTRIBUTED)}


def fences(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def spans(text):
    """Inline code of a page, without the fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def exists(path):
    """True for a path from the root, from the package or from its native kernels."""
    return any((base / path).exists() for base in (ROOT, ROOT / "src", ROOT / "src" / "zerogap", ROOT / "docs"))


def anchor(heading):
    """GitHub's id of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def missing_paths(text):
    looks = [s for s in spans(text) if re.fullmatch(r"[\w.\-]+(/[\w.\-]+)+/?|[\w\-]+/|[\w\-]+\.(py|md|yaml|html)", s)]
    prose = re.findall(r"(?<![\w/(`])((?:docs|tests|src|benchmarks|recipes|examples)/[\w./\-]*[\w/])", text)
    return [p for p in {*looks, *prose} - NOT_HERE if not exists(p) and not p.startswith(("cpu/", "path/", "runs/"))]


def missing_names(text):
    """Dotted names of the package (`zerogap.x.y`, `zg.X`) and `Class.method` of its public classes."""
    lost = []
    for name in re.findall(r"`(?:zerogap|zg)((?:\.\w+)+)[^`]*`", text):
        value = zerogap
        for part in name.strip(".").split("."):
            if not hasattr(value, part) and hasattr(value, "__path__"):
                spec = importlib.util.find_spec(f"{value.__name__}.{part}")
                if spec:
                    importlib.import_module(spec.name)
            if not hasattr(value, part):
                lost.append(name)
                break
            value = getattr(value, part)
    return lost


def command_line():
    return typer.main.get_command(cli.app)


def wrong_commands(text):
    """`zerogap NAME ... --option` lines whose command or option the program does not have."""
    group, wrong = command_line(), []
    lines = [line for block in fences(text, "") for line in block.splitlines()] + spans(text)
    for line in lines:
        words = line.split("#")[0].split()
        if len(words) < 2 or words[0] != "zerogap":
            continue
        command = group.commands.get(words[1])
        if command is None:
            wrong.append(line)
            continue
        options = {o for p in command.params if p.param_type_name == "option" for o in p.opts} | {"--help"}
        wrong += [line for word in words if word.startswith("--") and word.strip("[]") not in options]
    return wrong


def missing_targets(text):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    lines = [line for block in fences(text, "") for line in block.splitlines()] + spans(text)
    return [line for line in lines if (found := re.match(r"make ([a-z]+)", line)) and found[1] not in targets]


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[page]):
        path, _, part = target.partition("#")
        linked = (ROOT / page).parent / path if path else ROOT / page
        assert linked.exists(), f"{page} links to {target}"
        if part:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert part in map(anchor, headings), f"{page} links to {target}"


@pytest.mark.parametrize("page", TEXTS)
def test_paths_exist(page):
    assert missing_paths(TEXTS[page]) == []


@pytest.mark.parametrize("page", TEXTS)
def test_names_exist(page):
    assert missing_names(TEXTS[page]) == []


@pytest.mark.parametrize("page", TEXTS)
def test_commands_and_their_options_exist(page):
    assert wrong_commands(TEXTS[page]) == []
    assert missing_targets(TEXTS[page]) == []


def test_every_command_is_in_the_readme():
    named = set(re.findall(r"^\| `zerogap (\w+)", TEXTS["README.md"], flags=re.MULTILINE))
    assert named == set(command_line().commands)


@pytest.mark.parametrize("page", TEXTS)
def test_options_in_tables_exist(page):
    known = {o for c in command_line().commands.values() for p in c.params for o in p.opts}
    named = {option for span in spans(TEXTS[page]) for option in re.findall(r"^(--[\w-]+)", span)}
    assert named <= known | {"--help", "--check"}


@pytest.mark.parametrize("page", TEXTS)
def test_recipes_use_keys_that_exist(page):
    known = {key for key, _, _ in iter_fields()}
    sections = {key.partition(".")[0] for key in known if "." in key}

    def walk(tree, prefix=""):
        for key, value in tree.items():
            if isinstance(value, dict) and prefix + key not in known:
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield prefix + key

    written = {key for block in fences(TEXTS[page], "yaml") for key in walk(yaml.safe_load(block))}
    written |= {s for s in spans(TEXTS[page]) if re.fullmatch(r"\w+\.\w+", s) and s.partition(".")[0] in sections}
    assert written <= known | {key.rpartition(".")[0] for key in known}


@pytest.mark.parametrize("page", TEXTS)
def test_python_blocks_are_python_and_use_public_names(page):
    for block in fences(TEXTS[page], "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "zg":
                assert hasattr(zerogap, node.attr), f"{page} uses zg.{node.attr}"


def test_the_reward_of_the_page_works_as_it_says():
    """The page's function, called as a run calls it."""
    (block,) = fences(TEXTS["docs/write-a-reward.md"], "python")
    scope = {}
    exec(compile(block, "write-a-reward.md", "exec"), scope)
    rewards = RewardFunctions(("exact_answer",), (scope["exact_answer"],), (1.0,))
    rows = [Row(name, ({"role": "user", "content": "6 x 7?"},), {"answer": 42}) for name in ("row 0", "row 1")]
    rewards.check(["answer"])
    assert rewards.score(rows, [" 42\n", "41"], [[1], [2]], step=1).totals == [1.0, 0.0]


def test_generated_pages_are_current():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for name, page in generate.PAGES.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == page(), f"run `python docs/generate.py`: {name}"


def test_contract_version_of_the_page_is_the_code_s():
    assert f"version {zerogap.numerics.CONTRACT_VERSION}" in TEXTS["docs/numerics.md"].splitlines()[0]
    assert f"Contract version {zerogap.numerics.CONTRACT_VERSION}" in TEXTS["CHANGELOG.md"]


@pytest.mark.parametrize(
    ("find", "text"),
    [
        (missing_paths, "see `ops/nowhere.py`"),
        (missing_paths, "see docs/nowhere.md for more"),
        (missing_names, "call `zerogap.numerics.nothing`"),
        (wrong_commands, "run `zerogap fly`"),
        (wrong_commands, "```\nzerogap verify MODEL --fast\n```\n"),
        (missing_targets, "run `make coffee`"),
    ],
)
def test_each_look_up_can_fail(find, text):
    assert find(text)


def test_the_readme_s_python_runs(tmp_path):
    """The ten lines, on a tiny model with a tokenizer."""
    (block,) = fences(TEXTS["README.md"], "python")
    path = write_gguf(tmp_path / "tiny.gguf", tiny_spec("llama"), tokenizer=small_tokenizer())
    scope = {}
    exec(compile(block.replace("path/to/model", str(path)), "README.md", "exec"), scope)
    assert len(scope["samples"]) == 8
    assert scope["result"].compared_tokens == sum(len(s.completion_ids) for s in scope["samples"]) > 0
    assert scope["engine"].version == scope["trainer"].decoder.version == 1


def test_every_fault_is_on_the_page_of_verify():
    """With the check that it belongs to, in the table of `docs/verify-my-model.md`."""
    rows = re.findall(r"^\| `([\w-]+)` \| (\d+) \|", TEXTS["docs/verify-my-model.md"], flags=re.MULTILINE)
    assert {name: int(check) for name, check in rows} == {name: fault.check for name, fault in FAULTS.items()}


def test_every_cause_is_on_the_page_of_diagnose():
    """In the words that the command prints, and with nothing else in its tables."""
    rows = re.findall(r"^\| `([\w/]+)` \| (.*) \| (.*) \|$", TEXTS["docs/diagnose.md"], flags=re.MULTILINE)
    told = {name: (text, rest) for name, text, rest in rows}
    for subject, fields in SUBJECTS.items():
        if subject in OPERATOR_MEANINGS:
            named = ", ".join(f"`{field}`" for field in fields)
            assert told[subject] == (OPERATOR_MEANINGS[subject], named)
            assert set(fields) <= set(FIELD_MEANINGS)
        else:
            assert {f"{subject}/{field}" for field in fields} <= set(FRAMEWORK_MEANINGS)
    for name, meant in [*FRAMEWORK_MEANINGS.items(), *FIELD_MEANINGS.items()]:
        assert told[name] == (meant.text, meant.mend), name
    causes = {name for name in told if "/" in name}
    assert (
        causes
        == set(FRAMEWORK_MEANINGS)
        == {f"{s}/{f}" for s, fs in SUBJECTS.items() if s not in OPERATOR_MEANINGS for f in fs}
    )
