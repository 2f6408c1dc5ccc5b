# SPDX-License-Identifier: Apache-2.0
"""The folder of a training run and its record, `run.json`: settings, data and results.

A run resumes with the same settings, data and number of processes. Anything else is refused: it would be another run.
"""

import json
import math
from pathlib import Path
from typing import Any

from ..models.loading import RUN_FILE
from ..settings import RecurrentSettings
from ..utils.files import write_json


class RunFolder:
    """A run's folder and record. Only the first process writes."""

    def __init__(self, settings: RecurrentSettings, folder: Path, writes: bool):
        """Read the record, if the folder holds a run with the same settings. Writes nothing yet."""
        self.folder, self.writes = folder, writes
        now = settings.as_json()
        self.record: dict[str, Any] = {"kind": "run", "status": "running", "settings": now, "search": []}
        if not (folder / RUN_FILE).exists():
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise ValueError(f"--out {folder} exists and is not a run of carryforward. Use another folder.")
            return
        try:
            self.record = json.loads((folder / RUN_FILE).read_text())
            before = dict(self.record["settings"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder / RUN_FILE} is damaged: {error}. Use another --out.") from error
        self._refuse_changes("other settings", before, now)

    @property
    def finished(self) -> bool:
        return self.record["status"] == "finished"

    def begin(self, circumstances: dict[str, Any]) -> None:
        """Write the record; refuse to resume if the circumstances (data, processes) have changed."""
        before = self.record.setdefault("circumstances", circumstances)
        self._refuse_changes("other data or processes", before, circumstances)
        self.write()

    def finish(self, outcome: dict[str, Any]) -> None:
        """Write the outcome to the record and mark the run as finished."""
        self.record |= _finite(outcome) | {"status": "finished"}
        self.write()

    def write(self) -> None:
        if self.writes:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / RUN_FILE, self.record)

    def _refuse_changes(self, what: str, before: dict[str, Any], now: dict[str, Any]) -> None:
        changes = [
            f"{name}: {before.get(name)} there, {now[name]} here" for name in now if now[name] != before.get(name)
        ]
        if changes:
            raise ValueError(
                f"{self.folder} belongs to a run with {what} ({', '.join(changes)}). Use another --out, or the "
                "original values."
            )


def _finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
