# SPDX-License-Identifier: Apache-2.0
"""Several cells at once, each in a process of its own: a small model with few rows leaves most of a large GPU idle.

What a cell says while it runs is in a log beside its model.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..utils import console
from ..utils.signals import Interruptible


def run_side_by_side(commands: Mapping[str, Sequence[str]], work: Path, jobs: int) -> None:
    """Run cells, so many at a time.

    Args:
        commands: for each cell's name what Python is to run.
        work: where models and logs are.
    """
    work.mkdir(parents=True, exist_ok=True)
    waiting, running, failed = [*commands], dict[str, subprocess.Popen[bytes]](), list[str]()
    told = False
    stop = Interruptible("stopping: cells that are being trained are saved first")
    with stop.listening(signal.SIGINT, signal.SIGTERM):
        try:
            while (waiting and not stop.requested) or running:
                while waiting and len(running) < jobs and not stop.requested:
                    name = waiting.pop(0)
                    running[name] = _started(commands[name], _log(work, name))
                    console.note(f"{name}: started, see {_log(work, name)}")
                time.sleep(0.2)
                if stop.requested and not told:  # once: a second time would not be gentle
                    told = True
                    for process in running.values():
                        process.terminate()
                for name, process in [*running.items()]:
                    if process.poll() is not None:
                        del running[name]
                        console.note(f"{name}: {'done' if not process.returncode else 'failed'}")
                        failed += [name] if process.returncode else []
        finally:
            for process in running.values():
                process.kill()
    if stop.requested:
        raise KeyboardInterrupt("stopped. To go on, give the same command again.")
    if failed:
        logs = ", ".join(str(_log(work, name)) for name in failed)
        raise ChildProcessError(f"{len(failed)} of {len(commands)} cells failed: what they said last is in {logs}.")


def _started(command: Sequence[str], path: Path) -> subprocess.Popen[bytes]:
    with path.open("ab") as log:
        # in a session of its own, which Ctrl-C does not reach: it is told to stop once, by us
        return subprocess.Popen([sys.executable, *command], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                start_new_session=True)  # fmt: skip


def _log(work: Path, name: str) -> Path:
    return work / f"{name}.log"
