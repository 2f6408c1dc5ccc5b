# SPDX-License-Identifier: Apache-2.0
"""The folder of a training run and its record, `run.json`: settings, data and results.

A run resumes with the same settings, data and number of processes. Anything else is refused: it would be another run.
Only its length may grow: a run that is continued is exactly one that was planned longer from the start. The folder is
locked while a process trains in it.
"""

import math
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from ..settings.base import flag
from ..settings.recurrence import RecurrentSettings
from ..utils.checkpoints import RUN_FILE, read_run
from ..utils.files import clear_leftovers, is_vacant, write_sealed_json
from ..utils.locks import LOCK, lock_output


class RunFolder:
    """A run's folder and record, as a context: leaving it releases the lock. Only the first process writes."""

    def __init__(
        self, settings: RecurrentSettings, folder: Path, writes: bool, *, length_settings: tuple[str, ...] = ()
    ):
        """Read the record, if the folder holds a run with the same settings. Writes nothing yet.

        Args:
            length_settings: the settings that may differ from those of an earlier call: how long to train.
        """
        self.folder, self.writes, self.length_settings = folder, writes, length_settings
        self.settings = settings.as_json()
        self._lock, self._locked = ExitStack(), False
        self.record = self._read()

    def __enter__(self) -> Self:
        if self.writes and self.folder.is_dir():
            if not self.finished:
                self._lock_folder()
            else:
                with suppress(OSError, ValueError), lock_output(self.folder / LOCK, self.folder):
                    clear_leftovers(self.folder)
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.close()

    @property
    def finished(self) -> bool:
        return self.record["status"] == "finished" and self.record["settings"] == self.settings

    def begin(self, circumstances: dict[str, Any]) -> None:
        """Write the record; refuse to resume if the circumstances (data, processes) have changed."""
        if self.writes:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock_folder()
        before = self.record.setdefault("circumstances", circumstances)
        self._refuse_changes("other data or processes", before, circumstances)
        self.write()

    def plan(self, steps: int) -> None:
        """Record how many steps the run is to have, and the settings that say so. A run can only be made longer."""
        before = self.record.get("planned_steps", 0)
        if steps < before:
            length = " and ".join(map(flag, self.length_settings))
            raise ValueError(
                f"{self.folder} was planned for {before:,} steps, and this command asks for {steps:,}. A run can be "
                f"made longer, not shorter: use another --out, or larger {length}."
            )
        self.record |= {"planned_steps": steps, "settings": self.settings, "status": "running"}
        self.write()

    def finish(self, outcome: dict[str, Any]) -> None:
        """Write the outcome to the record and mark the run as finished."""
        self.record |= _finite(outcome) | {"status": "finished"}
        self.write()

    def write(self) -> None:
        if self.writes:
            write_sealed_json(self.folder / RUN_FILE, self.record)

    def _read(self) -> dict[str, Any]:
        """The record of an earlier call, or a new one. Refuses a folder of something else, and other settings."""
        path = self.folder / RUN_FILE
        blocked = next((parent for parent in self.folder.absolute().parents if parent.is_file()), None)
        if blocked is not None:
            raise ValueError(f"--out {self.folder}: {blocked} is a file, where a folder is needed. Use another folder.")
        if not path.is_file():
            if self.folder.exists() and (not self.folder.is_dir() or not is_vacant(self.folder)):
                raise ValueError(f"--out {self.folder} exists and is not a run of carryforward. Use another folder.")
            return {"kind": "run", "status": "running", "settings": self.settings, "search": []}
        record = read_run(path, "Use another --out.")
        if record.get("status") not in ("running", "finished") or not isinstance(record.get("search"), list):
            raise ValueError(f"{path} is damaged: status or search cannot be right. Use another --out.")
        before = record["settings"]
        same_length = {name: self.settings[name] for name in self.length_settings}
        self._refuse_changes("other settings", before | same_length, self.settings)
        return record

    def _lock_folder(self) -> None:
        """Lock the folder, unless that is done, and read the record again: another process may have written it."""
        if not self._locked:
            self._lock.enter_context(lock_output(self.folder / LOCK, self.folder))
            self._locked = True
            self.record = self._read()

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
