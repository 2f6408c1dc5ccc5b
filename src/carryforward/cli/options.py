# SPDX-License-Identifier: Apache-2.0
"""Options of the command line: those that commands share, and what typer lacks.

`options` gives a command an option for each field of a settings dataclass, `--config` reads defaults from a YAML file,
and `repeat_flags` lets one flag take several values.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
import os
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from ..presets import DEFAULT_GROUP_WINDOWS, DEFAULT_KEY_SIZE, DEFAULT_MEMORY_TOKENS, DEFAULT_SINKS, FAR_SELECTIONS
from ..settings.base import ADVANCED, MAX_INTEGER, RUN
from ..settings.recurrence import (
    ARCHIVE,
    DEFAULT_ARCHIVE,
    DEFAULT_GROUP,
    DEFAULT_REACH,
    DEFAULT_RECENT,
    FAR,
    GROUP,
    GROUP_WINDOWS,
    KEY_SIZE,
    MEMORY,
    MEMORY_TOKENS,
    REACH,
    RECENT,
    RIGHT,
    SELECTION,
    SINKS,
)
from ..utils.parsing import read_yaml


def read_config(context: typer.Context, parameter: Any, path: Path | None) -> Path | None:
    """Use the settings of a YAML file as defaults; flags on the command line take precedence."""
    if path is None:
        return None
    try:
        settings = read_yaml(path) or {}
        if not isinstance(settings, dict):
            raise ValueError(f"{path} must hold `name: value` lines.")
        context.default_map = {**(context.default_map or {}), **_defaults(settings, context.command, path)}
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return path


def _defaults(settings: dict[Any, Any], command: Any, path: Path) -> dict[str, Any]:
    """The values of a config file, by the names of the command's parameters. `name:` without a value is the default."""
    known = {option.opts[0].lstrip("-").replace("-", "_"): option for option in command.params}
    known = {name: option for name, option in known.items() if name not in ("config", "help")}
    defaults: dict[str, Any] = {}
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ValueError(f"{path}: {key!r} is not a setting of this command. It has: {', '.join(known)}.")
        option = known[name]
        if option.name in defaults:
            raise ValueError(f"{path}: {name} stands twice. Leave one out.")
        if value is not None:
            defaults[option.name] = _default(option, value, f"{path}: {name}")
    return defaults


def _default(option: Any, value: Any, where: str) -> Any:
    """The value of a config file, in the form that the command line has it."""
    multiple = getattr(option, "multiple", False) or option.nargs != 1
    if isinstance(value, dict) or (isinstance(value, list) and not multiple):
        raise ValueError(f"{where} must be a single value, not {reprlib.repr(value)}.")
    values = value if isinstance(value, list) else [value]
    for one in values:
        if not isinstance(one, str | int | float):
            raise ValueError(f"{where} must be a name or a number, not {reprlib.repr(one)}.")
        if isinstance(one, bool) and not getattr(option, "is_flag", False):
            raise ValueError(f"{where} must not be true or false, which is a flag's value.")
        if isinstance(one, str) and not one.strip():
            raise ValueError(f"{where} is empty. Give a value, or leave it out.")
    # As text: a number that is no integer is then refused where an integer is due, and not rounded.
    texts = [one if isinstance(one, bool) else str(one) for one in values]
    return texts if multiple else texts[0]


# --- options that commands share -----------------------------------------------------------------------------------

Config = Annotated[
    Path | None,
    typer.Option("--config", callback=read_config, is_eager=True, help="YAML file with settings. Flags override it."),
]
_JSON = "Print the result as JSON."
Json = Annotated[bool, typer.Option("--json", help=_JSON)]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...", show_default="the GPU, if there is one")]
Recurrent = Annotated[str, typer.Argument(help="Recurrent model: run folder, model folder or Hub name.")]
OutFolder = Annotated[Path, typer.Option(file_okay=False, help="Output folder. The same command resumes the work.")]

