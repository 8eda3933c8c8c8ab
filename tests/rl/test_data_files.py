"""Data sets as people bring them: JSON, parquet, folders, what `datasets` saved. The same rows from every kind."""

import json

import numpy as np
import pytest

from zerogap.config import DataConfig, DataSource
from zerogap.errors import ConfigError
from zerogap.rl import data_files
from zerogap.rl.data import load_prompts
from zerogap.rl.data_files import read_records

WHY = "this kind of data set is an extra: pip install 'zerogap[data]'"
ROWS = [
    {"question": "2+2?", "answer": "4", "tags": ["a", "b"], "level": {"name": "easy", "n": 1}},
    {"question": "1\u2028\u00e9\U0001f600", "answer": "5", "tags": [], "level": {"name": "hard", "n": None}},
    {"question": "3+3?", "answer": "6", "tags": ["c"], "level": {"name": "easy", "n": 0}},
]
VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": f"q{i}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"index": i, "split": "train"},
    }
    for i in range(3)
]


def parquet(path, rows):
    table = pytest.importorskip("pyarrow", reason=WHY).Table.from_pylist(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    pytest.importorskip("pyarrow.parquet", reason=WHY).write_table(table, path, row_group_size=2)
    return path


def jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def array(path, rows):
    path.write_text(json.dumps(rows, indent=1))
    return path


def saved(path, rows):
    datasets = pytest.importorskip("datasets", reason=WHY)
    datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


def saved_as_numpy(path, rows):
    datasets = pytest.importorskip("datasets", reason=WHY)
    datasets.Dataset.from_list(rows).with_format("numpy").save_to_disk(path)
    return path


def saved_with_splits(path, rows):
    datasets = pytest.importorskip("datasets", reason=WHY)
    parts = {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:1])}
    datasets.DatasetDict(parts).save_to_disk(path)
    return path


def folder_of_shards(path, rows):
    parquet(path / "data" / "train-00000-of-00002.parquet", rows[:2])
    parquet(path / "data" / "train-00001-of-00002.parquet", rows[2:])
    parquet(path / "data" / "test-00000-of-00001.parquet", rows[:1])
    return path


KINDS = {
    "a.jsonl": jsonl,
    "a.json": array,
    "lines.json": jsonl,
    "a.parquet": parquet,
    "saved": saved,
    "numpy": saved_as_numpy,
    "splits": saved_with_splits,
    "shards": folder_of_shards,
}


def load(path, needs_answer=True, **source):
    return load_prompts(DataConfig(train={"path": str(path), **source}), 0, lambda _: needs_answer)


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_the_same_from_every_kind(tmp_path, name):
    data = load(KINDS[name](tmp_path / name, ROWS))
    assert [row.prompt[0]["content"] for row in data.train] == [row["question"] for row in ROWS]
    wanted = [{k: v for k, v in row.items() if k != "question"} for row in ROWS]
    assert [row.columns for row in data.train] == wanted
    assert [type(row.columns["tags"]) for row in data.train] == [list] * 3
    assert "3 rows" in data.summary[0]
    assert len({row.name for row in data.train}) == 3


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_verl_are_recognised_in_every_kind(tmp_path, name):
    data = load(KINDS[name](tmp_path / name, VERL))
    assert [list(row.prompt) for row in data.train] == [row["prompt"] for row in VERL]
    assert [row.columns["answer"] for row in data.train] == ["0", "1", "2"]
    assert data.train[2].columns["extra_info"] == {"index": 2, "split": "train"}
    assert data.train[0].columns["data_source"] == "openai/gsm8k"


def test_parquet_of_pandas_with_arrays_of_messages(tmp_path):
    """What verl's own preprocessing writes: an object column with NumPy arrays of dicts."""
    pandas = pytest.importorskip("pandas", reason=WHY)
    frame = pandas.DataFrame(VERL)
    frame["prompt"] = [np.array(row["prompt"], dtype=object) for row in VERL]
    frame.to_parquet(tmp_path / "verl.parquet")
    data = load(tmp_path / "verl.parquet")
    assert [list(row.prompt) for row in data.train] == [row["prompt"] for row in VERL]
    assert data.train[1].columns["reward_model"] == {"style": "rule", "ground_truth": "1"}


def test_rows_in_memory_may_hold_arrays_of_dicts(tmp_path):
    """As pandas gives them back."""
    from zerogap.rl.data_rows import read_rows

    record = {**VERL[1], "prompt": np.array(VERL[1]["prompt"], dtype=object), "extra_info": {"index": np.int64(4)}}
    rows, _ = read_rows([("here:1", record)], DataSource(path="here"), 0, True)
    assert list(rows[0].prompt) == VERL[1]["prompt"]
    assert json.dumps(rows[0].columns["extra_info"]) == '{"index": 4}'


