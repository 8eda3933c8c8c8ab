"""NeMo RL's train_data_step files as two traces: padding, masks and the batch of one that its logger writes."""

import json

import numpy as np
import pytest

from zerogap.diagnose.adapters.nemo_rl import load_nemo_rl
from zerogap.diagnose.trace import Definition
from zerogap.errors import CheckpointError, ConfigError

NAN = float("nan")


def sample(index=0, nested=True, **change):
    """A sample of 6 tokens padded to 8, with a tool's answer in its completion."""
    fields = {
        "content": "2 + 2 = 4",
        "rewards": 1.0,
        "input_lengths": 6,
        "token_ids": [11, 12, 13, 14, 15, 16, 0, 0],
        "token_loss_mask": [0, 0, 1, 0, 1, 1, 0, 0],
        "sample_loss_mask": 1.0,
        "advantages": [0.0] * 8,
        "generation_logprobs": [0.0, 0.0, -0.5, 0.0, -0.25, -1.0, 0.0, 0.0],
        "prev_logprobs": [0.0, -7.0, -0.5, -3.0, -0.125, -1.0, -9.0, -9.0],
        **change,
    }
    return {**{k: [v] if nested else v for k, v in fields.items()}, "idx": index}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("nested", [True, False])
def test_a_step(nested, tmp_path):
    path = write(tmp_path / "train_data_step12.jsonl", [sample(0, nested), sample(1, nested, sample_loss_mask=0.0)])
    generation, policy = load_nemo_rl(path, Definition(temperature=0.7))
    assert (generation.name, policy.name) == (
        "NeMo RL generation (train_data_step12.jsonl)",
        "NeMo RL policy (train_data_step12.jsonl)",
    )
    first, second = generation.sequences
    assert first.ids.tolist() == [11, 12, 13, 14, 15, 16]
    assert first.prompt_length == 2
    assert first.counted.tolist() == [False, False, True, False, True, True]
    assert not second.counted.any(), "left out of the loss"
    for trace, last in ((generation, -0.25), (policy, -0.125)):
        wanted = np.array([NAN, NAN, -0.5, NAN, last, -1.0], np.float32)
        np.testing.assert_array_equal(trace.recorded.logprobs[0], wanted)
    assert policy.recorded.definition == Definition(temperature=0.7)


def test_the_definition_is_not_guessed(tmp_path):
    generation, _ = load_nemo_rl(write(tmp_path / "x.jsonl", [sample()]))
    assert generation.recorded.definition == Definition()


NEEDED = ["token_ids", "prev_logprobs", "generation_logprobs", "token_loss_mask", "input_lengths"]


@pytest.mark.parametrize("field", NEEDED)
def test_a_field_that_is_not_there_is_named(field, tmp_path):
    row = sample()
    del row[field]
    with pytest.raises(ConfigError, match=f"add {field}"):
        load_nemo_rl(write(tmp_path / "x.jsonl", [row]))


def test_damage(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"token_ids": ')
    with pytest.raises(CheckpointError, match="JSON lines"):
        load_nemo_rl(tmp_path / "x.jsonl")
    with pytest.raises(ConfigError, match="one per token"):
        load_nemo_rl(write(tmp_path / "y.jsonl", [sample(prev_logprobs=[-1.0] * 3)]))


@pytest.mark.parametrize(
    "change",
    [
        {"input_lengths": -1},
        {"input_lengths": 9},
        {"input_lengths": "6"},
        {"token_ids": 5},
        {"token_loss_mask": None},
        {"prev_logprobs": "x"},
        {"token_loss_mask": [[0, 1]] * 8},
        {"sample_loss_mask": "x"},
    ],
)
def test_fields_that_are_no_numbers_per_token_are_refused(change, tmp_path):
    ((name, _),) = change.items()
    path = write(tmp_path / "train_data_step1.jsonl", [sample(0, False, **change)])
    with pytest.raises(ConfigError, match=name):
        load_nemo_rl(path)
