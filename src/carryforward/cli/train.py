# SPDX-License-Identifier: Apache-2.0
"""`carryforward train`."""

import json
import os

import typer

from ..settings.commands import TrainSettings
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
    with user_errors(out):
        from ..training import train
        from ..training.lifecycle import uses_cpu

        record = train.train(settings, out, report_to=report_to, use_cpu=uses_cpu(device))
        if int(os.environ.get("RANK", "0")) == 0:
            typer.echo(json.dumps(record) if as_json else f"{out}: {train.summary(record)}")
