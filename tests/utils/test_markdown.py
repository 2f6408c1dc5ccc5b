# SPDX-License-Identifier: Apache-2.0
"""Names in Markdown tables are text, whatever characters they hold."""

import pytest

from carryforward.utils.markdown import escape_markdown, markdown_table


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("runs/my_model", "runs/my_model"),
        ("_a_", r"\_a\_"),
        ("a|b\nc", r"a\|b c"),
        ("`x` <img src=x onerror=alert(1)>", r"\`x\` &lt;img src=x onerror=alert(1)&gt;"),
        ("[text](javascript:x)", r"\[text\](javascript:x)"),
        ("a\\|b", r"a\\\|b"),
        ("*", r"\*"),
    ],
)
def test_escape_markdown(name, escaped):
    assert escape_markdown(name) == escaped


def test_a_cell_stays_on_its_line_and_in_its_column():
    table = markdown_table(["model", "n"], [[escape_markdown("a|b\nc"), "1"], ["d|e\nf", "2"]])
    assert table.splitlines()[2:] == [r"| a\|b c | 1 |", r"| d\|e f | 2 |"]
