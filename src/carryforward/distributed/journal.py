# SPDX-License-Identifier: Apache-2.0
"""Results of finished units of work, on disk until all are done: a command that is started again repeats none of them.

Each process appends lines to a file of its own. A line that a killed process or a power cut has left incomplete is not
used: its unit is done again.
"""

import json
import logging
import uuid
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ..utils.files import delete_folder

logger = logging.getLogger(__name__)


class Journal:
    """The results so far of one job.

    Attributes:
        out: the folder of the job's output.
    """

    def __init__(self, out: Path, identity: Any):
        """
        Args:
            identity: all that results depend on, as JSON; another job has another journal.
        """
        digest = blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=8).hexdigest()
        self.out = out
        self.folder = out / f".unfinished-{digest}"
        self._file: Any = None

    def add(self, name: str, number: int, result: Any) -> None:
        """Record the result of a unit: JSON, in which floats keep all their digits."""
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = (self.folder / f"{uuid.uuid4().hex}.jsonl").open("w", encoding="utf-8")
        entry = json.dumps([name, number, result])
        self._file.write(f"{_digest(entry)} {entry}\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def delete(self) -> None:
        """Delete the files of all processes, once the job's output is written."""
        self.close()
        if self.folder.exists():
            delete_folder(self.folder)

    @cached_property
    def found(self) -> dict[tuple[str, int], Any]:
        """What earlier calls have finished: by name and number of the unit. It is read from the disk once, when it is
        first used. Of several processes only the first may use it: others may read it later, when there is more."""
        found = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                digest, _, entry = line.partition(" ")
                if digest == _digest(entry):
                    name, number, result = json.loads(entry)
                    found[name, number] = result
        if found:
            logger.info("%d units of work are done already.", len(found))
        return found


def _digest(entry: str) -> str:
    return blake2b(entry.encode(), digest_size=8).hexdigest()
