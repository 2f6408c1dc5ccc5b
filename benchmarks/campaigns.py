# SPDX-License-Identifier: Apache-2.0
"""The campaigns of the tests in a long form: how many cases were tried, and how many failed.

    python benchmarks/campaigns.py --cases 90

Runs the tests that have a long form (see tests/helpers/campaigns.py), writes benchmarks/results/campaigns.json, and the
table in docs/reliability.md. Tests without a count of their own count as a case each.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from measurements import RESULTS, short, write_section

from carryforward.utils.files import write_json
from carryforward.utils.markdown import markdown_table
from carryforward.utils.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
OUT = RESULTS / "campaigns.json"
PAGE = ROOT / "docs" / "reliability.md"
# what a row of the table says, the tests' file, and the beginning of their names
ROWS = {
    "killed at a file operation: plainly, with a torn file, with the power": ("campaigns/test_crashes", "test_a_crash"),
    "killed twice": ("campaigns/test_crashes", "test_two_crashes"),
    "a file operation that fails: disk full, quota, file too large, read-only": ("campaigns/test_full_disk", "test_no"),
    "damage that keeps a file's size": ("campaigns/test_damage", "test_"),
    "Ctrl-C while a run starts, other signals while it works": ("campaigns/test_signals", "test_"),
    "two processes on one output": ("campaigns/test_two_processes", "test_"),
    "finished runs that are continued": ("campaigns/test_extended_runs", "test_"),
    "damaged and hostile files": ("properties/test_damaged_files", "test_"),
    "option values": ("cli/test_option_values", "test_"),
    "invalid calls": ("properties/test_invalid_calls", "test_"),
    "odd but valid calls, compared with one document at a time": ("properties/test_odd_calls", "test_"),
}


def run(cases: str) -> dict[str, Any]:
    """Run the tests; their counts by row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        counts, results = Path(folder) / "counts", Path(folder) / "results.xml"
        counts.touch()
        tests = sorted({str(ROOT / "tests" / f"{file}.py") for file, _ in ROWS.values()})
        environment = os.environ | {"CARRYFORWARD_CAMPAIGNS": cases, "CARRYFORWARD_CAMPAIGNS_OUT": str(counts)}
        command = [sys.executable, "-m", "pytest", *tests, f"--junitxml={results}", "-o", "faulthandler_timeout=0",
                   "-n", "2"]  # fmt: skip
        subprocess.run(command, cwd=ROOT, env=environment, check=False)
        recorded = [json.loads(line) for line in counts.read_text().splitlines()]
        found = ElementTree.parse(results).iter("testcase")
    own = {entry["name"]: (entry["tried"], entry["failed"]) for entry in recorded}
    rows = {row: {"tried": 0, "failed": 0} for row in ROWS}
    for test in found:
        name, file = test.get("name", ""), test.get("classname", "").replace("tests.", "").replace(".", "/")
        if test.find("skipped") is not None:
            continue
        for row, (own_file, beginning) in ROWS.items():
            if file == own_file and name.startswith(beginning):
                failed = test.find("failure") is not None or test.find("error") is not None
                tried, lost = own.get(_recorded_name(name), (1, int(failed)))
                rows[row]["tried"] += tried
                rows[row]["failed"] += max(lost, int(failed))
    return rows


def _recorded_name(name: str) -> str:
    """The name under which a test records its count."""
    short = {"test_damaged_files_are_refused_by_name": "damaged files",
             "test_odd_values_are_accepted_or_refused_by_name": "option values"}  # fmt: skip
    test, bracket, case = name.partition("[")
    return short.get(test, test) + bracket + case


def table(report: dict[str, Any]) -> str:
    """The table of the page."""
    lines = [[name, f"{row['tried']:,}", f"{row['failed']:,}"] for name, row in report["rows"].items()]
    where = f"Commit {short(report['commit'])}, {report['hardware']['cpu']}, `--cases {report['cases']}`"
    return f"{markdown_table(['', 'tried', 'failed'], lines)}\n\n{where} ([JSON](../benchmarks/results/{OUT.name}))."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="all", help="at most so many of each long series; all by default")
    parser.add_argument("--page", action="store_true", help="only write the table, from the results there are")
    arguments = parser.parse_args()
    if not arguments.page:
        write_json(OUT, {**provenance("cpu"), "seed": 0, "cases": arguments.cases, "rows": run(arguments.cases)})
    write_section(PAGE, "campaigns", table(json.loads(OUT.read_text())))


if __name__ == "__main__":
    main()
