# SPDX-License-Identifier: Apache-2.0
"""Read and write a cell's results: `run.json`, the record of its training, and one evaluation result per text.

Tables and figures are made from these files alone. An evaluation result names its training run and how the text was
scored; a result of another run, or scored in another way, is ignored.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from ..settings.commands import TrainSettings
from ..utils.checkpoints import RUN_FILE, read_run
from ..utils.files import write_json
from ..utils.parsing import read_json_object
from .recipes import RATES, Cell

_PATHS = ("model", "data", "validation_data")  # settings that differ between machines


def read_record(cell: Cell) -> dict[str, Any] | None:
    """The record of a cell's training, or None before it is finished."""
    file = cell.folder / RUN_FILE
    return read_run(file) if file.exists() else None


def differences(cell: Cell, record: dict[str, Any]) -> str:
    """How a record's settings differ from the recipe's, as text; empty if they do not."""
    rates_known = cell.rates_of is None or cell.rates_of.exists()
    now = (cell.resolved() if rates_known else cell.settings).as_json()
    before = TrainSettings().as_json() | record["settings"]  # defaults for settings newer than the record
    names = [name for name in now if name not in _PATHS and (rates_known or name not in RATES)]
    return ", ".join(f"{name}: {before[name]} there, {now[name]} in the recipe" for name in names
                     if now[name] != before[name])  # fmt: skip


def read_result(cell: Cell, text: str, record: dict[str, Any]) -> dict[str, Any] | None:
    """A cell's evaluation result on a text, or None unless it is of this training run, scored as the recipe says."""
    file = cell.folder / f"{text}.json"
    if not file.exists():
        return None
    result = read_json_object(file, "Move it away to score the text again.")
    same = result.get("asked") == scoring(cell, text) and result.get("run") == run_id(record)
    rows = result.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "overlap" in row for row in rows):
        raise ValueError(f"{file} is damaged: it has no rows with overlaps. Move it away to score the text again.")
    enough = all(overlap in [row["overlap"] for row in rows] for overlap in cell.overlaps)
    return result if same and enough else None


def scoring(cell: Cell, text: str) -> dict[str, Any]:
    """The settings of scoring a text that change its perplexity."""
    settings = cell.texts[text]
    return {
        "split": settings["split"],
        "max_document_tokens": settings.get("max_document_tokens"),
        "control": settings.get("control", True),
        "bf16": cell.settings.bf16,
    }


def run_id(record: dict[str, Any]) -> str:
    """A digest of a training run's record."""
    return hashlib.blake2b(json.dumps(record, sort_keys=True).encode(), digest_size=8).hexdigest()


def write(file: Path, content: dict[str, Any]) -> None:
    """Write JSON, with its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, content)
