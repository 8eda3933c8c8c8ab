"""Elementwise ops on other instruction sets: each build in its own process, outputs compared by digest."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import zerogap
from tests.ops.elementwise_cases import all_digests
from zerogap.ops.cpu import library

ROOT = Path(__file__).parents[2]
OURS = library.backend().removeprefix("cpu/")


def digests_of(isa: str) -> dict[str, str]:
    """Digests of all outputs of `elementwise_cases` on the build `isa`, in a process of its own."""
    source = str(Path(zerogap.__file__).parents[1])
    environment = os.environ | {"ZEROGAP_ISA": isa, "PYTHONPATH": os.pathsep.join([source, str(ROOT)])}
    command = [sys.executable, "-m", "tests.ops.elementwise_cases"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["backend"] == f"cpu/{isa}"
    return result["digests"]


@pytest.mark.skipif(OURS != "avx512bf16", reason="compares AVX2 with AVX512-BF16, which is not what this process runs")
def test_avx2_equals_avx512bf16() -> None:
    """No op of this family has an order of its own on either build: all bits are equal."""
    ours, theirs = all_digests(), digests_of("avx2")
    assert {n for n in ours if ours[n] != theirs[n]} == set()


@pytest.mark.skipif(
    OURS == "portable", reason="compares the portable build with one that fuses, and this process runs it"
)
def test_portable_differs_only_where_products_are_fused() -> None:
    """The portable build rounds products before sums. What has no sum of products is the same; the rest shows that
    this comparison can fail."""
    ours, theirs = all_digests(), digests_of("portable")
    same = {n for n in ours if ours[n] == theirs[n]}
    for dtype in ("float32", "bfloat16"):
        assert {f"{dtype}/{n}" for n in ("residual", "table", "embedding", "table grad")} <= same
    fused = ("master", "norm weight", "head weight", "normed", "dx", "q", "dgate")
    assert not same & {f"float32/{n}" for n in fused}
