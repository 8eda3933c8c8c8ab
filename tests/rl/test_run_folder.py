"""What a run may replace in its output folder, and what it may not."""

import pytest

from tests.tiny_runs import recipe
from zerogap.errors import ConfigError
from zerogap.rl.loop import Run
from zerogap.rl.report import read_lines
from zerogap.rl.run_folder import RunFolder


@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize("name", ["weights", "checkpoints", "model"])
def test_what_no_run_wrote_is_never_replaced(tmp_path, name, resume):
    config = recipe(tmp_path, name="project")
    precious = tmp_path / "project" / name / "precious"
    precious.parent.mkdir(parents=True)
    precious.write_text("mine")
    with pytest.raises(ConfigError, match=f"output_dir.*{name}"):
        Run(config, resume)
    assert precious.read_text() == "mine"


def test_a_file_is_no_output_folder(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ConfigError, match=r"output_dir.*is a file"):
        Run(recipe(tmp_path))


def test_what_a_killed_process_left_is_cleared(tmp_path):
    config = recipe(tmp_path)
    left = tmp_path / "run" / ".model.partial-1" / "shard-0"
    left.parent.mkdir(parents=True)
    left.write_text("half")
    RunFolder(config.output_dir).begin(config, 0)
    assert not left.parent.exists()


def test_a_line_cut_off_inside_a_character_is_left_out(tmp_path):
    path = tmp_path / "completions.jsonl"
    path.write_bytes(b'{"step": 1}\n{"completion": "\xe2\x82')
    assert read_lines(path) == [{"step": 1}]
