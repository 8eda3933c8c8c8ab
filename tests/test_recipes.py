"""Every recipe in recipes/ can be read, says what is true, and runs: shrunk, without network, model and data."""

import functools
import re
import socket
from pathlib import Path

import pytest

from zerogap.cli.inspect import as_bytes
from zerogap.config import load_config
from zerogap.models.advice import with_words
from zerogap.models.devices import device_memory, reserved
from zerogap.models.inventory import inventory, kv_bytes
from zerogap.models.layout import Layout
from zerogap.models.memory import memory_plan, trained_names
from zerogap.models.parameters import count_parameters, total
from zerogap.rl.smoke import LAYERS, run_smoke
from zerogap.weights.source import spec_at_hand

spec_once = functools.cache(spec_at_hand)  # reading the header of a GGUF file takes longer than a smoke run
RECIPES = {path.stem: path for path in sorted(Path("recipes").glob("*.yaml"))}
ONE_SIDED = {
    "smollm2-multiplication-one-sided": "none",
    "smollm2-multiplication-one-sided-tis": "token_tis",
    "small-moe-one-sided": "none",
}
LARGE = {  # stem -> layers that are trained
    "llama-3.1-8b": 8,
    "qwen3-30b-a3b": 4,
    "moonlight-16b-a3b": 8,
}
MODES = {
    "smollm2-multiplication-fp32": "fp32",
    "smollm2-multiplication": "bf16",
    "smollm2-multiplication-fp8": "fp8",
    "smollm2-multiplication-fp8-kv": "fp8-kv",
    "smollm2-multiplication-fp8-kv-calibrated": "fp8-kv",
    "llama-3.1-8b-bf16": "bf16",
    "llama-3.1-8b-fp8-kv": "fp8-kv",
    "qwen3-30b-a3b-bf16": "bf16",
    "qwen3-30b-a3b-fp8-kv": "fp8-kv",
    "moonlight-16b-a3b-bf16": "bf16",
    "moonlight-16b-a3b-fp8-kv": "fp8-kv",
    "small-moe": "bf16",
    "small-moe-fp8": "fp8",
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


@pytest.mark.parametrize(
    ("base", "name"),
    [
        (base, name)
        for base in ("smollm2-multiplication", "small-moe")
        for name in RECIPES
        if name.startswith(f"{base}-")
    ],
)
def test_the_modes_differ_in_nothing_but_the_mode(base, name):
    """So that their results can be compared."""
    first, other = (load_config(RECIPES[n]).model_dump() for n in (base, name))
    assert other["output_dir"] == f"runs/{name}"
    for tree in (first, other):
        del tree["numerics"], tree["output_dir"], tree["rollout"]["numerics"], tree["algorithm"]["correction"]
    assert first == other


@pytest.mark.parametrize("stem", LARGE)
def test_the_two_of_a_large_model_differ_in_the_mode_and_the_cache(stem):
    base, other = (load_config(RECIPES[f"{stem}-{mode}"]).model_dump() for mode in ("bf16", "fp8-kv"))
    for tree in (base, other):
        del tree["numerics"], tree["output_dir"], tree["rollout"]["kv_cache_memory"]
    assert base == other


@pytest.mark.parametrize("mode", ["bf16", "fp8-kv"])
@pytest.mark.parametrize(("stem", "layers"), LARGE.items())
def test_figures_in_the_comments_of_large_recipes(stem, layers, mode):
    text, config = RECIPES[f"{stem}-{mode}"].read_text(), load_config(RECIPES[f"{stem}-{mode}"])
    spec, contract = spec_once(config.model), config.contract()
    forms = inventory(spec, contract)
    assert f"{as_bytes(sum(f.nbytes for f in forms))} of weights" in text
    assert config.trainable == (f"last:{layers}",) and f"of {spec.num_layers} layers" in text
    counts = total(count_parameters(spec, trained_names(spec, contract, config.trainable)))
    assert f"{counts.trained / 1e9:.1f} billion parameters" in text
    assert f"bytes each ({as_bytes(16 * counts.trained)})" in text
    assert re.search(rf"of all (layers|tensors) {re.escape(as_bytes(16 * counts.total))}", text)
    assert f"12 bytes per trained parameter: {as_bytes(12 * counts.trained)} each" in text
    token = sum(kv_bytes(spec, contract))
    length = config.data.max_prompt_length + config.rollout.max_completion_length
    (sequences, tokens, each) = re.search(r"(\d+) sequences of (\d+) tokens at ([\d.]+ KiB)", text).groups()
    assert (int(sequences), int(tokens), each) == (config.rollout.max_sequences, length, as_bytes(token))
    room = config.rollout.kv_cache_memory * 2**30 / (int(sequences) * int(tokens) * token)
    assert 1.0 <= room < 1.03
    assert f"{sum(f.quantised for f in forms):,} matrices" in text or contract.name == "bf16"
    if spec.moe is not None:
        rows = config.optimizer.micro_batch_tokens * spec.moe.top_k // spec.moe.num_experts
        assert f"each expert sees about {rows} of these rows" in text
        figures = (
            f"{counts.total / 1e9:.1f} billion parameters, {counts.active / 1e9:.2f} billion of which a token uses"
        )
        assert figures in text


@pytest.mark.parametrize("name", [f"{stem}-{mode}" for stem in LARGE for mode in ("bf16", "fp8-kv")])
def test_large_recipes_fit_the_device_that_they_name(name):
    """The Llama ones a GPU of 80 GB, the others of 141 GB; and all tensors the layout that they name."""
    text, config = RECIPES[name].read_text(), load_config(RECIPES[name])
    spec, device = spec_once(config.model), "h100-80gb" if name.startswith("llama") else "h200-141gb"
    assert ("80 GB" if device == "h100-80gb" else "141 GB") in " ".join(text.replace("#", " ").split())
    room = device_memory(device, None) - reserved(device)
    assert memory_plan(spec, config).total <= room
    if named := re.search(r"trainable=all --devices (\d+) --layout (\S+)`", text):
        layout = Layout.parse(named[2], int(named[1]))
        assert memory_plan(spec, with_words(config, ["trainable=all"]), layout).total <= room


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
