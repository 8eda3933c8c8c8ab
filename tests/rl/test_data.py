"""Prompts: faults are named by file, line and column; orders resume; tasks hold out what they say."""

import json
import re

import pytest

from zerogap.config import DataConfig
from zerogap.errors import ConfigError
from zerogap.rl.data import PromptOrder, keep_short, load_prompts, read_jsonl
from zerogap.rl.reward import load_rewards

GOOD = {"question": "2+2?", "answer": "4"}


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
        read_jsonl(write(tmp_path, GOOD, row), None, None, needs_answer=True)
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
        read_jsonl(write(tmp_path, text=text), None, None, needs_answer=True)


def test_missing_and_non_utf8_files(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        read_jsonl(str(tmp_path / "absent.jsonl"), None, None, True)
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xe9"}')
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_jsonl(str(tmp_path / "latin.jsonl"), None, None, True)


def test_bom_crlf_blank_lines_and_line_separators(tmp_path):
    text = '\ufeff{"question": "a\u2028b", "answer": 4}\r\n\r\n{"question": "c", "answer": 0}\r\n\n'
    rows, note = read_jsonl(write(tmp_path, text=text), None, None, needs_answer=True)
    assert [r.prompt[0]["content"] for r in rows] == ["a\u2028b", "c"]
    assert [r.name.rpartition(":")[2] for r in rows] == ["1", "3"]
    assert rows[1].columns["answer"] == 0
    assert "2 rows" in note and "`question`" in note and "`answer`" in note


@pytest.mark.parametrize("prompt", ["prompt", "question", "problem", "input", "messages"])
@pytest.mark.parametrize("answer", ["answer", "solution", "ground_truth", "label", "target"])
def test_columns_are_recognised(tmp_path, prompt, answer):
    rows, note = read_jsonl(write(tmp_path, {prompt: "a", answer: "4", "other": [1]}), None, None, True)
    assert rows[0].prompt == ({"role": "user", "content": "a"},)
    assert rows[0].columns == {answer: "4", "answer": "4", "other": [1]}
    assert f"`{prompt}`" in note and f"`{answer}`" in note


def test_named_columns_and_verl_rows(tmp_path):
    path = write(tmp_path, {"question": "q", "text": "p", "answer": "1", "gold": "2"})
    rows, _ = read_jsonl(path, "text", "gold", True)
    assert rows[0].prompt[0]["content"] == "p"
    assert rows[0].columns["gold"] == "2" and rows[0].columns["answer"] == "1"
    verl = {"data_source": "d", "prompt": [{"role": "user", "content": "a"}], "reward_model": {"ground_truth": "7"}}
    rows, _ = read_jsonl(write(tmp_path, verl), None, None, True)
    assert rows[0].columns["answer"] == "7"


def test_answers_are_optional_where_no_reward_needs_them(tmp_path):
    rows, note = read_jsonl(write(tmp_path, {"prompt": "a"}), None, None, needs_answer=False)
    assert len(rows) == 1 and "nowhere" in note


def test_system_instruction_and_overlap(tmp_path):
    chat = {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "b"}], "answer": "1"}
    train = write(tmp_path, {"messages": "a", "answer": "1"}, chat)
    held = write(tmp_path, {"messages": "a", "answer": "1"}, {"messages": "z", "answer": "1"}, name="e.jsonl")
    data = load_prompts(DataConfig(train=train, eval=held, system="s", instruction="Number only."), 0, True)
    assert data.train[0].prompt == (
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\n\nNumber only."},
    )
    assert [m["content"] for m in data.train[1].prompt] == ["own", "b\n\nNumber only."]
    assert any("1 of 2 prompts are also trained on" in line for line in data.summary)
    with pytest.raises(ConfigError, match=r"data\.train"):
        load_prompts(DataConfig(train="something"), 0, True)


def test_over_long_prompts_are_counted():
    data = load_prompts(DataConfig(train="multiplication"), 0, True)
    lengths = {row.name: i for i, row in enumerate(data.train)}
    kept, dropped = keep_short(data.train, lambda row: lengths[row.name], 10)
    assert (len(kept), dropped) == (11, len(data.train) - 11)
    with pytest.raises(ConfigError, match="max_prompt_length = 5: raise it"):
        keep_short(data.train, lambda row: 6, 5)


def numbers(row):
    return tuple(map(int, re.findall(r"[0-9]+", row.prompt[0]["content"])))


def test_multiplication_holds_out_24_pairs_in_both_orders():
    data = load_prompts(DataConfig(train="multiplication"), 0, True)
    train, held = {numbers(r) for r in data.train}, {numbers(r) for r in data.held_out}
    assert (len(train), len(held)) == (76, 24)
    assert train | held == {(a, b) for a in range(10) for b in range(10)}
    assert not {(b, a) for a, b in held} & train
    assert all(int(r.columns["answer"]) == numbers(r)[0] * numbers(r)[1] for r in (*data.train, *data.held_out))


def test_largest_of_three_holds_out_sets():
    data = load_prompts(DataConfig(train="largest_of_three"), 3, True)
    train = {tuple(sorted(numbers(r))) for r in data.train}
    held = {tuple(sorted(numbers(r))) for r in data.held_out}
    assert (len(train), len(held), len(train & held)) == (1024, 64, 0)
    assert all(int(r.columns["answer"]) == max(numbers(r)) for r in (*data.train, *data.held_out))
    position = [numbers(r).index(max(numbers(r))) for r in data.train]
    assert min(position.count(i) for i in range(3)) > 250, "the largest stands anywhere"
    assert [r.prompt for r in load_prompts(DataConfig(train="largest_of_three"), 9, True).train] == [
        r.prompt for r in data.train
    ]


def test_reasoning_gym_scores_its_own_answers():
    config = DataConfig(train="reasoning_gym:basic_arithmetic", size=50, task={"max_terms": 3})
    data = load_prompts(config, 5, False)
    asked = {r.prompt[0]["content"] for r in data.held_out}
    assert len(data.held_out) == 10 and not asked & {r.prompt[0]["content"] for r in data.train}
    rewards = load_rewards(["task"], None, data.scorer)
    rows = data.train[:4]
    texts = [r.columns["answer"] for r in rows[:2]] + [f"I say <answer>{rows[2].columns['answer']}</answer>.", "no"]
    totals = rewards.score(rows, texts, [[]] * 4, 0).totals
    assert totals[:3] == [1.0] * 3 and totals[3] < 1.0
    again = load_prompts(config, 5, False)
    assert [r.prompt for r in again.train] == [r.prompt for r in data.train]
    with pytest.raises(ConfigError, match="reasoning-gym refuses"):
        load_prompts(DataConfig(train="reasoning_gym:no_such_task"), 0, False)
    with pytest.raises(ConfigError, match="reasoning-gym refuses"):
        load_prompts(DataConfig(train="reasoning_gym:basic_arithmetic", task={"colour": 1}), 0, False)


@pytest.mark.parametrize("shuffle", [True, False])
def test_order_is_resumable_at_every_position(shuffle):
    order = PromptOrder(7, seed=3, shuffle=shuffle)
    whole = order.take(0, 30)
    for position in range(25):
        assert order.take(position, 5) == whole[position : position + 5]
    for epoch in range(4):
        assert sorted(whole[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert (whole[:7] == whole[7:14]) is not shuffle
    assert (PromptOrder(7, seed=4, shuffle=shuffle).take(0, 30) == whole) is not shuffle


def test_order_is_frozen_for_all_versions():
    assert PromptOrder(10, seed=0).take(0, 10) == ORDER


ORDER = [8, 4, 2, 6, 0, 7, 5, 1, 9, 3]
