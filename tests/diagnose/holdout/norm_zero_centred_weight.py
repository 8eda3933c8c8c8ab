"""One side multiplies by 1 + weight (Megatron's layernorm_1p, Gemma), the weights were not shifted for it: in the norm
before the MLP of layer 1."""

from transformers.models.llama.modeling_llama import LlamaRMSNorm

from zerogap.diagnose.corpus.workshop import Workshop, turn

EXPECTED = "norm/formula"


class Shifted(LlamaRMSNorm):
    def forward(self, x):
        wide = x.float()
        normed = wide * (wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return (1 + self.weight) * normed.to(x.dtype)


def sides(workshop: Workshop):
    return workshop.pair(lambda m: turn(m, r"1\.post_attention_layernorm", Shifted))
