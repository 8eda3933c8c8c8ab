"""The command line: instant help without torch, errors with key and mend, exit codes."""

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tests.parity.routed_models import deepseek, qwen
from tests.tiny_runs import write_model
from zerogap.cli import app, main
from zerogap.cli.audit import parse_steps
from zerogap.cli.demo import Task, demo_recipe
from zerogap.cli.display import as_time
from zerogap.cli.numerics_option import contract_from
from zerogap.config import load_config
from zerogap.errors import ConfigError, ParityError
from zerogap.verify.ladder import LADDER
from zerogap.weights.random_model import write_random_model

COMMANDS = ("demo", "train", "audit", "verify", "diagnose", "inspect", "generate", "eval", "export")


def test_help_names_every_command_and_imports_no_torch():
    code = (
        "import sys; sys.argv = ['zerogap', '--help']\n"
        "from zerogap.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert name in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name):
    done = CliRunner().invoke(app, [name, "--help"])
    assert done.exit_code == 0
    assert "Usage" in done.output


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("a.b", 3, "choose [1, 2]"), 2), (ParityError("7 of 9 log-probs differ"), 1)]
)
def test_deliberate_errors_end_with_their_message(error, code, monkeypatch, capsys):
    def fail(*_args, **_words):
        raise error

    monkeypatch.setattr("zerogap.config.load_config", fail)
    monkeypatch.setattr("sys.argv", ["zerogap", "train", "recipe.yaml"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == code
    assert f"{type(error).__name__}: {error}" in capsys.readouterr().err


def test_steps_of_an_audit():
    assert parse_steps("1,4, 10-12") == [1, 4, 10, 11, 12]
    for text in ("", "a", "1-", "-3", "1,,2"):
        with pytest.raises(ConfigError, match=r"1,4,10-12"):
            parse_steps(text)


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.6, "1:00 min"), (365, "6:05 min"), (7800, "2:10 h")])
def test_times(seconds, text):
    assert as_time(seconds) == text


@pytest.mark.parametrize("task", list(Task))
def test_the_demo_is_the_recipe_of_its_task(task):
    """A reader who trains the recipe gets the demo's run; only folder, length and what is looked at may differ."""
    recipe = load_config(f"recipes/smollm2-{task.value.replace('_', '-')}.yaml").model_dump()
    demo = load_config(demo_recipe(task, recipe["optimizer"]["max_steps"], recipe["output_dir"])).model_dump()
    for section in ("logging", "eval", "data"):
        demo.pop(section), recipe.pop(section)
    assert demo == recipe


def test_a_prompt_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("absent", "binary"):
        done = CliRunner().invoke(app, ["generate", "model", "--prompt-file", str(tmp_path / name)])
        assert isinstance(done.exception, ConfigError)
        assert name in str(done.exception)


@pytest.mark.parametrize("command", ["audit", "verify", "diagnose", "inspect"])
def test_a_results_file_that_cannot_be_written_is_refused_before_the_work(command, tmp_path):
    for place, words in ((tmp_path / "absent" / "facts.json", "no folder"), (tmp_path, "it is a folder")):
        done = CliRunner().invoke(app, [command, "no model or run", "--json", str(place)])
        assert isinstance(done.exception, ConfigError), done.exception
        assert "--json" in str(done.exception) and words in str(done.exception)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "model")


CALIBRATED = "{preset: fp8-kv, kv_scale: calibrated, bf16_layers: {last: 1}}"


def test_generate_takes_every_mode(tiny_model):
    """The same greedy log-prob twice under a mode, and another one under another mode."""

    def total(numerics):
        words = ["--prompt", "say one", "--max-tokens", "8", "--logprobs", "--numerics", numerics]
        done = CliRunner().invoke(app, ["generate", str(tiny_model), *words])
        assert done.exit_code == 0, done.output
        return re.search(r"\[log-prob (-[\d.]+)\]", done.output)[1]

    totals = [total(numerics) for numerics in ("fp32", "bf16", "fp8", "fp8-kv", CALIBRATED)]
    assert len(set(totals)) == len(totals)
    assert total(CALIBRATED) == totals[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "numerics"), [(qwen(), "bf16"), (deepseek(96), "fp8-kv")])
def test_verify_takes_models_with_experts_and_latent_attention(spec, numerics, tmp_path):
    """From a folder without a tokenizer; a fault that the model cannot have is refused by name."""
    folder = write_random_model(tmp_path / "model", spec, peak=2.0)
    words = ["verify", str(folder), "--numerics", numerics]
    done = CliRunner().invoke(app, [*words, "--json", str(tmp_path / "facts.json")])
    assert done.exit_code == 0, done.output
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["exact"] and [check["number"] for check in facts["checks"]] == list(LADDER)
    refused = "stale-router-bias" if spec.mla is None else "stale-scales"
    done = CliRunner().invoke(app, [*words, "--inject", refused])
    assert isinstance(done.exception, ConfigError) and refused in str(done.exception)


def test_verify_says_which_contract_was_exact(tiny_model, tmp_path):
    words = ["--numerics", CALIBRATED, "--json", str(tmp_path / "facts.json")]
    done = CliRunner().invoke(app, ["verify", str(tiny_model), *words])
    assert done.exit_code == 0, done.output
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["exact"] and all(check["exact"] for check in facts["checks"])
    assert facts["numerics"] == contract_from(CALIBRATED).fields()
