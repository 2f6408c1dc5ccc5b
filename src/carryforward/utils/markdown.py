# SPDX-License-Identifier: Apache-2.0
"""Markdown tables."""

import re
from collections.abc import Iterable, Sequence


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table whose first columns, so many, hold words and whose others hold numbers, which stand on the right."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return "\n".join(f"| {' | '.join(map(_escaped, cells))} |" for cells in (head, rule, *rows))


def _escaped(cell: str) -> str:
    """A bar that is not escaped yet would end the cell."""
    return re.sub(r"(?<!\\)\|", r"\\|", cell)
