"""Tasks on processes of their own: each is done once, results come as they end, and a process that dies costs its task.

Processes are spawned, so nothing of the parent's threads or state gets into them. They do not see Ctrl-C: the parent
ends them, whichever way it leaves `results`; a parent that is killed leaves them with a closed pipe, at which they end.
"""

import dataclasses
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

JOIN_SECONDS = 5.0  # that a worker is given to end by itself


@dataclasses.dataclass(frozen=True)
class Lost:
    """What is left of a task whose process died. `code`: its exit code, negative for a signal; `seconds`: of life since
    the task was given."""

    code: int | None
    seconds: float

    @property
    def words(self) -> str:
        """How it ended."""
        if self.code is not None and self.code < 0:
            return f"signal {-self.code}"
        return f"exit code {self.code}"


@dataclasses.dataclass(eq=False)
class _Worker:
    """A process, the parent's end of its pipe, and the task that it has (number, when given); mutated by `results`."""

    process: BaseProcess
    pipe: Connection
    task: int
    since: float


def results(
    serve: Callable[..., None], arguments: Sequence[Any], tasks: Sequence[Any], count: int
) -> Iterator[tuple[int, Any]]:
    """(index of a task, its result or `Lost`), in the order in which they end.

    Args:
        serve: a module's function, called in each process as serve(pipe, *arguments): it receives tasks, sends one
            result for each, and returns on EOFError.
        tasks, arguments: what can be pickled.
        count: most processes at a time.
    """
    context = multiprocessing.get_context("spawn")
    waiting = iter(range(len(tasks)))
    workers: list[_Worker] = []

    def start(task: int) -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
        # A mask is inherited, and what comes meanwhile is delivered to the parent afterwards.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        workers.append(_Worker(process, ours, task, time.perf_counter()))
        theirs.close()  # so that the process's death is an end of file here
        _give(workers[-1], tasks)

    try:
        for _ in range(max(1, min(count, len(tasks)))):
            for task in waiting:
                start(task)
                break
        while workers:
            ready = wait([w.pipe for w in workers])
            for worker in [w for w in workers if w.pipe in ready]:
                done = worker.task
                try:
                    result, alive = worker.pipe.recv(), True
                except (EOFError, ConnectionError):
                    worker.process.join()
                    result, alive = Lost(worker.process.exitcode, time.perf_counter() - worker.since), False
                following = next(waiting, None)
                if alive and following is not None:
                    worker.task, worker.since = following, time.perf_counter()
                    _give(worker, tasks)
                else:
                    worker.pipe.close()
                    workers.remove(worker)
                    if alive:
                        worker.process.join(JOIN_SECONDS)
                    if following is not None:
                        start(following)
                yield done, result
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join()
            worker.pipe.close()


def _give(worker: _Worker, tasks: Sequence[Any]) -> None:
    """Hand a task over; a process that is dead by now is noticed when its result is waited for."""
    try:
        worker.pipe.send(tasks[worker.task])
    except (BrokenPipeError, ConnectionError):
        return
