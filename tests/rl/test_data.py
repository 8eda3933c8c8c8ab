"""Prompts: faults are named by file, line and column, columns are recognised and told, tasks hold out what they say."""

import json
import re

import pytest

from zerogap.config import DataConfig, DataSource, RewardConfig
from zerogap.errors import ConfigError
from zerogap.rl.data import keep_short, length_notes, load_prompts
from zerogap.rl.data_files import read_records
from zerogap.rl.data_rows import read_rows
from zerogap.rl.reward import load_rewards

GOOD = {"question": "2+2?", "answer": "4"}


def all_answers(path):
    return True


def no_answers(path):
    return False


def read(path, needs_answer=True, **columns):
    """Rows of a file and the lines of its summary as one text."""
    source = DataSource(path=path, **columns)
    _, records = read_records(source, "data.train", "train")
    rows, notes = read_rows(records, source, 0, needs_answer)
    return rows, "\n".join(notes)


def write(tmp_path, *rows, text=None, name="d.jsonl"):
    path = tmp_path / name
    path.write_bytes((text if text is not None else "".join(json.dumps(r) + "\n" for r in rows)).encode())
    return str(path)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"answer": "4"}, ["d.jsonl:2 column question", "no such column"]),
        ({"question": None, "answer": "4"}, ["d.jsonl:2 column question", "text or a list"]),
        ({"question": "", "answer": "4"}, ["d.jsonl:2 column question", "empty"]),
        ({"question": " \n\t", "answer": "4"}, ["d.jsonl:2 column question", "empty"]),
        ({"question": "a"}, ["d.jsonl:2 column answer", "missing"]),
        ({"question": "a", "answer": None}, ["d.jsonl:2 column answer", "None", "missing"]),
        ({"question": "a", "answer": " "}, ["d.jsonl:2 column answer", "missing"]),
        ({"question": "a", "answer": True}, ["d.jsonl:2 column answer", "missing"]),
        ({"question": [{"role": "system", "content": "s"}], "answer": "4"}, ["d.jsonl:2", "no user message"]),
        ({"question": [{"role": "user", "content": " "}], "answer": "4"}, ["d.jsonl:2", "not empty"]),
        ({"question": [{"role": "bot", "content": "s"}], "answer": "4"}, ["d.jsonl:2", "bot", "choose a role"]),
        ({"question": [{"role": "user"}], "answer": "4"}, ["d.jsonl:2", "exactly `role` and `content`"]),
        (
            {"question": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": "4"},
            ["d.jsonl:2", "assistant", "last message"],
        ),
        ([1], ["d.jsonl:2", "JSON object"]),
    ],
)
def test_faulty_rows_are_named(tmp_path, row, words):
    with pytest.raises(ConfigError) as error:
        read(write(tmp_path, GOOD, row))
    assert not [w for w in words if w not in str(error.value)], str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "0 rows"),
        ("\n\r\n", "0 rows"),
        ('{"question": "a"\n', r"d\.jsonl:1.*not JSON"),
        ('{"question": "a\\ud800", "answer": "b"}\n', r"d\.jsonl:1.*surrogate"),
        ('{"colour": 1}\n', r"d\.jsonl:1.*no prompt column"),
        ('{"question": "a"}\n', r"d\.jsonl:1.*no answer column"),
        ('{"data_source": "x", "reward_model": {"ground_truth": "4"}, "prompt": "text"}', "verl-style"),
        (
            '{"data_source": "x", "reward_model": {}, "prompt": [{"role": "user", "content": "a"}]}',
            "reward_model.ground",
        ),
    ],
)
def test_faulty_files_are_named(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words):
        read(write(tmp_path, text=text))


