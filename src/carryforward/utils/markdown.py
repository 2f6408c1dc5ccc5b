# SPDX-License-Identifier: Apache-2.0
"""Markdown tables."""

import html
import re
from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """Return a Markdown table. The first `text_columns` columns are left-aligned, the others, for numbers, right."""
    rule = ["---"] * text_columns + ["---:"] * (len(header) - text_columns)
    return "\n".join(f"| {' | '.join(map(_escape, cells))} |" for cells in (header, rule, *rows))


def escape_markdown(text: str) -> str:
    """A text on one line in which no character is read as markup: for names that come from users and files.

    >>> print(escape_markdown("runs/my_model|<b>*x*"))
    runs/my_model\\|&lt;b&gt;\\*x\\*
    """
    markup = r"([\\`*\[\]|$]|~(?=~)|(?<=~)~|(?<![^\W_])_|_(?![^\W_]))"  # not the underscore inside a word
    return re.sub(markup, r"\\\1", html.escape(" ".join(text.split()), quote=False))


def _escape(cell: str) -> str:
    """Escape vertical bars, which would end the cell, unless they are escaped already; so would line ends."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(cell.splitlines()))
