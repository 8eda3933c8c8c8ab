"""The fault corpus is what it says: faults change what is compared, controls do not; and how verdicts are scored."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from zerogap.diagnose.corpus import arithmetic
from zerogap.diagnose.corpus.open_modules import OpenAttention, OpenLayer, exact
from zerogap.diagnose.corpus.workshop import Workshop, turn
from zerogap.diagnose.self_test import CLEAN, Case, FaultFile, Score, fault_files, run
from zerogap.diagnose.side import Ask
from zerogap.diagnose.trace import Trace
from zerogap.errors import ConfigError

FILES = fault_files()
WORKSHOP = Workshop()


def test_corpus_size() -> None:
    assert sum(not f.clean for f in FILES) >= 60
    assert sum(f.clean for f in FILES) >= 12
    for file in FILES:
        assert len(file.module.__doc__ or "") > 60, f"{file.name} does not say what is wrong"


def _counted(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    ids = np.concatenate([s.ids[s.counted] for s in trace.sequences])
    pairs = zip(trace.recorded.logprobs, trace.sequences, strict=True)
    return ids, np.concatenate([p[s.counted] for p, s in pairs])


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_a_fault_changes_what_counts_and_a_control_does_not(file: FaultFile) -> None:
    a, b = file.module.sides(WORKSHOP)
    (ids_a, logp_a), (ids_b, logp_b) = _counted(a.trace), _counted(b.trace)
    lengths = [[len(s.ids) for s in side.trace.sequences] for side in (a, b)]
    same_ids = lengths[0] == lengths[1] and np.array_equal(ids_a, ids_b)
    if file.expected[0].startswith("ids/"):
        assert not same_ids
        return
    assert same_ids
    known = ~(np.isnan(logp_a) | np.isnan(logp_b))
    assert known.mean() > 0.9 and np.isfinite(logp_a[known]).all() and np.isfinite(logp_b[known]).all()
    different = (logp_a.view(np.int32) != logp_b.view(np.int32))[known].sum()
    assert (different == 0) == file.clean, f"{different} of {known.sum()} log-probs differ"


def test_open_modules_compute_the_same_bits() -> None:
    plain, opened = WORKSHOP.model(), WORKSHOP.model()
    turn(opened, "self_attn", OpenAttention)
    turn(opened, r"layers\.\d", OpenLayer)
    first, second = (WORKSHOP.torch_side(m).trace.recorded.logprobs for m in (plain, opened))
    assert all(np.array_equal(p, q, equal_nan=True) for p, q in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "ask",
    [
        Ask("decode"),
        Ask("chunked", chunk=5),
        Ask("prefix_hit"),
        Ask(batches=((3, 1), (2, 0))),
        Ask(neighbours=([5] * 37, [7, 8, 9])),
        Ask("decode", batches=((0, 1, 2, 3),)),
    ],
)
@pytest.mark.parametrize("padding", ["left", "right"])
def test_exact_models_have_the_same_bits_on_every_path(ask: Ask, padding: str) -> None:
    model = WORKSHOP.model()
    exact(model)
    side = WORKSHOP.torch_side(model, padding=padding)
    found = side.again(ask)
    assert found is not None
    for expected, got in zip(side.trace.recorded.logprobs, found.logprobs, strict=True):
        assert np.array_equal(expected, got, equal_nan=True)


def test_fma_rounds_once() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 4000, generator=generator)
    c = -(a * b) * (1 + torch.randn(4000, generator=generator) * 2.0**-20)
    c[:1000] = torch.randn(1000, generator=generator)
    got = arithmetic.fma(a, b, c)
    for x, y, z, r in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        exact_value = Fraction(x) * Fraction(y) + Fraction(z)
        near = [np.nextafter(np.float32(r), np.float32(s)) for s in (-np.inf, np.inf)]
        assert all(abs(Fraction(r) - exact_value) <= abs(Fraction(float(n)) - exact_value) for n in near)


def test_tf32_and_truncation() -> None:
    x = torch.tensor([1.0 + 2.0**-11, 1.0 + 3 * 2.0**-11, 1.0 + 2.0**-10, -1.0 - 2.0**-11 - 2.0**-20])
    assert arithmetic.tf32(x).tolist() == [1.0, 1.0 + 2.0**-9, 1.0 + 2.0**-10, -1.0 - 2.0**-10]
    assert arithmetic.truncated(torch.tensor([1.0 + 2.0**-7 - 2.0**-20])).tolist() == [1.0]


def test_attention_forms_agree_where_they_are_the_same_maths() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, h, 21, 16, generator=generator) for h in (4, 2, 2))
    mask = torch.full((21, 21), -1e30).triu(1)[None, None]
    expected = arithmetic.eager(q, k, v, mask, 0.25)
    for options in ({"block": 64}, {"block": 4}, {"block": 8, "parts": 3}, {"block": 8, "dtype": torch.float64}):
        got = arithmetic.online(q, k, v, mask, 0.25, **options)  # type: ignore[arg-type]
        assert (got - expected).abs().max() < 2e-6, options


# ---------------------------------------------------------------------------------------------------- scoring


def _case(expected: str, said: str) -> Case:
    return Case("x", (expected,) if isinstance(expected, str) else expected, said, "", "", 1.0)


def test_scores() -> None:
    score = Score(
        (
            _case("norm/rounding", "norm/rounding"),
            _case("linear/split", "linear/order"),  # wrong field
            _case("rope/formula", "unattributed/unattributed"),  # missed, and no false claim
            _case("attention/scale", "attention/unattributed"),  # the same
            _case("ids/tokens", "clean"),
            _case(CLEAN, "clean"),
            _case(CLEAN, "weights/stale"),  # blamed
        )
    )
    assert score.num_faults == 5 and len(score.controls) == 2
    assert score.precision == 1 / 3
    assert score.recall == 1 / 5
    assert [c.said for c in score.blamed] == ["weights/stale"]
    table = score.confusion()
    assert table["linear"] == {"wrong field": 1} and table["attention"] == {"field unattributed": 1}
    assert score.to_json()["num_faults"] == 5 and "precision 0.333" in score.summary()


def test_two_true_descriptions() -> None:
    case = Case("x", ("attention/split", "neighbours/batch_size"), "neighbours/batch_size", "neighbours", "", 1.0)
    assert case.right and Score((case,)).confusion() == {"neighbours": {"neighbours": 1}}


def test_a_folder_of_faults(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "shared.py").write_text('"""No fault."""\nVALUE = 1\n')
    (tmp_path / "mine" / "one.py").write_text('"""Doc."""\nEXPECTED = "norm/order"\ndef sides(workshop): ...\n')
    (file,) = fault_files(tmp_path)
    assert file.name == "mine/one" and file.expected == ("norm/order",)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('EXPECTED = "norm/colour"\ndef sides(workshop): ...\n', "EXPECTED"),
        ('EXPECTED = "norm/order"\n', "sides"),
        ("", "faults"),
    ],
)
def test_refused_fault_files(tmp_path: Path, text: str, key: str) -> None:
    (tmp_path / "one.py").write_text(f'"""Doc."""\n{text}')
    with pytest.raises(ConfigError, match=key):
        fault_files(tmp_path)


def test_a_fault_file_that_raises_is_a_row_and_stops_nothing(tmp_path: Path) -> None:
    broken = "def sides(workshop):\n    raise ValueError('no such kernel')\n"
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(f'"""Doc."""\nEXPECTED = "norm/order"\n{broken}')
    score = run(tmp_path)
    assert [c.said for c in score.cases] == ["error", "error"] and score.recall == 0.0
    assert "no such kernel" in score.cases[0].detail
