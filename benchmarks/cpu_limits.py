# SPDX-License-Identifier: Apache-2.0
"""What a container's limit on the processor costs: threads, the quota, and how long the process was stopped for it.

A control group with a quota may use so much processor time in each period, mostly of 100 ms. Thread pools that are
sized by the machine's cores, and not by the quota, use it up early in a period, and then every thread of the group
stands still until the period ends. The kernel counts these stops. Nothing of `carryforward` is imported here.
"""

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
# Read when a library is loaded: OpenMP (torch), MKL, OpenBLAS (NumPy), Rayon (tokenizers), torch's compiler.
THREAD_POOLS = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS",
)  # fmt: skip


def parse_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, with an option `--threads`. Thread pools are sized when libraries are loaded, so the
    script starts again with the variables set if they are not."""
    parser.add_argument("--threads", type=int, help="size of every thread pool, on any device (that of the libraries)")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        sizes = dict.fromkeys(THREAD_POOLS, str(arguments.threads))
        if any(os.environ.get(name) != size for name, size in sizes.items()):
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | sizes)
    return arguments


def throttling() -> dict[str, float]:
    """Counters of this process's control group since it was made; empty if it has no quota or the kernel does not say.

    Returns:
        periods: elapsed periods of the quota.
        throttled_periods: those in which the group used it up.
        throttled_seconds: how long its threads stood still, summed over processors.
    """
    with suppress(OSError, ValueError, KeyError):
        counters = dict(line.split() for line in (_folder() / "cpu.stat").read_text().splitlines())
        version_2 = "throttled_usec" in counters
        seconds = int(counters["throttled_usec"]) / 1e6 if version_2 else int(counters["throttled_time"]) / 1e9
        periods, throttled = int(counters["nr_periods"]), int(counters["nr_throttled"])
        return {"periods": periods, "throttled_periods": throttled, "throttled_seconds": seconds}
    return {}


def throttled_since(before: dict[str, float]) -> dict[str, float]:
    """The counters since an earlier reading."""
    return {name: count - before[name] for name, count in throttling().items() if name in before}


def limits() -> dict[str, Any]:
    """The quota in cores (None if there is none), the processors that this process may use, the threads of torch and
    of pools that the environment sets, and the load of the machine, which others may use too."""
    import torch

    threads = {"torch": torch.get_num_threads()}
    threads |= {name: int(os.environ[name]) for name in THREAD_POOLS if os.environ.get(name, "").isdigit()}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"quota_cores": quota(), "cores": cores, "threads": threads, "load": os.getloadavg()[0]}


def quota() -> float | None:
    """Processor time per time that the control group may use; None without a limit."""
    folder = _folder()
    with suppress(OSError, ValueError):
        allowed, period = (folder / "cpu.max").read_text().split()
        return None if allowed == "max" else int(allowed) / int(period)
    with suppress(OSError, ValueError):
        allowed, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return None if int(allowed) < 0 else int(allowed) / int(period)
    return None


def _folder() -> Path:
    """The control group of this process: of version 2, as this process sees it, or of version 1."""
    own = ROOT
    with suppress(OSError):
        paths = [line[3:].strip("/") for line in OWN.read_text().splitlines() if line.startswith("0::")]
        own = ROOT.joinpath(*paths)
    folders = (own, ROOT, ROOT / "cpu")
    return next((folder for folder in folders if (folder / "cpu.stat").exists()), ROOT)
