"""Attribution: planted forms are named by their field, noise is not, and what fits equally is listed and not chosen."""

import dataclasses

import pytest
import torch

from tests.diagnose.simulate import cases
from tests.diagnose.simulate.cases import BF16, FP32, Given
from zerogap.diagnose.attribute import Attribution, explain
from zerogap.diagnose.simulate import SIMULATORS
from zerogap.diagnose.verdict import UNATTRIBUTED


def attribute(given: Given, a: torch.Tensor, b: torch.Tensor) -> Attribution:
    return explain("0.node", given.kind, given.inputs, given.weights, given.parameters, a, b)


def planted(given: Given, base: int, shape: tuple[int, int], dtype: torch.dtype, **changes: str) -> torch.Tensor:
    """What a form computes: the kind's `base`-th whole form with fields changed."""
    problem = given.problem(torch.zeros(shape, dtype=dtype))
    simulator = SIMULATORS[given.kind]
    variant = simulator.bases(problem)[base].but(**changes)
    assert simulator.applies(variant, problem), variant
    return simulator.simulate(variant, problem).to(dtype)


def perturbed(out: torch.Tensor, share: float) -> torch.Tensor:
    """Some elements one unit in the last place away."""
    integer = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[out.dtype]
    chosen = torch.rand(out.shape, generator=torch.Generator().manual_seed(5)) < share
    return (out.clone().view(integer) + chosen.to(integer)).view(out.dtype)


CASES = {
    "linear": (cases.linear(), (cases.ROWS, 48), BF16),
    "linear fp32": (cases.linear(FP32, 192), (cases.ROWS, 48), FP32),
    "head": (cases.linear(kind="head"), (cases.ROWS, 48), FP32),
    "head of large logits": (cases.linear(kind="head", large=True), (cases.ROWS, 48), BF16),
    "norm": (cases.norm(), (cases.ROWS, 576), BF16),
    "norm fp32": (cases.norm(FP32), (cases.ROWS, 576), FP32),
    "activation": (cases.activation(), (cases.ROWS, 160), BF16),
    "residual": (cases.residual(), (cases.ROWS, 160), BF16),
    "rope": (cases.rope(), (cases.ROWS, 128), BF16),
    "rope fp32": (cases.rope(FP32), (cases.ROWS, 128), FP32),
    "attention": (cases.attention(lengths=[70, 27]), (97, 256), BF16),
    "attention fp32": (cases.attention(FP32, lengths=[70, 27]), (97, 256), FP32),
    "logprob": (cases.logprob(), (cases.ROWS, 1), FP32),
    "embedding": (cases.embedding(), (cases.ROWS, 96), BF16),
    "experts": (cases.experts(shared=True), (cases.ROWS, 64), BF16),
}

