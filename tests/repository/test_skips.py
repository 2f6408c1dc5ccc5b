# SPDX-License-Identifier: Apache-2.0
"""What is skipped says what would run it, and `make test-all` accepts no other reasons."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
# of reasons that no command removes
NO_COMMAND = r"needs a GPU|needs the corpora|not part of a source distribution|not in this version|forked"


def calls():
    """The calls that skip tests: file, the function's name, its arguments without the reason, the reason."""
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = node.func.attr
                reasons = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
                reasons += node.args[:1] if name == "skip" and ast.unparse(node.func) == "pytest.skip" else []
                if name in ("skipif", "importorskip") or (name == "skip" and reasons):
                    yield path, name, node, "".join(ast.unparse(reason) for reason in reasons)


def test_every_skip_names_what_would_run_it():
    dev = "".join(
        tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    )
    found = list(calls())
    assert len(found) > 20
    for path, name, node, reason in found:
        if name == "importorskip" and re.split(r"\W", node.args[0].value)[0].replace("_", "-") in dev:
            continue  # `make test` installs it
        assert re.search(f"make test|{NO_COMMAND}", reason), f"{path.name}, line {node.lineno}: {reason or 'no reason'}"


@pytest.mark.parametrize(
    ("reason", "expected"), [("needs a GPU: run it", True), ("make test-all: it installs trl", False)]
)
def test_missing_packages_are_errors_of_test_all(reason, expected, monkeypatch):
    monkeypatch.syspath_prepend(str(TESTS))
    record = __import__("run_all").Record()
    report = type("Report", (), {"nodeid": "a", "outcome": "skipped", "when": "setup"})()
    report.longrepr = ("file", 3, f"Skipped: {reason}")
    record.pytest_runtest_logreport(report)
    assert (record.count("skipped"), record.count("passed")) == (1, 0)
    assert (record.unexpected() == {}) == expected
