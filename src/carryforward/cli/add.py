# SPDX-License-Identifier: Apache-2.0
"""The job behind `carryforward add`: a plain model in, one out that reads on over window borders without training."""

from pathlib import Path

from ..backbones.architectures import architecture_of
from ..config import SINKS, RecurrenceConfig
from ..data.corpora import open_corpus
from ..data.documents import tokenise
from ..models.add_recurrence import add_recurrence
from ..models.loading import load_causal
from ..models.position_offsets import measure_position_offsets, needs_position_offsets
from ..utils import checkpoints, console

AT_ONCE = 1024  # a window need not be as long as a model can read


def extend(
    name: str,
    out: Path,
    *,
    data: str,
    window: int | None = None,
    kept: int | None = None,
    sinks: int | None = None,
    text_field: str = "text",
) -> dict[str, int]:
    """Save a model that carries keys and values from window to window; gives back what it does.

    Args:
        data: a corpus; a model with learned positions reads some of its training text to learn what they do.
        window: by default as many tokens as leave room for what is kept among the model's positions, 1,024 at most.
        kept: newest positions whose keys and values are carried; with `sinks`, half a window by default.
        sinks: the document's first positions, whose are carried too; 4 by default.
        text_field: the field of JSON lines and Hub rows that holds the text.
    """
    if out.exists():
        raise ValueError(f"--out {out} exists already. Give another folder.")
    console.note(f"loading {name}")
    loaded = load_causal(name)
    if loaded.recurrent:
        raise ValueError(f"{name} is recurrent already.")
    architecture = architecture_of(loaded.model.config)
    reaches = architecture.reaches(loaded.model.config)
    reach = min((one for one in reaches if one is not None), default=None)
    if window is None:
        positions = architecture.positions(loaded.model.config)
        usable = min(positions, reach or positions)
        carried = SINKS if sinks is None else sinks
        # half a window is kept: together they fill what can be used
        window = min(AT_ONCE, (2 * usable + 1) // 3 if kept is None else max(usable - kept - carried, kept + carried))
    given = {key: value for key, value in (("kept", kept), ("sinks", sinks)) if value is not None}
    recurrence = RecurrenceConfig.preset("kept", window=window, **given)
    model = add_recurrence(loaded.model, recurrence)
    if needs_position_offsets(model):
        measure_position_offsets(model, tokenise(open_corpus(data, "train", text_field=text_field), loaded.tokenizer))
    elif loaded.stored is not None:
        model.to(dtype=loaded.stored)  # type: ignore[call-arg]
    if reach is not None and window + recurrence.seen > reach:
        console.note(
            f"{name} has layers that look back {reach} tokens only, and would see further with what is kept. Use a "
            "smaller --window and --kept, or train it first."
        )
    with checkpoints.atomic_folder(out) as beside:
        model.save_pretrained(beside)
        loaded.tokenizer.save_pretrained(beside)
    return {"window": window, "kept": recurrence.kept, "sinks": recurrence.sinks}
