"""One step of a run in a process of its own, whose peak memory is then what that step took. Prints JSON.

Usage: python -m tests.models.peak_memory TREE, the recipe's tree as JSON. The model is random and never on disk, so
that no page of a file counts.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from zerogap.config import load_config
from zerogap.models.decoder import Decoder
from zerogap.models.memory import memory_plan, sequence_tokens
from zerogap.models.spec import ModelSpec, RopeSpec
from zerogap.rl.advantage import build_batch, group_advantages
from zerogap.rl.loss import PolicyLoss
from zerogap.rollout.engine import Engine
from zerogap.train.recompute import checkpoint
from zerogap.train.trainer import Trainer
from zerogap.types import SamplingParams
from zerogap.weights.random_model import random_tensors

SPEC = ModelSpec(
    family="qwen3",
    hidden_size=512,
    intermediate_size=2048,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=8192,
    norm_eps=1e-6,
    rope=RopeSpec(10000.0),
    tied=False,
    qkv_bias=False,
    o_bias=False,
    qk_norm=True,
    max_position=1024,
)


def resident(line: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(text.split()[1]) for text in lines if text.startswith(line))


def main() -> None:
    config = load_config(json.loads(sys.argv[1]))
    plan = memory_plan(SPEC, config)
    checkpoint(torch.square, torch.ones(1, requires_grad=True), use_reentrant=False)  # loads more of torch
    before = resident("VmRSS")
    decoder = Decoder(SPEC, config.contract(), max_positions=sequence_tokens(config))
    decoder.load(random_tensors(SPEC))
    trainer = Trainer(
        decoder,
        trainable=config.trainable,
        micro_batch_tokens=config.optimizer.micro_batch_tokens,
        activation_recompute=config.optimizer.activation_recompute,
    )
    rollout = config.rollout
    engine = Engine(
        decoder,
        kv_cache_bytes=int(rollout.kv_cache_memory * 2**30),
        max_batch_tokens=rollout.max_batch_tokens,
        max_sequences=rollout.max_sequences,
    )
    prompts = np.random.default_rng(0).integers(0, 8000, (4, config.data.max_prompt_length)).tolist()
    samples = engine.generate(prompts, SamplingParams(max_tokens=rollout.max_completion_length), num_samples=2)
    advantages = group_advantages([float(i % 2) for i in range(8)], [i // 2 for i in range(8)], "group")
    result = trainer.forward_backward(build_batch(samples, advantages, False), PolicyLoss())
    trainer.optim_step()
    engine.update_weights(trainer)
    assert result.mismatched_tokens == 0 < result.compared_tokens
    parts = {part.name: part.bytes for part in plan.parts}
    print(json.dumps({"measured": resident("VmHWM") - before, "planned": plan.total, "parts": parts}))


if __name__ == "__main__":
    main()
