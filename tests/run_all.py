# SPDX-License-Identifier: Apache-2.0
"""Run all tests but those that need a GPU, and write what came of it to docs/test-all.json: `make test-all`.

A test that is skipped for want of a package or a program is an error here. Arguments are pytest's, such as the names of
test files; the result is written only if there are none.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "docs" / "test-all.json"
BROWSER = ("chromium", "chromedriver")  # programs; Debian's packages are chromium and chromium-driver
# parts of the reasons for which a test may be skipped
ACCEPTED = ("GPU", "corpora", "not in this version of transformers")


class Record:
    """A plugin that counts outcomes."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.skipped: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome != "passed" or report.when == "call":
            self._add(report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome != "passed":
            self._add(report)

    def _add(self, report: Any) -> None:
        self.outcomes[report.nodeid] = report.outcome
        if report.outcome == "skipped":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skipped[report.nodeid] = reason.removeprefix("Skipped: ")

    def count(self, outcome: str) -> int:
        return sum(one == outcome for one in self.outcomes.values())

    def unexpected(self) -> dict[str, str]:
        """Skipped tests that should have run."""
        return {name: reason for name, reason in self.skipped.items() if not any(one in reason for one in ACCEPTED)}


def main(arguments: list[str]) -> int:
    """Run the tests. The exit status is not 0 if one fails or is skipped that should have run."""
    install_browser()
    from carryforward.utils.files import write_json
    from carryforward.utils.provenance import provenance

    made = provenance("cpu")  # before the result that is written changes the tree
    record, begun = Record(), time.perf_counter()
    status = int(pytest.main(["-n", "2", *arguments], plugins=[record]))
    seconds = time.perf_counter() - begun
    unexpected = record.unexpected()
    for name, reason in unexpected.items():
        print(f"{name} should have run: {reason}")
    if not arguments:
        counts = {outcome: record.count(outcome) for outcome in ("passed", "failed", "skipped")}
        made = {**made, "command": "make test-all"}
        write_json(RESULT, {**made, **counts, "seconds": round(seconds), "reasons": _by_reason(record.skipped)})
        print(f"written to {RESULT.relative_to(ROOT)}")
    return status or int(bool(unexpected))


def _by_reason(skipped: dict[str, str]) -> dict[str, int]:
    """How many tests were skipped for each reason."""
    reasons = [*skipped.values()]
    return {reason: reasons.count(reason) for reason in sorted({*reasons})}


def install_browser() -> None:
    """Install Chromium and its driver from Debian, as root; otherwise say how."""
    if all(map(shutil.which, BROWSER)):
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        sys.exit("make test-all needs Chromium and its driver: sudo apt-get install chromium chromium-driver")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "--yes", "--no-install-recommends", "chromium", "chromium-driver"]):
        subprocess.run(["apt-get", "-qq", *command], check=True, env=environment)


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
