# SPDX-License-Identifier: Apache-2.0
"""The command line, with one file for each command. Results go to stdout, everything else to stderr.

The commands import torch when they run, so that `--help` answers at once. Exit codes: 0 done, 1 failed, 2 wrong usage,
130 interrupted.
"""

import sys
from typing import Annotated

import typer

from .add import add
from .demo import demo
from .embed import embed
from .evaluate import evaluate
from .flops import flops
from .generate import generate
from .horizon import horizon
from .inspect import inspect
from .lm_eval import PASSED_ON, lm_eval
from .memory_tasks import memory_tasks
from .options import Command, Group, repeat_flags
from .qa import qa
from .report import report
from .reproduce import reproduce
from .samples import samples
from .topics import topics
from .train import train

app = typer.Typer(
    name="carryforward",
    cls=Group,
    help="Recurrence for pretrained transformers: documents of any length, in the memory of one window.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
_PANELS = {
    "Models": (demo, train, add, generate, embed),
    "Measurements": (evaluate, horizon, report, flops),
    "What the state does": (inspect, topics, samples),
    "Research": (reproduce,),
}
for panel, commands in _PANELS.items():
    for command in commands:
        app.command(cls=Command, rich_help_panel=panel)(command)
app.command("lm-eval", cls=Command, context_settings=PASSED_ON, rich_help_panel="Measurements")(lm_eval)
app.add_typer(qa, rich_help_panel="Models")
app.add_typer(memory_tasks, rich_help_panel="Measurements")


def _print_version(requested: bool) -> None:
    if requested:
        from .. import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options that stand before a command."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; the entry point `carryforward`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command = typer.main.get_command(app)
    command(args=repeat_flags(arguments, command), prog_name="carryforward")
