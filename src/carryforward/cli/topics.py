# SPDX-License-Identifier: Apache-2.0
"""`carryforward topics`."""

import json

import typer

from ..settings.commands import ContinuationSettings
from .errors import user_errors
from .options import Config, Device, Json, OutFolder, Recurrent, check_folder, options


@options(ContinuationSettings)
def topics(
    settings: ContinuationSettings,
    model: Recurrent,
    out: OutFolder,
    config: Config = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Measure how well generated text keeps to the topics of its context, with and without the state."""
    with user_errors(out):
        from ..analysis import topics as job
        from ..utils import console
        from ..utils.plotting import skip_without_matplotlib

        check_folder(out)
        result = job.topics(model, settings, out, device=device)
        typer.echo(json.dumps(result) if as_json else job.markdown(result))
        with skip_without_matplotlib(out / "topics.png"):
            job.draw(result, out / "topics.png")
        written = [name for name in ("topics.json", "topics.png") if (out / name).exists()]
        console.note(f"written to {out}: {', '.join(written)}")
