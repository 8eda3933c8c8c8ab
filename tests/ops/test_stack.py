"""Weights in stacks, head by head, and buffers: the same life and the same bits as weights that stand alone."""

import pytest
import torch

from tests.bits import assert_same_bits, unit_values
from zerogap.ops import quant
from zerogap.ops.cpu import gemm
from zerogap.ops.digest import digest
from zerogap.ops.handle import WeightHandle
from zerogap.ops.stack import PanelStack
from zerogap.types import BlockCodes, FP8Blocks, WeightSpec

BF16, FP32 = torch.bfloat16, torch.float32
SHAPE, SIZE = (200, 301), 3
FORMS = [(FP32, None), (BF16, None), (BF16, FP8Blocks("fp32", True)), (BF16, FP8Blocks("pow2", False))]


def spec(index: int, fp8: FP8Blocks | None, stack: bool = True) -> WeightSpec:
    return WeightSpec(f"w.{index}", SHAPE, "matrix", fp8=fp8, stack=("w", index, SIZE) if stack else None)


def stacked(storage: torch.dtype, fp8: FP8Blocks | None) -> tuple[PanelStack, list[WeightHandle]]:
    """A stack and its handles, which were not made in index order."""
    stack = PanelStack("w", SIZE, SHAPE, storage, fp8)
    made = {i: WeightHandle(spec(i, fp8), storage, stack) for i in (2, 0, 1)}
    return stack, [made[i] for i in range(SIZE)]


def assert_same_weight(handle: WeightHandle, alone: WeightHandle, what: str) -> None:
    for form in ("panels", "transposed", "scales", "master", "grad", "published"):
        ours, theirs = getattr(handle, form), getattr(alone, form)
        assert (ours is None) == (theirs is None), f"{what}: {form}"
        if ours is not None:
            assert_same_bits(ours, theirs, f"{what}: {form}")
    assert_same_bits(handle.value(), alone.value(), f"{what}: value")
    assert handle.digest() == alone.digest(), f"{what}: digest"
    one, two = handle.stored(), alone.stored()
    assert type(one) is type(two), f"{what}: stored"
    if isinstance(one, BlockCodes) and isinstance(two, BlockCodes):
        assert_same_bits(one.codes, two.codes, f"{what}: stored codes")


@pytest.mark.parametrize(("storage", "fp8"), FORMS)
@pytest.mark.parametrize("late", [False, True])
def test_a_stacked_weight_lives_as_one_that_stands_alone(storage, fp8, late):
    """Load, train, publish, freeze, load codes: every form of every weight, and that of its neighbours."""
    stack, handles = stacked(storage, fp8)
    alone = [WeightHandle(spec(i, fp8, stack=False), storage) for i in range(SIZE)]
    assert stack.handles == handles
    addresses = [h.panels.data_ptr() for h in handles]

    def everywhere(what, act=lambda handle, index: None):
        for index, (handle, lone) in enumerate(zip(handles, alone, strict=True)):
            act(handle, index)
            act(lone, index)
        for handle, lone in zip(handles, alone, strict=True):
            assert_same_weight(handle, lone, what)

    if not late:
        everywhere("empty", lambda h, i: h.enable_input_grad())
    everywhere("loaded", lambda h, i: h.load(unit_values(SHAPE, seed=i)))
    everywhere("trainable", lambda h, i: h.set_trainable(i == 1))
    if late:
        handles[1].enable_input_grad()  # one asks, all have them
        everywhere("input gradients", lambda h, i: h.enable_input_grad())
    everywhere("accumulators", lambda h, i: h.open_grad())

    def train(handle, index):
        if handle.trainable:
            handle.master += 0.05 * unit_values(SHAPE, seed=9)
            handle.publish()

    everywhere("published", train)
    everywhere("frozen", lambda h, i: h.set_trainable(False))
    codes = BlockCodes(*quant.quantise_weight(unit_values(SHAPE, BF16, seed=5), "pow2"))
    everywhere("codes", lambda h, i: h.load(codes if i == 0 else unit_values(SHAPE, seed=20 + i)))
    for index, handle in enumerate(handles):
        for form in ("panels", "transposed", "scales"):
            whole, part = getattr(stack, form), getattr(handle, form)
            assert (whole is None) == (part is None)
            assert whole is None or part.data_ptr() == whole[index].data_ptr(), f"{form} {index} is a copy"
    assert addresses == [h.panels.data_ptr() for h in handles]


