"""The native library: loading, the thread team, recorded programs."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from tests.bits import assert_same_bits, hard_values, unit_values
from zerogap.errors import ConfigError
from zerogap.ops.cpu import gemm, library


def weight(n: int, k: int) -> torch.Tensor:
    panels = gemm.allocate_panels(n, k, torch.bfloat16)
    gemm.pack(hard_values((n, k), torch.bfloat16, seed=n), panels)
    return panels


def two_products(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """[M, 64] -> [M, 96] -> [M, 70], the intermediate dropped on the way."""
    (y,) = gemm.product([gemm.Segment(x, first, 96)], "concatenate")
    (z,) = gemm.product([gemm.Segment(y, second, 70)], "concatenate")
    return z


# ------------------------------------------------------------------------------------------------ loading


def test_every_op_mirrors_its_struct() -> None:
    for operation in vars(gemm).values():
        if isinstance(operation, library.Operation):
            assert operation.number >= 0  # asserts equal sizes


def test_backend_and_build() -> None:
    assert library.backend() == f"cpu/{os.environ.get('ZEROGAP_ISA') or library.best_isa()}"
    assert len(library.build_id()) == 12 and {library.load(isa).zg_build_id() for isa in library.ISAS} == {
        library.build_id().encode()
    }


def test_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="ZEROGAP_ISA = 'sse9': choose one of avx512bf16, avx2, portable"):
        library.load("sse9")


@pytest.mark.parametrize("value", ["0", "two", "-1"])
def test_bad_thread_count_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ZEROGAP_NUM_THREADS", value)
    with pytest.raises(ConfigError, match="ZEROGAP_NUM_THREADS"):
        library.num_threads()


def test_pointer_takes_contiguous_tensors_only() -> None:
    with pytest.raises(AssertionError, match="contiguous"):
        library.pointer(torch.zeros(4, 4).T)


# ------------------------------------------------------------------------------------------------ thread team


def test_alternating_thread_counts() -> None:
    """1 to 4 threads in changing order, idle workers included, thousands of runs: the same bits, no hang."""
    x, first, second = hard_values((40, 64), torch.bfloat16, seed=1), weight(96, 64), weight(70, 96)
    with library.use_threads(1):
        expected = two_products(x, first, second)
    for i in range(300):
        with library.use_threads((4, 1, 2, 3, 2, 1, 3)[i % 7]):
            assert_same_bits(two_products(x, first, second), expected, f"run {i}")


def test_many_barriers_with_more_threads_than_cores() -> None:
    """A long recorded list, run with four threads: every command ends before the next one starts."""
    x, panels = unit_values((32, 256), torch.bfloat16, seed=1), gemm.allocate_panels(256, 256, torch.bfloat16)
    gemm.pack(unit_values((256, 256), seed=2) / 16, panels)  # values neither die out nor overflow

    def chain(value: torch.Tensor) -> torch.Tensor:
        for _ in range(200):
            (value,) = gemm.product([gemm.Segment(value, panels, 256)], "concatenate")
        return value

    with library.use_threads(1):
        expected = chain(x)
    assert expected.isfinite().all() and expected.unique().numel() > 1000
    with library.record(rows=(x,)) as program:
        out = chain(x)
    for threads in (4, 2, 4, 1, 2, 3, 2, 2):
        out.zero_()
        with library.use_threads(threads):
            program.run(rows=32)
        assert_same_bits(out, expected, f"{threads} threads")


def test_concurrent_callers() -> None:
    """Python threads that submit at the same time take turns."""
    first, second = weight(96, 64), weight(70, 96)
    inputs = [hard_values((20 + i, 64), torch.bfloat16, seed=i) for i in range(3)]
    expected = [two_products(x, first, second) for x in inputs]
    failures = []

    def work(i: int) -> None:
        try:
            with library.use_threads(1 + i):
                for _ in range(100):
                    assert_same_bits(two_products(inputs[i], first, second), expected[i])
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


FORK = """
import os, sys, torch
from zerogap.ops.cpu import gemm, library
x, w = torch.ones(50, 64), gemm.allocate_panels(96, 64, torch.float32)
w.fill_(1.0)
def run():
    with library.use_threads(3):
        return bool((gemm.product([gemm.Segment(x, w, 96)], "concatenate")[0] == 64).all())