def test_missing_and_non_utf8_files(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.train = '.*absent\.jsonl': no such file"):
        read(str(tmp_path / "absent.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xe9"}')
    with pytest.raises(ConfigError, match="not UTF-8"):
        read(str(tmp_path / "latin.jsonl"))


def test_bom_crlf_blank_lines_and_line_separators(tmp_path):
    text = '\ufeff{"question": "a\u2028b", "answer": 4}\r\n\r\n{"question": "c", "answer": 0}\r\n\n'
    rows, note = read(write(tmp_path, text=text))
    assert [r.prompt[0]["content"] for r in rows] == ["a\u2028b", "c"]
    assert [r.name.rpartition(":")[2] for r in rows] == ["1", "3"]
    assert rows[1].columns["answer"] == 0
    assert "2 rows" in note and "`question`" in note and "`answer`" in note


@pytest.mark.parametrize("prompt", ["prompt", "question", "problem", "query", "instruction", "input", "messages"])
@pytest.mark.parametrize("answer", ["answer", "solution", "ground_truth", "label", "target"])
def test_columns_are_recognised(tmp_path, prompt, answer):
    rows, note = read(write(tmp_path, {prompt: "a", answer: "4", "other": [1]}))
    assert rows[0].prompt == ({"role": "user", "content": "a"},)
    assert rows[0].columns == {answer: "4", "answer": "4", "other": [1]}
    assert f"`{prompt}`" in note and f"`{answer}`" in note


def test_named_columns_and_verl_rows(tmp_path):
    path = write(tmp_path, {"question": "q", "text": "p", "answer": "1", "gold": "2"})
    rows, note = read(path, prompt_column="text", answer_column="gold")
    assert rows[0].prompt[0]["content"] == "p"
    assert rows[0].columns == {"question": "q", "answer": "2", "gold": "2"}, "what the recipe names is the answer"
    assert "`text` (as the recipe says; also there: `question`)" in note
    assert "`gold` (as the recipe says; the file's own column `answer` is not used)" in note
    verl = {"data_source": "d", "prompt": [{"role": "user", "content": "a"}], "reward_model": {"ground_truth": "7"}}
    rows, note = read(write(tmp_path, verl | {"extra_info": {"answer": "long"}, "answer": "other"}))
    assert rows[0].columns["answer"] == "7" and rows[0].columns["reward_model"] == {"ground_truth": "7"}
    assert "`reward_model.ground_truth` (verl's" in note
    rows, _ = read(write(tmp_path, verl | {"extra_info": {"answer": "8"}}), answer_column="extra_info.answer")
    assert rows[0].columns["answer"] == "8"


def test_the_summary_tells_what_was_taken_and_shows_the_first_prompt(tmp_path):
    path = write(
        tmp_path, {"question": "What  is\nthis? " + "long " * 40, "input": "x", "answer": "4", "level": 3}, GOOD
    )
    data = load_prompts(DataConfig(train=path), 0, all_answers)
    text = "\n".join(data.summary)
    assert f"{path}: 2 rows" in text
    assert "prompt from column `question` (recognised by its name; also there: `input`)" in text
    assert "answer from column `answer` (recognised by its name)" in text
    assert "other columns, given to rewards: input, level" in text
    shown = re.search("first prompt: (.*)", text)[1]
    assert shown.startswith("What is this? long") and shown.endswith("...") and len(shown) == 123


def test_answers_are_optional_where_no_reward_needs_them(tmp_path):
    rows, note = read(write(tmp_path, {"prompt": "a"}), needs_answer=False)
    assert len(rows) == 1 and "nowhere" in note


def test_multi_turn_prompts_keep_their_messages(tmp_path):
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "b", "name": None},  # as a columnar file fills up
    ]
    rows, _ = read(write(tmp_path, {"prompt": turns, "answer": "1"}))
    assert [m["role"] for m in rows[0].prompt] == ["user", "assistant", "tool"]
    assert all(set(m) == {"role", "content"} for m in rows[0].prompt)


def test_system_instruction_and_overlap(tmp_path):
    chat = {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "b"}], "answer": "1"}
    train = write(tmp_path, {"messages": "a", "answer": "1"}, chat)
    held = write(tmp_path, {"messages": "a", "answer": "1"}, {"messages": "z", "answer": "1"}, name="e.jsonl")
    data = load_prompts(DataConfig(train=train, eval=held, system="s", instruction="Number only."), 0, all_answers)
    assert data.train[0].prompt == (
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\n\nNumber only."},
    )
    assert [m["content"] for m in data.train[1].prompt] == ["own", "b\n\nNumber only."]
    assert any("1 of 2 prompts are also trained on" in line for line in data.summary)
    with pytest.raises(ConfigError, match=r"data\.train"):
        load_prompts(DataConfig(train="something"), 0, all_answers)


