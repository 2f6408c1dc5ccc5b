# SPDX-License-Identifier: Apache-2.0
"""Keeps the line numbers in `docs/*.md` true: `python docs/anchors.py` rewrites them, a test checks them.

A reference to code is written as a link whose text names it, [`recurrence.Recurrence.pool`](../src/...py#L1): the
module and, inside it, a class, function, method or field. The line follows from the name.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "carryforward"
LINK = re.compile(r"\[`([\w./]+)`\]\(\.\./src/carryforward/([\w/]+)\.py#L\d+\)")


def line_of(name: str) -> int:
    """The line on which a dotted name is defined."""
    module, *path = name.split(".")
    nodes = ast.parse((SOURCE / f"{module}.py").read_text()).body
    line = 1
    for part in path:
        found = next((node for node in nodes if part in _defines(node)), None)
        if found is None:
            raise LookupError(f"{name}: there is no {part!r} in {module}.py")
        line, nodes = found.lineno, getattr(found, "body", [])
    return line


def _defines(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def refreshed(text: str) -> str:
    """The text with every reference pointing at its line."""

    def link(match: re.Match) -> str:
        name = match[1]
        return f"[`{name}`](../src/carryforward/{name.split('.')[0]}.py#L{line_of(name)})"

    return LINK.sub(link, text)


if __name__ == "__main__":
    for page in sorted((ROOT / "docs").glob("*.md")):
        before = page.read_text()
        after = refreshed(before)
        if after != before:
            page.write_text(after)
            print(f"refreshed {page.name}", file=sys.stderr)