# case, field, changes of the whole form (0 contract, 1 the usual foreign one)
PLANTS = [
    ("linear", "split", 0, {"split": "4 parts, tree"}),
    ("linear", "split", 0, {"split": "blocks of 128"}),
    ("linear", "order", 0, {"order": "descending"}),
    ("linear", "order", 0, {"order": "lanes of 16"}),
    ("linear", "primitive", 0, {"primitive": "tensor core"}),
    ("linear", "accumulate", 0, {"accumulate": "bf16"}),
    ("linear", "accumulate", 0, {"split": "blocks of 64", "accumulate": "bf16 parts"}),
    ("linear", "rounding", 0, {"rounding": "before the bias"}),
    ("linear", "rounding", 0, {"rounding": "truncated"}),
    ("linear", "formula", 0, {"formula": "no bias"}),
    ("linear", "operands", 0, {"operands": "e4m3", "block": "128x128, 1x128", "scale": "fp32"}),
    ("linear fp32", "operands", 0, {"operands": "tf32"}),
    ("linear fp32", "operands", 0, {"operands": "bf16"}),
    ("linear fp32", "primitive", 0, {"primitive": "mul+add"}),
    ("linear fp32", "split", 0, {"split": "4 parts, ring"}),
    ("linear fp32", "split", 0, {"split": "blocks of 56"}),
    ("head of large logits", "formula", 0, {"formula": "clamped to 4"}),
    ("head of large logits", "formula", 0, {"formula": "at most 4"}),
    ("head of large logits", "formula", 0, {"formula": "at least -3"}),
    ("head", "output", 0, {"output": "bf16"}),
    ("head", "formula", 0, {"formula": "softcap 30"}),
    ("head of large logits", "formula", 0, {"formula": "softcap 12"}),
    ("head of large logits", "formula", 0, {"formula": "softcap 7.5 in steps"}),
    ("head", "scale", 0, {"scale": "times 0.0625"}),
    ("head", "scale", 0, {"scale": "over 13"}),
    ("linear", "scale", 0, {"scale": "times 0.22"}),
    ("norm", "rounding", 0, {"rounding": "before the weight"}),
    ("norm", "formula", 1, {"formula": "rms with 1 + weight, eps 1e-05"}),
    ("norm", "formula", 1, {"formula": "rms, eps 0.001"}),
    ("norm", "formula", 1, {"formula": "rms, eps 0.03"}),
    ("norm", "formula", 1, {"formula": "none, eps 1e-05"}),
    ("norm fp32", "order", 0, {"order": "lanes of 8"}),
    ("norm fp32", "primitive", 0, {"primitive": "mul+add, 1/sqrt"}),
    ("norm", "accumulate", 1, {"accumulate": "bf16"}),
    ("activation", "rounding", 0, {"rounding": "activation first"}),
    ("activation", "formula", 1, {"formula": "gelu", "primitive": "contract"}),
    ("activation", "formula", 1, {"formula": "x sigmoid(1.702 x)", "primitive": "contract", "rounding": "every step"}),
    ("activation", "formula", 1, {"formula": "x sigmoid(1.3 x)", "primitive": "contract"}),
    ("activation", "formula", 1, {"formula": "x sigmoid(1.702 x), up plus 1", "primitive": "contract"}),
    ("activation", "formula", 1, {"formula": "silu, limit 1.25"}),
    ("activation", "formula", 0, {"formula": "up alone"}),
    ("residual", "formula", 0, {"formula": "x"}),
    ("residual", "formula", 0, {"formula": "x + 0.221359436 y"}),
    ("residual", "formula", 0, {"formula": "1.3 x + y"}),
    ("rope", "rounding", 0, {"rounding": "every step"}),
    ("rope", "formula", 1, {"formula": "halves, theta 100000"}),
    ("rope", "formula", 1, {"formula": "neighbours, theta 10000"}),
    ("rope", "positions", 1, {"positions": "one more"}),
    ("rope", "positions", 1, {"positions": "plus 17"}),
    ("rope", "positions", 1, {"positions": "plus -3 x 21, 40 x 27"}),
    ("rope", "formula", 1, {"formula": "halves, theta 32000"}),
    ("rope", "formula", 1, {"formula": "halves, theta 10000, first 0.375 of each head"}),
    ("rope", "formula", 1, {"formula": "halves, theta 10000, factor 1.25"}),
    ("rope", "positions", 1, {"positions": "times 0.125"}),
    ("attention", "split", 0, {"split": "2 parts"}),
    ("attention", "block", 0, {"block": "16 keys"}),
    ("attention", "rounding", 0, {"rounding": "none"}),
    ("attention", "rounding", 0, {"rounding": "scores and P"}),
    ("attention", "mask", 1, {"mask": "window of 16"}),
    ("attention", "mask", 1, {"mask": "chunks of 11"}),
    ("attention", "mask", 1, {"mask": "prefix of 6"}),
    ("attention", "scale", 1, {"scale": "1/D"}),
    ("attention", "scale", 1, {"scale": "times 1.3"}),
    ("attention", "formula", 1, {"formula": "softcap 20"}),
    ("attention", "formula", 1, {"formula": "softcap 7"}),
    ("attention", "formula", 1, {"formula": "sink"}),
    ("attention", "formula", 1, {"formula": "sinks 1.5"}),
    ("attention fp32", "primitive", 6, {"primitive": "torch exp, reciprocal"}),
    ("logprob", "rounding", 1, {"rounding": "log-softmax"}),
    ("logprob", "order", 3, {"order": "4 shards"}),
    ("logprob", "formula", 1, {"formula": "log(softmax + 0.0001)"}),
    ("logprob", "formula", 1, {"formula": "76 more of 0"}),
    ("logprob", "formula", 1, {"formula": "first 490"}),
    ("logprob", "rounding", 1, {"rounding": "4 decimals"}),
    ("logprob", "rounding", 1, {"rounding": "FP16 result"}),
    ("logprob", "primitive", 3, {"primitive": "exp2, log2"}),
    ("logprob", "primitive", 3, {"primitive": "exp2 of products, log2"}),
    ("logprob", "order", 3, {"order": "blocks of 128"}),
    ("logprob", "order", 3, {"order": "ascending"}),
    ("logprob", "order", 3, {"order": "lanes of 64"}),
    ("rope fp32", "primitive", 1, {"primitive": "FP32 angles, sine's fma"}),
    ("rope fp32", "rounding", 1, {"rounding": "BF16 table"}),
    ("rope fp32", "rounding", 1, {"rounding": "FP16 table"}),
    ("rope fp32", "rounding", 1, {"rounding": "BF16 angles"}),
    ("embedding", "formula", 0, {"formula": "row times sqrt(width)"}),
    ("embedding", "formula", 0, {"formula": "row times 12"}),
    ("embedding", "formula", 0, {"formula": "row, zeros of ids 24 to 47"}),
    ("embedding", "formula", 0, {"formula": "row, times 0 of ids 24 to 47"}),
    ("experts", "order", 1, {"order": "descending"}),
    ("experts", "accumulate", 1, {"accumulate": "fp32"}),
    ("experts", "formula", 1, {"formula": "no shared experts"}),
    ("experts", "formula", 1, {"formula": "activation gelu tanh"}),
    ("experts", "router/scale", 1, {"router__scale": "1.83"}),
    ("experts", "formula", 1, {"formula": "shared experts times 2.3"}),
    ("experts", "split", 1, {"split": "2 ranks"}),
    ("experts", "split", 1, {"split": "2 ranks of inner columns"}),
    ("experts", "rounding", 1, {"rounding": "activation first, weighted outputs, wide products"}),
    ("experts", "router/formula", 1, {"router__formula": "softmax, normalised, top 4"}),
    ("experts", "router/formula", 1, {"router__formula": "softmax"}),
    ("experts", "router/scale", 1, {"router__scale": "2.5"}),
]


