"""A scoped view of what every op produced, for diagnosis and for planting faults.

`with tap.listen(callback):` calls `callback(name, outputs, info)` after each op of this thread. Closed, it costs one
attribute look-up. Captured programs are not used while a tap is open: the engine then runs op by op (same bits).
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

Callback = Callable[[str, Mapping[str, torch.Tensor], Mapping[str, object]], None]
_state = threading.local()


def is_open() -> bool:
    """True inside `listen`, on this thread."""
    return bool(getattr(_state, "callbacks", None))


def observe(name: str, outputs: Mapping[str, torch.Tensor], info: Mapping[str, object]) -> None:
    """Called by each op after it ran. A callback may look at `outputs`, and a planted fault may write into them."""
    for callback in getattr(_state, "callbacks", ()):
        callback(name, outputs, info)


@contextmanager
def listen(callback: Callback) -> Iterator[None]:
    """Call `callback` after every op inside the block; blocks nest."""
    before = getattr(_state, "callbacks", ())
    _state.callbacks = (*before, callback)
    try:
        yield
    finally:
        _state.callbacks = before
