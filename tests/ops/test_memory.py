"""Long-lived buffers: zeroed, aligned, apart from each other, alive as long as a tensor of their arena is."""

import gc

import pytest
import torch

from zerogap.ops.cpu import memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(3, 5), (1,), (64, 64, 2), (0, 7), (17 << 20,)], ids=str)
def test_zeroed_and_aligned(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = memory.zeros(shape, dtype)
    assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
    assert tensor.data_ptr() % memory.ALIGNMENT == 0 and not tensor.any()


def test_tensors_do_not_overlap() -> None:
    """Many small tensors over the border of an arena: each keeps its own value."""
    count = 3 * memory.ARENA // (1 << 20)
    tensors = [memory.zeros((1 << 20,), torch.int8) for _ in range(count)]
    for i, tensor in enumerate(tensors):
        tensor.fill_(i)
    for i, tensor in enumerate(tensors):
        assert (tensor == i).all()


def test_arena_outlives_its_other_tensors() -> None:
    kept = memory.zeros((1000,), torch.float32)
    kept.fill_(7.0)
    for _ in range(4):
        memory.zeros((memory.ARENA // 8,), torch.float32).fill_(1.0)
    gc.collect()
    assert (kept == 7.0).all()