def test_a_weight_that_belongs_elsewhere_is_refused():
    stack, _ = stacked(BF16, None)
    wrong = [
        spec(0, None),  # its place is taken
        spec(0, None, stack=False),
        spec(0, FP8Blocks("fp32", True)),
        WeightSpec("w.1", SHAPE, "matrix", stack=("w", 1, 4)),
        WeightSpec("w.1", (301, 200), "matrix", stack=("w", 1, SIZE)),
        WeightSpec("w.1", SHAPE, "matrix", stack=("v", 1, SIZE)),
    ]
    for each in wrong:
        with pytest.raises(AssertionError, match=r"w\."):
            WeightHandle(each, BF16, stack)
    half = PanelStack("w", SIZE, SHAPE, BF16)
    WeightHandle(spec(0, None), BF16, half)
    with pytest.raises(AssertionError, match="1 of 3"):
        _ = half.handles


# ------------------------------------------------------------------------------------------------ head by head

HEADS = (3, 40, 24)
HEAD_SHAPE = (3 * 64, 70)


def assert_head_forms(handle: WeightHandle, value: torch.Tensor, what: str) -> None:
    assert_same_bits(handle.rows, value, f"{what}: rows")
    assert handle.digest() == digest(value), what
    assert handle.panels is None and handle.transposed is None
    parts = value.view(HEADS[0], -1, HEAD_SHAPE[1]).split(HEADS[1:], dim=1)
    for stack, part in zip((handle.first, handle.second), parts, strict=True):
        for head in range(HEADS[0]):
            n, k = part[head].shape
            panels, transposed = gemm.allocate_panels(n, k, value.dtype), gemm.allocate_panels(k, n, value.dtype)
            gemm.pack(part[head].contiguous(), panels, transposed)
            assert_same_bits(stack.panels[head], panels, f"{what}: panels of head {head}")
            assert_same_bits(stack.transposed[head], transposed, f"{what}: transposed panels of head {head}")


@pytest.mark.parametrize("storage", [FP32, BF16])
def test_a_weight_by_heads_has_both_parts_in_both_directions(storage):
    handle = WeightHandle(WeightSpec("kv_b", HEAD_SHAPE, "heads", head_parts=HEADS), storage)
    handle.load(unit_values(HEAD_SHAPE).T.contiguous().T)
    handle.enable_input_grad()
    assert_head_forms(handle, unit_values(HEAD_SHAPE).to(storage), "loaded")
    handle.set_trainable(True)
    handle.open_grad()
    assert handle.grad.shape == HEAD_SHAPE and handle.head_grad is None
    assert_same_bits(handle.master, handle.rows.float(), "master")
    before = handle.digest()
    handle.master += 0.05 * unit_values(HEAD_SHAPE, seed=1)
    handle.master[0, :2] = torch.tensor([2.0**-127, -(2.0**-127)])  # BF16 publishes zeros
    expected = handle.master.to(storage)
    if storage == BF16:
        expected[0, :2] = 0.0
    handle.publish()
    assert handle.digest() != before
    assert_head_forms(handle, expected, "published")
    codes = BlockCodes(*quant.quantise_weight(unit_values(HEAD_SHAPE, BF16, seed=2)))
    handle.load(codes)
    value = quant.dequantise(codes.codes, codes.scales).to(storage)
    assert_head_forms(handle, value, "from a block checkpoint")
    assert_same_bits(handle.stored(), value)


# ------------------------------------------------------------------------------------------------ buffers


def test_a_buffer_keeps_fp32_and_no_gradient_trains_it():
    handle = WeightHandle(WeightSpec("bias", (37,), "buffer"), BF16)
    for seed in (0, 1):
        value = unit_values(37, seed=seed) + 1e-6
        handle.load(value)
        assert_same_bits(handle.rows, value)
        assert_same_bits(handle.stored(), value)
        assert handle.digest() == digest(value)
    handle.load(unit_values(37, BF16))
    assert_same_bits(handle.rows, unit_values(37, BF16).float())
    handle.set_trainable(False)
    handle.enable_input_grad()
    assert handle.panels is None and not handle.trainable
    with pytest.raises(AssertionError, match="bias is a buffer"):
        handle.set_trainable(True)
