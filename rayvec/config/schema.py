"""Dataclasses whose values pydantic checks: bounds are in the types, and the docstring of a field stands below it."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import pydantic.dataclasses
from pydantic import ConfigDict, Field, InstanceOf, ValidationError
from pydantic.fields import FieldInfo

from rayvec.errors import ConfigError

__all__ = [
    "Count",
    "Fraction",
    "Name",
    "Natural",
    "NonNegative",
    "Positive",
    "Seed",
    "dataclass",
    "docs_of",
    "field_names",
    "fields_of",
    "suggested",
]


Name = Annotated[InstanceOf[str], Field(min_length=1)]  # which may carry an object, see `rayvec.config.references`
Natural = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]

OTHER_NAMES = {
    "batch_size": ("minibatch_size",),
    "buffer_size": ("replay_size",),
    "clip_param": ("clip_coef",),
    "clip_range": ("clip_coef",),
    "cuda": ("learner_device",),
    "device": ("learner_device",),
    "ent_coef": ("entropy_coef",),
    "env": ("env_id",),
    "learning_rate": ("policy_lr",),
    "lr": ("learning_rate", "policy_lr"),
    "n_epochs": ("num_epochs",),
    "net_arch": ("hidden_sizes",),
    "num_workers": ("workers_per_node",),
    "timesteps": ("total_steps",),
    "vf_coef": ("value_coef",),
}
"""Settings that have another name in other libraries, where it is not a near one."""

_LEAST_LIKENESS = 0.75
"""The least similarity (difflib's ratio) of an unknown name to the one that is suggested for it."""

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls: type | None = None, **options: Any) -> Any:
        """Decorates like `dataclasses.dataclass`; the values of an object are checked and converted when it is made.

        Raises:
            ConfigError: On a call of the class: a value has the wrong type, is outside its bounds, or is unknown.
        """
        if cls is None:
            return functools.partial(dataclass, **options)
        config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
        made = pydantic.dataclasses.dataclass(cls, config=config, **options)
        pydantic.dataclasses.rebuild_dataclass(made)  # raises now for a type that can't be found, not at the first call
        made.__init__ = _explaining(made.__init__)
        return made


def _explaining(init: Any) -> Any:
    """Returns a constructor that raises a `ConfigError` in place of pydantic's, and keeps what it was given."""

    @functools.wraps(init)
    def explained(self: Any, **given: Any) -> None:
        try:
            init(self, **given)
        except ValidationError as error:
            raise _refusal(type(self), given, error) from None
        object.__setattr__(self, "_given", given)

    return explained


def _refusal(cls: type, given: Mapping[str, Any], error: ValidationError) -> Exception:
    """Returns what to raise for values that pydantic refuses, or what a check of `cls` has raised."""
    errors, known = error.errors(include_url=False), fields_of(cls)
    if unknown := sorted(str(name) for name in given if name not in known):
        near = [f"{each} for {name}" for name in unknown if (each := suggested(name, known))]
        advice = f"Did you mean {' and '.join(near)}?" if near else "Correct it, or leave it out."
        return ConfigError(f"{cls.__name__} has no setting {', '.join(unknown)}. {advice}")
    raised = errors[0].get("ctx", {}).get("error")
    if isinstance(raised, ConfigError):
        return raised
    name = str(errors[0]["loc"][0])
    if name not in given:
        return ConfigError(f"{name} is missing. Pass it: {docs_of(cls).get(name, 'it has no default.')}")
    rules = " or ".join(dict.fromkeys(each["msg"] for each in errors))
    objects = name in ("env_id", "env_kwargs", "network", "wrappers")
    advice = " Pass objects to rayvec.train(config, env=..., network=...)." if objects else ""
    return ConfigError(f"{name} is {given[name]}. {rules}.{advice}")


def fields_of(cls: Any) -> dict[str, FieldInfo]:
    """Returns pydantic's descriptions of the fields of a class of settings, in the order of declaration."""
    fields: dict[str, FieldInfo] = cls.__pydantic_fields__
    return fields


def field_names(cls: Any) -> list[str]:
    """Returns the names of the fields of a class of settings, in the order of declaration."""
    return list(fields_of(cls))


def docs_of(cls: Any) -> dict[str, str]:
    """Returns the docstring of each field; a subclass that changes a default need not repeat it."""
    docs: dict[str, str] = {}
    for base in reversed([each for each in cls.__mro__ if hasattr(each, "__pydantic_fields__")]):
        docs |= {name: " ".join(each.description.split()) for name, each in fields_of(base).items() if each.description}
    return docs


def suggested(name: str, known: Collection[str]) -> str | None:
    """Returns which of the `known` settings a misspelt name stands for, or one of another library; None if none.

    >>> suggested("lr", ["learning_rate"]), suggested("total_step", ["total_steps"]), suggested("wings", ["seed"])
    ('learning_rate', 'total_steps', None)
    >>> suggested("epochs", ["num_epochs", "num_envs"]), suggested("env", ["seed", "env_id", "env_kwargs"])
    ('num_epochs', 'env_id')
    """
    if name in OTHER_NAMES:
        return next((each for each in OTHER_NAMES[name] if each in known), None)
    longer = [each for each in known if each.endswith(f"_{name}")]
    near = longer if len(longer) == 1 else difflib.get_close_matches(name, known, 1, _LEAST_LIKENESS)
    return next(iter(near), None)
