# SPDX-License-Identifier: Apache-2.0
"""Run several cells at once, each in its own process: one small model leaves most of a large GPU idle.

Each process writes its output to a log file next to its model.
"""

import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..utils import console
from ..utils.signals import STOP_SIGNALS, Interruptible


def run_parallel(
    commands: Mapping[str, Sequence[str]],
    work: Path,
    jobs: int,
    *,
    seconds: float = math.inf,
    watch: Callable[[Sequence[str]], None] = lambda running: None,
) -> None:
    """Run cells in parallel.

    Args:
        commands: the arguments of Python for each cell, by its name.
        work: folder of models and logs.
        jobs: how many run at once.
        seconds: after so many, cells are stopped, as they are by Ctrl-C; none is started any more.
        watch: called several times a second with the names of the cells that are running.
    """
    work.mkdir(parents=True, exist_ok=True)
    waiting, running, failed = [*commands], dict[str, subprocess.Popen[bytes]](), list[str]()
    terminated, end = False, time.monotonic() + seconds
    stop = Interruptible("stopping: cells that are being trained are saved first")
    with stop.listening(*STOP_SIGNALS):
        try:
            while (waiting and not stop.requested) or running:
                while waiting and len(running) < jobs and not stop.requested:
                    name = waiting.pop(0)
                    running[name] = _start(commands[name], _log(work, name))
                    console.note(f"{name}: started, see {_log(work, name)}")
                time.sleep(0.2)
                watch([*running])
                stop.requested |= time.monotonic() > end
                if stop.requested and not terminated:  # once: a second signal would stop them before they have saved
                    terminated = True
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
        raise KeyboardInterrupt("stopped. To resume, run the same command again.")
    if failed:
        logs = ", ".join(str(_log(work, name)) for name in failed)
        raise ChildProcessError(f"{len(failed)} of {len(commands)} cells failed. Their output is in {logs}.")


def _start(command: Sequence[str], path: Path) -> subprocess.Popen[bytes]:
    with path.open("ab") as log:
        # In its own session, which Ctrl-C does not reach: `run_parallel` sends the only signal.
        return subprocess.Popen([sys.executable, *command], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                start_new_session=True)  # fmt: skip


def _log(work: Path, name: str) -> Path:
    return work / f"{name}.log"
