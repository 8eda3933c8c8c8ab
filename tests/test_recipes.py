"""Every recipe in recipes/ can be read, says what is true, and runs: shrunk, without network, model and data."""

import functools
import re
import socket
from pathlib import Path

import pytest

from tests.tiny import LLAMA_8B
from zerogap.cli.inspect import as_bytes
from zerogap.config import load_config
from zerogap.models.inventory import inventory, kv_bytes
from zerogap.models.spec import ModelSpec
from zerogap.rl.smoke import LAYERS, run_smoke
from zerogap.weights.source import spec_at_hand

spec_once = functools.cache(spec_at_hand)  # reading the header of a GGUF file takes longer than a smoke run
RECIPES = {path.stem: path for path in sorted(Path("recipes").glob("*.yaml"))}
ONE_SIDED = {"smollm2-multiplication-one-sided": "none", "smollm2-multiplication-one-sided-tis": "token_tis"}
MODES = {
    "smollm2-multiplication-fp32": "fp32",
    "smollm2-multiplication": "bf16",
    "smollm2-multiplication-fp8": "fp8",
    "smollm2-multiplication-fp8-kv": "fp8-kv",
    "smollm2-multiplication-fp8-kv-calibrated": "fp8-kv",
    "llama-3.1-8b-bf16": "bf16",
    "llama-3.1-8b-fp8-kv": "fp8-kv",
}


def test_there_is_a_recipe_of_each_mode():
    for name, mode in MODES.items():
        assert load_config(RECIPES[name]).contract().name == mode
    assert load_config(RECIPES["smollm2-multiplication-fp8-kv-calibrated"]).contract().kv_scale == "calibrated"
    assert {name for name, path in RECIPES.items() if load_config(path).one_sided} == set(ONE_SIDED)
    for name, kind in ONE_SIDED.items():
        config = load_config(RECIPES[name])
        assert config.algorithm.correction.kind == kind
        assert (config.contract().name, config.rollout_contract().name) == ("bf16", "fp8")
        assert path_head(name).startswith("# NOT EXACT")


def path_head(name):
    return RECIPES[name].read_text().splitlines()[0]


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("smollm2-multiplication-")])
def test_the_modes_differ_in_nothing_but_the_mode(name):
    """So that their results can be compared."""
    base, other = (load_config(RECIPES[n]).model_dump() for n in ("smollm2-multiplication", name))
    assert other["output_dir"] == f"runs/{name}"
    for tree in (base, other):
        del tree["numerics"], tree["output_dir"], tree["rollout"]["numerics"], tree["algorithm"]["correction"]
    assert base == other


def test_the_two_of_the_8b_model_differ_in_the_mode_and_the_cache():
    base, other = (load_config(RECIPES[n]).model_dump() for n in ("llama-3.1-8b-bf16", "llama-3.1-8b-fp8-kv"))
    for tree in (base, other):
        del tree["numerics"], tree["output_dir"], tree["rollout"]["kv_cache_memory"]
    assert base == other


@pytest.mark.parametrize("name", ["llama-3.1-8b-bf16", "llama-3.1-8b-fp8-kv"])
def test_figures_in_the_comments_of_the_8b_recipes(name):
    text, config = RECIPES[name].read_text(), load_config(RECIPES[name])
    spec, contract = ModelSpec.from_hf(LLAMA_8B), config.contract()
    forms = inventory(spec, contract)
    assert f"{as_bytes(sum(f.nbytes for f in forms))} of weights" in text
    layer = sum(f.size for f in forms if f.layer == 0)
    assert config.trainable == ("last:8",) and f"{8 * layer / 1e9:.1f} billion parameters" in text
    assert (
        f"bytes each ({as_bytes(16 * 8 * layer)})" in text and f"all layers {as_bytes(16 * sum(f.size for f in forms))}"
    )
    assert f"12 bytes per trained parameter: {as_bytes(12 * 8 * layer)} each" in text
    token = sum(kv_bytes(spec, contract))
    length = config.data.max_prompt_length + config.rollout.max_completion_length
    (sequences, tokens, each) = re.search(r"(\d+) sequences of (\d+) tokens at ([\d.]+ KiB)", text).groups()
    assert (int(sequences), int(tokens), each) == (config.rollout.max_sequences, length, as_bytes(token))
    room = config.rollout.kv_cache_memory * 2**30 / (int(sequences) * int(tokens) * token)
    assert 1.0 <= room < 1.03
    assert str(sum(f.quantised for f in forms)) in text or contract.name == "bf16"


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs_and_is_as_exact_as_it_says(name, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a smoke run uses the network"))
    monkeypatch.setattr("zerogap.rl.smoke.spec_at_hand", spec_once)
    config = load_config(RECIPES[name])
    result = run_smoke(config)
    small = result.config
    assert result.compared > 0
    assert result.exact == (name not in ONE_SIDED) != result.one_sided
    assert (result.mismatched > 0) == result.one_sided
    assert small.algorithm == config.algorithm
    assert (small.contract(), small.rollout_contract()) == (config.contract(), config.rollout_contract())
    assert small.optimizer.lr_scheduler_type == config.optimizer.lr_scheduler_type
    assert small.optimizer.activation_recompute == config.optimizer.activation_recompute
    assert not Path(small.output_dir).exists()
    assert f"{LAYERS} random layers" in result.notes[0]
