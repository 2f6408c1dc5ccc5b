# SPDX-License-Identifier: Apache-2.0
"""Settings that all training commands share: a model, data, and what passes from window to window."""

import json
from dataclasses import Field, asdict, dataclass, fields
from functools import partial
from typing import Any

from ..presets import (
    COMBINED_WITH,
    DEFAULT_GROUP_WINDOWS,
    DEFAULT_KEY_SIZE,
    DEFAULT_MEMORY_TOKENS,
    DEFAULT_SINKS,
    FAR_SELECTIONS,
    MAX_DEFAULT_WINDOW,
    PAPER_WINDOW,
    POOLED_LAYERS,
    POOLINGS,
    PRESET_MEMORIES,
)
from .base import Settings, at_least, flag, memory_setting, setting

PYTHON_DOCS = "python-docs"  # the built-in text: the documentation that comes with Python
BUNDLED = "bundled"  # the model that comes with the package
# help texts that several commands share
OVERLAP = "Tokens shared by consecutive windows."
PRESET = "What passes from window to window: recommended (keys and values) or paper (a pooled vector)."
DEFAULT_WINDOW = f"2/3 of the model's positions, at most {MAX_DEFAULT_WINDOW}; paper: {PAPER_WINDOW}"
DEFAULT_RECENT = "half a window, or --right, less the sinks"
REACH = "Positions of its past that a window sees: a number (2000), or memory for the state (64MB)."
DEFAULT_REACH = "half a window"
RECENT = "Most recent positions whose keys and values are carried."
SINKS = "Attention sinks: a document's first positions, always carried."
FAR = "Far positions, carried although they have left the recent ones."
SELECTION = f"Which positions become far: {', '.join(FAR_SELECTIONS)}."
GROUP = "Neighbouring positions that are averaged (merged) or looked up together (lookup)."
DEFAULT_GROUP = "merged: 4, lookup: 32"
ARCHIVE = "Positions kept to be looked up (lookup), which no window attends to otherwise."
DEFAULT_ARCHIVE = "4096"
RIGHT = "Encoders: first positions of the window after it that a window sees."
GROUP_WINDOWS = "Windows of a group, inside which windows see the one after them (with --right)."
MEMORY = "Memory: kv (keys and values), vector (pooled), tokens, associative; kv beside vector or associative."
MEMORY_TOKENS = "tokens, associative: number of memory tokens."
KEY_SIZE = "associative: size of keys and queries."
POOLED_LAYERS_HELP = "vector: layers that are pooled: all, last, or below (those below --insert-at)."
HIDDEN_SIZES_HELP = "vector: sizes of its network's hidden layers."
CORPUS = (
    "Corpus: wikitext-103, pg19, NAME=FOLDER, a folder, a .txt, .jsonl or .parquet file, a Hub dataset, python-docs."
)


def kv_setting(default: Any, help: str, shown: str | None = None) -> Any:
    """A field of the memory "kv"."""
    return memory_setting(default, f"kv: {help[0].lower()}{help[1:]}", shown=shown, kind="kv")


vector_setting = partial(memory_setting, kind="vector")


