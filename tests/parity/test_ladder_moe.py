"""The parity ladder with experts and latent attention: router ties, hot and empty experts, groups, shared experts,
dense layers, compressed queries, yarn; BF16, FP8 and every form of the cache.

Each of check 10's four optimizer steps moves weights, correction biases (where the family has them) and, with
calibrated scales, the scale set; the experts that rollout and trainer chose are compared with the log-probs.
"""

import dataclasses

import pytest

from tests.parity.routed_models import assert_planted, decoder_of, deepseek, qwen
from tests.tiny import tiny_decoder
from zerogap.errors import ConfigError
from zerogap.models.decoder import Decoder
from zerogap.models.moe_spec import MoESpec
from zerogap.models.spec import ModelSpec
from zerogap.ops.cpu import library
from zerogap.ops.moe import Routing
from zerogap.verify.faults import FAULTS, fault, planted
from zerogap.verify.ladder import LADDER, climb, subject_for

ALL = ("all",)
BUT_ROUTERS = ("*_proj*", "*norm.weight", "model.embed_tokens.weight", "lm_head.weight")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its contract, what its routers are made to do, the tensors trained, native threads."""

    spec: ModelSpec
    contract: dict
    router: str = ""
    trainable: tuple[str, ...] = ALL
    threads: int = 1

    def decoder(self) -> Decoder:
        return decoder_of(self.spec, self.contract["preset"], self.router, **_fields(self.contract))


def _fields(contract: dict) -> dict:
    return {name: value for name, value in contract.items() if name != "preset"}


BF16, FP8, FP8_KV = ({"preset": name} for name in ("bf16", "fp8", "fp8-kv"))
CALIBRATED = FP8_KV | {"kv_scale": "calibrated"}
POW2 = {"scale_format": "pow2"}
CASES = {
    "qwen": Case(qwen(num_layers=3), BF16, "steered"),
    "qwen, ties that stay": Case(qwen(), BF16, "tied", BUT_ROUTERS, threads=2),
    "qwen fp8": Case(qwen(), FP8 | POW2, "tied"),
    "qwen fp8, one expert for all": Case(qwen(5, 1), FP8, "steered", threads=2),
    "qwen fp8-kv": Case(qwen(), FP8_KV, "steered", threads=2),
    "qwen calibrated": Case(qwen(), CALIBRATED | POW2 | {"bf16_first": 1}, "tied"),
    "deepseek": Case(deepseek(), BF16, "tied", threads=2),
    "deepseek, compressed, yarn": Case(deepseek(96, yarn=True, num_layers=3), BF16, "steered"),
    "deepseek fp8, yarn": Case(deepseek(yarn=True), FP8 | {"bf16_tensors": ["shared_experts"]}, "steered", threads=2),
    "deepseek fp8, compressed": Case(deepseek(160, grouped=False), FP8 | POW2, "tied"),
    "deepseek fp8-kv": Case(deepseek(96), FP8_KV | POW2, "tied"),
    "deepseek calibrated": Case(deepseek(yarn=True, grouped=False), CALIBRATED, "steered", threads=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_check_is_exact(name):
    case = CASES[name]
    subject = dataclasses.replace(subject_for(case.decoder(), max_length=100), steps=3, trainable=case.trainable)
    with library.use_threads(case.threads):
        results = list(climb(subject))
    assert [r.number for r in results] == list(LADDER)
    for result in results:
        assert result.exact, f"check {result.number}, {result.name}: {result.differing} differ; {result.first}"
    if case.router == "steered" or case.trainable == BUT_ROUTERS:  # five updates later
        assert_planted(subject.decoder, subject.sequences[-1], case.router)


@pytest.mark.parametrize("name", CASES)
def test_routers_do_what_they_are_made_for(name):
    decoder = CASES[name].decoder()
    if decoder.needs_calibration:
        decoder.calibrate([range(3, 90)])
    assert_planted(decoder, range(3, 90), CASES[name].router)


# Every fault that only these families can have, on the smallest model that can.
EXPERTS, LATENTS = (lambda: decoder_of(qwen()), lambda: decoder_of(deepseek(), "fp8-kv"))
PLANTED = {
    "expert-capacity": EXPERTS,
    "router-ties": LATENTS,
    "raw-router-weights": EXPERTS,
    "latent-norm": LATENTS,
    "latent-rope": LATENTS,
    "stale-experts": EXPERTS,
    "stale-router-bias": LATENTS,
}


def test_every_fault_of_experts_and_latents_is_planted_below():
    dense, latents = tiny_decoder(), LATENTS()
    assert set(PLANTED) == {n for n, f in FAULTS.items() if f.lacks(dense) and not f.lacks(latents)}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_turns_its_own_check_red_first(name):
    subject = dataclasses.replace(subject_for(PLANTED[name](), max_length=100), steps=1)
    with planted(fault(name), subject) as faulty:
        red = [r.number for r in climb(faulty) if not r.exact]
    assert red, f"{name}: nothing turned red"
    assert red[0] == fault(name).check
    assert set(red[1:]) <= set(fault(name).follow)
    assert all(r.exact for r in climb(subject, [3])), "the subject is whole again"


def test_a_fault_that_routers_cannot_have_is_refused():
    raw = qwen(moe=MoESpec(Routing(4, 2, normalise=False), expert_size=32))
    for name, words in (("stale-router-bias", "correction bias"), ("raw-router-weights", "norm_topk_prob")):
        with pytest.raises(ConfigError, match=words), planted(fault(name), subject_for(decoder_of(raw))):
            pass
