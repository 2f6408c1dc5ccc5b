# SPDX-License-Identifier: Apache-2.0
"""The command line of what is carried between windows: `carryforward topics` and `samples`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ..settings import ContinuationSettings
from .errors import Config, Device, Json, user_errors
from .options import options

Recurrent = Annotated[str, typer.Argument(help="A recurrent model: a run, a folder or a Hub name.")]
Folder = Annotated[
    Path, typer.Option(file_okay=False, help="Folder for everything. Interrupted, the same command goes on.")
]


@options(ContinuationSettings)
def topics(
    settings: ContinuationSettings,
    model: Recurrent,
    out: Folder,
    config: Config = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Do continuations keep to the topics of their contexts, with the state and without it?"""
    with user_errors():
        from ..analysis import topic_report
        from ..utils import console
        from ..utils.plotting import left_out

        result = topic_report.measure(model, settings, out, device=device)
        typer.echo(json.dumps(result) if as_json else topic_report.markdown(result))
        with left_out(out / "topics.png"):
            topic_report.draw(result, out / "topics.png")
        written = [name for name in ("topics.json", "topics.png") if (out / name).exists()]
        console.note(f"written to {out}: {', '.join(written)}")


@options(ContinuationSettings)
def samples(
    settings: ContinuationSettings,
    model: Recurrent,
    out: Folder,
    rows: Annotated[int, typer.Option(min=1, help="Of each table.")] = 10,
    config: Config = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """What is written after contexts, beside each other: by topic, and by the people of the context."""
    with user_errors():
        from ..analysis import samples
        from ..utils import console

        result = samples.tabulate(model, settings, out, rows=rows, device=device)
        typer.echo(json.dumps(result) if as_json else samples.markdown(result))
        console.note(f"written to {out}: samples.html and samples.md, the texts beside each other; samples.json")
