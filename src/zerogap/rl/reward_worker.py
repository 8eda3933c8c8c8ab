"""The process that a reward function runs in: loads it, calls it when asked, answers with checked numbers.

Its main thread runs the function, so signals work in it as they do in a script. It ends when its parent does, or when
nobody asks any more. What the function prints goes where the parent says; requests and answers have pipes of their own.
"""

import dataclasses
import inspect
import numbers
import os
import pickle
import resource
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, BinaryIO

from zerogap.errors import ConfigError
from zerogap.rl.reward_loading import FunctionSpec, load_function
from zerogap.rl.reward_values import Hooks, Outcome, call, checked, parameters_of, raised

Words = tuple[str, Any, str]  # of an error: key, value, mend

HEAD = struct.Struct("<Q")  # bytes of the message that follows
LIBRARY_BYTES = 4 * 2**30  # address space where a library computes what a completion says: 10**10**10 ends here
PARENT_SECONDS = 1.0  # between looks whether the parent still lives


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why there is no result.

    Attributes:
        words: key, value and mend of the error.
        deliberate: the function was refused or refused its arguments in words of its own; it did not just break.
    """

    words: Words
    deliberate: bool = False


def main(requests: int, answers: int) -> None:
    """Serve until the requests end.

    Args:
        requests, answers: file descriptors.
    """
    parent = os.getppid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with os.fdopen(requests, "rb") as asked, os.fdopen(answers, "wb") as told:
        spec = receive(asked)
        assert isinstance(spec, FunctionSpec), "the first message says what to load"
        try:
            function = load_function(spec)
            parameters = parameters_of(function)
        except ConfigError as error:
            send(told, Refusal((error.key, portable(error.value), error.mend)))
            return
        send(told, (parameters, spec.row_by_row and not inspect.iscoroutinefunction(function)))
        if spec.fails_with is not None:
            resource.setrlimit(resource.RLIMIT_AS, (LIBRARY_BYTES, LIBRARY_BYTES))
        while (request := receive(asked)) is not None:
            if spec.fails_with is not None:  # the signal ends this process, wherever it computes
                signal.setitimer(signal.ITIMER_PROF, spec.cpu_seconds)
            answer = _answer(spec.name, function, *request)
            sys.stdout.flush()
            sys.stderr.flush()
            send(told, answer)


def _answer(name: str, function: Callable[..., Any], arguments: dict[str, Any], rows: list[str]) -> Any:
    """(outcome of a call, what is wrong with single values), or a refusal."""
    hooks = Hooks()
    try:
        result = call(function, arguments, hooks)
        if inspect.isawaitable(result):
            result = _finished(result)
        scores, errors = checked(name, result, rows)
    except ConfigError as error:
        return Refusal((error.key, portable(error.value), error.mend), deliberate=True)
    except Exception as error:  # noqa: BLE001 (a user's code may raise anything; the run is told)
        traceback.print_exc()
        failed = raised(name, error)
        return Refusal((failed.key, failed.value, failed.mend))
    return Outcome(scores, portable(hooks.extra), hooks.metrics), [(e.key, e.value, e.mend) for e in errors]


def portable(value: Any) -> Any:
    """The value, with everything that is not JSON's as text: the other process may not know its class."""
    if isinstance(value, dict):
        return {str(key): portable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [portable(entry) for entry in value]
    known = value is None or type(value) in (bool, int, float, str)
    return value if known else float(value) if isinstance(value, numbers.Real) else str(value)


def _finished(awaitable: Awaitable[Any]) -> Any:
    import asyncio  # only where a function needs it: processes begin in an instant

    async def wait() -> Any:
        return await awaitable

    return asyncio.run(wait())


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os._exit(1)


def receive(file: BinaryIO) -> Any:
    """The next message, or None where there is none any more."""
    head = file.read(HEAD.size)
    return pickle.loads(file.read(HEAD.unpack(head)[0])) if len(head) == HEAD.size else None


def send(file: BinaryIO, message: Any) -> None:
    """One message."""
    file.write(as_message(message))
    file.flush()


def as_message(message: Any) -> bytes:
    """A message with its length before it."""
    content = pickle.dumps(message)
    return HEAD.pack(len(content)) + content
