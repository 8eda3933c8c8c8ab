"""A trace's weights come from the folder it names, and only if they are those that the side computed with."""

import pytest
import torch
from safetensors.torch import save_file

from tests.bits import assert_same_bits
from tests.diagnose.sides import recorded
from zerogap.diagnose.sketch import sketch
from zerogap.diagnose.source_weights import SourceWeights

NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(6, 4, generator=generator).bfloat16() for n in (NAME, "model.embed_tokens.weight")}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 16)
    return tmp_path, tensors


def test_tensors_of_the_folder_are_handed_out(folder):
    path, tensors = folder
    side = recorded(source=str(path), weights={NAME: sketch(tensors[NAME])})
    assert_same_bits(side.weight(NAME), tensors[NAME])
    assert_same_bits(side.weight("lm_head.weight"), tensors["model.embed_tokens.weight"], "a tied head")
    assert side.weight("model.norm.weight") is None


def test_another_version_of_a_tensor_is_not_handed_out(folder):
    path, tensors = folder
    assert recorded(source=str(path), weights={NAME: sketch(tensors[NAME] * 2)}).weight(NAME) is None


def test_a_side_that_held_them_wider_gets_them_wider(folder):
    path, tensors = folder
    side = recorded(source=str(path), weights={NAME: sketch(tensors[NAME].float())})
    assert side.weight(NAME).dtype == torch.float32


@pytest.mark.parametrize("folder", ["", "no/such/folder"])
def test_no_folder_no_weights(folder):
    assert SourceWeights(folder, {}).get(NAME) is None
