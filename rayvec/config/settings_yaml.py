"""Reads and writes settings in YAML, with the numbers of YAML 1.2: PyYAML takes 1:4 for 64, and 1e-3 for a string."""

from __future__ import annotations

import re
from typing import Any

import yaml

from rayvec.errors import ConfigError


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads numbers as YAML 1.2 has them."""


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes strings that look like numbers in YAML 1.1 or 1.2."""


_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_NUMBERS = {"tag:yaml.org,2002:int": r"[-+]?(0|[1-9][0-9_]*)", "tag:yaml.org,2002:float": _FLOAT}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in _NUMBERS]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), list("-+0123456789."))
    _Dumper.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), list("-+0123456789."))


def read_yaml(text: str) -> Any:
    """Returns what YAML holds.

    Raises:
        ConfigError: It is no YAML.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
    raise ConfigError(f"The settings are no YAML text: {problem}. Correct the file, or pass the text of config.yaml.")


def write_yaml(value: Any) -> str:
    """Returns plain values as YAML, from which `read_yaml` makes equal ones."""
    return str(yaml.dump(value, Dumper=_Dumper))
