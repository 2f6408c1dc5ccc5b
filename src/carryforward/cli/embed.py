# SPDX-License-Identifier: Apache-2.0
"""`carryforward embed`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ..distributed.processes import launched
from ..settings.commands import EmbedSettings
from .errors import user_errors
from .options import Config, Device, Json, options


@options(EmbedSettings)
def embed(
    settings: EmbedSettings,
    model: Annotated[str, typer.Argument(help="Recurrent model, or a plain one (its windows are then independent).")],
    documents: Annotated[Path, typer.Argument(help="JSON lines or .parquet file, one document per line or row.")],
    out: Annotated[
        Path, typer.Option(help="File to write: .parquet, .npy or .safetensors. The same command resumes the work.")
    ],
    config: Config = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Compute vectors of whole documents, of their chunks, tokens or windows."""
    with user_errors(out), launched() as processes:
        from ..embeddings.embed import embed as embed_file

        result = embed_file(model, documents, out, settings, device=device, processes=processes)
        skipped = f", {len(result['skipped'])} lines skipped" if result["skipped"] else ""
        if processes.is_first:
            typer.echo(json.dumps(result) if as_json else f"{out}: {result['documents']:,} documents{skipped}")
