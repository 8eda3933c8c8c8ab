"""Elementwise ops on other instruction sets: each build in its own process, outputs compared by digest."""

import pytest

from tests.ops.elementwise_cases import all_digests
from tests.ops.other_builds import digests_of
from zerogap.ops.cpu import library

OURS = library.backend().removeprefix("cpu/")


@pytest.mark.skipif(OURS != "avx512bf16", reason="compares AVX2 with AVX512-BF16, which is not what this process runs")
def test_avx2_equals_avx512bf16() -> None:
    """No op of this family has an order of its own on either build: all bits are equal."""
    ours, theirs = all_digests(), digests_of("tests.ops.elementwise_cases", "avx2")
    assert {n for n in ours if ours[n] != theirs[n]} == set()


@pytest.mark.skipif(
    OURS == "portable", reason="compares the portable build with one that fuses, and this process runs it"
)
def test_portable_differs_only_where_products_are_fused() -> None:
    """The portable build rounds products before sums. What has no sum of products is the same; the rest shows that
    this comparison can fail."""
    ours, theirs = all_digests(), digests_of("tests.ops.elementwise_cases", "portable")
    same = {n for n in ours if ours[n] == theirs[n]}
    for dtype in ("float32", "bfloat16"):
        assert {f"{dtype}/{n}" for n in ("residual", "table", "embedding", "table grad")} <= same
    fused = ("master", "norm weight", "head weight", "normed", "dx", "q", "dgate")
    assert not same & {f"float32/{n}" for n in fused}
