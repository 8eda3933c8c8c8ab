"""The recorder puts rows of prefill and decoding where their tokens are, and refuses what does not fit."""

import numpy as np
import pytest
import torch

import zerogap as zg
from zerogap.errors import ConfigError

DEFINITION = zg.Definition(temperature=1.0, processed=True)


def recorded():
    """Two sequences of 3 + 2 and 2 + 1 tokens; row of a token: its number, tenfold in the second sequence."""
    recorder = zg.Recorder()
    recorder.record("embed", torch.zeros(7, 1))
    for index, (prompt, new) in enumerate(((3, 2), (2, 1))):
        rows = torch.arange(prompt + new, dtype=torch.float32)[:, None] * 10**index
        with recorder.sequence(index):
            recorder.record("embed", rows[:prompt])
            recorder.record("lm_head", rows[prompt - 1 : prompt], first=prompt - 1)
            for at in range(prompt, prompt + new - 1):
                recorder.record("embed", rows[at : at + 1])
                recorder.record("lm_head", rows[at : at + 1])
    return recorder


def test_rows_stand_at_their_tokens_and_the_rest_is_nan(tmp_path):
    ids, logprobs = [[1, 2, 3, 4, 5], [6, 7, 8]], [[-0.5, -0.25], [-1.0]]
    made = recorded().trace("engine", ids, [3, 2], logprobs, DEFINITION, layout={"tensor_parallel_size": 1})
    zg.save_trace(made, tmp_path / "engine")
    found = zg.load_trace(tmp_path / "engine").recorded
    gap = np.nan
    np.testing.assert_array_equal(found.boundaries["embed"][:, 0], [0, 1, 2, 3, gap, 0, 10, gap])
    np.testing.assert_array_equal(found.boundaries["lm_head"][:, 0], [gap, gap, 2, 3, gap, gap, 10, gap])
    np.testing.assert_array_equal(found.logprobs[0], np.array([gap, gap, gap, -0.5, -0.25], np.float32))
    assert (found.path, found.batches, found.definition) == ("decode", ((0,), (1,)), DEFINITION)


def test_a_sequence_recorded_again_is_new():
    recorder = recorded()
    with recorder.sequence(1):
        recorder.record("embed", torch.full((2, 1), 7.0))
    np.testing.assert_array_equal(recorder.boundaries([5, 3])["embed"][5:, 0], [7, 7, np.nan])


@pytest.mark.parametrize("rows", [torch.zeros(6, 1), torch.zeros(2, 2), torch.zeros(2, 1, dtype=torch.bfloat16)])
def test_what_does_not_fit_is_refused(rows):
    recorder = recorded()
    with recorder.sequence(1):
        recorder.record("embed", rows)
    with pytest.raises(ConfigError, match="embed"):
        recorder.boundaries([5, 3])


def test_flat_rows_open_blocks_and_unlike_numbers_are_refused():
    recorder = recorded()
    with recorder.sequence(0):
        with pytest.raises(ConfigError, match="width"):
            recorder.record("embed", torch.zeros(3))
        with pytest.raises(ConfigError, match="still open"), recorder.sequence(1):
            pass
    with pytest.raises(ConfigError, match="logprobs"):
        recorded().trace("engine", [[1, 2, 3, 4, 5], [6, 7, 8]], [3, 2], [[0.0], [0.0]], DEFINITION)
