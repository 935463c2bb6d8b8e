"""The command line reads settings: each field of a class of settings is an option, and its help shows what applies."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, get_args, get_origin

from rayvec.config.base import TrainConfig
from rayvec.config.presets import starting_values
from rayvec.config.schema import docs_of, field_names, fields_of, suggested
from rayvec.config.settings_yaml import read_yaml
from rayvec.errors import ConfigError, counted, require

_GROUPS = {
    "run": "total_steps seed preset config resume run_dir init_from learner_device",
    "environment": "env_id env_kwargs env_servers wrappers num_envs",
    "algorithm": "num_steps learning_rate learning_rate_schedule policy_lr q_lr gamma",
    "network": "network recurrent hidden_sizes activation cnn action_masks",
    "evaluation": "eval_episodes eval_interval_steps",
    "logging": "episode_metrics track checkpoint_interval_s",
    "cluster": "num_nodes workers_per_node address inference learners num_learners sync_fraction variable_lengths "
    "cores_per_env gpus_per_env resources_per_env",
    "faults": "on_env_error step_timeout_s start_timeout_s restart_env_every replay_calls spare_envs on_bad_obs "
    "on_node_loss",
    "expert": "native probe preload groups learner_threads precision compile plugin eval_max_episode_steps "
    "eval_deterministic eval_env eval_env_kwargs entropy_coef_schedule clip_coef_schedule policy_lr_schedule "
    "q_lr_schedule shared_trunk layer_norm "
    "log_std_init recurrent_size sequence_length replay_on_device checkpoint_replay clip_value_loss "
    "prefetch rho_bar c_bar vtrace_lambda num_critics",
}
"""The groups of options of ``train``, in the order of the help. Settings in none of them are of the algorithm."""
_OF_ALL = {"cluster", "faults", "expert"}
"""Groups that ``--help-all`` shows and ``--help`` does not."""
_COLUMN, _MAX_WIDTH = 31, 100


class OptionParser(argparse.ArgumentParser):
    """Raises a `ConfigError` in place of printing the usage and ending the process."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, argument_default=argparse.SUPPRESS, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raises a `ConfigError`."""
        raise ConfigError(f"{self.prog}: {message}. `{self.prog} --help` lists the options.")


def read_options(
    command: str,
    cls: Any,
    args: Sequence[str],
    base: Mapping[str, Any] | None = None,
    others: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Returns the settings that the arguments of a command set; ``--help`` prints the options and ends the process.

    Args:
        command: The command, for messages.
        cls: The class of its settings.
        args: The arguments.
        base: Settings that options change, of a file.
        others: Further options, which were read before, with what they do.

    Raises:
        ConfigError: An option is unknown, or lacks its value.
    """
    parser, others = OptionParser(f"rayvec {command}"), others or {}
    for name in field_names(cls):
        _add(parser, cls, name)
    parser.add_argument("-h", "--help", action="store_const", const="help")
    parser.add_argument("--help-all", dest="help", action="store_const", const="help-all")
    found, unknown = parser.parse_known_args(args)
    given = vars(found)
    if wanted := given.pop("help", None):
        print(_help(command, cls, {**(base or {}), **given}, others, is_whole=wanted == "help-all"))
        raise SystemExit(0)
    if unknown:
        option = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
        name = option.removeprefix("--").removeprefix("no-").replace("-", "_")
        near = suggested(name, [*field_names(cls), *others])
        advice = f"Did you mean --{near.replace('_', '-')}?" if near else f"`rayvec {command} --help-all` lists them."
        raise ConfigError(f"{option} is no option of `rayvec {command}`. {advice}")
    kinds = {name: get_origin(each.annotation) for name, each in fields_of(cls).items()}
    return {name: _pairs(name, value) if kinds[name] is dict else value for name, value in given.items()}


def _add(parser: OptionParser, cls: Any, name: str) -> None:
    """Adds the option of a setting; one that is on or off also stands alone, and as ``--no-NAME``."""
    kind, option = fields_of(cls)[name].annotation, name.replace("_", "-")
    is_many = get_origin(kind) in (tuple, dict)
    if name == getattr(cls, "positional", None):
        parser.add_argument(name, nargs="*" if is_many else "?")
    elif bool in (kind, *get_args(kind)):
        parser.add_argument(f"--{option}", nargs="?", const=True, type=_word)
        parser.add_argument(f"--no-{option}", dest=name, action="store_const", const=False)
    else:
        parser.add_argument(f"--{option}", nargs="*" if is_many else None, type=_word)


def _word(word: str) -> str | None:
    return None if word == "None" else word


def _pairs(name: str, words: Sequence[str]) -> Any:
    """Reads NAME VALUE pairs, or one mapping in YAML."""
    if len(words) == 1 and words[0].startswith("{"):
        return read_yaml(words[0])
    option = name.replace("_", "-")
    require(
        len(words) % 2 == 0, f"--{option} has {counted(len(words), 'word')}. Pass NAME VALUE pairs, or {{name: value}}."
    )
    return {key: read_yaml(value) for key, value in zip(words[::2], words[1::2], strict=True)}


def _help(command: str, cls: Any, given: Mapping[str, Any], others: Mapping[str, str], *, is_whole: bool) -> str:
    """Returns the help of a command, with the values that apply; of all options, or of those that most runs need."""
    trains = issubclass(cls, TrainConfig)
    defaults = {name: each.get_default(call_default_factory=True) for name, each in fields_of(cls).items()}
    values = starting_values(cls, given) if trains else defaults
    about = (cls.__doc__ or "").partition("\n")[0]
    if trains:
        about += (
            f" Options are shown with the values that apply; * is of the preset {values['preset']}. Switches are "
            f"--NAME and --no-NAME.{'' if is_whole else ' --help-all shows all options.'}"
        )
    docs, positional = {**docs_of(cls), **others}, getattr(cls, "positional", None)
    places = {name: title for title, names in _GROUPS.items() for name in names.split() if trains}
    rows: dict[str, list[str]] = {title: [] for title in _GROUPS}
    for name in sorted({*field_names(cls), *others}, key=[*places, *field_names(cls)].index):
        mark = "*" if trains and name not in {*given, *others} and values[name] != defaults[name] else ""
        value = "PATH" if name in others else _shown(values.get(name)) + mark
        head = f"  {name.upper()}" if name == positional else f"  --{name.replace('_', '-')} {value}"
        text = docs.get(name, "") if is_whole else re.split(r"(?<=\.)\s|[;:] ", docs.get(name, ""))[0].rstrip(".")
        rows.setdefault(places.get(name, "algorithm" if trains else "options"), []).append(row(head, text))
    shown = {title: lines for title, lines in rows.items() if lines and (is_whole or title not in _OF_ALL)}
    parts = [f"usage: rayvec {command} [OPTIONS]\n", row("", about, 0)]
    return "\n".join([*parts, *("\n".join(["", f"{title}:", *lines]) for title, lines in shown.items())])


def row(head: str, text: str, column: int = _COLUMN) -> str:
    """Returns lines of help: `head`, and from a column on `text`, within the width of the terminal."""
    width, head = min(shutil.get_terminal_size().columns, _MAX_WIDTH), f"{head}  ".ljust(column) if column else ""
    return textwrap.fill(text, width, initial_indent=head, subsequent_indent=" " * column, break_on_hyphens=False)


def _shown(value: object) -> str:
    if value is None or value == () or value == {}:
        return "unset"
    if isinstance(value, dict):
        return " ".join(f"{name} {each}" for name, each in value.items())
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
