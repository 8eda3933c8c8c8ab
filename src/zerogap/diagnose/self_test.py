"""The diagnoser's own test: every planted fault is diagnosed, and verdicts are scored against what was planted.

A fault counts as right only if subject *and* field are right. Precision is right verdicts among those that name a
subject and a field; recall is right verdicts among all faults, so that `unattributed` is a miss. Clean controls must
end without a cause; one that is blamed counts against precision too.
"""

import dataclasses
import importlib
import importlib.util
import json
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from zerogap.diagnose import workers as processes
from zerogap.diagnose.verdict import SUBJECTS, UNATTRIBUTED
from zerogap.errors import ConfigError
from zerogap.ops.cpu import library

CLEAN = "clean"
_BUGS = (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
CORPUS = Path(__file__).parent / "corpus"
_PARTS = ("operators", "definition", "state", "routing", "fp8", "paths", "controls")


@dataclasses.dataclass(frozen=True)
class FaultFile:
    """One file: `name` is its path below the folder without `.py`; `expected` holds `subject/field`, or `clean`."""

    name: str
    path: Path
    expected: tuple[str, ...]
    module: types.ModuleType

    @property
    def clean(self) -> bool:
        """True for a control."""
        return self.expected == (CLEAN,)


@dataclasses.dataclass(frozen=True)
class Case:
    """One diagnosis. `said`: `subject/field`, `clean` where nothing is blamed, `error` where the tool failed; `check`:
    the check that decided; `detail`: what it said more."""

    name: str
    expected: tuple[str, ...]
    said: str
    check: str
    detail: str
    seconds: float

    @property
    def clean(self) -> bool:
        """True for a control."""
        return self.expected == (CLEAN,)

    @property
    def right(self) -> bool:
        """The verdict is what was planted."""
        return self.said in self.expected

    @property
    def named(self) -> bool:
        """The verdict names a subject and a field."""
        return self.said not in (CLEAN, "error") and not self.said.endswith(UNATTRIBUTED)


@dataclasses.dataclass(frozen=True)
class Score:
    """The self-test's result.

    Attributes:
        cases: in the order of the files.
        elapsed: seconds by the clock; 0 where nobody measured.
        workers: processes that diagnosed; 0: this one.
    """

    cases: tuple[Case, ...]
    elapsed: float = 0.0
    workers: int = 0

    @property
    def faults(self) -> tuple[Case, ...]:
        """Cases that are no controls."""
        return tuple(c for c in self.cases if not c.clean)

    @property
    def controls(self) -> tuple[Case, ...]:
        """Clean cases."""
        return tuple(c for c in self.cases if c.clean)

    @property
    def num_faults(self) -> int:
        """Planted faults."""
        return len(self.faults)

    @property
    def precision(self) -> float:
        """Right verdicts among all that name subject and field, controls included; 1 if none does."""
        named = [c for c in self.cases if c.named]
        return sum(c.right for c in named) / len(named) if named else 1.0

    @property
    def recall(self) -> float:
        """Right verdicts among all faults; 1 if there are none."""
        return sum(c.right for c in self.faults) / self.num_faults if self.faults else 1.0

    @property
    def blamed(self) -> tuple[Case, ...]:
        """Controls that did not end as clean."""
        return tuple(c for c in self.controls if not c.right)

    @property
    def seconds(self) -> float:
        """Time of all cases together."""
        return sum(c.seconds for c in self.cases)

    def confusion(self) -> dict[str, dict[str, int]]:
        """Expected subject -> said subject -> cases; `wrong field` where only the field is not right."""
        table: dict[str, dict[str, int]] = {}
        for case in self.cases:
            subjects = [e.split("/")[0] for e in case.expected]
            said = case.said.split("/")[0]
            if not case.right and case.named and said in subjects:
                said = "wrong field"
            elif not case.right and case.said.endswith(UNATTRIBUTED) and said in subjects:
                said = "field unattributed"
            row = table.setdefault(subjects[0] if not case.right else next(s for s in subjects if s == said), {})
            row[said] = row.get(said, 0) + 1
        return table

    def to_json(self) -> dict[str, Any]:
        """`num_faults`, `precision`, `recall`, and all cases, JSON-ready."""
        return {
            "num_faults": self.num_faults,
            "num_controls": len(self.controls),
            "precision": self.precision,
            "recall": self.recall,
            "controls_blamed": [c.name for c in self.blamed],
            "seconds": self.seconds,
            "elapsed": self.elapsed,
            "workers": self.workers,
            "confusion": self.confusion(),
            "cases": [{**dataclasses.asdict(c), "right": c.right} for c in self.cases],
        }

    def summary(self) -> str:
        """The confusion table, what was not right, and the figures, as text."""
        lines = ["expected -> said (cases)"]
        for subject, row in sorted(self.confusion().items()):
            lines.append(f"  {subject:12s} " + ", ".join(f"{said} {n}" for said, n in sorted(row.items())))
        wrong = [c for c in self.cases if not c.right]
        lines += [f"not right ({len(wrong)}):"] if wrong else []
        lines += [f"  {c.name:36s} expected {' or '.join(c.expected)}, said {c.said} ({c.check})" for c in wrong]
        lines.append(
            f"{self.num_faults} faults: precision {self.precision:.3f}, recall {self.recall:.3f}; "
            f"{len(self.blamed)} of {len(self.controls)} clean controls blamed; {self._time()}"
        )
        return "\n".join(lines)

    def _time(self) -> str:
        if self.workers:
            processes = "1 worker" if self.workers == 1 else f"{self.workers} workers"
            return f"{self.elapsed:.0f} s with {processes}, {self.seconds:.0f} s of diagnoses"
        return f"{self.elapsed or self.seconds:.0f} s"


def write_json(score: Score, path: Path) -> None:
    """Write `Score.to_json`."""
    path.write_text(json.dumps(score.to_json(), indent=1) + "\n", encoding="utf-8")


def fault_files(folder: Path | None = None) -> list[FaultFile]:
    """All fault files of a folder, subfolders included, by name; None: the built-in corpus.

    A file without `EXPECTED` is a module that faults share, and is left out.

    Raises:
        ConfigError: no such folder, no fault in it, or a file whose EXPECTED or `sides` is not what corpus/__init__.py
            asks for.
    """
    root = CORPUS if folder is None else folder
    if not root.is_dir():
        raise ConfigError("faults", str(root), "give a folder of fault files")
    found = []
    paths = [p for part in _PARTS for p in (root / part).glob("*.py")] if folder is None else root.rglob("*.py")
    for path in sorted(paths):
        name = path.relative_to(root).with_suffix("").as_posix()
        module = _imported(path, name, builtin=folder is None)
        if hasattr(module, "EXPECTED"):
            found.append(FaultFile(name, path, _expected(module, path), module))
    if not found:
        raise ConfigError("faults", str(root), "no file there defines EXPECTED and sides(workshop)")
    return found


def _imported(path: Path, name: str, builtin: bool) -> types.ModuleType:
    """The module of a fault file; a foreign one is imported by its path, under a name of its own."""
    if builtin:
        return importlib.import_module(f"zerogap.diagnose.corpus.{name.replace('/', '.')}")
    known = f"zerogap_faults.{name.replace('/', '.')}"
    spec = importlib.util.spec_from_file_location(known, path)
    assert spec is not None and spec.loader is not None, f"{path} is a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[known] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _expected(module: types.ModuleType, path: Path) -> tuple[str, ...]:
    given = module.EXPECTED
    expected = (given,) if isinstance(given, str) else tuple(given)
    known = {f"{subject}/{field}" for subject, fields in SUBJECTS.items() for field in fields}
    for one in expected:
        if one not in known and expected != (CLEAN,):
            raise ConfigError(f"{path.name}: EXPECTED", one, "give subject/field of verdict.SUBJECTS, or clean")
    if not callable(getattr(module, "sides", None)):
        raise ConfigError(f"{path.name}: sides", None, "define sides(workshop), which returns two sides")
    return expected


def run(
    folder: Path | None = None,
    progress: Callable[[Case], None] | None = None,
    names: Sequence[str] = (),
    workers: int = 0,
) -> Score:
    """Diagnose every fault of a folder (None: the built-in corpus) and score the verdicts.

    Args:
        progress: called after each case.
        names: only these files, by name.
        workers: processes of one thread each that share the files; 0: all are diagnosed in this process. They are
            spawned, so a script that asks for any needs its `if __name__ == "__main__":`. One that dies makes its case
            an `error`.

    Raises:
        ConfigError: see `fault_files`; or a name that is not there.
    """
    began = time.perf_counter()
    files = fault_files(folder)
    if missing := set(names) - {f.name for f in files}:
        raise ConfigError("names", ", ".join(sorted(missing)), "there is no such fault file")
    chosen = [f for f in files if not names or f.name in names]
    cases: dict[int, Case] = {}
    for i, case in _diagnosed(chosen, folder, workers):
        cases[i] = case
        if progress is not None:
            progress(case)
    in_order = tuple(cases[i] for i in range(len(chosen)))
    return Score(in_order, time.perf_counter() - began, min(workers, len(chosen)))


def _diagnosed(files: Sequence[FaultFile], folder: Path | None, workers: int) -> Iterator[tuple[int, Case]]:
    """(index of a file, its case), as they end."""
    if workers == 0:
        from zerogap.diagnose.corpus.workshop import Workshop

        workshop = Workshop()
        yield from ((i, _case(file, workshop)) for i, file in enumerate(files))
        return
    for i, found in processes.results(_serve, (folder,), [f.name for f in files], workers):
        if isinstance(found, processes.Lost):
            words = f"the worker that diagnosed it ended ({found.words})"
            found = Case(files[i].name, files[i].expected, "error", "", words, found.seconds)
        yield i, found


def _serve(pipe: Connection, folder: Path | None) -> None:
    """A worker: file names in, cases out, until the pipe is closed."""
    from zerogap.diagnose.corpus.workshop import Workshop

    torch.set_num_threads(1)
    files, workshop = {f.name: f for f in fault_files(folder)}, Workshop()
    with library.use_threads(1):
        while True:
            try:
                name = pipe.recv()
            except EOFError:
                return
            pipe.send(_case(files[name], workshop))


def _case(file: FaultFile, workshop: Any) -> Case:
    """One diagnosis; a tool that fails has not named the fault."""
    from zerogap.diagnose.run import diagnose

    began = time.perf_counter()
    try:
        verdict = diagnose(*file.module.sides(workshop)).verdict
    except _BUGS as error:  # whosever bug it is, the tool's or the file's, the other faults are still scored
        said, check, detail = "error", "", f"{type(error).__name__}: {error}"
    else:
        check = verdict.check
        said = CLEAN if verdict.cause is None else verdict.cause.name
        detail = "" if verdict.cause is None else verdict.cause.detail
    return Case(file.name, file.expected, said, check, detail, time.perf_counter() - began)
