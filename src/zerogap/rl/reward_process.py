"""Reward functions in processes of their own: called side by side, each call bounded in time, a fault named.

A function that hangs, ends its process or takes all memory of it costs the completions of one call. Its process is then
ended, with all that it had started, and the next call gets a new one. Nothing of a function's state is in the run's
process, and nothing that it does to its arguments is seen here. What it prints is captured.
"""

import dataclasses
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import IO, Any

from zerogap.errors import ConfigError
from zerogap.rl.reward_loading import FunctionSpec
from zerogap.rl.reward_values import Outcome, Parameter, RewardError, accepted
from zerogap.rl.reward_worker import HEAD, Refusal, Words, as_message

BEGIN = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from zerogap.rl.reward_worker import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""
LOAD_SECONDS = 600.0  # to import the function's module; a model that it loads there takes its time
SHOWN_OUTPUT = 2**16  # bytes of what one call printed that are kept: the first half and the last half
CHUNK = 2**16
MOST_SLOW = 3  # calls for single completions of one batch that may take too long; the rest then have no score


class _Worker:
    """A running process. Mutated by its calls; ended when nobody refers to it any more."""

    def __init__(self, spec: FunctionSpec) -> None:
        requests, self._requests = os.pipe()
        self.answers, answers = os.pipe()
        self.printed: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        words = ["-c", BEGIN, json.dumps(sys.path), str(requests), str(answers)]
        self.process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=self.printed,
            stderr=self.printed,
            pass_fds=(requests, answers),
            start_new_session=True,  # Ctrl-C in the terminal is the run's alone
        )
        os.close(requests)
        os.close(answers)
        self.buffer = bytearray()
        self.end = weakref.finalize(self, _end, self.process, (self._requests, self.answers), self.printed)
        self.ask(spec)

    def ask(self, message: Any) -> None:
        """Send a message. A process that has ended is noticed when its answer is read."""
        content = memoryview(as_message(message))
        try:
            while content:
                content = content[os.write(self._requests, content) :]
        except BrokenPipeError:
            return

    def read(self) -> bool:
        """Take what has come; False if nothing comes any more."""
        chunk = os.read(self.answers, CHUNK)
        self.buffer += chunk
        return bool(chunk)

    def message(self) -> tuple[Any] | None:
        """The next whole message, as (message,), or None."""
        if len(self.buffer) < HEAD.size:
            return None
        length = HEAD.size + HEAD.unpack(self.buffer[: HEAD.size])[0]
        if len(self.buffer) < length:
            return None
        content = bytes(self.buffer[HEAD.size : length])
        del self.buffer[:length]
        return (pickle.loads(content),)

    def ended(self) -> int | None:
        """Exit code of a process that answers no more; None if it goes on without answering."""
        try:
            return self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return None

    def output(self) -> str:
        """What has been printed since the last look."""
        size = self.printed.seek(0, os.SEEK_END)  # the position is shared with the process, which goes on from there
        self.printed.seek(0)
        if size <= SHOWN_OUTPUT:
            content = self.printed.read()
        else:
            content = self.printed.read(SHOWN_OUTPUT // 2) + b"\n...\n"
            self.printed.seek(size - SHOWN_OUTPUT // 2)
            content += self.printed.read()
        self.printed.seek(0)
        self.printed.truncate()
        return content.decode("utf-8", "replace")


def _end(process: subprocess.Popen[bytes], pipes: Sequence[int], printed: IO[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in pipes:
        os.close(pipe)
    printed.close()


class IsolatedFunction:
    """A reward function in a process of its own. Mutated by `call_all`.

    Attributes:
        spec: what it is.
        limit: seconds that a call may take.
        parameters: its arguments.
        row_by_row: completions are scored one by one.
    """

    def __init__(self, spec: FunctionSpec, limit: float) -> None:
        """
        Raises:
            ConfigError: the function cannot be loaded.
        """
        self.spec, self.limit = spec, limit
        self._worker: _Worker | None = None
        self.parameters: tuple[Parameter, ...] = ()
        self.row_by_row = False
        self.start()

    def start(self) -> _Worker:
        """Its process, begun anew if it has ended."""
        if self._worker is not None and self._worker.process.poll() is None:
            return self._worker
        self._worker = worker = _Worker(self.spec)
        deadline = time.monotonic() + LOAD_SECONDS
        while (loaded := worker.message()) is None:
            left = deadline - time.monotonic()
            if left <= 0 or not _wait_for([worker.answers], left):
                self.close()
                mend = f"loading it took more than {LOAD_SECONDS:g} s"
                raise ConfigError("reward.functions", self.spec.path, mend)
            if not worker.read():
                output = worker.output().strip().splitlines()
                self.close()
                mend = f"its process ended while it was loaded{': ' + output[-1] if output else ''}"
                raise ConfigError("reward.functions", self.spec.path, mend)
        (answer,) = loaded
        if isinstance(answer, Refusal):
            self.close()
            raise ConfigError(*answer.words)
        self.parameters, self.row_by_row = answer
        return worker

    def close(self) -> str:
        """End its process; returns what it had printed."""
        worker, self._worker = self._worker, None
        if worker is None:
            return ""
        if worker.process.poll() is None:
            os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.wait()
        output = worker.output()
        worker.end()
        return output


class _Job:
    """The calls of one function for one batch. Mutated as they are done."""

    def __init__(self, function: IsolatedFunction, arguments: Mapping[str, Any], rows: Sequence[str]) -> None:
        self.function, self.rows = function, list(rows)
        self.arguments = accepted(arguments, function.parameters)
        self.step = 1 if function.row_by_row else len(rows)
        self.outcomes: list[Outcome] = []
        self.worker: _Worker | None = None
        self.deadline = 0.0
        self._slow = 0

    @property
    def done(self) -> bool:
        """Every row has been scored, or has failed to be."""
        return len(self.outcomes) * self.step >= len(self.rows)

    def _now(self) -> slice:
        begin = len(self.outcomes) * self.step
        return slice(begin, begin + self.step)

    def ask(self) -> None:
        """Send the next request."""
        rows = self._now()
        chosen = {k: v[rows] if isinstance(v, list) else v for k, v in self.arguments.items()}
        self.worker = self.function.start()
        self.worker.ask((chosen, self.rows[rows]))
        self.deadline = time.monotonic() + self.function.limit

    def fail(self, timed_out: bool) -> None:
        """The process was too slow, or ended: what it was to score has no score, and it begins anew."""
        assert self.worker is not None, "a request was sent"
        value, mend = f"over {self.function.limit:g} s", "it took too long; mend the function, or raise reward.timeout"
        if not timed_out:
            code = self.worker.ended()
            timed_out = code == -signal.SIGPROF and self.function.spec.fails_with is not None
            value, mend = f"exit code {code}", "its process ended; mend the function"
        output = self.function.close()
        self._note((f"reward function {self.function.spec.name}", value, mend), output, timed_out=timed_out)
        self._slow += timed_out
        if self._slow == MOST_SLOW and self.function.spec.fails_with is None and not self.done:
            left = self.rows[self._now().start :]
            self.outcomes += [Outcome([None], timeouts=1)] * len(left)

    def take(self, answer: Any) -> None:
        """An outcome with the faults of single values, or what was wrong with all of it."""
        assert self.worker is not None, "a request was sent"
        output = self.worker.output()
        if isinstance(answer, Refusal):
            self._note(answer.words, output, deliberate=answer.deliberate)
            return
        outcome, faults = answer
        errors = tuple(RewardError(*words, output=output) for words in faults)
        self.outcomes.append(dataclasses.replace(outcome, errors=len(errors), faults=errors, output=output))

    def _note(self, words: Words, output: str, timed_out: bool = False, deliberate: bool = False) -> None:
        """What a library makes of the model's words is no fault of the function; everything else is one."""
        rows = self.rows[self._now()]
        key, value, mend = words
        place = f"{key}, row {rows[0]}" if self.function.row_by_row else key
        error = RewardError(place, value, mend, timed_out=timed_out, output=output)
        score = None if deliberate else self.function.spec.fails_with
        self.outcomes.append(
            Outcome(
                [score] * len(rows),
                errors=0 if timed_out else len(rows),
                timeouts=len(rows) if timed_out else 0,
                faults=(error,) if score is None else (),
                output=output,
            )
        )

    def outcome(self) -> Outcome:
        """All calls as one."""
        if self.step > 1:
            return self.outcomes[0]
        extra: dict[str, list] = {}
        metrics: dict[str, list[float]] = {}
        for i, one in enumerate(self.outcomes):
            for column, values in one.extra.items():
                if len(values) == 1:
                    extra.setdefault(column, [None] * len(self.outcomes))[i] = values[0]
            for name, logged in one.metrics.items():
                metrics.setdefault(name, []).extend(logged)
        return Outcome(
            [score for one in self.outcomes for score in one.scores],
            extra,
            metrics,
            sum(one.errors for one in self.outcomes),
            sum(one.timeouts for one in self.outcomes),
            tuple(fault for one in self.outcomes for fault in one.faults),
            "".join(one.output for one in self.outcomes),
        )


def call_all(
    calls: Sequence[tuple[IsolatedFunction, Mapping[str, Any], Sequence[str]]], stop_at_fault: bool
) -> list[Outcome]:
    """Call several functions side by side.

    Args:
        calls: function, arguments (lists with an entry per row, or values for all), and where each row stands.
        stop_at_fault: end all calls at the first fault.

    Returns:
        One outcome per call.

    Raises:
        RewardError: the first fault, with `stop_at_fault`.
    """
    jobs = [_Job(*one) for one in calls]
    waiting = [job for job in jobs if not job.done]
    try:
        for job in waiting:
            job.ask()
        while waiting:
            _advance(waiting)
            for fault in (fault for job in waiting for outcome in job.outcomes for fault in outcome.faults):
                if stop_at_fault:
                    raise fault
            waiting = [job for job in waiting if not job.done]
        return [job.outcome() for job in jobs]
    finally:
        for job in waiting:  # an answer that nobody waits for must not be taken for that of a later call
            if not job.done:
                job.function.close()


def _advance(waiting: Sequence[_Job]) -> None:
    """Wait until something happens, and take it."""
    places = {job.worker.answers: job for job in waiting if job.worker is not None}
    for place in _wait_for(list(places), min(job.deadline for job in waiting) - time.monotonic()):
        job = places[place]
        assert job.worker is not None, "it was asked"
        alive = job.worker.read()
        message = job.worker.message()
        if message is not None:
            job.take(*message)
        elif not alive:
            job.fail(timed_out=False)
        else:
            continue
        if not job.done:
            job.ask()
    for job in waiting:
        if not job.done and time.monotonic() > job.deadline:
            job.fail(timed_out=True)
            if not job.done:
                job.ask()


def _wait_for(files: Sequence[int], seconds: float) -> list[int]:
    """Those of the files that can be read, after at most so many seconds."""
    with selectors.DefaultSelector() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        return [key.fd for key, _ in selector.select(max(0.0, seconds))]
