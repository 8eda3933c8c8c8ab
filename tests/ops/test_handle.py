"""The weight handle publishes values, whatever memory they come from, in every form that it has."""

import pytest
import torch

from tests.bits import assert_different_bits, assert_same_bits, unit_values
from zerogap.errors import CheckpointError, NonFiniteError
from zerogap.ops import quant
from zerogap.ops.cpu import gemm
from zerogap.ops.cpu import quant as kernels
from zerogap.ops.handle import WeightHandle
from zerogap.types import BlockCodes, FP8Blocks, WeightSpec

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


# ------------------------------------------------------------------------------------------------ quantised matrices

SHAPE = (200, 301)
FORMATS = ("fp32", "pow2")


def quantised(tensor=None, scale_format="fp32", gradients=True, trainable=False):
    handle = WeightHandle(WeightSpec("q", SHAPE, "matrix", fp8=FP8Blocks(scale_format, gradients)), torch.bfloat16)
    if tensor is not None:
        handle.load(tensor)
    handle.set_trainable(trainable)
    handle.enable_input_grad()
    return handle


def assert_consistent(handle, value, what=""):
    """Every form of the handle is that of `value`, BF16, quantised afresh."""
    fp8 = handle.spec.fp8
    codes, scales = quant.quantise_weight(value, fp8.scale_format)
    assert_same_bits(handle.value(), value, f"{what}: value")
    assert_same_bits(handle.scales, scales, f"{what}: scales")
    assert_same_bits(handle.codes().codes, codes, f"{what}: codes")
    n, k = SHAPE
    if fp8.gradients:
        transposed = kernels.allocate_panels(k, n)
        kernels.load_codes(codes, None, transposed)
    else:
        transposed = gemm.allocate_panels(k, n, torch.bfloat16)
        gemm.pack(value, None, transposed)
    assert_same_bits(handle.transposed, transposed, f"{what}: transposed panels")
    fresh = quantised(value, fp8.scale_format, fp8.gradients)
    assert handle.digest() == fresh.digest(), what


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("trainable", [False, True])
def test_a_quantised_matrix_is_that_of_its_published_value(scale_format, gradients, trainable):
    tensor = unit_values(SHAPE)
    handle = quantised(tensor, scale_format, gradients, trainable)
    assert_consistent(handle, tensor.to(torch.bfloat16), "loaded")
    for name, view in views(tensor).items():
        again = quantised(torch.zeros(SHAPE), scale_format, gradients, trainable)
        again.load(view)
        view.zero_()
        assert_consistent(again, tensor.to(torch.bfloat16), name)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("gradients", [False, True])
def test_every_publication_equals_a_fresh_quantisation_and_has_its_own_digest(scale_format, gradients):
    """The second update as well as the first, and what stays when training ends."""
    handle = quantised(unit_values(SHAPE), scale_format, gradients, trainable=True)
    addresses = [t.data_ptr() for t in (handle.panels, handle.scales, handle.transposed)]
    digests = [handle.digest()]
    for update in range(3):
        handle.master += 0.05 * unit_values(SHAPE, seed=10 + update)
        assert handle.digest() == digests[-1], "nothing changes before publish()"
        handle.publish()
        assert_consistent(handle, handle.master.to(torch.bfloat16), f"update {update}")
        digests.append(handle.digest())
    assert len(set(digests)) == 4
    assert addresses == [t.data_ptr() for t in (handle.panels, handle.scales, handle.transposed)], "in place"
    handle.set_trainable(False)
    assert handle.master is None
    assert_consistent(handle, handle.value(), "frozen again")
    assert handle.digest() == digests[-1]


def test_codes_come_from_the_published_value_and_never_from_the_master():
    """Both masters round to 17.0, whose code is 16 (a tie to even); 17.01 itself would be 18."""
    tensor = torch.zeros(SHAPE)
    tensor[0, 0] = 448.0  # the scale is 1
    tensor[1, 1] = 17.01
    published = tensor.to(torch.bfloat16)
    assert published[1, 1] == 17.0
    of_master = kernels.encode(tensor)[0]
    trainable = quantised(torch.zeros(SHAPE), trainable=True)
    trainable.load(tensor)
    assert float(trainable.master[1, 1]) == float(torch.tensor(17.01)), "the master keeps what BF16 cannot hold"
    frozen, from_published = quantised(tensor), quantised(published)
    for handle in (trainable, frozen, from_published):
        assert float(kernels.decode(handle.codes().codes[1, 1])) == 16.0
        assert_different_bits(handle.codes().codes, of_master)
    assert len({h.digest() for h in (trainable, frozen, from_published)}) == 1


def test_the_digest_covers_scales():
    """Twice the weights: the same codes, twice the scales."""
    once, twice = quantised(unit_values(SHAPE)), quantised(2 * unit_values(SHAPE))
    assert_same_bits(once.codes().codes, twice.codes().codes)
    assert once.digest() != twice.digest()