assert run()
for generation in range(2):
    child = os.fork()
    if not child:
        sys.exit(0 if run() and run() else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    assert run()
print("forked")
"""


def test_fork() -> None:
    """A forked child gets workers of its own, and the parent keeps its."""
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "forked\n", done.stderr[-2000:]


def test_subnormals_are_flushed_and_the_mode_is_restored() -> None:
    """2^-127 counts as zero inside a kernel (on every thread) and as itself outside."""
    tiny = torch.full((64, 64), 2.0**-127)
    panels = gemm.allocate_panels(64, 64, torch.float32)
    panels.fill_(1.0)
    assert not (gemm.product([gemm.Segment(tiny, panels, 64)], "concatenate")[0] != 0).any()
    assert (tiny + tiny == 2.0**-126).all()


# ------------------------------------------------------------------------------------------------ recorded programs


@pytest.mark.parametrize("threads", [1, 2])
def test_replay_equals_eager(threads: int) -> None:
    """A program recorded at capacity 40, run for any number of rows, writes the bits of an eager call."""
    x, first, second = torch.zeros(40, 64, dtype=torch.bfloat16), weight(96, 64), weight(70, 96)
    with library.record(rows=(x,)) as program:
        assert library.recording()
        out = two_products(x, first, second)
    assert not library.recording() and out.shape == (40, 70)
    for rows in (1, 7, 40, 0, 13):
        value = hard_values((40, 64), torch.bfloat16, seed=rows)
        x.copy_(value)
        out.fill_(7.0)
        with library.use_threads(threads):
            program.run(rows=rows)
        assert_same_bits(out[:rows], two_products(value[:rows].contiguous(), first, second), f"{rows} rows")
        assert (out[rows:] == 7.0).all(), "rows beyond the count are left alone"


def test_recorded_buffers_are_recycled() -> None:
    """A buffer that the recording code dropped serves again; one that it holds does not."""
    x, panels = torch.zeros(4, 64, dtype=torch.bfloat16), weight(64, 64)
    with library.record(rows=(x,)):
        held = gemm.product([gemm.Segment(x, panels, 64)], "concatenate")[0]
        dropped = gemm.product([gemm.Segment(x, panels, 64)], "concatenate")[0].data_ptr()
        again = gemm.product([gemm.Segment(x, panels, 64)], "concatenate")[0]
    assert held.data_ptr() != dropped and again.data_ptr() == dropped


def test_two_symbols() -> None:
    """Outputs follow the rows of their own input."""
    x, y = torch.ones(8, 64, dtype=torch.bfloat16), torch.ones(5, 64, dtype=torch.bfloat16)
    panels = weight(64, 64)
    with library.record(tokens=(x,), outputs=(y,)) as program:
        a = gemm.product([gemm.Segment(x, panels, 64)], "concatenate")[0]
        b = gemm.product([gemm.Segment(y, panels, 64)], "concatenate")[0]
    a.fill_(7.0), b.fill_(7.0)
    program.run(tokens=2, outputs=4)
    assert (a[2:] == 7.0).all() and (b[4:] == 7.0).all() and (a[:2] != 7.0).any() and (b[:4] != 7.0).any()


def test_rows_beyond_the_capacity_are_a_bug() -> None:
    x, panels = torch.zeros(4, 64, dtype=torch.bfloat16), weight(64, 64)
    with library.record(rows=(x,)) as program:
        gemm.product([gemm.Segment(x, panels, 64)], "concatenate")
    with pytest.raises(AssertionError, match="exceed the capacity"):
        program.run(rows=5)
    with pytest.raises(AssertionError, match="got"):
        program.run(tokens=1)


def test_gradients_are_not_recorded() -> None:
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    starts, acc = torch.tensor([0, 4], dtype=torch.int32), torch.zeros(64, 64)
    with library.record(rows=(x,)), pytest.raises(AssertionError, match="not recorded"):
        gemm.weight_grad(x, x, starts, acc)
