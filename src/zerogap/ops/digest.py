"""A 128-bit name for a tensor's value: equal dtype, shape and bytes give equal digests, anything else differs.

The bytes are hashed natively in chunks of 256 KiB (kernels/digest.cpp: a change within one 64-bit word always changes
the chunk's hash); BLAKE2b over dtype, shape and the chunk hashes in order makes the digest. It guards against mistakes,
not against an adversary. It does not depend on threads, instruction set or memory layout (a view is read in its logical
order), nor on the machine, as long as that is little-endian.
"""

import hashlib

import torch

from zerogap.ops.cpu import digest as kernels


def digest(*tensors: torch.Tensor) -> str:
    """32 hex digits over dtype, shape and bytes (the raw ones: -0 and +0 differ, NaN payloads count), in this order."""
    name = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        tensor = tensor.detach().contiguous()
        head = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        name.update(head.encode() + b"\0" + kernels.chunk_hashes(tensor).numpy().tobytes())
    return name.hexdigest()
