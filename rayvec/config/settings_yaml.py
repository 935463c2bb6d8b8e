"""Reads and writes settings in YAML, with the numbers of YAML 1.2: PyYAML takes 1:4 for 64, and 1e-3 for a text."""

from __future__ import annotations

import re
from typing import Any

import yaml

__all__ = ["read_yaml", "write_yaml"]


def read_yaml(text: object) -> Any:
    """Returns what a YAML text holds, or a text that says why it is none."""
    if not isinstance(text, str):
        return f"{type(text).__name__} in place of a text"
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        return f"no YAML ({' '.join(str(error).split())})"


def write_yaml(value: Any) -> str:
    """Returns plain values as YAML, from which `read_yaml` makes equal ones."""
    return str(yaml.dump(value, Dumper=_Dumper))


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a key that occurs twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for position, key in enumerate(keys) if key in keys[:position]), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} occurs twice", node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes texts that look like numbers in YAML 1.1 or 1.2."""


_NUMBERS = {
    "int": r"[-+]?(0|[1-9][0-9_]*)|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag.rpartition(":")[2] not in _NUMBERS]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _pattern in _NUMBERS.items():
    for _reader in (_Loader, _Dumper):
        _reader.add_implicit_resolver(
            f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), list("-+0123456789.")
        )
