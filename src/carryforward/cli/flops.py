# SPDX-License-Identifier: Apache-2.0
"""`carryforward flops`."""

import dataclasses
import json
from typing import Annotated

import typer

from ..presets import PAPER_WINDOW
from ..settings.base import flag
from ..settings.recurrence import BUNDLED, OVERLAP, RecurrentSettings
from .add import kv_settings
from .errors import user_errors
from .options import (
    Archive,
    Far,
    GroupSize,
    GroupWindows,
    Json,
    KeySize,
    Memory,
    MemoryTokens,
    Reach,
    Recent,
    Right,
    Selection,
    Sinks,
)


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
        str | None,
        typer.Option(
            help="Recurrence that is added to a plain model: paper or recommended.",
            show_default="paper; recommended with --reach, --recent, --sinks, --far or --right",
        ),
    ] = None,
    memory: Memory = None,
    reach: Reach = None,
    recent: Recent = None,
    sinks: Sinks = None,
    far: Far = None,
    selection: Selection = None,
    group: GroupSize = None,
    archive: Archive = None,
    right: Right = None,
    group_windows: GroupWindows = None,
    memory_tokens: MemoryTokens = None,
    key_size: KeySize = None,
    as_json: Json = False,
) -> None:
    """Count FLOPs per token, and the size of the state.

    FLOPs are the base model's as the paper counts them, the recurrence's and the output layer's. A state is what one
    text carries from window to window, here in float32.
    """
    with user_errors():
        from ..config import RecurrentModelConfig
        from ..evaluation.flops import flops_per_token, state_size
        from ..evaluation.report import flops_table
        from ..models.add_recurrence import recurrence_of
        from ..models.loading import describe

        carried = {
            "reach": reach, "recent": recent, "sinks": sinks, "far": far, "selection": selection, "group": group,
            "archive": archive, "right": right, "group_windows": group_windows,
            "memory": tuple(memory) if memory else None, "memory_tokens": memory_tokens, "key_size": key_size,
        }  # fmt: skip
        given = [flag(name) for name, value in carried.items() if value is not None]
        preset = preset or (RecurrentSettings.preset if given else "paper")
        settings = kv_settings(preset, window=window, **carried)
        config = describe(model)
        recurrence = None
        if not isinstance(config, RecurrentModelConfig):
            fields = settings.recurrence_fields()
            recurrence = recurrence_of(config, **{"window": PAPER_WINDOW, **fields})
        elif given:
            raise ValueError(f"{model} is recurrent already: leave {', '.join(given)} out.")
        size = state_size(config, window, recurrence=recurrence)
        state = {"state_positions": size.positions, "state_bytes": size.bytes}
        rows = [
            {"overlap": tokens, **dataclasses.asdict(flops_per_token(config, window, tokens, recurrence=recurrence))}
            for tokens in overlap or [0]
        ]
        if as_json:
            typer.echo(json.dumps([{**row, **state} for row in rows]))
            return
        carries = (recurrence or config.recurrence).describe()
        typer.echo(flops_table(rows))
        typer.echo(f"\nstate: {size.bytes / 1e6:,.3f} MB per text, {size.positions:,} positions: {carries}")
