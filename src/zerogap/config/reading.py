"""From a YAML file and `a.b=c` words to a checked recipe."""

import copy
import difflib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import pydantic
import yaml

from zerogap.config.recipe import RunConfig
from zerogap.config.section import Section
from zerogap.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not a word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def iter_fields(section: type[Section] = RunConfig, prefix: str = "") -> Iterator[tuple[str, object, str]]:
    """(dotted key, default, description) of every leaf, in declaration order; a required key has `...` as default."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from iter_fields(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, ... if field.is_required() else field.default, field.description or ""


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of a recipe's tree with `a.b=c` words applied in order; `c` is read as YAML.

    Raises:
        ConfigError: a word without `=`, or a path through something that is not a section.
    """
    tree = copy.deepcopy(tree)
    for word in overrides:
        path, equals, text = word.partition("=")
        if not equals or not path:
            raise ConfigError("override", word, "write it as section.key=value")
        *sections, leaf = path.split(".")
        node = tree
        for depth, name in enumerate(sections):
            contract = sections[: depth + 1] in (["numerics"], ["rollout", "numerics"])
            if contract and isinstance(node.get(name), str):
                node[name] = {"preset": node[name]}
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                raise ConfigError(path, text, f"{'.'.join(sections[: depth + 1])} is a value, not a section")
        node[leaf] = _read_yaml(text, path)
    return tree


def load_config(source: str | pathlib.Path | dict[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a recipe.

    Args:
        source: path of a YAML file, or its tree.
        overrides: `a.b=c` words.

    Raises:
        ConfigError: names the key, the value and the mend; also for a missing or malformed file.
    """
    if isinstance(source, dict):
        tree = source
    else:
        path = pathlib.Path(source)
        if not path.is_file():
            raise ConfigError("recipe", str(source), "no such file")
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError("recipe", str(source), f"not UTF-8 text: {error}") from None
        tree = _read_yaml(text, str(source))
    if not isinstance(tree, dict):
        raise ConfigError("recipe", tree, "a recipe is a mapping of keys to values")
    try:
        return RunConfig.model_validate(apply_overrides(tree, overrides))
    except pydantic.ValidationError as error:
        raise _translate(error) from None


def _read_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(where, text if len(text) < 80 else "...", f"not valid YAML: {error}") from None


def _translate(error: pydantic.ValidationError) -> ConfigError:
    """The first finding of pydantic as one of ours, with the number of others."""
    findings = error.errors(include_url=False)
    first = findings[0]
    original = first.get("ctx", {}).get("error")
    if isinstance(original, ConfigError):
        return original
    known = [key for key, _, _ in iter_fields()]
    names = [str(part) for part in first["loc"] if part not in ("str", "dict[str,any]")]
    key = ".".join(names)
    mend = first["msg"].replace("Input should be", "it should be")
    if first["type"] == "extra_forbidden":
        leaf = names[-1]
        near = [k for k in known if k.rsplit(".", 1)[-1] == leaf] or difflib.get_close_matches(key, known, 1)
        siblings = [k for k in known if k.rpartition(".")[0] == key.rpartition(".")[0]]
        mend = f"unknown key; did you mean {near[0]}?" if near else f"unknown key; known here: {', '.join(siblings)}"
    elif first["type"] == "missing":
        return ConfigError(key, None, "this key must be given")
    if len(findings) > 1:
        mend += f" ({len(findings) - 1} more wrong: {', '.join('.'.join(map(str, f['loc'])) for f in findings[1:4])})"
    return ConfigError(key, first["input"], mend)
