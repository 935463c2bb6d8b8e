"""How the command line reads the settings of a run: its options are the fields of the config classes, read by tyro."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Union, get_type_hints

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from rayvec.config.base import CONFIGS, Scalar, TrainConfig
from rayvec.config.schema import OTHER_NAMES, describe, field_names, suggested
from rayvec.errors import ConfigError

__all__ = ["check_options", "subcommands", "with_values"]

_RESUME_HELP = (
    "Resume the run in this directory from its last checkpoint, with its own settings; you may change only {}."
)


def _node_counts(words: list[str]) -> int | tuple[int, ...] | str | None:
    """Returns the value of ``--num-nodes``: a number, MIN:MAX, or None. Other words are left to the check of the field.

    >>> _node_counts(["4"]), _node_counts(["1:4"]), _node_counts(["None"])
    (4, (1, 4), None)
    """
    counts = words[0].split(":")
    if words[0] == "None" or not all(count.isdecimal() for count in counts):
        return None if words[0] == "None" else words[0]
    return int(words[0]) if len(counts) == 1 else tuple(map(int, counts))


_NODE_COUNTS = PrimitiveConstructorSpec(
    nargs=1,
    metavar="INT|MIN:MAX|None",
    instance_from_str=_node_counts,
    is_instance=lambda value: True,
    str_from_instance=lambda value: [":".join(map(str, value)) if isinstance(value, tuple) else str(value)],
)


_COMPILE = {"auto": "auto", "on": True, "off": False, "True": True, "False": False}


def _compile(words: Sequence[str]) -> Any:
    """Reads a value of ``--compile``."""
    if words[0] not in _COMPILE:
        raise ValueError(f"auto, on or off, not {words[0]!r}")
    return _COMPILE[words[0]]


_COMPILES = PrimitiveConstructorSpec(
    nargs=1,
    metavar="{auto,on,off}",
    instance_from_str=_compile,
    is_instance=lambda value: True,
    str_from_instance=lambda value: [next(name for name, known in _COMPILE.items() if known == value)],
)
_SWITCHES = ("--compile", "--prefetch")
"""Options of settings that are on, off or a third value. They take a value, and also stand alone or as --no-x."""
_TYPES = {
    "num_nodes": Annotated[Any, _NODE_COUNTS],
    "compile": Annotated[Any, _COMPILES],
    "prefetch": bool | None,
    "env_kwargs": dict[str, Scalar],
}
"""What the command line reads in place of a setting's own type."""


def _options(cls: type[TrainConfig]) -> type[TrainConfig]:
    """Returns the fields of `cls`, and ``resume``, without checks: tyro would reformat their messages."""
    docs = {row.name: row.doc for row in describe(cls)}
    types = {**get_type_hints(cls, include_extras=True), **_TYPES}
    options = [
        (item.name, Annotated[types[item.name], tyro.conf.arg(help=docs[item.name])], copy.copy(item))
        for item in dataclasses.fields(cls)
    ]
    help_text = _RESUME_HELP.format(", ".join(name.replace("_", "-") for name in cls.adjustable()))
    resume = ("resume", Annotated[Path | None, tyro.conf.arg(help=help_text)], field(default=None))
    namespace = {"__doc__": cls.__doc__, "__post_init__": lambda self: None}
    return dataclasses.make_dataclass(
        cls.__name__, [*options, resume], bases=(cls,), namespace=namespace, frozen=True, kw_only=True
    )


def subcommands() -> Any:
    """Returns one subcommand for each algorithm; a union needs a second member to be one."""
    return Union[
        *(Annotated[_options(cls), tyro.conf.subcommand(name)] for name, cls in CONFIGS.items()),
        Annotated[None, tyro.conf.Suppress],
    ]


def with_values(args: Sequence[str]) -> Sequence[str]:
    """Returns the arguments of ``train`` with a value for those of `_SWITCHES` that the algorithm has.

    >>> with_values(["train", "ppo", "--no-compile", "--compile", "--run-dir", "compile"])
    ['train', 'ppo', '--compile', 'False', '--compile', 'True', '--run-dir', 'compile']
    """
    if args[:1] != ["train"] or len(args) < 2 or args[1] not in CONFIGS:
        return args
    switches = [option for option in _SWITCHES if option.removeprefix("--") in field_names(CONFIGS[args[1]])]
    found: list[str] = []
    for arg, following in itertools.zip_longest(args, args[1:], fillvalue=""):
        option = arg.replace("--no-", "--", 1)
        is_alone = option in switches and (option != arg or not following or following.startswith("-"))
        found += [option, str(option == arg)] if is_alone else [arg]
    return found


def check_options(args: Sequence[str]) -> None:
    """Refuses names of other libraries in the arguments of ``train``; tyro refuses other unknown options.

    Raises:
        ConfigError: There is one; the message says what it is called here.
    """
    cls = CONFIGS.get(args[1]) if args[:1] == ["train"] and len(args) > 1 else None
    known = field_names(cls) if cls else []
    for arg in args if cls else ():
        option = arg.partition("=")[0]
        name = option.removeprefix("--").replace("-", "_")
        if option.startswith("--") and name in OTHER_NAMES and name not in known and (near := suggested(name, known)):
            raise ConfigError(
                f"{option} is no option of `rayvec train {args[1]}`. Did you mean --{near.replace('_', '-')}?"
            )