def test_values_below_the_normal_range_are_published_as_signed_zeros():
    tensor = torch.zeros(SHAPE)
    tensor[0, :4] = torch.tensor([2.0**-127, -(2.0**-127), 2.0**-126, -(2.0**-126)])
    handle = quantised(tensor, trainable=True)
    assert_same_bits(handle.value()[0, :4].float(), torch.tensor([0.0, -0.0, 2.0**-126, -(2.0**-126)]))
    assert_consistent(handle, handle.value())


def stored_codes(scale_format="fp32", seed=3):
    codes, scales = quant.quantise_weight(unit_values(SHAPE, torch.bfloat16, seed=seed), scale_format)
    return BlockCodes(codes, scales)


@pytest.mark.parametrize("gradients", [False, True])
def test_stored_codes_are_taken_over_as_they_are(gradients):
    """Also codes that no quantisation of their value would give: here no block reaches 448."""
    stored = stored_codes()
    stored = BlockCodes(torch.where((stored.codes & 0x7F) > 0x77, 0x77, stored.codes), stored.scales * 1.5)
    handle = quantised(stored, gradients=gradients)
    assert_same_bits(handle.codes().codes, stored.codes)
    assert_same_bits(handle.scales, stored.scales)
    value = quant.dequantise(stored.codes, stored.scales)
    assert_same_bits(handle.value(), value)
    expected = kernels.allocate_panels(301, 200) if gradients else gemm.allocate_panels(301, 200, torch.bfloat16)
    kernels.load_codes(stored.codes, None, expected) if gradients else gemm.pack(value, None, expected)
    assert_same_bits(handle.transposed, expected)
    other = quantised(unit_values(SHAPE), gradients=gradients)  # a buffer that held something else
    other.load(stored)
    assert_same_bits(other.transposed, expected)
    assert other.digest() == handle.digest() and other.published is None


def test_stored_codes_stay_until_the_first_publication():
    """So a model starts its training with the bits that it has as a frozen one (a reference model, an audit)."""
    stored = stored_codes()
    stored = BlockCodes(torch.where((stored.codes & 0x7F) > 0x77, 0x77, stored.codes), stored.scales * 1.5)
    value = quant.dequantise(stored.codes, stored.scales)
    frozen, trained, late = quantised(stored), quantised(stored, trainable=True), quantised(stored_codes(seed=4))
    late.set_trainable(True)
    late.load(stored)
    for handle in (trained, late):
        assert_same_bits(handle.master, value.float())
        assert_same_bits(handle.value(), value)
        assert handle.digest() == frozen.digest()
        assert_same_bits(handle.stored().codes, stored.codes)
        handle.set_trainable(False)
        assert handle.digest() == frozen.digest() and isinstance(handle.stored(), BlockCodes)
        handle.set_trainable(True)
        handle.publish()
        assert_consistent(handle, value, "published")
        assert handle.digest() != frozen.digest() and not isinstance(handle.stored(), BlockCodes)
        handle.load(stored)
        assert handle.digest() == frozen.digest()


def test_stored_codes_whose_scales_do_not_fit_are_quantised_anew():
    stored = stored_codes("fp32")
    handle = quantised(stored, "pow2")
    assert_consistent(handle, quant.dequantise(stored.codes, stored.scales))
    powers = stored_codes("pow2")
    for scale_format in FORMATS:
        assert_same_bits(quantised(powers, scale_format).scales, powers.scales)


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
def test_stored_codes_are_dequantised_where_the_contract_does_not_quantise(storage):
    stored = stored_codes()
    handle = WeightHandle(WeightSpec("q", SHAPE, "matrix"), storage)
    handle.load(stored)
    assert_same_bits(handle.value(), quant.dequantise(stored.codes, stored.scales).to(storage))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda s: BlockCodes(s.codes, s.scales[:1]), r"q: codes .* with scales torch.float32 \(1, 3\)"),
        (lambda s: BlockCodes(s.codes, s.scales.to(torch.bfloat16)), r"need float32 scales \(2, 3\)"),
        (lambda s: BlockCodes(s.codes, s.scales * 0), "q: a scale is not a positive number"),
        (lambda s: BlockCodes(s.codes, s.scales * float("inf")), "q: a scale is not a positive number"),
        (lambda s: BlockCodes(s.codes | 0x7F, s.scales), "q: a code is NaN"),
        (lambda s: BlockCodes(s.codes[1:], s.scales), r"q: shape \(199, 301\)"),
    ],
)
def test_stored_codes_that_are_no_numbers_are_refused(fault, message):
    with pytest.raises(CheckpointError, match=message):
        quantised(fault(stored_codes()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(bad):
    tensor = unit_values(SHAPE)
    tensor[150, 299] = bad
    with pytest.raises(NonFiniteError, match=r"q: a NaN or an infinity in the block .* row 128, column 256"):
        quantised(tensor)
    handle = quantised(unit_values(SHAPE), trainable=True)
    handle.master[150, 299] = bad
    with pytest.raises(NonFiniteError, match="q: a NaN"):
        handle.publish()
