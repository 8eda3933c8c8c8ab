"""The benchmark of routed layers compares the same layer on both sides, and sees it where it does not."""

import copy

import pytest
import torch

from benchmarks import ops_moe as benchmark

FAMILIES = pytest.mark.parametrize("name", list(benchmark.CONFIGS))


def small(name):
    config = copy.deepcopy(benchmark.CONFIGS[name])
    config.hidden_size, config.moe_intermediate_size = 256, 128
    if name == "Moonlight":
        config.n_routed_experts = 20
    else:
        config.num_experts = 20
    return config


def sides(name, swap=""):
    """Both layers, with two of our tensors exchanged if `swap` names a pair, and tokens and gradients for them."""
    torch.manual_seed(1)
    config = small(name)
    block = benchmark.peer_layer(config)
    tensors = benchmark.by_name(block.state_dict())
    if swap:
        one, two = swap.split(" and ")
        tensors[one], tensors[two] = tensors[two], tensors[one]
    layer = benchmark.Layer(config, "bf16", tensors.__getitem__)
    layer.open_bins()
    return block, layer, config


@FAMILIES
def test_both_sides_are_the_same_layer(name) -> None:
    block, layer, config = sides(name)
    x = benchmark.common_tokens(block, layer, 48)
    dy = torch.randn_like(x)
    assert max(benchmark.compare(block, layer, x, dy).values()) < benchmark.LIMIT
    coded = benchmark.Layer(config, "fp8", lambda tensor: layer.handles[tensor].value())
    coded.open_bins(layer)
    with torch.no_grad():
        assert benchmark.difference(coded(x), layer(x)) < 0.15


@FAMILIES
def test_another_layer_is_refused(name) -> None:
    block, layer, _ = sides(name, "experts.3.gate_proj.weight and experts.3.up_proj.weight")
    x = benchmark.common_tokens(block, layer, 48)
    with pytest.raises(AssertionError, match="the layers differ"):
        benchmark.compare(block, layer, x, torch.randn_like(x))


def test_a_row_has_both_ratios() -> None:
    config = small("Moonlight")
    layer, cases, found = benchmark.against_peer("Moonlight", config, "forward 64", 1)
    benchmark.against_bf16(layer, config, cases, 1)
    (case,) = cases
    assert case.row["peer"] in benchmark.IMPLEMENTATIONS and len(found) == 3
    for ratio, mine in (("zerogap_over_peer", "zerogap_ms"), ("fp8_over_bf16", "fp8_ms")):
        assert case.row[ratio] > 0 and case.row[mine] > 0
