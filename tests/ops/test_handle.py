"""The weight handle publishes values, whatever memory they come from, in every form that it has."""

import pytest
import torch

from tests.bits import assert_same_bits, unit_values
from zerogap.ops.handle import WeightHandle
from zerogap.types import WeightSpec

SPECS = [
    WeightSpec("matrix", (200, 96), "matrix"),
    WeightSpec("tied", (200, 96), "embedding", out_leaf_size=64),
    WeightSpec("embedding", (200, 96), "embedding"),
    WeightSpec("vector", (96,), "vector"),
]


def views(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values as a transposed view, as every second element, and inside a larger buffer."""
    spread = torch.zeros((*tensor.shape, 2))
    spread[..., 0] = tensor
    buffer = torch.full((tensor.numel() + 20,), 7.0)
    buffer[10:-10] = tensor.reshape(-1)
    return {
        "transposed": tensor.T.contiguous().T if tensor.dim() == 2 else tensor.flip(0).contiguous().flip(0),
        "strided": spread[..., 0],
        "inside a buffer": buffer[10:-10].view(tensor.shape),
    }


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
def test_views_publish_their_values_and_a_reused_buffer_leaves_nothing_behind(spec, trainable, storage):
    tensor = unit_values(spec.shape)
    expected = WeightHandle(spec, storage)
    expected.load(tensor)
    for name, view in views(tensor).items():
        handle = WeightHandle(spec, storage)
        handle.load(torch.zeros(spec.shape))
        handle.set_trainable(trainable)
        handle.enable_input_grad()
        handle.load(view)
        view.zero_()  # the source's memory is used again
        assert_same_bits(handle.value(), tensor.to(storage), name)
        assert handle.digest() == expected.digest(), name
        if handle.panels is not None:
            assert_same_bits(handle.panels, expected.panels, f"{name}: panels")
            fresh = WeightHandle(spec, storage)
            fresh.load(tensor)
            fresh.enable_input_grad()
            assert_same_bits(handle.transposed, fresh.transposed, f"{name}: transposed panels")
        if handle.master is not None:
            assert_same_bits(handle.master, tensor, f"{name}: master")
