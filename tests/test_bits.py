"""The equality that every other test stands on, shown able to fail."""

import numpy as np
import pytest
import torch

from tests.bits import assert_different_bits, assert_same_bits, count_differing_bits, hard_values, unit_values


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.bool]
)
def test_equal_arrays_pass_in_every_dtype(dtype):
    values = hard_values((3, 8), torch.float32, seed=1).to(dtype)
    assert_same_bits(values, values.clone(), "values")
    if dtype != torch.bfloat16:
        assert_same_bits(values.numpy(), values.numpy().copy(), "values")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_signed_zeros_differ(dtype):
    with pytest.raises(AssertionError, match=r"1 of 2 .*\n.*\(1,\)"):
        assert_same_bits(torch.tensor([1.0, -0.0], dtype=dtype), torch.tensor([1.0, 0.0], dtype=dtype), "zeros")


def test_nan_payloads_compare():
    quiet, payload = np.array([0x7FC00000, 0x7FC00001], dtype=np.uint32).view(np.float32)
    assert_same_bits(np.array([quiet]), np.array([quiet]), "nan")
    with pytest.raises(AssertionError, match="0x7fc00001"):
        assert_same_bits(np.array([quiet]), np.array([payload]), "nan")


def test_message_names_the_first_coordinate_both_values_and_both_patterns():
    expected = torch.ones(4, 5)
    actual = expected.clone()
    actual[2, 3] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    actual[3, 4] = 1.5
    with pytest.raises(AssertionError) as caught:
        assert_same_bits(actual, expected, "the product")
    message = str(caught.value)
    for part in ("the product", "2 of 20", "(2, 3)", "0x3f800001", "0x3f800000", "difference 0.5"):
        assert part in message


def test_shape_and_dtype_are_part_of_equality():
    with pytest.raises(AssertionError, match="shape"):
        assert_same_bits(torch.ones(2, 1), torch.ones(2), "form")
    with pytest.raises(AssertionError, match="dtype"):
        assert_same_bits(torch.ones(2), torch.ones(2, dtype=torch.float64), "form")


def test_non_contiguous_views_compare_by_coordinate():
    square = hard_values((6, 6), seed=2)
    assert_same_bits(square.t(), square.t().contiguous(), "transposed")
    assert count_differing_bits(square.t(), square) > 0


def test_a_control_without_a_difference_fails():
    assert_different_bits(torch.tensor([0.0]), torch.tensor([-0.0]), "control")
    with pytest.raises(AssertionError, match="shows nothing"):
        assert_different_bits(torch.ones(3), torch.ones(3), "control")


def test_hard_values_show_the_order_of_summation():
    values = hard_values((64, 256), torch.float32, seed=3).numpy()
    ascending, descending = np.zeros(64, np.float32), np.zeros(64, np.float32)
    for k in range(256):
        ascending += values[:, k]
        descending += values[:, 255 - k]
    assert count_differing_bits(ascending, descending) > 48
    assert np.isfinite(values).all() and np.abs(values).max() / np.abs(values).min() > 2**20


def test_generators_are_functions_of_their_seed():
    for make in (hard_values, unit_values):
        assert_same_bits(make((5, 7), torch.bfloat16, seed=4), make((5, 7), torch.bfloat16, seed=4), "same seed")
        assert_different_bits(make((5, 7), torch.bfloat16, seed=4), make((5, 7), torch.bfloat16, seed=5), "other seed")
