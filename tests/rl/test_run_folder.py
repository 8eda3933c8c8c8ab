"""What a run may replace in its output folder, and what it may not."""

import resource

import pytest

from tests.tiny_runs import lines, recipe, train, without_times
from zerogap.errors import ConfigError, OutputError
from zerogap.rl.loop import Run
from zerogap.rl.observer import Observer
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


def test_a_folder_that_cannot_be_made_is_refused_first(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"output_dir.*file is no folder"):
        Run(recipe(tmp_path, f"output_dir={tmp_path}/file/run"))


def test_a_file_that_cannot_be_written_is_an_output_error(tmp_path):
    run = Run(recipe(tmp_path, "checkpoint.every=1"))
    run.folder.path.mkdir()
    (run.folder.path / "metrics.jsonl").mkdir()  # nobody can append to it
    (run.folder.path / "metrics.jsonl" / "x").touch()
    run.folder.begin = lambda config, step: None
    with pytest.raises(OutputError, match=r"could not be written .*there is no checkpoint yet"):
        run.train()


def test_a_named_checkpoint_replaces_no_other_run_and_needs_work(tmp_path):
    config = recipe(tmp_path, "checkpoint.every=1", "optimizer.max_steps=2")
    train(config)
    newest = str(RunFolder(config.output_dir).checkpoints / "checkpoint-2")
    other = recipe(tmp_path, "optimizer.max_steps=1", name="other")
    train(other)
    with pytest.raises(ConfigError, match=r"output_dir.*holds a run, and .*checkpoint-2 is of another"):
        Run(recipe(tmp_path, name="other"), newest)
    for name in ("run", "new"):
        with pytest.raises(ConfigError, match=r"max_steps = 2: .*checkpoint-2 has done 2 steps"):
            Run(recipe(tmp_path, "checkpoint.every=1", "optimizer.max_steps=2", name=name), newest)
    assert (RunFolder(config.output_dir).model / "config.json").is_file()


def test_checkpoints_go_before_the_lines_that_they_need(tmp_path, monkeypatch):
    """Killed while an older checkpoint is taken up again: what is left has all lines of its newest checkpoint."""
    config = recipe(tmp_path, "checkpoint.every=1", "checkpoint.keep=3")
    run = train(config)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "_cut_lines", killed)
    with pytest.raises(KeyboardInterrupt):
        run.folder.begin(config, 1)
    monkeypatch.undo()
    assert [path.name for path in run.folder.checkpoints.iterdir()] == ["checkpoint-1"]
    assert {record["step"] for record in read_lines(run.folder.path / "metrics.jsonl")} >= {1}
    again = Run(config)
    assert again.step == 1
    assert again.train()
    assert again.decoder.digests() == run.decoder.digests()


class FillsUp(Observer):
    """From the second checkpoint on, no file may become longer than half a checkpoint's tensors."""

    def __init__(self, folder):
        self.checkpoints = RunFolder(folder).checkpoints

    def phase(self, step, name):
        if (step, name) == (2, "checkpoint"):
            size = (self.checkpoints / "checkpoint-1" / "trainer.safetensors").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_a_save_onto_a_full_disk_loses_nothing_that_was_whole(tmp_path):
    whole = train(recipe(tmp_path, "checkpoint.every=1"))
    config = recipe(tmp_path, "checkpoint.every=1", name="full")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(OutputError, match=r"full: a file could not be written .*checkpoint-1 is whole"):
            Run(config, "auto", FillsUp(config.output_dir)).train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in RunFolder(config.output_dir).checkpoints.iterdir()] == ["checkpoint-1"]
    again = Run(config)
    assert again.step == 1
    assert again.train()
    assert again.decoder.digests() == whole.decoder.digests()
    assert without_times(lines(again, "metrics")) == without_times(lines(whole, "metrics"))
    assert again.compared_tokens == whole.compared_tokens > 0
