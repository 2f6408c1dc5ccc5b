# SPDX-License-Identifier: Apache-2.0
"""The code and the commands of every page of the documentation run, in the order in which they are printed."""

import importlib.util
import re
from pathlib import Path

import pytest
from helpers import doc_pages

DOCS = Path(__file__).resolve().parents[2] / "docs"
OWN_TEST = {"quickstart.md"}  # tests/repository/test_quickstart.py looks at its results, too
# They need names that they do not define, or minutes: to be run like the others once they are changed.
NOT_YET = {"evaluation.md", "memory-tasks.md", "question-answering.md", "training.md"}
ALL = [page for page in sorted(DOCS.glob("*.md")) if page.name not in OWN_TEST and "```" in page.read_text()]
PAGES = [page for page in ALL if page.name not in NOT_YET]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs(page, monkeypatch, tmp_path):
    for package in doc_pages.packages(page):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"make test-all: it installs {package}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CARRYFORWARD_CACHE", str(tmp_path / "cache"))
    blocks, commands = doc_pages.run_page(page)
    printed = [
        text if language else line
        for language, text in doc_pages.BLOCK.findall(page.read_text())
        if language in ("", "python")
        for line in (text.splitlines() if not language else [text])
        if language or re.search(r"(^|\| )carryforward ", line)
    ]
    assert blocks + commands == sum(not doc_pages.unrunnable(one) for one in printed)


def test_what_is_not_run_is_still_there():
    text = "\n".join(page.read_text() for page in ALL)
    stale = [pattern for pattern in doc_pages.NEEDS if not re.search(pattern, text, re.MULTILINE)]
    stale += [pattern for pattern, _ in doc_pages.SIZES if not re.search(pattern, text)]
    assert stale == []
