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
    """Fine-tune a causal language model with recurrence, or without it as a baseline."""
    with user_errors(out):
        from ..training import train
        from ..training.lifecycle import uses_cpu

        record = train.train(settings, out, report_to=report_to, use_cpu=uses_cpu(device))
        if int(os.environ.get("RANK", "0")) == 0:
            best = record.get("best_word_perplexity")
            validation = f", validation word perplexity {best:,.2f}" if best else ""
            typer.echo(json.dumps(record) if as_json else f"{out}: {record['tokens']:,} tokens{validation}")