@dataclass(frozen=True)
class RecurrentSettings(Settings):
    """Settings that all training commands share: a model, data, and a recurrence. None means that the model decides."""

    model: str = setting(BUNDLED, "Hub name, folder or .gguf file; bundled comes with the package.")
    data: str = setting(PYTHON_DOCS, CORPUS)

    preset: str = setting("recommended", PRESET)
    window: int | None = setting(None, "Tokens per window.", shown=DEFAULT_WINDOW)
    reach: str | None = setting(None, REACH, shown=DEFAULT_REACH, kind="kv")
    recurrence: bool = memory_setting(True, "Train the plain model on the same windows, as a baseline.")
    memory: tuple[str, ...] | None = memory_setting(None, MEMORY, shown="the preset's")
    overlap: int | None = memory_setting(None, OVERLAP, shown="0")
    recent: int | None = kv_setting(None, RECENT, shown=DEFAULT_RECENT)
    sinks: int | None = kv_setting(None, SINKS, shown=str(DEFAULT_SINKS))
    far: int | None = kv_setting(None, FAR, shown="0")
    selection: str | None = kv_setting(None, SELECTION, shown=FAR_SELECTIONS[0])
    group: int | None = kv_setting(None, GROUP, shown=DEFAULT_GROUP)
    archive: int | None = kv_setting(None, ARCHIVE, shown=DEFAULT_ARCHIVE)
    right: int | None = kv_setting(None, RIGHT, shown="0")
    group_windows: int | None = kv_setting(None, GROUP_WINDOWS, shown=str(DEFAULT_GROUP_WINDOWS))
    slots: int | None = vector_setting(None, "vector: number of vectors.", shown="1")
    insert_at: tuple[str, ...] | None = vector_setting(
        None, "vector: layers that receive it, counted from 1, or all.", shown="2"
    )
    pooling: str | None = vector_setting(None, "vector: pooling over positions: mean, max or attention.", shown="mean")
    pooled_layers: str | None = vector_setting(None, POOLED_LAYERS_HELP, shown="all")
    hidden_sizes: tuple[int, ...] | None = vector_setting(None, HIDDEN_SIZES_HELP, shown="200 200 200")
    residual: bool | None = vector_setting(None, "vector: add the pooled vector to its network's output.")
    init_std: float | None = vector_setting(
        None, "vector: initial standard deviation of its network's last layer.", shown="0.02"
    )
    state_per_layer: bool | None = vector_setting(None, "vector: a separate one for each layer of --insert-at.")
    memory_tokens: int | None = memory_setting(
        None, MEMORY_TOKENS, shown=str(DEFAULT_MEMORY_TOKENS), kind=("tokens", "associative")
    )
    key_size: int | None = memory_setting(None, KEY_SIZE, shown=str(DEFAULT_KEY_SIZE), kind="associative")
    bptt_windows: int | None = memory_setting(None, "Truncated BPTT: detach the state every N windows.", shown="never")
    block_windows: str | None = memory_setting(
        None, "Windows of each row that run side by side, where none waits for another: N or auto.", shown="auto"
    )
    keep_windows: str | None = memory_setting(
        None, "Windows of a sample that keep activations instead of recomputing them.", shown="auto"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "window", "recent", "group", "archive", "slots", "hidden_sizes", "memory_tokens", "key_size",
                 "bptt_windows")  # fmt: skip
        at_least(0, self, "overlap", "sinks", "far", "right", "init_std")
        at_least(2, self, "group_windows")
        choices_of = {"pooling": POOLINGS, "pooled_layers": POOLED_LAYERS, "selection": FAR_SELECTIONS}
        for name, choices in choices_of.items():
            if getattr(self, name) not in (None, *choices):
                raise ValueError(f"{flag(name)} {getattr(self, name)}: it must be one of {', '.join(choices)}.")
        self._check_reach()
        self.recurrence_fields()

    def _check_reach(self) -> None:
        """Refuse sizes of the memory "kv" that contradict each other, or have no effect."""
        both = [flag(name) for name in ("recent", "far") if getattr(self, name) is not None]
        if self.reach is not None and both:
            raise ValueError(
                f"--reach {self.reach}: it sets how many positions are carried in all, and so does {both[0]}. Leave "
                "one of them out."
            )
        if self.selection is not None and not self.far:
            raise ValueError(
                f"--selection {self.selection}: it chooses far positions, and none are carried. Give --far as well."
            )
        if self.group_windows is not None and not self.right:
            raise ValueError(
                f"--group-windows {self.group_windows}: without --right windows see nothing after them. Give --right "
                "as well."
            )

    def as_json(self) -> dict[str, Any]:
        """As a run's record has them: without tuples."""
        return json.loads(json.dumps(asdict(self)))

    def recurrence_fields(self) -> dict[str, Any]:
        """The arguments of `models.add_recurrence.recurrence_of` that were given."""
        if self.preset not in PRESET_MEMORIES:
            raise ValueError(f"--preset {self.preset}: it must be one of {', '.join(PRESET_MEMORIES)}.")
        if not self.recurrence:
            self._refuse_memory()
        names = ("window", "reach", "overlap", "bptt_windows", "block_windows", "keep_windows")
        values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        memory = self._memory_options()
        for name, least in (("block_windows", 1), ("keep_windows", 0)):
            if name in values:
                values[name] = _windows(name, values[name], least)
        if self.memory is not None or any(len(options) > 1 for options in memory):
            values["memory"] = memory
        return {"preset": self.preset, **values}

    def _memory_options(self) -> list[dict[str, Any]]:
        """For each kind of memory, its fields that were given."""
        kinds = PRESET_MEMORIES[self.preset] if self.memory is None else self.memory
        options: dict[str, dict[str, Any]] = {kind: {"kind": kind} for kind in kinds}
        for one in fields(self):
            owners, value = _owners(one), getattr(self, one.name)
            if not owners or value is None:
                continue
            kind = next((owner for owner in owners if owner in options), None)
            if kind is None:
                all_kinds = [*options, owners[0]]
                both = f"or --memory {' '.join(all_kinds)} for both, " if _combine(all_kinds) else ""
                raise ValueError(
                    f"{flag(one.name)} is an option of the memory {' or '.join(owners)}, and the memory is "
                    f"{', '.join(options)}. Use --memory {owners[0]}, {both}or leave it out."
                )
            if one.name != "reach":  # which becomes fields of the memory's config where the model is known
                options[kind][one.name] = _layers(value) if one.name == "insert_at" else value
        return [*options.values()]

    def _refuse_memory(self) -> None:
        """Refuse settings that have no effect without recurrence."""
        own = [one for one in fields(self) if _owners(one)]
        names = ["memory", *(one.name for one in own), "bptt_windows"]
        unused = [flag(name) for name in names if getattr(self, name) is not None]
        if unused:
            raise ValueError(
                f"{', '.join(unused)}: no effect with --no-recurrence, which carries nothing. Leave it out."
            )


def _owners(one: Field) -> tuple[str, ...]:
    """The kinds of memory that a field belongs to."""
    kind = one.metadata.get("kind") or ()
    return (kind,) if isinstance(kind, str) else kind


def _combine(kinds: list[str]) -> bool:
    """Whether kinds of memory can stand beside each other."""
    return all(other in COMBINED_WITH.get(kind, kinds) for kind in kinds for other in kinds if other != kind)


def _windows(name: str, value: str, least: int) -> int | str:
    """Parse --block-windows or --keep-windows."""
    if value == "auto":
        return value
    if not (value.isascii() and value.isdecimal()) or int(value) < least:
        raise ValueError(f"{flag(name)} {value}: give a number from {least}, or auto.")
    return int(value)


def _layers(values: tuple[str, ...]) -> tuple[int, ...] | int | str:
    """Parse --insert-at."""
    if values == ("all",):
        return "all"
    try:
        layers = tuple(int(value) for value in values)
    except ValueError:
        raise ValueError(f"--insert-at {' '.join(values)}: give layer numbers from 1, or all.") from None
    return layers[0] if len(layers) == 1 else layers
