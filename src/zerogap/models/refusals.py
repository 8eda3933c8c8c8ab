"""What a `config.json` may ask for that no family here computes: refused by name before any weight is read."""

from collections.abc import Mapping
from typing import Any

from zerogap.errors import ConfigError
from zerogap.models.config_keys import MISSING, switch, whole


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an activation, bias, attention or quantisation that is not computed."""
    act = config.get("hidden_act", MISSING)
    if act != "silu":
        raise ConfigError("config.hidden_act", act, "only silu is computed")
    if switch(config, "mlp_bias", default=False):
        raise ConfigError("config.mlp_bias", True, "MLP biases are not computed; choose another model")
    window = config.get("sliding_window")
    if switch(config, "use_sliding_window", default=False) or (
        window is not None and "use_sliding_window" not in config
    ):
        raise ConfigError("config.sliding_window", window, "sliding-window attention is not computed")
    layers = config.get("layer_types") or []
    if not isinstance(layers, list | tuple):
        raise ConfigError("config.layer_types", layers, "give a list with a kind per layer, or leave it out")
    kinds = sorted({str(kind) for kind in layers} - {"full_attention"})
    if kinds:
        raise ConfigError("config.layer_types", kinds, "only full_attention layers are computed")
    _refuse_other_quantisation(config.get("quantization_config"))
    extra_layers(config)
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("config.partial_rotary_factor", config["partial_rotary_factor"], "only 1.0 is computed")


def extra_layers(config: Mapping[str, Any]) -> int:
    """How many layers of extra prediction heads a checkpoint may hold behind the decoder's; they are never computed.

    `num_nextn_predict_layers` of DeepSeek-V3 (multi-token prediction, arXiv 2412.19437, section 2.2).
    """
    key = "num_nextn_predict_layers"
    return 0 if config.get(key) in (None, 0) else whole(config, key)


def _refuse_other_quantisation(quantisation: object) -> None:
    """Only block-FP8 is read, as DeepSeek-V3 and the Qwen3-FP8 models state it (transformers' FineGrainedFP8Config).

    Which tensors are codes stands in the files themselves, so the lists of modules decide nothing. Scales are read as
    the numbers they are, whatever `scale_fmt` calls them.
    """
    if quantisation is None:
        return
    if not isinstance(quantisation, Mapping):
        raise ConfigError("config.quantization_config", quantisation, "give a mapping with quant_method")
    other = "only fp8 in blocks of 128 x 128 is read; use that checkpoint of the model, or the unquantised one"
    needed = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    allowed: dict[str, tuple[object, ...]] = {
        "fmt": ("e4m3",),
        "activation_scheme": ("dynamic",),
        "scale_fmt": ("float", "ue8m0"),
        "expert_dtype": ("fp8",),
        "dequantize": (False, True),  # asks a loader for BF16 weights; the contract says here what is done with them
    }
    for key, value in needed.items():
        given = quantisation.get(key, MISSING)
        if (list(given) if isinstance(given, tuple) else given) != value:
            raise ConfigError(f"config.quantization_config.{key}", given, other)
    for key, given in quantisation.items():
        if key in needed or given is None or key in ("modules_to_not_convert", "modules_to_convert", "ignored_layers"):
            continue
        if key not in allowed:
            raise ConfigError(f"config.quantization_config.{key}", given, f"its meaning is not known here; {other}")
        if given not in allowed[key]:
            choices = " or ".join(str(choice) for choice in allowed[key])
            raise ConfigError(f"config.quantization_config.{key}", given, f"only {choices} is computed; {other}")
