"""The parity ladder in FP8: linear layers, KV cache and attention, both scale modes and formats, and what stays BF16.

Check 10 trains for four optimizer steps; with calibrated scales each of them computes under a scale set of its own.
"""

import pytest

from tests.parity.test_ladder import REFUSED
from tests.tiny import tiny_decoder, tiny_spec
from zerogap.models.decoder import Decoder
from zerogap.ops.cpu import library
from zerogap.verify.faults import FAULTS, fault, planted
from zerogap.verify.ladder import LADDER, climb, subject_for

# name -> contract fields, sizes of the model. Widths are no multiples of 128 unless head_dim and heads make them so.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64}
ODD = {"hidden_size": 160, "intermediate_size": 208, "num_heads": 4, "num_kv_heads": 2, "head_dim": 80}
LONG = {"hidden_size": 192, "intermediate_size": 320, "num_heads": 4, "num_kv_heads": 1, "head_dim": 128}
KEPT = {"bf16_first": 1, "bf16_last": 1}
CASES = {
    "fp8": ("llama", {"preset": "fp8"}, WIDE),
    "fp8 pow2, kept layers": ("qwen3", {"preset": "fp8", "scale_format": "pow2", **KEPT}, ODD),
    "fp8, bf16 backward": ("llama", {"preset": "fp8", "linear_grad": "bf16"}, ODD),
    "fp8, kept tensors": ("qwen3", {"preset": "fp8", "bf16_tensors": ["q_proj", "gate_proj"]}, LONG),
    "fp8-kv": ("llama", {"preset": "fp8-kv"}, ODD),
    "fp8-kv pow2": ("qwen3", {"preset": "fp8-kv", "scale_format": "pow2", **KEPT}, LONG),
    "fp8-kv fp8 attention": ("llama", {"preset": "fp8-kv", "attention_math": "fp8"}, LONG),
    "calibrated": ("qwen3", {"preset": "fp8-kv", "kv_scale": "calibrated"}, WIDE),
    "calibrated pow2, kept layers": (
        "llama",
        {"preset": "fp8-kv", "kv_scale": "calibrated", "scale_format": "pow2", **KEPT},
        ODD,
    ),
    "calibrated fp8 attention": (
        "qwen3",
        {"preset": "fp8-kv", "kv_scale": "calibrated", "attention_math": "fp8"},
        ODD,
    ),
    "bf16 linear, fp8 cache": ("llama", {"preset": "bf16", "kv": "fp8", "kv_scale": "calibrated"}, LONG),
}


def decoder_of(name: str) -> Decoder:
    family, fields, sizes = CASES[name]
    changes = dict(fields)
    return tiny_decoder(family, changes.pop("preset"), spec=tiny_spec(family, num_layers=3, **sizes), **changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_check_is_exact(name):
    threads = 1 + list(CASES).index(name) % 2
    with library.use_threads(threads):
        results = list(climb(subject_for(decoder_of(name))))
    assert [r.number for r in results] == list(LADDER)
    for result in results:
        assert result.exact, f"check {result.number}, {result.name}: {result.differing} differ; {result.first}"


def test_quantisation_is_seen():
    """The modes compute different numbers: a ladder that compared a mode with itself by mistake would not notice."""
    from zerogap.verify.paths import trainer_logits

    sequences = [list(range(3, 90))]
    seen = set()
    for name in ("fp8", "fp8-kv", "fp8-kv fp8 attention"):
        _, fields, _ = CASES[name]
        changes = dict(fields)
        decoder = tiny_decoder("llama", changes.pop("preset"), **changes)
        seen.add(trainer_logits(decoder, sequences, [[0]])[0].numpy().tobytes())
    seen.add(trainer_logits(tiny_decoder("llama"), sequences, [[0]])[0].numpy().tobytes())
    assert len(seen) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in FAULTS if n not in REFUSED or n == "stale-scales"])
def test_a_planted_fault_turns_its_own_check_red_first(name):
    subject = subject_for(decoder_of("calibrated"))
    with planted(fault(name), subject) as faulty:
        red = [r.number for r in climb(faulty) if not r.exact]
    assert red, f"{name}: nothing turned red"
    assert red[0] == fault(name).check
    assert set(red[1:]) <= set(fault(name).follow)
