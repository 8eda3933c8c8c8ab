"""The list of quantised tensors travels with checkpoints; one that differs is refused by its first tensor."""

import json

import pytest

from tests.tiny import tiny_decoder
from zerogap.errors import CheckpointError, ContractError
from zerogap.models.inventory import inventory
from zerogap.numerics import PRESETS
from zerogap.train.checkpoint import load_checkpoint, save_checkpoint
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
