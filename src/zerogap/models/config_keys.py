"""Values of a `config.json` by key, each of the type that it must have: missing or odd ones are refused by name."""

from collections.abc import Mapping
from typing import Any

from zerogap.errors import ConfigError

MISSING = "<missing>"


def whole(config: Mapping[str, Any], key: str) -> int:
    """A positive whole number."""
    value = config.get(key, MISSING)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.{key}", value, "give a positive whole number in config.json")
    return value


def number(key: str, value: object) -> float:
    """A positive number: `value`, which stands under `key`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ConfigError(f"config.{key}", value, "give a positive number in config.json")
    return float(value)


def switch(config: Mapping[str, Any], key: str, default: bool | None = None) -> bool:
    """True or false; absent means `default`, if there is one."""
    value = config.get(key, MISSING if default is None else default)
    if not isinstance(value, bool):
        raise ConfigError(f"config.{key}", value, "give true or false in config.json")
    return value
