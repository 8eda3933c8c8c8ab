"""The `--numerics` option of several commands: the words of a recipe's `numerics` key, read the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerogap.numerics import Numerics

NUMERICS_HELP = (
    "The numerics contract, as in a recipe: fp32; bf16; fp8 (linear layers in FP8); fp8-kv (linear layers, KV cache "
    "and attention); or a mapping that replaces fields of one of them, in quotes: "
    '"{preset: fp8-kv, kv_scale: calibrated, bf16_layers: {first: 1, last: 1}}".'
)


def contract_from(text: str) -> Numerics:
    """The contract that the option's text asks for.

    Raises:
        ConfigError: no preset, no mapping, or a field or value that the contract cannot have.
    """
    from zerogap.config import apply_overrides, contract_of
    from zerogap.errors import ConfigError

    asked = apply_overrides({}, [f"numerics={text}"])["numerics"]
    if not isinstance(asked, str | dict):
        raise ConfigError("--numerics", text, 'give a preset, or a mapping such as "{preset: fp8, scale_format: pow2}"')
    if isinstance(asked, dict) and "rollout" in asked:
        mend = "only a recipe can give the rollout a contract of its own (rollout.numerics)"
        raise ConfigError("--numerics", text, mend)
    return contract_of(asked)
