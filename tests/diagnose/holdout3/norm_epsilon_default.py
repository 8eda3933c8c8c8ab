"""The trainer runs its own default epsilon 1e-5, the engine the 1e-6 of the checkpoint.

Met when a Qwen checkpoint (`rms_norm_eps` 1e-6) is converted and Megatron's `--norm-epsilon` keeps its default 1e-5.
"""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "norm/formula"


def default_epsilon(model: Model) -> None:
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.variance_epsilon = 1e-5


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(other=default_epsilon, family="qwen2", dtype="float32", facts={"norm_eps": 1e-6})
