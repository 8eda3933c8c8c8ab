"""How keys and values of a model stand in pages, by its spec and the contract."""

from zerogap.errors import ConfigError
from zerogap.models.spec import ModelSpec
from zerogap.numerics import DType, Numerics
from zerogap.ops.kv import DenseCodec, FP8Codec
from zerogap.ops.latent import LatentCodec
from zerogap.types import KVCodec


def codec_of(spec: ModelSpec, numerics: Numerics) -> KVCodec:
    """The codec of the contract.

    Raises:
        ConfigError: the model's cache has no such form.
    """
    if spec.mla is not None and numerics.attention_math is DType.FP8:
        mend = "latent attention reads its fp8 cache with bf16 operands: choose bf16"
        raise ConfigError("numerics.attention_math", numerics.attention_math.value, mend)
    if spec.mla is not None and numerics.kv is DType.FP8:
        sizes = spec.mla.sizes
        return LatentCodec(sizes.latent, sizes.rope, DType.FP8, numerics.kv_scale, numerics.scale_format)
    if numerics.kv is DType.FP8:
        heads, size = spec.num_kv_heads, spec.head_dim
        return FP8Codec(heads, size, numerics.kv_scale, numerics.scale_format, numerics.attention_math)
    return plain_codec(spec, numerics)


def plain_codec(spec: ModelSpec, numerics: Numerics) -> KVCodec:
    """The same without FP8: keys and values in the storage dtype."""
    if spec.mla is not None:
        return LatentCodec(spec.mla.sizes.latent, spec.mla.sizes.rope, numerics.storage)
    return DenseCodec(spec.num_kv_heads, spec.head_dim, numerics.storage)
