# SPDX-License-Identifier: Apache-2.0
"""Run a function in two processes of one group."""

import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .commands import LOOPBACK

LIMIT = 120  # seconds after which a process that has not ended prints its stack and exits


def run(work: Callable, folder: Path, *arguments) -> list:
    """Call `work(rank, *arguments)` in two processes of one group; the result of each.

    The processes are forked where that is safe: they need not import torch again, which takes longer than most work.
    """
    how = "fork" if sys.platform == "linux" else "spawn"
    mp.start_processes(_enter, (work, str(folder), *arguments), nprocs=2, start_method=how)
    return [torch.load(folder / f"rank-{rank}.pt") for rank in (0, 1)]


def _enter(rank: int, work: Callable, folder: str, *arguments) -> None:
    faulthandler.register(signal.SIGALRM, chain=True)  # `dump_traceback_later` waits for a thread that is not forked
    signal.alarm(LIMIT)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    gc.freeze()  # collections would look at all that was there before
    torch.set_num_threads(1)
    # A file, not a port, which another test may be using.
    store, limit = f"file://{folder}/store", timedelta(seconds=LIMIT // 2)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=limit)
    torch.save(work(rank, *arguments), f"{folder}/rank-{rank}.pt")
    dist.destroy_process_group()  # the alarm stays on: a process may hang while it ends, too
