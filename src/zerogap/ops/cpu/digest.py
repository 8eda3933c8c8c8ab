"""Chunk hashes of a tensor's bytes. Mirrors kernels/digest.h; see `zerogap.ops.digest`."""

import ctypes

import torch

from zerogap.ops.cpu.library import Arguments, Operation, pointer, submit

DIGEST_CHUNK = 1 << 18  # bytes, as in kernels/digest.h


class DigestArguments(Arguments):
    _fields_ = [("rows", ctypes.c_int64), ("data", ctypes.c_void_p), ("hashes", ctypes.c_void_p)]


DIGEST = Operation("digest", DigestArguments)


def chunk_hashes(tensor: torch.Tensor) -> torch.Tensor:
    """int64 [chunks, 2]: two 64-bit hashes of each 256 KiB of the contiguous tensor's bytes."""
    num_bytes = tensor.numel() * tensor.element_size()
    hashes = torch.empty((-(-num_bytes // DIGEST_CHUNK), 2), dtype=torch.int64)
    submit(DIGEST, DigestArguments(rows=num_bytes, data=pointer(tensor), hashes=pointer(hashes)), hashes)
    return hashes
