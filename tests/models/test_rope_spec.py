"""RoPE of a config: yarn in both spellings, written back, refused by name."""

import pytest

from zerogap.errors import ConfigError
from zerogap.models.rope_spec import RopeSpec

MOONLIGHT = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
YARNS = [
    MOONLIGHT,
    {"factor": 4.0, "original_max_position_embeddings": 32768},
    {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False, "attention_factor": 1.5},
    {"factor": 2, "original_max_position_embeddings": 64, "beta_fast": None, "mscale": None, "attention_factor": None},
]


@pytest.mark.parametrize("table", YARNS)
def test_yarn_is_read_in_both_spellings_and_written_back(table) -> None:
    old = RopeSpec.from_hf({"rope_theta": 50000, "rope_scaling": {"type": "yarn", **table}})
    new = RopeSpec.from_hf({"rope_parameters": {"rope_theta": 50000, "rope_type": "yarn", **table}})
    assert old == new and old.kind == "yarn"
    assert (old.factor, old.original_max_position) == (table["factor"], table["original_max_position_embeddings"])
    assert (old.truncate, old.attention_factor) == (table.get("truncate", True), table.get("attention_factor"))
    assert old.beta_fast == 32 and old.mscale == (table.get("mscale") or 0.0)
    assert RopeSpec.from_hf({"rope_theta": 50000, "rope_scaling": old.to_hf()}) == old
    written = old.to_hf()
    assert all(written[key] == value for key, value in table.items() if value is not None and key != "truncate")


def test_transformers_reads_what_is_written() -> None:
    from transformers import DeepseekV3Config

    spec = RopeSpec.from_hf({"rope_theta": 10000.0, "rope_scaling": {"type": "yarn", **MOONLIGHT}})
    config = DeepseekV3Config(rope_parameters={"rope_theta": 10000.0, **spec.to_hf()})
    assert RopeSpec.from_hf(config.to_dict()) == spec


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"factor": 0.5}, "rope_scaling.factor = 0.5"),
        ({"factor": None}, "rope_scaling.factor = None"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({"beta_fast": 0.5}, "rope_scaling.beta_fast = 0.5"),
        ({"attention_factor": -1.0}, "rope_scaling.attention_factor"),
        ({"mscale": "1"}, "rope_scaling.mscale"),
        ({"truncate": 1}, "truncate"),
        ({"type": "longrope"}, "rope_scaling.rope_type"),
    ],
)
def test_odd_values_are_refused_by_name(change, key) -> None:
    with pytest.raises(ConfigError, match=key):
        RopeSpec.from_hf({"rope_theta": 10000.0, "rope_scaling": {"type": "yarn", **MOONLIGHT, **change}})
