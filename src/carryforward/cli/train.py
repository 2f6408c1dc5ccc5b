# SPDX-License-Identifier: Apache-2.0
"""`carryforward train`."""

import json

import typer

from ..distributed.processes import launched
from ..settings.commands import TrainSettings
from ..utils.console import is_first_process
from .errors import user_errors
from .options import Config, ReportTo, RunOut, TrainingDevice, TrainingJson, options


@options(TrainSettings)
def train(
    settings: TrainSettings,
    out: RunOut,
    config: Config = None,
    report_to: ReportTo = "none",
    device: TrainingDevice = None,
    as_json: TrainingJson = False,
) -> None:
    """Train a language model, a masked one or a classifier with recurrence, or without it as a baseline."""
    with user_errors(out), launched():
        from ..training import train
        from ..training.lifecycle import uses_cpu

        record = train.train(settings, out, report_to=report_to, use_cpu=uses_cpu(device))
        if is_first_process():
            typer.echo(json.dumps(record) if as_json else f"{out}: {train.summary(record)}")
