"""What recorded log-probs mean by their own logits: another token's log-prob in the place of some."""

import numpy as np
import pytest
import torch

from zerogap.diagnose.checks.rescoring import PLAIN, Scorer, _in_part
from zerogap.diagnose.trace import Pass, SequenceTrace, Trace


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_likeliest_token_in_the_place_of_some(noise: float) -> None:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 40, (60,), generator=generator)
    logits = 3 * torch.randn(60, 40, generator=generator)
    table = logits[:-1].log_softmax(-1)
    own = table.gather(1, ids[1:, None])[:, 0]
    listed = own >= table.topk(8).values[:, -1]
    recorded = torch.where(listed, own, table.amax(-1) - noise)
    numbers = np.append(np.float32(np.nan), recorded.numpy()).astype(np.float32)
    trace = Trace("a", (SequenceTrace(ids.numpy().astype(np.int32), 4),), (Pass((numbers,)),))
    words = _in_part(Scorer(trace, logits, (numbers,), np.zeros(0)), PLAIN)
    assert ("the likeliest token" in words) == (noise == 0.0), words
