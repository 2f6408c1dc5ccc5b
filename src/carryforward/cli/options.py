# SPDX-License-Identifier: Apache-2.0
"""What the command line's options can do beyond typer's: several values behind one flag, a YAML file of defaults, and a
flag for each field of a dataclass."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer


def spread(arguments: list[str], command: Any) -> list[str]:
    """`--overlap 0 5 10` as `--overlap 0 --overlap 5 --overlap 10`, for options of a command that take several values.

    Args:
        command: what the arguments are for, or a group of which they name one.
    """
    for name in arguments:
        if not hasattr(command, "commands") or name not in command.commands:
            break
        command = command.commands[name]
    names = [name for option in command.params if getattr(option, "multiple", False) for name in option.opts]
    several = {name: _is_word if name in _OF_WORDS else _is_number for name in names}
    spread: list[str] = []
    option = ""
    for argument in arguments:
        if option and spread[-1] != option and several[option](argument):
            spread.append(option)
        elif argument.startswith("-") and not _is_number(argument):
            name = argument.partition("=")[0]
            option = name if name in several else ""
        elif option and not several[option](argument) and spread[-1] != option:
            option = ""
        spread.append(argument)
    return spread


_OF_WORDS = ("--cell", "--text")  # all others are of numbers


def _is_word(text: str) -> bool:
    return not text.startswith("-")


def _is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False


def read_config(context: typer.Context, parameter: Any, path: Path | None) -> Path | None:
    """Settings from a YAML file become defaults; flags on the command line win."""
    if path is None:
        return None
    import yaml

    try:
        settings = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise typer.BadParameter(f"{path} must hold `name: value` lines.")
    known = {option.opts[0].lstrip("-").replace("-", "_"): option for option in context.command.params}
    known = {name: option for name, option in known.items() if name not in ("config", "help")}
    defaults = {}
    for given, value in settings.items():
        name = str(given).replace("-", "_")
        if name not in known:
            raise typer.BadParameter(f"{path}: {given!r} is not a setting of this command. It has: {', '.join(known)}.")
        several = getattr(known[name], "multiple", False) or known[name].nargs != 1
        if isinstance(value, dict) or (isinstance(value, list) and not several):
            raise typer.BadParameter(f"{path}: {name} must be a single value, not {value}.")
        defaults[known[name].name] = [value] if several and not isinstance(value, list) else value
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def options(settings: type) -> Callable[[Callable], Callable]:
    """Give a command an option for each field of a dataclass; the command receives the dataclass, filled in."""

    def decorate(command: Callable) -> Callable:
        hints = get_type_hints(settings)
        fields = {field.name: field for field in dataclasses.fields(settings)}
        own = inspect.signature(command).parameters
        options = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is dataclasses.MISSING else _listed(field.default),
                annotation=Annotated[
                    _LISTS.get(hints[field.name], hints[field.name]),
                    typer.Option(help=field.metadata["help"], rich_help_panel=field.metadata["panel"]),
                ],
            )
            for field in fields.values()
        ]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            filled = {name: given.pop(name) for name in fields}
            try:
                made = settings(**{n: tuple(v) if isinstance(v, list) else v for n, v in filled.items()})
            except ValueError as error:
                raise typer.BadParameter(str(error)) from error
            command(made, **given)

        rest = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in list(own.values())[1:]]
        ordered = sorted([*options, *rest], key=lambda one: one.default is not inspect.Parameter.empty)
        run.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
        return run

    return decorate


# the command line has lists where settings have tuples
_LISTS: dict[Any, Any] = {
    tuple[float, ...]: list[float],
    tuple[int, ...] | None: list[int] | None,
    tuple[str, ...] | None: list[str] | None,
}


def _listed(default: Any) -> Any:
    return list(default) if isinstance(default, tuple) else default
