# SPDX-License-Identifier: Apache-2.0
"""Which memory remembers what, and over how many windows?

    python run.py retrieval --jobs 16 --minutes 9       # measures what is missing; run it again to go on
    python run.py copy peer --only "copy-120-*-0"       # arms whose name matches a pattern
    python run.py facts --base path/to/smollm2 --data path/to/books
    python run.py retrieval --plan                      # what there is to do, and how long it should take
    python run.py --tables-only                         # writes README.md and the figures

Every arm (`arms.py`) is a process of its own (`measuring.py`), `--jobs` of them side by side, and writes its own JSON.
An arm that was measured at the same commit in the same way is skipped. `--minutes` stops before that time is over: what
is running writes what it has, marked as unfinished, and goes on from a checkpoint in the next call.

- $CARRYFORWARD_COMMIT names the commit where there is no repository. Without a clean commit nothing is skipped.
- Small models share a GPU best with NVIDIA's Multi-Process Service: `nvidia-cuda-mps-control -d` before the run.
- `peer` needs a package: see `peer.py`. Measuring needs neither typer nor matplotlib.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from arms import GIVEN, GROUPS, Arm, arms_of
from estimates import plan
from harness import command_line
from measuring import RESULTS, add_options, checkpoint_of, describe
from pages import write_pages

from carryforward.reproduction.parallel import run_parallel
from carryforward.utils import console

RESERVE = 40  # seconds before the end at which arms are told to stop
REPORT_EVERY = 60  # seconds
SAME = ("kind", "commit", "arm")  # what must agree for an arm to be skipped


def main() -> None:
    command_line(__doc__, add_arguments, measure_group, write_pages)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("groups", nargs="+", choices=GROUPS, help="which arms")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="measure these arms only")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop before this time is over")
    parser.add_argument("--plan", action="store_true", help="show what there is to do, and measure nothing")
    add_options(parser)


def measure_group(arguments: argparse.Namespace) -> None:
    if arguments.tiny and arguments.out == RESULTS:
        raise SystemExit("--tiny: give another folder for its results, with --out.")
    arms = chosen(arguments)
    missing = [arm for arm in arms if not is_measured(arm, arguments)]
    console.note(f"{len(missing)} of {len(arms)} arms to measure")
    if arguments.plan:
        print(plan(missing, arguments.jobs))
    elif missing:
        run(missing, arguments)


def run(arms: Sequence[Arm], arguments: argparse.Namespace) -> None:
    """Measure arms in processes of their own, until the time is over."""
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(name, "1")  # the arms share the machine's cores
    for arm in arms:
        forget_other_checkpoints(arm, arguments)
    logs = arguments.out / "runs"
    commands = {arm.name: command(arm, arguments) for arm in arms}
    started, seconds = time.monotonic(), 60 * arguments.minutes - RESERVE
    try:
        run_parallel(commands, logs, arguments.jobs, seconds=seconds, watch=Report(logs))
    except KeyboardInterrupt:
        if time.monotonic() - started < seconds:
            raise
        console.note("the time is over: run the same command again to go on")


def command(arm: Arm, arguments: argparse.Namespace) -> list[str]:
    """The arguments of Python that measure an arm."""
    options = [f"--{name}={getattr(arguments, name)}" for name in ("out", "device", "jobs", "data")]
    options += [f"--fast-path={arguments.fast_path}"] + [f"--base={arguments.base}"] * bool(arguments.base)
    return [str(Path(__file__).with_name("measuring.py")), arm.name, *options, *["--tiny"] * arguments.tiny]


class Report:
    """Prints the last line of every running arm's log now and then."""

    def __init__(self, logs: Path):
        self.logs, self.last = logs, time.monotonic()

    def __call__(self, running: Sequence[str]) -> None:
        if time.monotonic() - self.last < REPORT_EVERY:
            return
        self.last = time.monotonic()
        for name in running:
            lines = (self.logs / f"{name}.log").read_text(errors="replace").splitlines()
            console.note(f"  {name}: {lines[-1] if lines else 'starting'}")


def chosen(arguments: argparse.Namespace) -> list[Arm]:
    """The arms whose names match a pattern, in the order of measuring: every arm of a seed before the next seed. Those
    of a base model that is not given are left out."""
    arms = [arm for group in arguments.groups for arm in arms_of(group, tiny=arguments.tiny)]
    arms = sorted((arm for arm in arms if any(fnmatch(arm.name, p) for p in arguments.only)), key=lambda arm: arm.seed)
    arms = [arm for arm in arms if arm.model.get("base") != GIVEN or arguments.base]
    if not arms:
        raise SystemExit(f"--only {' '.join(arguments.only)} matches no arm of {', '.join(arguments.groups)}.")
    return arms


def is_measured(arm: Arm, arguments: argparse.Namespace) -> bool:
    """Whether a finished result is there, from the same clean commit."""
    return is_of_this_run(arm, arguments) and read(arm, arguments)["finished"]


def is_of_this_run(arm: Arm, arguments: argparse.Namespace) -> bool:
    """Whether there is a result of this arm, perhaps unfinished, from the same clean commit."""
    expected = json.loads(json.dumps(describe(arm, arguments)))
    commit = expected["commit"]
    if commit == "unknown" or commit.endswith("-dirty") or not (arguments.out / f"{arm.name}.json").exists():
        return False
    return all(read(arm, arguments).get(key) == expected[key] for key in SAME)


def read(arm: Arm, arguments: argparse.Namespace) -> dict:
    return json.loads((arguments.out / f"{arm.name}.json").read_text())


def forget_other_checkpoints(arm: Arm, arguments: argparse.Namespace) -> None:
    """Delete a checkpoint of other code: training cannot go on from it."""
    if not is_of_this_run(arm, arguments):
        checkpoint_of(arm, arguments.out).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