@pytest.mark.parametrize(
    ("case", "field", "base", "changes"), PLANTS, ids=lambda v: str(v) if not isinstance(v, dict) else ""
)
def test_a_planted_field_is_named(case: str, field: str, base: int, changes: dict[str, str]) -> None:
    given, shape, dtype = CASES[case]
    subject, _, name = f"{given.kind}/{field}".rpartition("/")
    one, other = planted(given, base, shape, dtype), planted(given, base, shape, dtype, **changes)
    found = attribute(given, one, other)
    assert found.cause.name == f"{subject.split('/')[-1]}/{name}", found
    assert found.a is not None and found.b is not None and found.a.share_all == found.b.share_all == 1.0
    assert any(
        all(variant[n.replace("__", "/")] == value for n, value in changes.items())
        for variant in (found.b.variant, *found.b.alternatives)
    ), "what was planted is among what fits"


@pytest.mark.parametrize(
    ("field", "one", "other"),
    [
        ("block", "stored, 1x64", "stored, 1x32"),
        ("block", "128x128, 1x128", "128x128, token"),
        ("block", "channel, token", "tensor, token"),
        ("scale", "fp32", "fp32, reciprocal"),
        ("scale", "fp32", "bf16 of the weight"),
        ("operands", "e4m3", "e4m3, e5m2 rows"),
        ("scale", "pow2", "fp32, amax 240"),
    ],
)
def test_both_sides_quantise(field: str, one: str, other: str) -> None:
    """Each side's blocks and scales are found though neither side is plain."""
    given, shape, dtype = CASES["linear"]
    form = {"operands": "e4m3", "block": "128x128, 1x128", "scale": "fp32"}
    sides = [planted(given, 0, shape, dtype, **(form | {field: value})) for value in (one, other)]
    found = attribute(given, *sides)
    assert found.cause.name == f"linear/{field}" and found.a is not None and found.b is not None, found


