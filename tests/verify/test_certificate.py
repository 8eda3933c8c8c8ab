"""Certificates: accepted on a re-run, refused after one changed weight, one changed field, another contract, a broken
seal or a cut file; a planted fault lets none be written; a sample is drawn by its seed and compares less."""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.tiny_runs import recipe, write_model
from zerogap.cli import app
from zerogap.config import load_config
from zerogap.errors import CheckpointError, ConfigError
from zerogap.numerics import preset
from zerogap.verify.certificate import broken_seals, read_certificate, seal, write_certificate
from zerogap.verify.certify import certify, objections
from zerogap.verify.faults import fault
from zerogap.verify.recheck import ACCEPTED, APART, LEFT, OTHER, REFUSED, check
from zerogap.verify.short_run import REWARD, ShortRun

WEIGHT = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("certified") / "model")


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("certificate") / "certificate.json"
    write_certificate(path, certify(str(model), preset("bf16"), texts=["one and two are three, which is not four"]))
    return path


@pytest.fixture
def record(file):
    """A certificate that a test may change."""
    return copy.deepcopy(read_certificate(file))


def refused(result):
    return {line.field: line for line in result.lines if line.verdict == REFUSED}


def changed_model(model, folder, name=WEIGHT):
    """A copy of the model in which one element of one tensor is negative."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    flat = tensors[name].reshape(-1)
    flat[flat.abs().argmax()] *= -1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# ---------------------------------------------------------------------------------------------------- accepted


def test_an_exact_model_has_a_certificate_that_is_accepted_when_run_again(record):
    assert objections(record) == []
    assert broken_seals(record) == []
    assert [step["version"] for step in record["run"]["steps"]] == [0, 1, 2]
    assert all(version["changed"] for version in record["weights"])
    result = check(record)
    assert result.accepted, refused(result)
    assert not result.partly
    assert {line.verdict for line in result.lines} == {ACCEPTED}
    certified = record["neighbours"]["compared"] + sum(c["compared"] for c in record["ladder"])
    certified += sum(step["compared"] for step in record["run"]["steps"]) + sum(s["tokens"] for s in record["audit"])
    assert result.compared == certified


def test_a_model_that_lies_elsewhere_is_accepted(record, model, tmp_path):
    shutil.copytree(model, tmp_path / "moved")
    result = check(record, model=str(tmp_path / "moved"), sample=0.01)
    assert result.accepted, refused(result)
    assert next(line for line in result.lines if line.field == "model.source").verdict == OTHER


@pytest.mark.slow
@pytest.mark.parametrize(("family", "numerics"), [("qwen3_moe", "bf16"), ("deepseek_v3", "fp8-kv"), ("qwen2", "fp32")])
def test_every_family_and_mode_can_be_certified(family, numerics, tmp_path):
    record = seal(certify(str(write_model(tmp_path / "model", family)), preset(numerics)))
    assert objections(record) == []
    routed = {bool(sample["experts"]) for step in record["run"]["steps"] for sample in step["samples"]}
    assert routed == {family in ("qwen3_moe", "deepseek_v3")}
    result = check(record, sample=0.1)
    assert result.accepted, refused(result)


def test_calibrated_scales_are_part_of_it(model):
    numerics = preset("fp8-kv", kv_scale="calibrated")
    record = seal(certify(str(model), numerics))
    assert objections(record) == []
    assert all("kv_scales" in version["changed"] for version in record["weights"])
    result = check(record, sample=0.4)
    assert result.accepted, refused(result)


def test_a_recipe_is_certified_with_its_own_prompts_and_settings(tmp_path):
    asked = recipe(tmp_path, "numerics=fp8", "rollout.top_k=20", "algorithm.loss_type=dr_grpo", "trainable=[last:1]")
    record = seal(certify(asked.model, asked.contract(), recipe=asked))
    assert objections(record) == []
    said = {prompt["messages"][-1]["content"] for prompt in record["run"]["prompts"]}
    assert said == {f"say {word}" for word in ("one", "two", "three", "four", "five")}
    kept = record["run"]["recipe"]
    assert (kept["rollout"]["top_k"], kept["algorithm"]["loss_type"], kept["trainable"]) == (20, "dr_grpo", ["last:1"])
    assert all(name.startswith("model.layers.1.") for name in record["weights"][1]["changed"])
    (tmp_path / "train.jsonl").unlink()  # the record holds all that is needed
    result = check(record, sample=0.4)
    assert result.accepted, refused(result)


# ---------------------------------------------------------------------------------------------------- samples


def test_a_sample_is_drawn_by_its_seed_and_compares_less(record):
    whole, first, again, other = (check(record, sample=s, seed=n) for s, n in ((1.0, 0), (0.1, 1), (0.1, 1), (0.1, 2)))
    assert all(result.accepted for result in (whole, first, again, other))
    assert first.compared < whole.compared and other.compared < whole.compared
    assert first.lines == again.lines
    assert [line.field for line in first.lines] != [line.field for line in other.lines]
    assert any(line.verdict == LEFT for line in first.lines)


@pytest.mark.parametrize("sample", [0.0, -1.0, 1.5])
def test_a_sample_is_a_share(record, sample):
    with pytest.raises(ConfigError, match="share"):
        check(record, sample=sample)


# ---------------------------------------------------------------------------------------------------- refused


def test_one_changed_weight_is_refused_by_name_before_anything_is_computed(record, model, tmp_path):
    result = check(record, model=str(changed_model(model, tmp_path / "changed")))
    assert not result.accepted
    assert list(refused(result)) == [f"model.tensors.{WEIGHT}", f"weights.{WEIGHT}"]
    assert result.compared == 0
    assert next(line.field for line in result.lines if line.verdict == LEFT) == "neighbours"


def test_equal_values_in_another_dtype_are_the_same_tensors(record, model, tmp_path):
    shutil.copytree(model, tmp_path / "wide")
    tensors = load_file(tmp_path / "wide" / "model.safetensors")
    wide = {name: t.to(torch.float32) for name, t in tensors.items()}
    save_file(wide, tmp_path / "wide" / "model.safetensors", metadata={"format": "pt"})
    result = check(record, model=str(tmp_path / "wide"), sample=0.01)
    assert result.accepted, refused(result)


def test_a_bit_that_the_contract_rounds_away_is_refused_too(model, tmp_path):
    record = seal(certify(str(model), preset("fp8")))
    shutil.copytree(model, tmp_path / "changed")
    tensors = load_file(tmp_path / "changed" / "model.safetensors")
    small = tensors[WEIGHT].reshape(-1)
    small.view(torch.int16)[small.abs().argmin()] ^= 1
    save_file(tensors, tmp_path / "changed" / "model.safetensors", metadata={"format": "pt"})
    result = check(record, model=str(tmp_path / "changed"))
    assert list(refused(result)) == [f"model.tensors.{WEIGHT}"]


# What is edited, and the fields that are refused: for cheap fields, and for those that only a re-run can find.
EDITS = [
    ("identity.contract", "0123456789abcdef", "identity.contract"),
    ("contract.kv_split", 2048, "identity.contract"),
    ("contract.version", 2, "identity.contract"),
    ("model.spec.num_heads", 12, "model.spec.num_heads"),
    ("model.spec.norm_eps", 1e-6, "model.spec.norm_eps"),
    ("model.parameters", 5, "model.parameters"),
    ("model.tokenizer", "ab" * 32, "model.tokenizer"),
    ("model.source", "nowhere/", "model"),
    (f"model.tensors.{WEIGHT}", "0" * 32, f"model.tensors.{WEIGHT}"),
    (f"weights.0.changed.{WEIGHT}", "0" * 32, f"weights.{WEIGHT}"),
    ("weights.1.version", 0, "weights.version 0"),
    ("sequences.0", "7 700 3", "sequences[0]"),
    ("neighbours.trials", 3, "neighbours.trials"),
    ("neighbours.differing", 1, "neighbours"),
    ("ladder.2.differing", 4, "ladder.3"),
    ("ladder.0.number", 7, "ladder"),
    ("run.recipe.numerics", {"preset": "fp8"}, "run.recipe.numerics"),
    ("run.recipe.optimizer.max_steps", 9, "run.recipe.optimizer.max_steps"),
    ("run.recipe.rollout.page_size", 17, "run.recipe.rollout.page_size"),
    ("run.steps.1.mismatched", 2, "run.step 2"),
    ("run.steps.1.version", 7, "run.step 2"),
    ("audit.2.redrawn", 1, "audit.step 3"),
]
RESULTS = [
    ("neighbours.victims.2.logits", "0" * 32, "neighbours.victims[2].logits"),
    ("neighbours.compared", 17, "neighbours"),
    ("ladder.4.compared", 17, "ladder.5"),
    (f"weights.2.changed.{WEIGHT}", "0" * 32, f"weights.version 2.{WEIGHT}"),
    ("run.prompts.3.ids", "4 5", "run.prompts[3].ids"),
    ("run.steps.2.samples.5.logprobs", "0" * 32, "run.step 3.samples[5].logprobs"),
    ("run.steps.0.samples.1.kept", "0" * 32, "run.step 1.samples[1].kept"),
    ("run.steps.0.samples.1.finish_reason", "abort", "run.step 1.samples[1].finish_reason"),
    ("audit.0.tokens", 17, "audit.step 1"),
]
CAUSES = [  # what is run becomes another thing, found by a small sample, too
    ("seed", 1, "neighbours.drawn"),
    ("sequences.0", "1 2 9", "neighbours.victims[3].prompt"),
    ("run.prompts.0.messages.0.content", "What is 2 times 2?", "run.prompts[0].ids"),
    ("run.recipe.optimizer.learning_rate", 5e-4, f"weights.version 1.{WEIGHT}"),
    ("run.recipe.rollout.temperature", 1.0, "run.step 1.samples[0].logprobs"),
    ("run.recipe.seed", 3, "run.step 1.samples[0].ids"),
]


def edit(record, path, value):
    *parents, last = path.removesuffix(f".{WEIGHT}").split(".") + ([WEIGHT] if path.endswith(WEIGHT) else [])
    place = record
    for part in parents:
        place = place[int(part) if isinstance(place, list) else part]
    place[int(last) if isinstance(place, list) else last] = value
    return record


@pytest.mark.parametrize(("path", "value", "field"), EDITS)
def test_an_edited_field_is_refused_even_if_sealed_again(record, path, value, field):
    result = check(seal(edit(record, path, value)))
    assert field in refused(result)
    assert result.compared == 0, "what costs little is found before anything is computed"
    assert not result.accepted


def test_edited_results_are_refused_by_running_them(record):
    for path, value, _ in RESULTS:
        edit(record, path, value)
    result = check(seal(record))
    assert set(refused(result)) == {field for _, _, field in RESULTS}
    assert not result.accepted


@pytest.mark.parametrize(("path", "value", "field"), CAUSES)
def test_an_edited_cause_is_refused_by_running_it(record, path, value, field):
    result = check(seal(edit(record, path, value)), sample=0.01)
    assert field in refused(result)
    assert not result.accepted


@pytest.mark.parametrize("section", ["seed", "made", "run", "model", "sequences"])
def test_an_edited_section_breaks_the_seal_and_is_named(record, section):
    value = {
        "seed": 9,
        "made": {"at": "never", "seconds": {}},
        "run": {**record["run"], "steps": record["run"]["steps"][:2]},
        "model": {**record["model"], "source": "another"},
        "sequences": record["sequences"][:2],
    }[section]
    result = check({**record, section: value})
    assert refused(result)["seal"].here == f"broken: {section}"
    assert result.compared == 0


def test_an_edited_seal_is_named(record):
    assert broken_seals({**record, "seal": "0" * 64}) == ["seal"]
    assert broken_seals({**record, "sections": record["sections"] | {"run": "0" * 64}}) == ["run"]


def test_another_contract_is_refused_with_both_fingerprints(record):
    asked = preset("fp8")
    result = check(record, numerics=asked)
    line = refused(result)["identity.contract"]
    assert line.certified == preset("bf16").fingerprint()
    assert asked.fingerprint() in line.here and "linear 'fp8', not 'bf16'" in line.here
    assert result.compared == 0


# ---------------------------------------------------------------------------------------------------- other machines


def test_another_build_of_the_same_class_is_said_and_all_bits_are_compared(record):
    record["identity"]["build"] = "0123456789ab"
    result = check(seal(record), sample=0.01)
    assert result.accepted and not result.partly
    assert next(line for line in result.lines if line.field == "identity.build").verdict == OTHER
    assert any("all bits are compared" in note for note in result.notes)
    record["run"]["steps"][0]["samples"][0]["logprobs"] = "0" * 32
    assert not check(seal(record), sample=0.01).accepted


def test_on_another_backend_class_bits_stand_apart_and_equalities_are_run_again(record):
    record["identity"]["backend"] = "cpu/abacus"
    record["run"]["steps"][0]["samples"][0]["logprobs"] = "0" * 32
    record["weights"][1]["changed"][WEIGHT] = "0" * 32
    record["neighbours"]["victims"][0]["logits"] = "0" * 32
    result = check(seal(record))
    assert result.accepted and result.partly, refused(result)
    apart = {line.field for line in result.lines if line.verdict == APART}
    assert apart == {
        "identity.backend",
        "neighbours.victims[0].logits",
        "run.step 1.samples[0].logprobs",
        f"weights.version 1.{WEIGHT}",
    }
    assert any("another backend class" in note for note in result.notes)
    record["weights"][0]["changed"][WEIGHT] = "0" * 32
    assert not check(seal(record)).accepted, "weights on disk are the same everywhere"


# ---------------------------------------------------------------------------------------------------- faults


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("packing", {"neighbours", "ladder.2"}),
        ("other-side", {"ladder.3", "run"}),  # a drawn token has no log-prob on the trainer's side
        ("chunk-border", {"neighbours", "ladder.4"}),
        ("page-size", {"neighbours", "ladder.6"}),
        ("log-shift", {"ladder.10"}),
    ],
)
def test_a_planted_fault_is_found_and_named(model, name, fields):
    found = dict(objections(certify(str(model), preset("bf16"), fault=fault(name))))
    assert fields <= set(found)
    if "neighbours" in fields:
        assert "smallest that still differs" in found["neighbours"]


# ---------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.95])
def test_a_cut_file_is_refused(file, tmp_path, share):
    text = file.read_text()
    (tmp_path / "cut.json").write_text(text[: int(share * len(text))])
    with pytest.raises(CheckpointError, match=r"cut\.json: (cut short|damaged)"):
        read_certificate(tmp_path / "cut.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.pop("audit"), r"field `audit` is missing"),
        (lambda r: r["run"]["steps"][1].pop("compared"), r"field `run\.steps\[1\]\.compared` is missing"),
        (lambda r: r["run"].update(more=1), r"field `run\.more` is unknown"),
        (lambda r: r["run"]["recipe"].update(reward={"functions": ["os:system"]}), r"`run\.recipe\.reward` is unknown"),
        (lambda r: r["ladder"][0].update(compared="9"), r"field `ladder\[0\]\.compared` is '9', a count is needed"),
        (lambda r: r["ladder"][0].update(compared=-1), r"field `ladder\[0\]\.compared` is -1"),
        (lambda r: r.update(seed=True), r"field `seed` is True"),
        (lambda r: r.update(sequences=["1 2", "x"]), r"field `sequences\[1\]` is 'x'"),
        (lambda r: r.update(audit={}), r"field `audit` is {}, a list is needed"),
        (lambda r: r.update(model=[]), r"field `model` is \[\], a mapping is needed"),
        (lambda r: r["identity"].update(contract="zz"), r"field `identity\.contract` is 'zz'"),
        (lambda r: r.update(version=2), r"version 2, this build reads version 1"),
        (lambda r: r.update(format="other"), r"not a certificate"),
    ],
)
def test_a_field_of_another_kind_is_named(record, tmp_path, change, words):
    change(record)
    (tmp_path / "edited.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=words):
        read_certificate(tmp_path / "edited.json")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b"[]", "not a certificate"),
        (b'{"format": NaN}', "NaN is not a number"),
        (b'{"format": 1, "format": 2}', "'format' stands there twice"),
        (b"[" * 100_000, "damaged"),
        (b"\x80\x04K\x01.", "not UTF-8"),
    ],
)
def test_what_is_no_certificate_is_refused(tmp_path, content, words):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        read_certificate(tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_certificate(tmp_path / "absent")


def test_the_older_file_stays_until_the_new_one_is_whole(record, tmp_path):
    (tmp_path / "certificate.json").write_text("older")
    with pytest.raises(CheckpointError, match="`seed`"):
        write_certificate(tmp_path / "certificate.json", record | {"seed": "none"})
    with pytest.raises(TypeError):
        write_certificate(tmp_path / "certificate.json", record | {"contract": {"name": object()}})
    assert (tmp_path / "certificate.json").read_text() == "older"
    write_certificate(tmp_path / "certificate.json", record)
    assert [path.name for path in tmp_path.iterdir()] == ["certificate.json"]
    assert broken_seals(read_certificate(tmp_path / "certificate.json")) == []


def test_the_reward_is_never_what_a_record_names(record, tmp_path):
    section = record["run"]
    config = ShortRun(section["recipe"], tuple(p["messages"] for p in section["prompts"])).config("model", tmp_path)
    assert config.reward.functions == (REWARD,)


# ---------------------------------------------------------------------------------------------------- refused requests


def test_what_cannot_be_certified_is_refused(model, tmp_path):
    one_sided = load_config(recipe(tmp_path, "rollout.numerics=fp8").model_dump())
    with pytest.raises(ConfigError, match="nothing to certify"):
        certify(one_sided.model, one_sided.contract(), recipe=one_sided)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="no tokenizer"):
        certify(str(tmp_path / "model"), preset("bf16"))


# ---------------------------------------------------------------------------------------------------- the command


def run(*words):
    return CliRunner().invoke(app, ["verify", *map(str, words)])


def test_the_command_writes_and_accepts_and_refuses(model, tmp_path):
    file = tmp_path / "certificate.json"
    file.write_text("older")
    done = run(model, "--certificate", file, "--inject", "chunk-border", "--json", tmp_path / "facts.json")
    assert done.exit_code == 1
    assert "no certificate" in done.output and file.read_text() == "older"
    assert "ladder.4" in json.loads((tmp_path / "facts.json").read_text())["objections"]
    done = run(model, "--certificate", file, "--seed", 3)
    assert done.exit_code == 0, done.output
    assert "certified in" in done.output
    assert read_certificate(file)["seed"] == 3
    done = run("--check", file, "--sample", 0.01, "--json", tmp_path / "facts.json")
    assert done.exit_code == 0, done.output
    assert "accepted" in done.output and "refused" not in done.output
    assert json.loads((tmp_path / "facts.json").read_text())["accepted"]
    done = run("--check", file, "--model", changed_model(model, tmp_path / "changed"))
    assert done.exit_code == 1
    assert "refused" in done.output
    done = run("--check", file, "--numerics", "fp8")
    assert done.exit_code == 1
    assert preset("fp8").fingerprint() in done.output.replace("\n", "")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("model", "--check", "file"), "MODEL"),
        (("--check", "file", "--certificate", "file"), "--certificate"),
        (("model", "--sample", "0.5"), "--sample"),
        (("model", "--model", "other"), "--model"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words, key):
    done = run(*words)
    assert isinstance(done.exception, ConfigError)
    assert done.exception.key == key
