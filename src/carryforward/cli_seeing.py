# SPDX-License-Identifier: Apache-2.0
"""The command line of what is carried between windows: `carryforward topics` and `samples`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from .options import options
from .plainly import Config, Device, Json, told_plainly
from .settings import ContinuationSettings

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
    with told_plainly():
        from . import console, topic_reports
        from .figure import left_out

        result = topic_reports.measure(model, settings, out, device=device)
        typer.echo(json.dumps(result) if as_json else topic_reports.markdown(result))
        with left_out(out / "topics.png"):
            topic_reports.draw(result, out / "topics.png")
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
    with told_plainly():
        from . import console, sample_tables

        result = sample_tables.tabulate(model, settings, out, rows=rows, device=device)
        typer.echo(json.dumps(result) if as_json else sample_tables.markdown(result))
        console.note(f"written to {out}: samples.html and samples.md, the texts beside each other; samples.json")
