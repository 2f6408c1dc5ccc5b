# SPDX-License-Identifier: Apache-2.0
"""`carryforward add`: make a plain model recurrent, without training."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..presets import DEFAULT_SINKS
from ..settings import ADVANCED, DEFAULT_RECENT, DEFAULT_WINDOW, PRESET, PYTHON_DOCS, TEXT_FIELD, RecurrentSettings
from .errors import user_errors
from .options import Json, check_folder

if TYPE_CHECKING:
    from ..config import RecurrenceConfig


def add(
    model: Annotated[str, typer.Argument(help="Plain causal model: Hub name, folder or .gguf file.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the new model.")],
    preset: Annotated[str, typer.Option(help=f"{PRESET} The latter must be trained.")] = RecurrentSettings.preset,
    window: Annotated[int | None, typer.Option(help="Tokens per window.", show_default=DEFAULT_WINDOW)] = None,
    recent: Annotated[
        int | None,
        typer.Option(help="Most recent positions whose keys and values are carried.", show_default=DEFAULT_RECENT),
    ] = None,
    sinks: Annotated[
        int | None,
        typer.Option(
            help="Attention sinks: a document's first positions, always carried.", show_default=str(DEFAULT_SINKS)
        ),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            help="Text in the model's language, to measure position offsets on. Only models with learned positions, "
            "such as GPT-2, need it."
        ),
    ] = PYTHON_DOCS,
    text_field: Annotated[str, typer.Option(help=TEXT_FIELD, rich_help_panel=ADVANCED)] = "text",
    as_json: Json = False,
) -> None:
    """Add recurrence to a language model without training, for texts of any length."""
    with user_errors(out):
        from ..utils import console

        if preset != RecurrentSettings.preset and (recent is not None or sinks is not None):
            raise ValueError(
                f"--recent and --sinks are options of --preset {RecurrentSettings.preset}. Leave them out."
            )
        settings = RecurrentSettings(preset=preset, window=window, recent=recent, sinks=sinks)
        recurrence = add_to_folder(model, out, settings, data=data, text_field=text_field)
        result = {"window": recurrence.window, "memory": recurrence.describe()}
        summary = f"windows of {result['window']} tokens; memory: {result['memory']}"
        typer.echo(json.dumps({"out": str(out), **result}) if as_json else f"{out}: {summary}")
        console.note(recurrence.usage_note())


def add_to_folder(
    name: str, out: Path, settings: RecurrentSettings, *, data: str, text_field: str = "text"
) -> "RecurrenceConfig":
    """Save a plain model with recurrence added. Returns the recurrence.

    Args:
        settings: the recurrence; their model and data are not used.
        data: a corpus. A model with learned positions needs some of its training text to measure position offsets.
        text_field: the field of JSON lines and Hub rows that holds the text.
    """
    from ..backbones.architectures import architecture_of
    from ..data.documents import load_documents
    from ..models.add_recurrence import add_recurrence
    from ..models.loading import describe_causal, load_causal
    from ..utils import console
    from ..utils.files import atomic_folder, clear_leftovers

    check_folder(out.absolute().parent)
    if out.exists():
        clear_leftovers(out.absolute().parent, out.name)
        raise ValueError(f"--out {out} exists already. Give another folder.")
    fields = settings.recurrence_fields()
    if Path(name).suffix != ".gguf":  # whose config takes seconds to read
        config, _ = describe_causal(name)
        architecture_of(getattr(config, "base_config", config))
    console.note(f"loading {name}")
    loaded = load_causal(name)
    if loaded.recurrent:
        raise ValueError(f"{name} is recurrent already.")
    architecture = architecture_of(loaded.model.config)
    documents = None
    if not architecture.rotary and settings.preset == RecurrentSettings.preset:
        documents = load_documents(data, "train", loaded.tokenizer, text_field=text_field)
    model = add_recurrence(loaded.model, documents=documents, tokenizer=loaded.tokenizer, **fields)
    recurrence = model.config.recurrence
    if documents is None and loaded.stored is not None:
        model.to(dtype=loaded.stored)  # type: ignore[call-arg]
    limit = min((size for size in architecture.sliding_windows(loaded.model.config) if size), default=None)
    if limit is not None and recurrence.window + recurrence.extra_positions > limit:
        console.note(
            f"Some layers of {name} attend to the last {limit} tokens only; with the carried positions they see more. "
            "Use a smaller --window and --recent, or train the model."
        )
    with atomic_folder(out) as temporary:
        model.save_pretrained(temporary)  # with its tokenizer
    return recurrence
