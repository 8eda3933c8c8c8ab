"""Digests: every bit, dtype, shape and order counts; threads and memory layout do not."""

import pytest
import torch

from tests.bits import hard_values
from zerogap.ops.cpu import library
from zerogap.ops.cpu.digest import DIGEST_CHUNK
from zerogap.ops.digest import digest


@pytest.mark.parametrize("count", [1, 7, 8, 63, 64, 65, 1000])
def test_each_single_bit_counts(count: int) -> None:
    """All digests of all tensors that are one flipped bit away are distinct."""
    base = hard_values(count, seed=count).view(torch.int32)
    seen = {digest(base)}
    for i in range(0, count, max(1, count // 40)):
        for bit in range(32):
            changed = base.clone()
            changed[i] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
            seen.add(digest(changed))
    assert len(seen) == 1 + 32 * len(range(0, count, max(1, count // 40)))


def test_large_tensors_and_chunk_borders() -> None:
    """One byte changed at the start, the end and both sides of chunk borders; bytes swapped between chunks."""
    base = torch.randint(0, 256, (3 * DIGEST_CHUNK + 13,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    seen = {digest(base)}
    for i in (0, DIGEST_CHUNK - 1, DIGEST_CHUNK, 2 * DIGEST_CHUNK, 3 * DIGEST_CHUNK - 1, 3 * DIGEST_CHUNK + 12):
        changed = base.clone()
        changed[i] ^= 1
        seen.add(digest(changed))
    order = torch.arange(base.numel())
    swapped = torch.cat([order[DIGEST_CHUNK : 2 * DIGEST_CHUNK], order[:DIGEST_CHUNK], order[2 * DIGEST_CHUNK :]])
    seen |= {digest(base[swapped]), digest(base[:-1]), digest(torch.cat([base, base.new_zeros(1)]))}
    assert len(seen) == 10


def test_dtype_shape_and_sign_of_zero() -> None:
    zero = torch.zeros(4, 6)
    different = [
        zero,
        -zero,
        zero.view(6, 4),
        zero.view(24),
        zero.view(4, 6, 1),
        zero.to(torch.int32),
        zero.to(torch.bfloat16),
        zero[:3],
        torch.zeros(0),
        torch.zeros(0, 3),
        torch.zeros(()),
    ]
    assert len({digest(t) for t in different}) == len(different)
    assert len({digest(zero), digest(zero.clone()), digest(zero.requires_grad_())}) == 1


def test_views_count_by_value() -> None:
    """A transposed or strided view has the digest of its contiguous copy, not that of the memory it looks at."""
    x = hard_values((12, 20), torch.bfloat16, 1)
    assert digest(x.T) == digest(x.T.contiguous()) != digest(x)
    assert digest(x[:, ::2]) == digest(x[:, ::2].contiguous())
    assert digest(x[3:]) == digest(x[3:].clone()) != digest(x[:-3])


def test_threads() -> None:
    x = hard_values(1_000_003, seed=1)
    digests = set()
    for threads in (1, 2, 3):
        with library.use_threads(threads):
            digests.add(digest(x))
    assert len(digests) == 1


def test_known_value() -> None:
    """Digests stand in checkpoints and records, so their definition must not move unnoticed."""
    assert digest(torch.arange(10)) == "3d2519ac699308e2cbe49cd02e553d3d"
