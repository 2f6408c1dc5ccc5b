# SPDX-License-Identifier: Apache-2.0
"""The provenance of a result: versions, commit, hardware. Every result in JSON contains it."""

import contextlib
import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__


def commit() -> str:
    """Return the commit of the source, with "-dirty" if files differ, or $CARRYFORWARD_COMMIT if that is set."""
    if "CARRYFORWARD_COMMIT" in os.environ:
        return os.environ["CARRYFORWARD_COMMIT"]
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]  # the hash, not a tag
    here = Path(__file__).parent.parent
    if (here.parents[1] / "pyproject.toml").exists():  # a checkout: elsewhere, git might find another project
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            return subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"


def provenance(device: str) -> dict[str, Any]:
    """Return what to record with a result that was measured on `device`."""
    import torch

    hardware: dict[str, Any] = {"device": device, "cpu": _cpu(), "cores": os.cpu_count()}
    if device.startswith("cuda"):
        hardware["gpu"] = torch.cuda.get_device_name(device)
    names = ("torch", "transformers", "accelerate", "numpy")
    return {
        "carryforward": __version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(sys.argv),
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in names},
        "hardware": hardware,
    }


def _command(arguments: Sequence[str]) -> str:
    """Return the command line without directories of this machine: results are published."""
    name = Path(arguments[0]).name
    program = name if name.endswith(".py") and name != "__main__.py" else "carryforward"
    return shlex.join([program, *(re.sub(r"(^|=)[/~][^=]*/([^/=]+)", r"\1\2", argument) for argument in arguments[1:])])


def _cpu() -> str:
    with contextlib.suppress(OSError, IndexError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()
