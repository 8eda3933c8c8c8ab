"""The list of quantised tensors and the KV scales travel with checkpoints; what differs, is missing or is something
else is refused by name, and nothing of it is put in place."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from tests.tiny import tiny_decoder
from zerogap.errors import CheckpointError, ContractError
from zerogap.models.inventory import inventory
from zerogap.numerics import PRESETS
from zerogap.train import checkpoint as module
from zerogap.train.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from zerogap.train.trainer import Trainer


@pytest.mark.parametrize("numerics", ["bf16", "fp8", "fp8-kv"])
def test_a_checkpoint_says_what_is_quantised(tmp_path, numerics):
    trainer = Trainer(tiny_decoder("qwen3", numerics))
    path = save_checkpoint(tmp_path, 1, trainer, {})
    stored = json.loads((path / "state.json").read_text())["quantised"]
    forms = inventory(trainer.decoder.spec, PRESETS[numerics])
    assert stored == list(trainer.decoder.quantised()) == [form.name for form in forms if form.quantised]
    assert len(stored) == (0 if numerics == "bf16" else 14)
    assert load_checkpoint(path, trainer)["step"] == 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda names: names[:3] + names[4:],
            ContractError,
            r"\(1\): model\.layers\.0\.self_attn\.k_proj\.weight is qu",
        ),
        (lambda names: [*names, "lm_head.weight"], ContractError, r"\(1\): lm_head\.weight is quantised there and not"),
        (lambda names: None, CheckpointError, "does not say which tensors are quantised"),
    ],
)
def test_another_list_is_refused(tmp_path, change, error, message):
    """Both sides claim one contract, but a rule that picks tensors by name picked others."""
    trainer = Trainer(tiny_decoder("qwen3", "fp8"))
    file = save_checkpoint(tmp_path, 1, trainer, {}) / "state.json"
    facts = json.loads(file.read_text())
    before = trainer.decoder.digests()
    file.write_text(json.dumps(facts | {"quantised": change(facts["quantised"])}))
    with pytest.raises(error, match=message):
        load_checkpoint(file.parent, trainer)
    assert trainer.decoder.digests() == before


@pytest.fixture(scope="module")
def calibrated():
    trainer = Trainer(tiny_decoder(numerics="fp8-kv", kv_scale="calibrated"))
    trainer.decoder.calibrate([[1, 2, 3]])
    return trainer


@pytest.fixture(scope="module")
def saved(tmp_path_factory, calibrated):
    return save_checkpoint(tmp_path_factory.mktemp("saved"), 1, calibrated, {})


@pytest.fixture
def checkpoint(tmp_path, saved):
    """A copy of the calibrated trainer's checkpoint, to be damaged."""
    return shutil.copytree(saved, tmp_path / saved.name)


def changed(facts, name, value):
    """`facts` with one of them replaced, or left out where the value is None."""
    return {key: value if key == name else old for key, old in facts.items() if key != name or value is not None}


@pytest.mark.parametrize("value", [None, "x", [1]])
@pytest.mark.parametrize("name", ["step", "updates", "version", "trainable", "numerics", "digests", "extra"])
def test_a_fact_that_is_missing_or_something_else_is_named(checkpoint, calibrated, name, value):
    file = checkpoint / "state.json"
    before = calibrated.decoder.digests()
    file.write_text(json.dumps(changed(json.loads(file.read_text()), name, value)))
    words = "trains 1 tensors" if (name, value) == ("trainable", [1]) else f"checkpoint-1: state.json has {name} = "
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(file.parent, calibrated)
    assert calibrated.decoder.digests() == before


@pytest.mark.parametrize("content", [b"[1]", b"null", b"\xff\xfe", b""])
def test_a_state_that_is_no_mapping_is_refused(checkpoint, calibrated, content):
    file = checkpoint / "state.json"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="checkpoint-1"):
        load_checkpoint(file.parent, calibrated)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (None, "state.json holds none"),
        ("x", "state.json holds none"),
        ([[[1.0], [1.0]]], r"\(1, 2, 1\), this model needs \(2, 2, 2\)"),
        ([[[1.0, 1.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, -1.0]]], "positive numbers"),
        ([[[1.0, 1.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]]], "kv_scales has digest"),
    ],
)
def test_kv_scales_that_are_missing_or_others_are_refused(checkpoint, calibrated, scales, message):
    file = checkpoint / "state.json"
    facts, own = json.loads(file.read_text()), calibrated.decoder.kv_scales
    file.write_text(json.dumps(changed(facts, "kv_scales", scales)))
    with pytest.raises(CheckpointError, match=f"checkpoint-1: .*{message}"):
        load_checkpoint(file.parent, calibrated)
    calibrated.decoder.set_kv_scales(own)


def test_every_digest_must_be_there(checkpoint, calibrated):
    file = checkpoint / "state.json"
    facts = json.loads(file.read_text())
    del facts["digests"]["kv_scales"]
    file.write_text(json.dumps(facts))
    with pytest.raises(CheckpointError, match=r"kv_scales has digest .* says None"):
        load_checkpoint(file.parent, calibrated)


def test_a_moment_of_another_shape_is_refused_and_not_spread(checkpoint, calibrated):
    file = checkpoint / "trainer.safetensors"
    tensors = load_file(file)
    tensors["first/model.embed_tokens.weight"] = tensors["first/model.embed_tokens.weight"][:1] + 1.0
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="tensors differ from those of this run's optimizer"):
        load_checkpoint(file.parent, calibrated)
    assert not calibrated.optimizer.state()["first/model.embed_tokens.weight"].any()


def test_the_newest_is_the_highest_step_and_older_ones_go(tmp_path):
    """Step 10 is newer than step 9, although its name sorts before."""
    trainer = Trainer(tiny_decoder())
    for step in (8, 9, 10):
        save_checkpoint(tmp_path, step, trainer, {})
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-9"]


@pytest.mark.parametrize("fails", ["save_file", "replace_folder"])
def test_a_save_that_fails_leaves_the_checkpoints_that_were_there(tmp_path, monkeypatch, fails):
    trainer = Trainer(tiny_decoder())
    save_checkpoint(tmp_path, 9, trainer, {})
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, fails, full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(tmp_path, 10, trainer, {})
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    assert load_checkpoint(list_checkpoints(tmp_path)[-1], trainer)["step"] == 9


def test_what_a_killed_save_left_is_neither_listed_nor_kept(tmp_path):
    trainer = Trainer(tiny_decoder())
    save_checkpoint(tmp_path, 9, trainer, {})
    shutil.copytree(tmp_path / "checkpoint-9", tmp_path / ".checkpoint-10.partial")
    shutil.copytree(tmp_path / "checkpoint-9", tmp_path / ".checkpoint-7.old-1")
    (tmp_path / "checkpoint-11").mkdir()  # no state.json
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-9"]
    save_checkpoint(tmp_path, 10, trainer, {})
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]
    assert not list(tmp_path.glob(".*"))