def test_a_hub_data_set_from_a_local_folder(tmp_path):
    """`hf:` reads by the rules of `datasets`, which take a folder for a data set, too."""
    pytest.importorskip("datasets", reason=WHY)
    jsonl(tmp_path / "set" / "train.jsonl", ROWS)
    jsonl(tmp_path / "set" / "test.jsonl", ROWS[1:])
    data = load_prompts(DataConfig(train=f"hf:{tmp_path}/set::train[:2]", eval=f"hf:{tmp_path}/set"), 0, lambda _: True)
    assert (len(data.train), len(data.held_out)) == (2, 2)
    assert "(split train[:2]): 2 rows" in data.summary[0]
    assert any("held out:" in line and "(split test): 2 rows" in line for line in data.summary)
    with pytest.raises(ConfigError, match=r"data\.train = .* datasets cannot load split 'dev'"):
        load(f"hf:{tmp_path}/set", split="dev")
    with pytest.raises(ConfigError, match=r"data\.train\.split = 'dev': .* names one already"):
        load(f"hf:{tmp_path}/set::train", split="dev")
    with pytest.raises(ConfigError, match=r"datasets cannot load split 'train'"):
        load(f"hf:{tmp_path}/absent")


@pytest.mark.parametrize("name", ["splits", "shards"])
def test_a_split_may_be_named(tmp_path, name):
    path = KINDS[name](tmp_path / name, ROWS)
    assert len(load(path, split="test").train) == 1
    with pytest.raises(ConfigError, match=r"data\.train\.split = 'dev'"):
        load(path, split="dev")
    held = load_prompts(DataConfig(train=str(path), eval=str(path)), 0, lambda _: True)
    assert (len(held.train), len(held.held_out)) == (3, 1)


def test_a_folder_whose_files_name_no_split_is_read_whole(tmp_path):
    jsonl(tmp_path / "set" / "b.jsonl", ROWS[:1])
    parquet(tmp_path / "set" / "a.parquet", ROWS[1:])
    data = load(tmp_path / "set")
    assert [row.columns["answer"] for row in data.train] == ["5", "6", "4"]
    assert [row.name.rpartition("/")[2] for row in data.train] == ["a.parquet:1", "a.parquet:2", "b.jsonl:1"]
    jsonl(tmp_path / "set" / "test.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"no file of that name, but a\.parquet, b\.jsonl, test\.jsonl"):
        load(tmp_path / "set")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", "[]", "0 rows"),
        ("a.json", " \n", "0 rows"),
        ("a.json", '[{"question": "a", "answer": "1"}, 3]', r"a\.json:2 = '3': a row is a JSON object"),
        ("a.json", '["x"]', r"a\.json:1 = 'x': a row is a JSON object"),
        ("a.json", '"x"', "holds an array of rows"),
        ("a.json", "[1, 2", "not JSON"),
        ("a.json", "[" * 100_000, "not JSON"),
        ("a.json", '{"data": [1]}', r"a\.json:1.*no prompt column"),
        ("a.jsonl", '{"question": ' + "9" * 5000 + "}", r"a\.jsonl:1.*not readable"),
        ("a.jsonl", '{"question": "a", "answer": "\\udcff"}', r"a\.jsonl:1.*surrogate"),
        ("a.parquet", "PAR1 but no more", r"data\.train = .*a\.parquet': not a readable parquet file"),
        ("a.parquet", "", "not a readable parquet file"),
        ("set/notes.txt", "x", "nothing in it that can be read"),
        ("set/dataset_dict.json", '{"splits": ["train"]}', "datasets cannot load it"),
        ("set/state.json", "{}", "datasets cannot load it"),
    ],
)
def test_faulty_files_are_named(tmp_path, name, content, words):
    if "parquet" in name or "json" in name.removeprefix("a."):
        pytest.importorskip("datasets", reason=WHY)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        load(path.parent if name.startswith("set") else path)


@pytest.mark.parametrize(
    ("faulty", "number", "words"),
    [
        ([{"prompt": "text"}, {"prompt": "text"}], 1, "in a verl-style file the prompt is a list of messages"),
        ([{}, {"reward_model": {"style": "rule", "ground_truth": None}}], 2, "the answer is missing"),
        ([{}, {"prompt": []}], 2, "a prompt is a text or a list"),
    ],
)
def test_faulty_rows_of_verl_are_named_by_row(tmp_path, faulty, number, words):
    path = parquet(tmp_path / "v.parquet", [VERL[i] | row for i, row in enumerate(faulty)])
    with pytest.raises(ConfigError, match=rf"v\.parquet:{number} .*{words}"):
        load(path)


def test_an_empty_parquet_file_has_no_rows(tmp_path):
    table = pytest.importorskip("pyarrow", reason=WHY).table({"prompt": [], "answer": []})
    pytest.importorskip("pyarrow.parquet", reason=WHY).write_table(table, tmp_path / "e.parquet")
    with pytest.raises(ConfigError, match="0 rows"):
        load(tmp_path / "e.parquet")


@pytest.mark.parametrize("library", ["pyarrow", "datasets"])
def test_a_missing_library_is_asked_for_by_the_extra(tmp_path, monkeypatch, library):
    path = saved(tmp_path / "saved", ROWS) if library == "datasets" else parquet(tmp_path / "a.parquet", ROWS)
    monkeypatch.setattr(data_files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"needs {library}: pip install 'zerogap\[data\]'"):
        read_records(DataSource(path=str(path)), "data.train", "train")
