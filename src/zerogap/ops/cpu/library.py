"""Loads the native library, and submits or records its commands.

Every native op is a `Command`: a number, and one argument struct that starts with the number of rows. `submit` runs one
command at once. Inside `with record(...) as program:` commands are collected instead of run, and `program.run(...)`
executes the whole list in one call, for any number of rows up to the recorded capacity: that is how the engine pays the
Python price of a forward pass once. The same decoder code does both; recording changes where outputs live, never a bit.
"""

import ctypes
import dataclasses
import functools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from zerogap import env
from zerogap.errors import ConfigError, ZerogapError

FOLDER = Path(__file__).parent
ISAS = ("avx512bf16", "avx2", "portable")  # best first
ARGS_BYTES = 504
STORAGE = {torch.float32: 0, torch.bfloat16: 1}  # the `storage` flag of argument structs


class Command(ctypes.Structure):
    """Mirror of `zg::Command` (kernels/team.h)."""

    _fields_ = [("op", ctypes.c_int32), ("rows_from", ctypes.c_int32), ("args", ctypes.c_ubyte * ARGS_BYTES)]


assert ctypes.sizeof(Command) == 512, "Command must mirror kernels/team.h"


class Arguments(ctypes.Structure):
    """Base of the argument structs. Subclasses mirror a C++ struct field by field; `rows` comes first."""


@functools.cache
def load(isa: str | None = None) -> ctypes.CDLL:
    """The native library for `isa`; by default the one that `ZEROGAP_ISA` names, else the best one that runs here."""
    isa = isa or env.forced_isa() or best_isa()
    if isa not in ISAS:
        raise ConfigError("ZEROGAP_ISA", isa, f"choose one of {', '.join(ISAS)}")
    path = FOLDER / f"libzerogap_{isa}.so"
    if not path.exists():
        raise ZerogapError(
            f"the native library {path.name} is missing from {FOLDER}: install zerogap with `pip install .` "
            "(a C++17 compiler is needed then), or run `make native` in a source tree"
        )
    library = ctypes.CDLL(str(path))
    for name in ("zg_isa", "zg_build_id", "zg_op_name"):
        getattr(library, name).restype = ctypes.c_char_p
    library.zg_op_args_size.restype = ctypes.c_int64
    library.zg_run.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32]
    return library


def best_isa() -> str:
    """Name of the best build that this processor runs."""
    probe = (
        ctypes.CDLL(str(FOLDER / "libzerogap_portable.so")) if (FOLDER / "libzerogap_portable.so").exists() else None
    )
    if probe is None:
        return "portable"  # `load` explains what is missing
    return next(isa for isa in ISAS if (FOLDER / f"libzerogap_{isa}.so").exists() and probe.zg_supports(isa.encode()))


def backend() -> str:
    """Backend class of the loaded library, for `Identity` (`cpu/avx512bf16`)."""
    return f"cpu/{load().zg_isa().decode()}"


def build_id() -> str:
    """Hash over kernel sources, compiler and flags."""
    return load().zg_build_id().decode()


@functools.cache
def _op_numbers() -> dict[str, int]:
    library = load()
    return {library.zg_op_name(i).decode(): i for i in range(library.zg_num_ops())}


@dataclasses.dataclass(frozen=True)
class Operation:
    """A native op by name with the mirror of its argument struct; sizes are compared when it is first used."""

    name: str
    arguments: type[Arguments]

    @functools.cached_property
    def number(self) -> int:
        number, size = _op_numbers()[self.name], ctypes.sizeof(self.arguments)
        native = load().zg_op_args_size(number)
        assert size == native, f"{self.name}: Python mirrors {size} bytes of arguments, the library has {native}"
        assert size <= ARGS_BYTES, f"{self.name}: arguments do not fit a command"
        return number


_threads = threading.local()  # .count: threads of this Python thread's submissions; .program: the recording program


