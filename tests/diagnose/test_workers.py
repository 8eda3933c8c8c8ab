"""The self-test's worker processes: every task once, in the order of the files, and a dead process costs one case."""

import os
from pathlib import Path

import pytest

from tests.diagnose.serving import serve
from zerogap.diagnose import workers
from zerogap.diagnose.self_test import run

FAULT = '"""Doc."""\nimport os\nimport signal\nEXPECTED = "norm/order"\ndef sides(workshop):\n    {}\n'
SAYS = "raise ValueError(str((os.getpid(), __import__('torch').get_num_threads())))"


@pytest.mark.parametrize("count", [1, 2, 9])
def test_every_task_is_done_once(count):
    found = dict(workers.results(serve, (3,), [0, 1, 2, 3, 4], count))
    assert sorted(found) == [0, 1, 2, 3, 4]
    assert [found[i][1] for i in range(5)] == [0, 3, 6, 9, 12]
    assert 1 <= len({found[i][0] for i in range(5)}) <= count


def test_no_task_starts_no_process():
    assert not list(workers.results(serve, (1,), [], 2))


@pytest.mark.parametrize(("dies", "words"), [(-9, "signal 9"), (-3, "exit code 3")])
def test_a_dead_process_costs_its_task_only(dies, words):
    found = dict(workers.results(serve, (2,), [1, dies, 5, dies, 7], 2))
    assert sorted(found) == [0, 1, 2, 3, 4]
    assert [found[i][1] for i in (0, 2, 4)] == [2, 10, 14]
    assert [found[i].words for i in (1, 3)] == [words, words]


def test_leaving_early_ends_the_processes():
    running = workers.results(serve, (1,), [1, 2, 3, 4], 2)
    _, (pid, _) = next(running)
    running.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_self_test_on_workers(tmp_path: Path):
    for name in ("a", "b", "d"):
        (tmp_path / f"{name}.py").write_text(FAULT.format(SAYS))
    (tmp_path / "c.py").write_text(FAULT.format("os.kill(os.getpid(), signal.SIGKILL)"))
    seen = []
    score = run(tmp_path, progress=seen.append, workers=2)
    assert [c.name for c in score.cases] == ["a", "b", "c", "d"] and len(seen) == 4
    assert [c.said for c in score.cases] == ["error"] * 4
    assert "ended (signal 9)" in score.cases[2].detail
    told = [eval(score.cases[i].detail.removeprefix("ValueError: ")) for i in (0, 1, 3)]
    assert all(pid != os.getpid() and threads == 1 for pid, threads in told)
    assert score.workers == 2 and "2 workers" in score.summary() and score.to_json()["elapsed"] > 0
