# SPDX-License-Identifier: Apache-2.0
"""The base of all settings dataclasses: it checks each value by the type of its field, in the words of its option.

A field's metadata holds its help text and the panel it stands in under `--help`: None is the main panel, for what most
users need.
"""

import math
from dataclasses import dataclass, field, fields
from functools import partial
from types import UnionType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

# panels of `--help`
ADVANCED = "Advanced"
RUN = "Advanced: run"
MEMORY = "Advanced: memory"
MAX_INTEGER = 2**64  # above the largest seed of torch, and above any count
_ACCEPTED = {
    int: "an integer below 2**64",
    float: "a finite number",
    bool: "true or false",
    str: "a text that is not empty",
}


def setting(
    default: Any,
    help: str,
    panel: str | None = None,
    shown: str | None = None,
    kind: str | tuple[str, ...] | None = None,
) -> Any:
    """A field of a settings dataclass.

    Args:
        panel: the group of options it stands in under `--help`; None is the main one.
        shown: the default that `--help` shows, where `default` is None because the job or the model decides.
        kind: the kind of memory that it belongs to, or several.
    """
    return field(default=default, metadata={"help": help, "panel": panel, "shown": shown, "kind": kind})


memory_setting = partial(setting, panel=MEMORY)
advanced_setting = partial(setting, panel=ADVANCED)
data_setting = partial(setting, panel="Advanced: data")
optimisation_setting = partial(setting, panel="Advanced: optimisation")
run_setting = partial(setting, panel=RUN)


@dataclass(frozen=True)
class Settings:
    """Settings of a command. A subclass checks in `__post_init__`, after this class, what else its values must be.

    Attributes:
        seeds: the lowest and the highest seed. By default those that numpy, scikit-learn and transformers accept.
    """

    seeds: ClassVar[tuple[int, int]] = (0, 2**32 - 1)

    def __post_init__(self) -> None:
        """Refuse values of another type, empty texts, NaN, infinity, and seeds that a library would refuse later."""
        for name, (kind, several, optional) in _kinds(type(self)).items():
            value = getattr(self, name)
            if value is None and optional:
                continue
            values = value if several and isinstance(value, tuple) else (value,)
            is_tuple = isinstance(value, tuple) and bool(value)
            if is_tuple != several or not all(_fits(kind, one) for one in values):
                accepted = "a tuple with a value in it" if several and not is_tuple else _ACCEPTED[kind]
                raise ValueError(f"{flag(name)} {' '.join(map(repr, values))}: it must be {accepted}.")
        low, high = self.seeds
        if not low <= (getattr(self, "seed", None) or 0) <= high:
            raise ValueError(f"--seed {self.seed}: it must be from {low} to {high}.")  # type: ignore[attr-defined]


def flag(name: str) -> str:
    """The command-line option of a field."""
    return "--" + name.replace("_", "-")


def at_least(least: int, settings: Settings, *names: str) -> None:
    """Check the smallest value of settings; None, for the default, passes."""
    for name in names:
        values = getattr(settings, name)
        for value in values if isinstance(values, tuple) else (values,):
            if value is not None and value < least:
                raise ValueError(f"{flag(name)} {value}: it must be at least {least}.")


def _kinds(settings: type[Settings]) -> dict[str, tuple[type, bool, bool]]:
    """Of each field: the type of its value, whether it has several in a tuple, and whether None is a default."""
    hints, kinds = get_type_hints(settings), {}
    for one in fields(settings):
        hint = hints[one.name]
        optional = isinstance(hint, UnionType)
        kind = next(kind for kind in get_args(hint) if kind is not type(None)) if optional else hint
        several = get_origin(kind) is tuple
        kinds[one.name] = get_args(kind)[0] if several else kind, several, optional
    return kinds


def _fits(kind: type, value: Any) -> bool:
    """Whether a value is of a setting's type. True and False are no numbers, and NaN and infinity are none either."""
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is str:
        return isinstance(value, str) and bool(value.strip()) and "\0" not in value
    if isinstance(value, int):
        return abs(value) < MAX_INTEGER
    return kind is float and isinstance(value, float) and math.isfinite(value)
