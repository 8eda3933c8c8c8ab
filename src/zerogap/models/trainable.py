"""Which tensors of a model are trained: from a user's patterns to names."""

import fnmatch
from collections.abc import Iterable, Sequence

from zerogap.errors import ConfigError


def select_trainable(names: Iterable[str], patterns: Sequence[str], num_layers: int) -> set[str]:
    """Names of the tensors to train.

    Args:
        names: checkpoint names.
        patterns: shell patterns on names (`model.layers.29.*`), or `last:N` for the last N decoder layers, or `all`.
        num_layers: decoder layers in the model.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    names, chosen = list(names), set()
    for pattern in patterns:
        if pattern == "all":
            hits = set(names)
        elif pattern.startswith("last:"):
            count = pattern.removeprefix("last:")
            if not count.isdigit() or not 1 <= int(count) <= num_layers:
                raise ConfigError("trainable", pattern, f"choose last:1 to last:{num_layers}")
            wanted = {f"layers.{i}." for i in range(num_layers - int(count), num_layers)}
            hits = {n for n in names if any(w in n for w in wanted)}
        else:
            hits = set(fnmatch.filter(names, pattern))
        if not hits:
            raise ConfigError(
                "trainable",
                pattern,
                "no tensor that can be trained matches; names look like model.layers.0.mlp.up_proj.weight",
            )
        chosen |= hits
    return chosen
