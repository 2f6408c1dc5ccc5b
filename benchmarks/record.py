# SPDX-License-Identifier: Apache-2.0
"""Results on their way to a file: what was there before goes only when a run is at its end.

A run writes what it has measured to a file beside, `memory-cpu.json.unfinished`, after every case. Ended early, it
leaves that one to look at and the results as they were.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from carryforward.utils.files import write_json
from carryforward.utils.provenance import provenance

Write = Callable[[dict[str, Any]], None]


@contextmanager
def at_the_end(out: Path) -> Iterator[Write]:
    """Give what writes a report beside `out`; the last one written takes its place."""
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f"{out.name}.unfinished")
    written = False  # by this run: an earlier one may have left its own

    def write(report: dict[str, Any]) -> None:
        nonlocal written
        write_json(unfinished, report)
        written = True

    try:
        yield write
    except BaseException as error:
        if written:  # said below the traceback, where it is seen
            error.add_note(f"What was measured is in {unfinished}; the results are as they were.")
        raise
    if written:
        os.replace(unfinished, out)


@contextmanager
def cases(out: Path, report: dict[str, Any]) -> Iterator[Write]:
    """Give what adds a case to a report."""
    found: list[dict[str, Any]] = []
    with at_the_end(out) as write:

        def add(case: dict[str, Any]) -> None:
            found.append(case)
            write(report | {"cases": found})

        yield add


class Report:
    """Rows, each with its commit: ratios are of one row's sides, never across rows. A run of all parts starts anew;
    one of some keeps the other rows, which must be of the same machine, versions and shapes."""

    def __init__(self, out: Path, device: str, shapes: dict[str, Any], whole: bool):
        self.record: dict[str, Any] = {**provenance(device), "seed": 0, "shapes": shapes, "rows": []}
        self.commit = self.record.pop("commit")
        if out.exists() and not whole:
            earlier = json.loads(out.read_text())
            if differ := list(differences(earlier, self.record)):
                rest = "Rows of both cannot stand in one file: run all parts, or give another --out."
                raise SystemExit(f"{out} was measured with {'; '.join(differ)}. {rest}")
            self.record |= {"shapes": earlier["shapes"] | shapes, "rows": earlier["rows"]}
        self.file = at_the_end(out)

    def __enter__(self) -> "Report":
        self.write = self.file.__enter__()
        return self

    def __exit__(self, *ended: Any) -> bool | None:
        return self.file.__exit__(*ended)

    def add(self, row: dict[str, Any]) -> None:
        same = ("row", "shape", "batch", "windows")
        others = [r for r in self.record["rows"] if any(r.get(k) != row.get(k) for k in same)]
        self.record["rows"] = [*others, {"commit": self.commit, **row}]
        self.write(self.record)
        print(json.dumps(row))


def differences(earlier: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """What keeps rows apart. A shape that only one of them knows does not: no row of the other has it."""
    for what in ("hardware", "versions", "shapes"):
        was, is_now = earlier[what], now[what]
        for name in dict.fromkeys([*was, *is_now]):
            if was.get(name) != is_now.get(name) and (what != "shapes" or name in was.keys() & is_now.keys()):
                yield f"{name} {was.get(name)}, now {is_now.get(name)}"
