"""Facts of operators from a config: those of a live model and of its trace agree."""

import pytest

from tests.diagnose.adapters.models import some_sequences, tiny_model
from zerogap.diagnose.adapters.torch_side import TorchSide
from zerogap.diagnose.config_facts import config_parameters
from zerogap.diagnose.side import RecordedSide

QWEN = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "sliding_window": 4096,
    "use_sliding_window": False,
}


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_a_trace_knows_what_the_live_side_knew(family):
    live = TorchSide(tiny_model(family), some_sequences())
    recorded = RecordedSide(live.trace)
    for node in live.nodes:
        facts, expected = recorded.parameters(node), live.parameters(node)
        assert {name: expected[name] for name in facts} == facts, node
    assert recorded.parameters("0.q_rope")["theta"] == 10000.0
    assert recorded.parameters("1.attention")["head_dim"] == 16


def test_older_configs_and_switched_off_windows_are_read():
    assert config_parameters("0.q_rope", QWEN) == {"theta": 1e6, "scaling": {}, "head_dim": 32, "num_heads": 4}
    attention = config_parameters("0.attention", QWEN)
    assert attention["sliding_window"] is None and attention["scale"] == 32**-0.5
    assert config_parameters("0.attention", QWEN | {"use_sliding_window": True})["sliding_window"] == 4096
    heads = {"q_norm": 4, "k_norm": 2, "input_norm": 1}
    for norm, count in heads.items():
        assert config_parameters(f"0.{norm}", QWEN) == {"eps": 1e-6, "num_heads": count}
    routed = QWEN | {
        "num_experts_per_tok": 2,
        "n_routed_experts": 8,
        "norm_topk_prob": False,
        "scoring_func": "sigmoid",
    }
    assert config_parameters("0.router", routed)["num_experts"] == 8
    assert config_parameters("0.router", routed)["normalise"] is False


def test_what_a_config_does_not_say_is_empty():
    assert config_parameters("0.attention", {}) == {}
    assert config_parameters("0.attention", QWEN | {"kv_lora_rank": 64}) == {}
    assert config_parameters("0.q_proj", QWEN) == {}
