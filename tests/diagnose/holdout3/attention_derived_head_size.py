"""Scores are scaled by the size of a head that is derived, hidden / heads = 16, where the config states 32.

Met wherever a stack ignores `head_dim` (Mistral Nemo and Qwen3 state one that is not hidden / heads).
"""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "attention/scale"


def derived(model: Model) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = (model.config.hidden_size // model.config.num_attention_heads) ** -0.5


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(derived, family="qwen3")
