"""Long-lived buffers on huge pages.

Decoding reads every weight once per step, far more than the caches hold. On 4 KB pages the page walks alone can halve
the bandwidth (1.2 to 1.8 times, measured); weights of one layer are smaller than a huge page, so they share *arenas*.
An arena lives as long as any tensor cut from it. Where the system offers no huge pages, this is ordinary memory.
"""

import math
import mmap
import threading

import torch

ALIGNMENT = 64  # bytes: a cache line, and one AVX-512 vector
ARENA = 32 << 20  # bytes; a larger tensor gets one of its own


class _Arenas:
    """Mutable: the arena that the next tensor is cut from."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.current: mmap.mmap | None = None
        self.used = 0

    def take(self, size: int) -> tuple[mmap.mmap, int]:
        """A zeroed range of `size` bytes, as its arena and offset."""
        with self.lock:
            if self.current is None or self.used + size > len(self.current):
                arena = mmap.mmap(-1, max(ARENA, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                if hasattr(mmap, "MADV_HUGEPAGE"):
                    arena.madvise(mmap.MADV_HUGEPAGE)
                if size >= ARENA:
                    return arena, 0
                self.current, self.used = arena, 0
            offset = self.used
            self.used += -(-size // ALIGNMENT) * ALIGNMENT
            return self.current, offset


_arenas = _Arenas()


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A zeroed CPU tensor for data that lives long and is read often; 64-byte aligned, never freed piecemeal."""
    count = math.prod(shape)
    if not count:
        return torch.zeros(shape, dtype=dtype)
    arena, offset = _arenas.take(count * dtype.itemsize)
    return torch.frombuffer(arena, dtype=dtype, count=count, offset=offset).view(shape)