# of commands that make a plain model recurrent
Reach = Annotated[str | None, typer.Option(help=REACH, show_default=DEFAULT_REACH)]
Recent = Annotated[int | None, typer.Option(help=RECENT, show_default=DEFAULT_RECENT)]
Sinks = Annotated[int | None, typer.Option(help=SINKS, show_default=str(DEFAULT_SINKS))]
Far = Annotated[int | None, typer.Option(help=FAR, show_default="0", rich_help_panel=ADVANCED)]
Selection = Annotated[
    str | None, typer.Option(help=SELECTION, show_default=FAR_SELECTIONS[0], rich_help_panel=ADVANCED)
]
GroupSize = Annotated[int | None, typer.Option(help=GROUP, show_default=DEFAULT_GROUP, rich_help_panel=ADVANCED)]
Archive = Annotated[int | None, typer.Option(help=ARCHIVE, show_default=DEFAULT_ARCHIVE, rich_help_panel=ADVANCED)]
Right = Annotated[int | None, typer.Option(help=RIGHT, show_default="0")]
GroupWindows = Annotated[
    int | None,
    typer.Option(help=GROUP_WINDOWS, show_default=str(DEFAULT_GROUP_WINDOWS), rich_help_panel=ADVANCED),
]
Memory = Annotated[list[str] | None, typer.Option(metavar="<str>...", help=MEMORY, show_default="the preset's")]
MemoryTokens = Annotated[
    int | None,
    typer.Option(help=MEMORY_TOKENS, show_default=str(DEFAULT_MEMORY_TOKENS), rich_help_panel=ADVANCED),
]
KeySize = Annotated[
    int | None, typer.Option(help=KEY_SIZE, show_default=str(DEFAULT_KEY_SIZE), rich_help_panel=ADVANCED)
]

# of commands that train
RunOut = Annotated[Path, typer.Option("--out", help="Run folder. The same command resumes an interrupted run.")]
ReportTo = Annotated[
    str, typer.Option(rich_help_panel=RUN, help="Experiment tracker, as Trainer's report_to: tensorboard, wandb, ...")
]
TrainingDevice = Annotated[
    str | None,
    typer.Option(
        "--device", rich_help_panel=RUN, help="cpu, to leave the GPU unused.", show_default="the GPU, if there is one"
    ),
]
TrainingJson = Annotated[bool, typer.Option("--json", rich_help_panel=RUN, help=_JSON)]


_MAX_NAME = 255  # bytes of a file's name, on all common file systems


def check_folder(folder: Path | None, flag: str = "--out") -> None:
    """Refuse, before any work, a folder that cannot be made or written to. Makes nothing."""
    if folder is None:
        return
    if any(len(os.fsencode(part)) > _MAX_NAME for part in folder.parts):
        raise ValueError(f"{flag} {str(folder)[:60]}…: the name is too long. Use at most {_MAX_NAME} bytes.")
    place = next(one for one in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(one))
    if not place.is_dir():
        raise ValueError(f"{flag} {folder}: {place} is a file, where a folder is needed. Give another folder.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"{flag} {folder}: no permission to write to {place}. Give another folder.")


def check_file(file: Path | None, flag: str = "--out") -> None:
    """Refuse, before any work, a file that cannot be written. Makes nothing."""
    if file is None:
        return
    if os.path.isdir(file):  # False for a name that is too long
        raise ValueError(f"{flag} {file} is a folder: give the name of a file.")
    if os.path.lexists(file):
        check_folder(file.absolute().parent, flag)
    else:
        check_folder(file, flag)


# --- an option for each field of a dataclass -----------------------------------------------------------------------


def options(settings: type) -> Callable[[Callable], Callable]:
    """Give a command an option for each field of a dataclass, in place of its parameter of that type."""

    def decorate(command: Callable) -> Callable:
        fields = dataclasses.fields(settings)
        hints = get_type_hints(settings)
        own = inspect.signature(command).parameters
        (receiver,) = (name for name, parameter in own.items() if parameter.annotation is settings)

        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            values = {field.name: arguments.pop(field.name) for field in fields}
            values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
            try:
                filled = settings(**values)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from error
            command(**{receiver: filled}, **arguments)

        parameters = []
        for name, parameter in own.items():
            if name == receiver:
                parameters += [_parameter(field, hints[field.name]) for field in fields]
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        parameters.sort(key=lambda parameter: parameter.default is not inspect.Parameter.empty)
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


# typer has lists where settings have tuples
_LISTS: dict[Any, Any] = {
    tuple[float, ...]: list[float],
    tuple[int, ...] | None: list[int] | None,
    tuple[str, ...] | None: list[str] | None,
}
_METAVARS: dict[Any, str] = {
    tuple[float, ...]: "<float>...",
    tuple[int, ...] | None: "<int>...",
    tuple[str, ...] | None: "<str>...",
}


def _parameter(field: dataclasses.Field, hint: Any) -> inspect.Parameter:
    """The parameter from which typer makes the option of a field."""
    option = typer.Option(
        help=field.metadata["help"],
        rich_help_panel=field.metadata["panel"],
        show_default=field.metadata.get("shown") or hint is not bool,  # the name of a flag says its default
        metavar=_METAVARS.get(hint),
    )
    default = list(field.default) if isinstance(field.default, tuple) else field.default
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
        annotation=Annotated[_LISTS.get(hint, hint), option],
    )


