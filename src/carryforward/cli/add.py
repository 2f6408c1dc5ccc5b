# SPDX-License-Identifier: Apache-2.0
"""`carryforward add`: make a plain model recurrent, without training."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..settings.base import ADVANCED, flag
from ..settings.commands import TEXT_FIELD
from ..settings.recurrence import DEFAULT_WINDOW, PRESET, PYTHON_DOCS, RecurrentSettings
from .errors import user_errors
from .options import Archive, Far, GroupSize, Json, Reach, Recent, Selection, Sinks, check_folder

if TYPE_CHECKING:
    from ..config import RecurrenceConfig


def add(
    model: Annotated[str, typer.Argument(help="Plain causal model: Hub name, folder or .gguf file.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the new model.")],
    preset: Annotated[str, typer.Option(help=f"{PRESET} The latter must be trained.")] = RecurrentSettings.preset,
    window: Annotated[int | None, typer.Option(help="Tokens per window.", show_default=DEFAULT_WINDOW)] = None,
    reach: Reach = None,
    recent: Recent = None,
    sinks: Sinks = None,
    far: Far = None,
    selection: Selection = None,
    group: GroupSize = None,
    archive: Archive = None,
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

        carried = {
            "reach": reach, "recent": recent, "sinks": sinks, "far": far, "selection": selection, "group": group,
            "archive": archive,
        }  # fmt: skip
        settings = kv_settings(preset, window=window, **carried)
        recurrence = add_to_folder(model, out, settings, data=data, text_field=text_field)
        result = {"window": recurrence.window, "memory": recurrence.describe()}
        summary = f"windows of {result['window']} tokens; memory: {result['memory']}"
        typer.echo(json.dumps({"out": str(out), **result}) if as_json else f"{out}: {summary}")
        console.note(recurrence.usage_note())


def kv_settings(preset: str, *, window: int | None, **carried: Any) -> RecurrentSettings:
    """Settings of a recurrence: a preset, or "recommended" with other sizes.

    Args:
        carried: settings of the memory "kv"; None stands for the default.
    """
    given = [flag(name) for name, value in carried.items() if value is not None]
    if given and preset != RecurrentSettings.preset:
        raise ValueError(f"{', '.join(given)}: --preset {preset} says what is carried, too. Leave one of the two out.")
    return RecurrentSettings(preset=preset, window=window, **carried)


def add_to_folder(
    name: str, out: Path, settings: RecurrentSettings, *, data: str, text_field: str = "text"
) -> "RecurrenceConfig":
    """Save a plain model with recurrence added. Returns the recurrence.

    Args:
        settings: the recurrence; their model and data are not used.
        data: a corpus. A model with learned positions needs some of its training text to measure position offsets.
        text_field: the field of JSON lines and Hub rows that holds the text.
    """
    from ..backbones.architectures import is_known
    from ..backbones.quantization import is_quantized
    from ..config import RecurrentModelConfig
    from ..data.documents import load_documents
    from ..models.add_recurrence import add_recurrence, ensure_architecture, recurrence_of
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
        if isinstance(config, RecurrentModelConfig):
            raise ValueError(f"{name} is recurrent already.")
        if is_known(config):  # refuse what does not fit the model
            RecurrentModelConfig(base_config=config, recurrence=recurrence_of(config, **fields))
    console.note(f"loading {name}")
    loaded = load_causal(name)
    if loaded.recurrent:
        raise ValueError(f"{name} is recurrent already.")
    architecture = ensure_architecture(loaded.model)
    documents = None
    if not architecture.rotary and settings.preset == RecurrentSettings.preset:
        documents = load_documents(data, "train", loaded.tokenizer, text_field=text_field)
    model = add_recurrence(loaded.model, documents=documents, tokenizer=loaded.tokenizer, **fields)
    recurrence = model.config.recurrence
    if documents is None and loaded.stored is not None and not is_quantized(model):
        model.to(dtype=loaded.stored)  # type: ignore[call-arg]
    limit = min((size for size in architecture.sliding_windows(loaded.model.config) if size), default=None)
    if limit is not None and recurrence.window + recurrence.extra_positions > limit:
        console.note(
            f"Some layers of {name} attend to the last {limit} tokens only; with the carried positions they see more. "
            "Use a smaller --window and --reach, or train the model."
        )
    with atomic_folder(out) as temporary:
        model.save_pretrained(temporary)  # with its tokenizer
    return recurrence