def num_threads() -> int:
    """Threads that commands submitted by this Python thread use. No bit depends on it."""
    return getattr(_threads, "count", None) or env.num_threads()


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Use `count` native threads inside the block."""
    before = getattr(_threads, "count", None)
    _threads.count = count
    try:
        yield
    finally:
        _threads.count = before


def submit(operation: Operation, arguments: Arguments, rows_of: torch.Tensor, keep: tuple = ()) -> None:
    """Run one command, or record it.

    Args:
        operation, arguments: what to run; pointers inside must stay valid until it has run.
        rows_of: a tensor whose first axis is the op's rows; while recording, its symbol decides which count is used.
        keep: tensors that the command points at, kept alive by a recording program.
    """
    command = Command(operation.number, -1)
    ctypes.memmove(command.args, ctypes.addressof(arguments), ctypes.sizeof(arguments))
    program = getattr(_threads, "program", None)
    if program is not None:
        program.add(command, rows_of, keep)
        return
    _check(load().zg_run(ctypes.addressof(command), 1, None, num_threads()))


def empty(rows_of: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised output [rows, *shape] with as many rows as `rows_of`; while recording, a buffer of the program."""
    program = getattr(_threads, "program", None)
    if program is not None:
        return program.buffer(rows_of, shape, dtype)
    return torch.empty((rows_of.shape[0], *shape), dtype=dtype)


def recording() -> bool:
    """True inside `record`."""
    return getattr(_threads, "program", None) is not None


def _check(code: int) -> None:
    if code == 1:
        raise ZerogapError("the system refused to start threads for the native kernels: lower ZEROGAP_NUM_THREADS")
    if code == 2:
        raise MemoryError("out of memory in the native kernels")
    assert code == 0, f"zg_run returned {code}"


class Program:
    """A recorded list of commands over fixed buffers, parametrised by row counts (`symbols`).

    Buffers are recycled as soon as the recording code has dropped them, as an eager run would free them.
    """

    def __init__(self, symbols: dict[str, tuple[torch.Tensor, ...]]) -> None:
        """`symbols`: name -> the input buffers whose first axis has that many rows (at capacity)."""
        self._names = list(symbols)
        self._symbol_of = {t.data_ptr(): i for i, (_, ts) in enumerate(symbols.items()) for t in ts}
        self._capacity = [ts[0].shape[0] for ts in symbols.values()]
        self._commands: list[Command] = []
        self._keep: list[object] = list(symbols.values())
        self._free: dict[tuple, list[torch.Tensor]] = {}
        self._array: ctypes.Array | None = None

    def add(self, command: Command, rows_of: torch.Tensor, keep: tuple) -> None:
        command.rows_from = self._symbol_of[rows_of.data_ptr()]
        self._commands.append(command)
        self._keep.append(keep)

    def buffer(self, rows_of: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        symbol = self._symbol_of[rows_of.data_ptr()]
        key = (symbol, shape, dtype)
        free = self._free.setdefault(key, [])
        storage = free.pop() if free else torch.zeros((self._capacity[symbol], *shape), dtype=dtype)
        self._keep.append(storage)
        self._symbol_of[storage.data_ptr()] = symbol
        view = storage.view(storage.shape)
        weakref.finalize(view, free.append, storage)
        return view

    def finish(self) -> None:
        """Called when recording ends: the list is frozen."""
        self._array = (Command * len(self._commands))(*self._commands)
        self._free = {}

    def run(self, **rows: int) -> None:
        """Execute all commands with the given row counts, one keyword per symbol."""
        assert self._array is not None and set(rows) == set(self._names), f"a program over {self._names} got {rows}"
        counts = [rows[name] for name in self._names]
        assert all(0 <= c <= cap for c, cap in zip(counts, self._capacity, strict=True)), f"{rows} exceed the capacity"
        values = (ctypes.c_int64 * len(counts))(*counts)
        _check(load().zg_run(ctypes.addressof(self._array), len(self._array), ctypes.addressof(values), num_threads()))


@contextmanager
def record(**symbols: tuple[torch.Tensor, ...]) -> Iterator[Program]:
    """Collect the commands submitted by this thread inside the block into a `Program`.

    Args:
        symbols: for each row count, the input buffers (at capacity) whose first axis has that many rows.
    """
    assert not recording(), "recordings do not nest"
    _threads.program = program = Program(symbols)
    try:
        yield program
    finally:
        _threads.program = None
        program.finish()


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Address of a contiguous CPU tensor's first element, for an argument struct; None stays None."""
    if tensor is None:
        return None
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), "native ops take contiguous CPU tensors"
    return tensor.data_ptr()