# --- help ----------------------------------------------------------------------------------------------------------


class _CompactHelp:
    """Shows each flag once: `--bf16`, and `--no-validation` where that changes the default. Both forms are accepted.

    typer shows both in columns of their own and a type, which leaves no room for the help text in a narrow terminal.
    The help text of a flag that is on by default describes its `--no-` form.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for option in self.get_params(ctx):  # type: ignore[attr-defined]
            if getattr(option, "is_flag", False):
                shown = option.secondary_opts if option.default is True and option.secondary_opts else option.opts
                option.opts, option.secondary_opts, option.metavar = shown, [], ""
        super().format_help(ctx, formatter)  # type: ignore[misc]


class Command(_CompactHelp, TyperCommand):
    """A command that refuses values without sense, whatever the option: empty names, NaN, numbers without bounds."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        for option in self.params:
            for value in _values(given.get(option.name or "")):
                if isinstance(value, str) and option.name not in MAY_BE_EMPTY:
                    _check_text(option, value)
        rest = super().parse_args(ctx, args)
        for option in self.params:
            for value in _values(ctx.params.get(option.name or "")):
                if isinstance(value, int) and abs(value) >= MAX_INTEGER:
                    raise typer.BadParameter(f"{option.opts[0]} {value}: it must be below 2**64.")
                if isinstance(value, float) and not math.isfinite(value):
                    raise typer.BadParameter(f"{option.opts[0]} {value}: it must be a finite number.")
        return rest


MAY_BE_EMPTY = ("prompt",)  # options whose value may be an empty text


def _values(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


def _check_text(option: Any, value: str) -> None:
    name = option.opts[0]
    if not value.strip():
        raise typer.BadParameter(f"{name} is empty: give a value, or leave it out.")
    if "\0" in value:
        raise typer.BadParameter(f"{name} {value!r} holds a null character. Leave it out.")


class Group(_CompactHelp, TyperGroup):
    pass


# --- several values after one flag ---------------------------------------------------------------------------------


WORDS = ("<str>...", "<path>...")  # metavars of options that take several words; all others take numbers


def repeat_flags(arguments: list[str], command: Any) -> list[str]:
    """Turn `--overlap 0 5 10` into `--overlap 0 --overlap 5 --overlap 10`, for options that take several values.

    Args:
        command: the command that the arguments are for, or the group of it: the first arguments then name it.
    """
    for name in arguments:
        if not hasattr(command, "commands") or name not in command.commands:
            break
        command = command.commands[name]
    is_value = {
        name: _is_word if option.metavar in WORDS else _is_number
        for option in command.params
        if getattr(option, "multiple", False)
        for name in option.opts
    }
    repeated: list[str] = []
    flag = ""  # the option whose values are being read
    for argument in arguments:
        if flag and repeated[-1] != flag and is_value[flag](argument):
            repeated.append(flag)
        elif argument.startswith("-") and not _is_number(argument):
            name = argument.partition("=")[0]
            flag = name if name in is_value else ""
        elif flag and not is_value[flag](argument) and repeated[-1] != flag:
            flag = ""
        repeated.append(argument)
    return repeated


def _is_word(text: str) -> bool:
    return not text.startswith("-")


def _is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False
