"""zerogap: reinforcement learning for language models whose rollout engine and trainer compute the same bits.

    import zerogap as zg

    trainer = zg.Trainer("path/to/model", numerics="bf16")
    engine = zg.Engine.for_trainer(trainer)
    samples = engine.generate(prompts, zg.SamplingParams(temperature=1.0, max_tokens=64))
    batch = zg.build_batch(samples, zg.group_advantages(rewards, groups, "group"), False)
    result = trainer.forward_backward(batch, zg.PolicyLoss())   # result.mismatched_tokens == 0
    trainer.optim_step()
    engine.update_weights(trainer)

Names are loaded on first use, so that `import zerogap` costs nothing.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "ConfigError": "zerogap.errors",
    "ContractError": "zerogap.errors",
    "Definition": "zerogap.diagnose.trace",
    "Engine": "zerogap.rollout.engine",
    "Numerics": "zerogap.numerics",
    "ParityError": "zerogap.errors",
    "PolicyLoss": "zerogap.rl.loss",
    "Recorder": "zerogap.diagnose.adapters.recorder",
    "Sample": "zerogap.types",
    "SequenceTrace": "zerogap.diagnose.trace",
    "SamplingKey": "zerogap.types",
    "SamplingParams": "zerogap.types",
    "TorchSide": "zerogap.diagnose.adapters.torch_side",
    "TrainBatch": "zerogap.types",
    "Trainer": "zerogap.train.trainer",
    "ZerogapError": "zerogap.errors",
    "build_batch": "zerogap.rl.advantage",
    "diagnose": "zerogap.diagnose.run",
    "capture": "zerogap.diagnose.adapters.capture",
    "group_advantages": "zerogap.rl.advantage",
    "load_trace": "zerogap.diagnose.trace",
    "open_model": "zerogap.weights",
    "preset": "zerogap.numerics",
    "save_trace": "zerogap.diagnose.trace",
    "sketch": "zerogap.diagnose.sketch",
}


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'zerogap' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    return getattr(importlib.import_module(_HOME[name]), name)
