"""A gated MLP with GELU: the tanh approximation in the trainer, the exact one in the engine.

vllm-project/vllm#3411, NVIDIA-NeMo/Megatron-Bridge#4661: Gemma's config says `gelu` and means the approximation.
"""

from transformers.activations import ACT2FN

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "activation/formula"


def act(model: Model, name: str) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = ACT2FN[name]


def exact_gelu(model: Model) -> None:
    act(model, "gelu")


def approximate(model: Model) -> None:
    act(model, "gelu_pytorch_tanh")


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(exact_gelu, approximate, dtype="float32", facts={"intermediate_size": 192})
