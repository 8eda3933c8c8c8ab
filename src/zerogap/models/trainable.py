"""Which tensors of a model are trained, from a user's patterns to names, and through which ones gradients flow."""

import fnmatch
from collections.abc import Collection, Iterable, Sequence

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


def input_gradients(names: Iterable[str], trained: Collection[str], num_layers: int) -> list[str]:
    """The tensors that gradients flow through, in the order of `names`: from the first trained layer up, and the head
    whatever is trained."""
    names = list(names)
    first = min((depth(name, num_layers) for name in trained), default=num_layers + 1)
    head = "lm_head.weight" if "lm_head.weight" in names else "model.embed_tokens.weight"
    return [name for name in names if name == head or depth(name, num_layers) >= first]


def depth(name: str, num_layers: int) -> int:
    """0 for the embedding, 1.. for layers, num_layers + 1 for final norm and head."""
    parts = name.split(".")
    if parts[1] == "layers":
        return 1 + int(parts[2])
    return 0 if parts[1] == "embed_tokens" else num_layers + 1
