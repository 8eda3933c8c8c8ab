"""Log-probs of given tokens from a foreign model's logits, under any definition, in plain torch.

FP32 throughout: logits / T, filters in the order temperature, top-k, top-p, min-p (that of vLLM and transformers), then
log-softmax over what is kept. A token outside the kept set has minus infinity.
"""

import numpy as np
import torch

from zerogap.diagnose.trace import Definition


def defined_logprobs(ids: np.ndarray, logits: torch.Tensor, definition: Definition) -> np.ndarray:
    """Log-probs of a sequence's tokens.

    Args:
        ids: int [N].
        logits: [N, V] in any dtype; row i - 1 scores `ids[i]`.
        definition: what the numbers mean; what it leaves open is temperature 1 without filters.

    Returns:
        float32 [N]; NaN for the first token.
    """
    logp = np.full(len(ids), np.nan, np.float32)
    if len(ids) < 2:
        return logp
    z = logits[: len(ids) - 1].float()
    if definition.processed:
        if definition.temperature not in (None, 0.0, 1.0):
            z = z / definition.temperature
        z = _filtered(z, definition)
    picked = torch.from_numpy(np.asarray(ids[1:]).astype(np.int64))[:, None]
    logp[1:] = z.log_softmax(-1).gather(1, picked)[:, 0].numpy()
    return logp


def _filtered(z: torch.Tensor, definition: Definition) -> torch.Tensor:
    """Scores with -inf outside the kept set."""
    if definition.top_k and definition.top_k < z.shape[-1]:
        lowest = z.topk(definition.top_k, dim=-1).values[:, -1:]
        z = z.masked_fill(z < lowest, -torch.inf)
    if definition.top_p is not None and definition.top_p < 1.0:
        ordered, order = z.sort(dim=-1, descending=True)
        mass = ordered.softmax(-1).cumsum(-1)
        outside = torch.zeros_like(mass, dtype=torch.bool)
        outside[:, 1:] = mass[:, :-1] >= definition.top_p
        z = z.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), -torch.inf)
    if definition.min_p:
        p = z.softmax(-1)
        z = z.masked_fill(p < definition.min_p * p.amax(-1, keepdim=True), -torch.inf)
    return z
