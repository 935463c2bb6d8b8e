"""Reads and writes settings in YAML, with the numbers of YAML 1.2: PyYAML takes 1:4 for 64, and 1e-3 for a string."""

from __future__ import annotations

import re
from typing import Any

import yaml

from rayvec.errors import ConfigError

__all__ = ["read_yaml", "write_yaml"]


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a key that occurs twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        for key, _ in reversed(node.value):
            if keys.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} occurs twice", key.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes strings that look like numbers in YAML 1.1 or 1.2."""


_NUMBERS = {
    "int": r"[-+]?(0|[1-9][0-9_]*)",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag.rpartition(":")[2] not in _NUMBERS]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _pattern in _NUMBERS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), list("-+0123456789.")
        )


def read_yaml(text: object) -> Any:
    """Returns what YAML holds.

    Raises:
        ConfigError: It is no string, or no YAML.
    """
    try:
        if isinstance(text, str):
            return yaml.load(text, _Loader)
        got = f"a {type(text).__name__}"
    except yaml.YAMLError as error:
        got = " ".join(str(error).split())
    raise ConfigError(f"The settings are no YAML text: {got}. Correct the file, or pass the text of config.yaml.")


def write_yaml(value: Any) -> str:
    """Returns plain values as YAML, from which `read_yaml` makes equal ones."""
    return str(yaml.dump(value, Dumper=_Dumper))
