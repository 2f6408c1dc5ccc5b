# SPDX-License-Identifier: Apache-2.0
"""Start a function in several processes as torchrun does: with a store of the launcher's, and if one fails, all end."""

import os
import signal
import time
from collections.abc import Callable

from torch import distributed

from . import crash
from .commands import LOOPBACK


def launch(
    job: Callable[[], object], count: int = 2, operations: dict[int, crash.Operations] | None = None
) -> list[crash.Result]:
    """Run a job in forked processes of one launch. Returns the result of each.

    Args:
        operations: what to do at the file operations of a process, by its rank.
    """
    store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def start(rank: int) -> crash.Child:
        environment = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count,
            "MASTER_ADDR": "localhost", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True,
            "GLOO_SOCKET_IFNAME": LOOPBACK,
        }  # fmt: skip

        def work() -> None:
            os.environ |= {name: str(value) for name, value in environment.items()}
            job()

        return crash.Child(work, (operations or {}).get(rank))

    children = [start(rank) for rank in range(count)]
    _end_together(children)
    return [child.wait() for child in children]


def _end_together(children: list[crash.Child]) -> None:
    """Wait until all have ended; once one has failed, ask the others to end. They stay to be waited for."""
    running, asked = set(children), False
    while running:
        for child in [*running]:
            child.read()
            status = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is None:
                continue
            running.discard(child)
            failed = status.si_code != os.CLD_EXITED or status.si_status
            if failed and not asked:
                asked = True
                time.sleep(0.1)  # torchrun looks ten times a second
                for other in running:
                    os.kill(other.pid, signal.SIGTERM)
        time.sleep(0.02)