def test_blocks_of_keys_in_the_other_direction() -> None:
    """Named though the blocks themselves are no usual whole form's."""
    given, shape, dtype = CASES["attention fp32"]
    order = "library: torch.matmul"
    sides = [planted(given, 6, shape, dtype, block="8 keys", order=f"{order}{end}") for end in ("", ", backwards")]
    found = attribute(given, *sides)
    assert found.cause.name == "attention/order" and found.a is not None and found.b is not None, found


@pytest.mark.parametrize(("case", "share"), [*((case, 0.2) for case in CASES), ("norm", 0.002), ("linear", 0.002)])
def test_noise_is_unattributed(case: str, share: float) -> None:
    given, shape, dtype = CASES[case]
    out = planted(given, 0, shape, dtype)
    other = perturbed(out, share)
    if torch.equal(out, other):
        pytest.skip("too few elements for this share: none was perturbed")
    found = attribute(given, out, other)
    assert found.cause.name == f"{given.kind}/{UNATTRIBUTED}", found
    assert found.a is not None and found.b is None


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_have_no_cause(case: str) -> None:
    given, shape, dtype = CASES[case]
    out = planted(
        given, 1 if len(SIMULATORS[given.kind].bases(given.problem(torch.zeros(shape)))) > 1 else 0, shape, dtype
    )
    found = attribute(given, out, out.clone())
    assert found.same and found.a is not None and found.b is not None


def test_what_fits_equally_is_listed_and_not_chosen() -> None:
    """Products 1 and 2 of four are equal, so that two lanes and two parts give the same bits: neither is claimed."""
    x, w = cases.randn(40, 4, seed=1), cases.randn(30, 4, seed=2)
    x[:, 2], w[:, 2] = x[:, 1], w[:, 1]
    given = Given("linear", {"x": x}, {"a.weight": w}, {})
    one = planted(given, 0, (40, 30), FP32)
    other = planted(given, 0, (40, 30), FP32, order="lanes of 2")
    assert torch.equal(other, planted(given, 0, (40, 30), FP32, split="2 parts, ascending")), "the premise"
    found = attribute(given, one, other)
    assert found.cause.field == UNATTRIBUTED and {"order", "split"} <= set(found.fields), found
    assert found.b is not None and len(found.b.alternatives) >= 1
    assert "explain the bits equally" in found.cause.detail


def test_what_is_not_known_is_not_guessed() -> None:
    """Missing weights, parameters or kinds end unattributed, not in an error."""
    given, shape, dtype = CASES["attention"]
    out = planted(given, 0, shape, dtype)
    bare = dataclasses.replace(given, parameters={})
    assert attribute(bare, out, perturbed(out, 0.1)).cause.name == f"attention/{UNATTRIBUTED}"
    given, shape, dtype = CASES["linear"]
    out = planted(given, 0, shape, dtype)
    bare = dataclasses.replace(given, weights={})
    assert attribute(bare, out, perturbed(out, 0.1)).cause.name == f"linear/{UNATTRIBUTED}"
    assert explain("x", "no such kind", {}, {}, {}, out, out).cause.name == f"{UNATTRIBUTED}/{UNATTRIBUTED}"


def test_other_inputs_are_replayed_on_their_own() -> None:
    """Where the inputs differ, the operator is the same if one form gives both sides' bits exactly, and only then."""
    given, shape, dtype = CASES["norm"]
    moved = dataclasses.replace(given, inputs={"x": given.inputs["x"].flip(0)})
    one, other = planted(given, 0, shape, dtype), planted(moved, 0, shape, dtype)
    foreign = planted(moved, 0, shape, dtype, rounding="before the weight")

    def across(b: torch.Tensor) -> Attribution:
        return explain("0.norm", "norm", given.inputs, given.weights, given.parameters, one, b, inputs_b=moved.inputs)

    assert across(other).same
    assert across(foreign).cause.name == "norm/rounding"
    assert across(perturbed(other, 0.001)).cause.name == f"norm/{UNATTRIBUTED}"


def test_nan_is_not_compared() -> None:
    given, shape, dtype = CASES["norm"]
    one, other = planted(given, 0, shape, dtype), planted(given, 1, shape, dtype)
    one[3], other[5, :100] = float("nan"), float("nan")
    assert attribute(given, one, other).cause.name == "norm/rounding"
