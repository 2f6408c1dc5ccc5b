# SPDX-License-Identifier: Apache-2.0
"""A cell's results: a folder with `run.json`, the record of its training, and a result of `carryforward evaluate` for
each text. They are all that tables and figures are made of.

A result belongs to one training run and to one way of scoring, and says to which; anything else is not taken for it.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from ..models.loading import RUN_FILE
from ..settings import TrainSettings
from ..utils.files import write_json
from .recipes import RATES, Cell

_ELSEWHERE = ("model", "data", "validation_data")  # settings that say where things are on a machine


def record_of(cell: Cell) -> dict[str, Any] | None:
    """The record of a cell's training, or None before it is finished."""
    file = cell.folder / RUN_FILE
    return json.loads(file.read_text()) if file.exists() else None


def differing(cell: Cell, record: dict[str, Any]) -> str:
    """How a record's settings differ from the recipe's, in words; empty if they do not."""
    rates = cell.rates_of is None or cell.rates_of.exists()  # else they cannot be known
    now = (cell.resolved() if rates else cell.settings).as_json()
    before = TrainSettings().as_json() | record["settings"]  # a setting that is newer than the record
    names = [name for name in now if name not in _ELSEWHERE and (rates or name not in RATES)]
    return ", ".join(f"{name}: {before[name]} there, {now[name]} in the recipe" for name in names
                     if now[name] != before[name])  # fmt: skip


def result_of(cell: Cell, text: str, record: dict[str, Any]) -> dict[str, Any] | None:
    """What a cell scored on a text, if it was that model and that way of scoring."""
    file = cell.folder / f"{text}.json"
    if not file.exists():
        return None
    result = json.loads(file.read_text())
    same = result.get("asked") == asked(cell, text) and result.get("run") == identity(record)
    enough = set(cell.overlaps) <= {row["overlap"] for row in result["rows"]}
    return result if same and enough else None


def asked(cell: Cell, text: str) -> dict[str, Any]:
    """The way of scoring, as far as it decides a number."""
    told = cell.texts[text]
    return {
        "split": told["split"],
        "max_document_tokens": told.get("max_document_tokens"),
        "control": told.get("control", True),
        "bf16": cell.settings.bf16,
    }


def identity(record: dict[str, Any]) -> str:
    """One training run, told from every other."""
    return hashlib.blake2b(json.dumps(record, sort_keys=True).encode(), digest_size=8).hexdigest()


def write(file: Path, content: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, content)
