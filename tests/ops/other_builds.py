"""Other builds of the native library than the one that this process loaded, each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import zerogap
from zerogap.ops.cpu import library

ROOT = Path(__file__).parents[2]


def skip_unless_supported(isa: str) -> None:
    """Skip where this processor does not run the build `isa`."""
    if not library.load("portable").zg_supports(isa.encode()):
        pytest.skip(f"this processor does not run {isa}")


def rerun(file: str, isa: str, words: str) -> None:
    """Assert that the tests of `file` that `-k words` selects pass on the build `isa`; skip where they just did."""
    skip_unless_supported(isa)
    if library.backend() == f"cpu/{isa}":
        pytest.skip(f"the tests above ran on {isa}")
    done = _run(isa, "pytest", "-q", "-x", "-p", "no:cacheprovider", file, "-k", words)
    assert done.returncode == 0, f"{isa}:\n{done.stdout[-3000:]}{done.stderr[-1000:]}"


def digests_of(module: str, isa: str) -> dict[str, str]:
    """What `python -m module` prints on the build `isa`: JSON with its `backend` and the `digests` of its outputs."""
    done = _run(isa, module)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["backend"] == f"cpu/{isa}"
    return result["digests"]


def _run(isa: str, *words: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(zerogap.__file__).parents[1])
    environment = os.environ | {"ZEROGAP_ISA": isa, "PYTHONPATH": os.pathsep.join([source, str(ROOT)])}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
