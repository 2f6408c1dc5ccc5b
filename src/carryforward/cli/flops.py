# SPDX-License-Identifier: Apache-2.0
"""`carryforward flops`."""

import dataclasses
import json
from typing import Annotated

import typer

from ..presets import PAPER_WINDOW
from ..settings import BUNDLED, OVERLAP
from .errors import user_errors
from .options import Json


def flops(
    model: Annotated[str, typer.Option(help="Hub name or folder.")] = BUNDLED,
    window: Annotated[
        int | None, typer.Option(help="Tokens per window.", show_default="a recurrent model's own, or 300")
    ] = None,
    overlap: Annotated[
        list[int] | None,
        typer.Option(metavar="<int>...", help=f"{OVERLAP} One or several values.", show_default="0"),
    ] = None,
    preset: Annotated[
        str, typer.Option(help="Recurrence that is added to a plain model: paper or recommended.")
    ] = "paper",
    as_json: Json = False,
) -> None:
    """Count FLOPs per token: the base model's as the paper counts them, the recurrence's and the output layer's."""
    with user_errors():
        from ..config import RecurrentModelConfig
        from ..evaluation.flops import flops_per_token
        from ..evaluation.report import flops_table
        from ..models.add_recurrence import recurrence_of
        from ..models.loading import load_config

        config = load_config(model)
        recurrence = None
        if not isinstance(config, RecurrentModelConfig):
            recurrence = recurrence_of(config, preset=preset, window=window or PAPER_WINDOW)
        rows = [
            {"overlap": tokens, **dataclasses.asdict(flops_per_token(config, window, tokens, recurrence=recurrence))}
            for tokens in overlap or [0]
        ]
        typer.echo(json.dumps(rows) if as_json else flops_table(rows))