def test_over_long_prompts_are_counted():
    data = load_prompts(DataConfig(train="multiplication"), 0, all_answers)
    lengths = {row.name: i for i, row in enumerate(data.train)}
    kept, dropped = keep_short(data.train, lambda row: lengths[row.name], 10)
    assert (len(kept), dropped) == (11, len(data.train) - 11)
    assert lengths[kept[-1].name] == 10, "the limit itself fits, one more does not"
    with pytest.raises(ConfigError, match="max_prompt_length = 5: raise it"):
        keep_short(data.train, lambda row: 6, 5)


def test_lengths_are_told_as_quantiles():
    assert length_notes(range(1, 101), 98) == [
        "tokens of prompts: 1 to 100, half up to 50, 90 % 90, 99 % 99",
        "2 prompts are longer than 98 tokens and left out",
    ]
    assert length_notes([7, 3, 5], 7, "held-out prompts") == [
        "tokens of held-out prompts: 3 to 7, half up to 5, 90 % 7, 99 % 7"
    ]
    assert length_notes([], 7) == []


def numbers(row):
    return tuple(map(int, re.findall(r"[0-9]+", row.prompt[0]["content"])))


def test_multiplication_holds_out_24_pairs_in_both_orders():
    data = load_prompts(DataConfig(train="multiplication"), 0, all_answers)
    train, held = {numbers(r) for r in data.train}, {numbers(r) for r in data.held_out}
    assert (len(train), len(held)) == (76, 24)
    assert train | held == {(a, b) for a in range(10) for b in range(10)}
    assert not {(b, a) for a, b in held} & train
    assert all(int(r.columns["answer"]) == numbers(r)[0] * numbers(r)[1] for r in (*data.train, *data.held_out))


def test_largest_of_three_holds_out_sets():
    data = load_prompts(DataConfig(train="largest_of_three"), 3, all_answers)
    train = {tuple(sorted(numbers(r))) for r in data.train}
    held = {tuple(sorted(numbers(r))) for r in data.held_out}
    assert (len(train), len(held), len(train & held)) == (1024, 64, 0)
    assert all(int(r.columns["answer"]) == max(numbers(r)) for r in (*data.train, *data.held_out))
    position = [numbers(r).index(max(numbers(r))) for r in data.train]
    assert min(position.count(i) for i in range(3)) > 250, "the largest stands anywhere"
    assert [r.prompt for r in load_prompts(DataConfig(train="largest_of_three"), 9, all_answers).train] == [
        r.prompt for r in data.train
    ]


def score_task(data, rows, texts):
    config = RewardConfig(functions="task", timeout=None)
    return load_rewards(config, data.tasks).score(rows, texts, [[]] * len(rows), 0).totals


def test_reasoning_gym_scores_its_own_answers():
    config = DataConfig(train="reasoning_gym:basic_arithmetic", size=50, task={"max_terms": 3})
    data = load_prompts(config, 5, no_answers)
    asked = {r.prompt[0]["content"] for r in data.held_out}
    assert len(data.held_out) == 10 and not asked & {r.prompt[0]["content"] for r in data.train}
    rows = data.train[:4]
    texts = [r.columns["answer"] for r in rows[:2]] + [f"I say <answer>{rows[2].columns['answer']}</answer>.", "no"]
    totals = score_task(data, rows, texts)
    assert totals[:3] == [1.0] * 3 and totals[3] < 1.0
    again = load_prompts(config, 5, no_answers)
    assert [r.prompt for r in again.train] == [r.prompt for r in data.train]
    with pytest.raises(ConfigError, match="reasoning-gym refuses"):
        load_prompts(DataConfig(train="reasoning_gym:no_such_task"), 0, no_answers)
    with pytest.raises(ConfigError, match="reasoning-gym refuses"):
        load_prompts(DataConfig(train="reasoning_gym:basic_arithmetic", task={"colour": 1}), 0, no_answers)
    with pytest.raises(ConfigError, match=r"data\.task .* no data set is a reasoning_gym"):
        load_prompts(DataConfig(train="multiplication", task={"colour": 1}), 0, no_answers)


