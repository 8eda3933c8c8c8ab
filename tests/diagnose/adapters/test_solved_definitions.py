"""Definitions are read off the numbers that follow from them, also ones that no list of usual values has."""

import numpy as np
import pytest
import torch

from zerogap.diagnose.adapters.logprobs import defined_logprobs
from zerogap.diagnose.adapters.solved_definitions import definitions, temperature
from zerogap.diagnose.trace import Definition

PLAIN = Definition(1.0, True, 0, 1.0, 0.0)


def scored(definition: Definition, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [40, 200], tokens that the definition keeps, and their log-probs under it."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(40, 200, generator=generator)
    allowed = torch.stack([logp(logits, torch.full((40,), i), definition).isfinite() for i in range(200)], 1)
    weights = logits.softmax(-1) * allowed
    ids = torch.multinomial(weights, 1, generator=generator)[:, 0]
    return logits, ids, logp(logits, ids, definition)


def logp(logits: torch.Tensor, ids: torch.Tensor, definition: Definition) -> torch.Tensor:
    joined = np.concatenate([[0], ids.numpy()])
    return torch.from_numpy(defined_logprobs(joined, torch.cat([logits, logits[:1]]), definition)[1:])


@pytest.mark.parametrize(
    "wanted",
    [
        Definition(0.73, True, 0, 1.0, 0.0),
        Definition(1.37, True, 0, 1.0, 0.0),
        Definition(1.0, True, 37, 1.0, 0.0),
        Definition(1.0, True, 0, 0.93, 0.0),
        Definition(1.0, True, 0, 1.0, 0.035),
    ],
)
def test_the_definition_is_among_what_is_proposed(wanted: Definition) -> None:
    logits, ids, recorded = scored(wanted)
    found = list(definitions(logits, ids, recorded, PLAIN))
    fits = [d for d in found if float((logp(logits, ids, d) - recorded).abs().max()) < 1e-5]
    assert fits, found
    if wanted.temperature != 1.0:
        assert wanted in fits


def test_numbers_that_follow_from_none() -> None:
    """Noise is not explained by any definition that is proposed."""
    logits, ids, recorded = scored(PLAIN)
    noisy = recorded + torch.randn(40, generator=torch.Generator().manual_seed(3))
    for proposed in definitions(logits, ids, noisy, PLAIN):
        assert float((logp(logits, ids, proposed) - noisy).abs().mean()) > 0.1


def test_no_finite_number_shows_no_temperature() -> None:
    assert temperature(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), torch.full((2,), -torch.inf)) is None
