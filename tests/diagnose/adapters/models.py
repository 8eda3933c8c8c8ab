"""Tiny transformers models for tests of adapters: seeded random weights, two layers, several families and dtypes."""

from typing import Any

import numpy as np
import torch
import transformers

from zerogap.diagnose.trace import SequenceTrace

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "initializer_range": 0.2,  # with the usual 0.02 logits are flat, and a wrong forward looks right
}


def tiny_model(family: str = "llama", attention: str = "eager", dtype: torch.dtype = torch.bfloat16) -> Any:
    """A causal language model in evaluation mode; the global random state is left alone."""
    routed = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = {
        "llama": lambda: transformers.LlamaConfig(**SIZES),
        "qwen3": lambda: transformers.Qwen3Config(**SIZES),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **routed),
    }[family]()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):  # ones would hide where the weight is applied
                torch.nn.init.normal_(parameter, 1.0, 0.1)
    return model.to(dtype).eval()


def some_sequences(lengths: tuple[tuple[int, int], ...] = ((5, 12), (7, 20), (3, 9))) -> list[SequenceTrace]:
    """Random ids; (prompt, tokens in all) of each."""
    generator = np.random.default_rng(0)
    return [SequenceTrace(generator.integers(0, 256, n).astype(np.int32), prompt) for prompt, n in lengths]