def test_several_data_sets_are_mixed_and_each_task_scores_its_own_rows(tmp_path):
    path = write(tmp_path, GOOD, {"question": "3+3?", "answer": "6"})
    train = [
        {"path": "reasoning_gym:chain_sum", "weight": 2, "size": 20},
        {"path": "reasoning_gym:leg_counting", "size": 15, "instruction": "Only a number."},
        {"path": path, "system": "s"},
    ]
    data = load_prompts(DataConfig(train=train, instruction="Think."), 1, lambda p: p == path)
    assert [row.part for row in data.train] == [0] * 16 + [1] * 12 + [2] * 2
    assert data.weights == (2.0, 1.0, 1.0)
    assert [row.source for row in data.held_out[:4]] == ["reasoning_gym:chain_sum", "reasoning_gym:leg_counting"] * 2
    assert "mixed by weight: 50.0% reasoning_gym:chain_sum, 25.0% reasoning_gym:leg_counting" in data.summary[-1]
    texts = [row.prompt[-1]["content"].rpartition("\n\n")[2] for row in data.train]
    assert texts == ["Think."] * 16 + ["Only a number."] * 12 + ["Think."] * 2
    assert [row.prompt[0]["role"] for row in data.train[-3:]] == ["user", "system", "system"]
    rows = [data.train[0], data.train[20], data.train[28]]
    assert score_task(data, rows, [row.columns["answer"] for row in rows]) == [1.0, 1.0, None]
    drawn = data.order(data.train, 1, True).take(0, 40)
    assert [sum(data.train[i].part == part for i in drawn) for part in range(3)] == [20, 10, 10]


def test_one_task_may_stand_twice_with_other_settings():
    train = [{"path": "reasoning_gym:chain_sum", "size": 10, "task": {"min_terms": n, "max_terms": n}} for n in (2, 5)]
    data = load_prompts(DataConfig(train=train), 1, no_answers)
    assert len(data.tasks) == 2
    assert [row.prompt[0]["content"].count("+") + row.prompt[0]["content"].count("-") >= 4 for row in data.train] == (
        [False] * 8 + [True] * 8
    )


def test_a_data_set_without_a_short_prompt_is_named(tmp_path):
    data = load_prompts(DataConfig(train=["multiplication", write(tmp_path, GOOD)]), 0, all_answers)
    with pytest.raises(ConfigError, match=r"max_prompt_length = 9: raise it: all 1 prompts of .*d\.jsonl are longer"):
        keep_short(data.train, lambda row: 9 + row.part, 9)


def test_what_a_task_holds_out_is_not_trained_on_from_a_file(tmp_path):
    held = load_prompts(DataConfig(train="multiplication"), 0, all_answers).held_out
    rows = [{"prompt": held[3].prompt[0]["content"], "answer": "1"}, {"prompt": "another", "answer": "2"}]
    data = load_prompts(DataConfig(train=["multiplication", write(tmp_path, *rows)]), 0, all_answers)
    assert [row.prompt[0]["content"] for row in data.train if row.part == 1] == ["another"]
    assert "1 rows to train on are held out by another data set, and left out" in data.summary


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"train": {"path": "multiplication", "split": "x"}}, r"data\.train\.split = 'x': leave it out"),
        ({"train": "multiplication", "eval": "multiplication"}, r"data\.eval = 'multiplication': a task is held out"),
        ({"train": ["multiplication", "x.csv"]}, r"data\.train\[1\] = 'x\.csv': give a \.jsonl"),
        ({"train": ["multiplication", "no.parquet"]}, r"data\.train\[1\] = 'no\.parquet': no such file"),
        ({"train": "multiplication", "eval": ["a.jsonl", "b.jsonl"]}, r"data\.eval\[0\] = 'a\.jsonl': no such file"),
    ],
)
def test_data_sets_that_cannot_be_had_are_named_by_their_key(section, words):
    with pytest.raises(ConfigError, match=words):
        load_prompts(DataConfig(**section), 0, all_answers)
