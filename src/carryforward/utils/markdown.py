# SPDX-License-Identifier: Apache-2.0
"""Markdown tables."""

import re
from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """Return a Markdown table. The first `text_columns` columns are left-aligned, the others, for numbers, right."""
    rule = ["---"] * text_columns + ["---:"] * (len(header) - text_columns)
    return "\n".join(f"| {' | '.join(map(_escape, cells))} |" for cells in (header, rule, *rows))


def _escape(cell: str) -> str:
    """Escape vertical bars, which would end the cell, unless they are escaped already."""
    return re.sub(r"(?<!\\)\|", r"\\|", cell)
