# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: result files that are replaced only when a run is complete, and cases in child processes.

After every case a run writes its measurements to `NAME.json.unfinished`. If it ends early, that file stays and the old
results are untouched; at the end it replaces them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cpu_limits import limits, throttled_since, throttling

from carryforward.utils.files import write_json, write_text
from carryforward.utils.provenance import provenance

RESULTS = Path(__file__).parent / "results"
Write = Callable[[dict[str, Any]], None]


def run_case(script: str, *arguments: str, env: dict[str, str]) -> Any:
    """Run one case of a script in a child process and parse the JSON that it prints on its last line."""
    command = [sys.executable, script, *arguments]
    process = subprocess.run(command, env=os.environ | env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(process.stdout.splitlines()[-1])


@contextmanager
def replace_at_end(out: Path) -> Iterator[Write]:
    """Yield a function that writes a report next to `out`. On a normal exit the last one written replaces `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f"{out.name}.unfinished")
    written = False  # by this run: an earlier one may have left a file

    def write(report: dict[str, Any]) -> None:
        nonlocal written
        write_json(unfinished, report)
        written = True

    try:
        yield write
    except BaseException as error:
        if written:
            error.add_note(f"The measurements so far are in {unfinished}; {out} is unchanged.")
        raise
    if written:
        os.replace(unfinished, out)


@contextmanager
def collect_cases(out: Path, report: dict[str, Any]) -> Iterator[Write]:
    """Yield a function that adds a case to a report, which replaces `out` at the end. A case records what the limits
    on the processor cost since the one before."""
    cases: list[dict[str, Any]] = []
    cpu = CpuRecord()
    with replace_at_end(out) as write:

        def add(case: dict[str, Any]) -> None:
            cases.append(case | {"cpu": cpu.since_last()})
            write(report | {"cases": cases})

        yield add


def short(commit: str) -> str:
    """A commit as tables show it."""
    return commit[:7] + "-dirty" * commit.endswith("-dirty")


def write_section(page: Path, script: str, text: str) -> None:
    """Replace the section of a page that a script of this folder writes."""
    begin, end = f"<!-- written by benchmarks/{script}.py -->", f"<!-- end of {script} -->"
    before, _, rest = page.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} has no section {begin} ... {end}")
    write_text(page, f"{before}{begin}\n\n{text}\n\n{end}{after}")


class CpuRecord:
    """What the limits on the processor cost, measurement by measurement."""

    def __init__(self) -> None:
        self.before = throttling()

    def since_last(self) -> dict[str, Any]:
        """The limits, and how often and how long the process was stopped for them since the last call."""
        stopped, self.before = throttled_since(self.before), throttling()
        return {**limits(), **stopped}


class Report:
    """Rows of measurements, each with its commit and what limits on the processor cost since the row before. Ratios are
    taken within a row, never across rows.

    A run of all parts (`whole`) starts a new file. A run of some parts keeps the other rows, which must have been
    measured on the same machine, with the same versions and shapes.
    """

    def __init__(self, out: Path, device: str, shapes: dict[str, Any], whole: bool):
        self.record: dict[str, Any] = {**provenance(device), "seed": 0, "shapes": shapes, "rows": []}
        self.commit = self.record.pop("commit")
        if out.exists() and not whole:
            earlier = json.loads(out.read_text())
            if different := list(differences(earlier, self.record)):
                advice = "Rows of both cannot be in one file: run all parts, or give another --out."
                raise SystemExit(f"{out} was measured with {'; '.join(different)}. {advice}")
            self.record |= {"shapes": earlier["shapes"] | shapes, "rows": earlier["rows"]}
        self.file = replace_at_end(out)
        self.cpu = CpuRecord()

    def __enter__(self) -> "Report":
        self.write = self.file.__enter__()
        return self

    def __exit__(self, *exception: Any) -> bool | None:
        return self.file.__exit__(*exception)

    def add(self, row: dict[str, Any], show: bool = True) -> None:
        """Add a row in place of an earlier one with the same name, shape, batch and windows, and write the file."""
        key = ("row", "shape", "batch", "windows")
        row = {**row, "cpu": self.cpu.since_last()}
        others = [r for r in self.record["rows"] if any(r.get(k) != row.get(k) for k in key)]
        self.record["rows"] = [*others, {"commit": self.commit, **row}]
        self.write(self.record)
        if show:
            print(json.dumps(row), flush=True)

    def drop(self, name: str, shape: str) -> None:
        """Remove an earlier row that others replace."""
        self.record["rows"] = [r for r in self.record["rows"] if (r["row"], r["shape"]) != (name, shape)]


def differences(earlier: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Differences in hardware, versions and shapes that both reports have, as text."""
    for group in ("hardware", "versions", "shapes"):
        before, after = earlier[group], now[group]
        for name in dict.fromkeys([*before, *after]):
            known = name in before.keys() & after.keys()  # a shape of one report alone is in no row of the other
            if before.get(name) != after.get(name) and (group != "shapes" or known):
                yield f"{name} {before.get(name)}, now {after.get(name)}"
