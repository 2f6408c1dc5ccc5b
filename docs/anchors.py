# SPDX-License-Identifier: Apache-2.0
"""Update the line numbers of links to code in `docs/*.md`: `python docs/anchors.py`. A test checks them.

A link to code has the code's name as its text: [`memories/vector.VectorMemory.pool`](../src/...py#L1). The part before
the first dot is the path of the module inside the package. The rest names a class, function, method, field or constant
in it, whose line the link gets.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "carryforward"
LINK = re.compile(r"\[`([\w./]+)`\]\(\.\./src/carryforward/[\w/]+\.py#L\d+\)")


def line_of(name: str) -> int:
    """The line that defines a name such as `memories/vector.VectorMemory.pool`."""
    module, *path = name.split(".")
    file = SOURCE / f"{module}.py"
    if not file.exists():
        raise LookupError(f"{name}: there is no module {module}.py")
    line, nodes = 1, ast.parse(file.read_text()).body
    for part in path:
        definition = next((node for node in nodes if part in _defined_names(node)), None)
        if definition is None:
            raise LookupError(f"{name}: there is no {part!r} in {module}.py")
        line, nodes = definition.lineno, getattr(definition, "body", [])
    return line


def _defined_names(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def refreshed(text: str) -> str:
    """A page's text with every link to code pointing at its line."""

    def link(match: re.Match) -> str:
        name = match[1]
        return f"[`{name}`](../src/carryforward/{name.partition('.')[0]}.py#L{line_of(name)})"

    return LINK.sub(link, text)


if __name__ == "__main__":
    for page in sorted((ROOT / "docs").glob("*.md")):
        before = page.read_text()
        after = refreshed(before)
        if after != before:
            page.write_text(after)
            print(f"refreshed {page.name}", file=sys.stderr)
