# SPDX-License-Identifier: Apache-2.0
"""The documentation site: it builds without a warning, has all names and commands, and its links lead somewhere."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

pytest.importorskip("mkdocs", reason="make test-all installs mkdocs")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
site_hooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site_hooks)

PAGES = {"usage.md", "index.md", "experiments/README.md", "src/carryforward/windows.py.html", "LICENSE",
         "examples/notebooks/a.ipynb.md"}  # fmt: skip


@pytest.mark.parametrize(
    ("here", "link", "expected"),
    [
        ("design.md", "usage.md#control", "usage.md#control"),
        ("design.md", "../experiments/README.md", "experiments/README.md"),
        ("design.md", "../experiments", "experiments/README.md"),
        ("design.md", "../README.md", "index.md"),
        ("design.md", "../src/carryforward/windows.py#L12", "src/carryforward/windows.py.html#line-12"),
        ("reference/python.md", "../usage.md", "../usage.md"),
        ("experiments/LOG.md", "../docs/usage.md", "../usage.md"),
        ("experiments/LOG.md", "../LICENSE", "../LICENSE"),
        ("index.md", "../examples/notebooks/a.ipynb", "examples/notebooks/a.ipynb.md"),
        ("design.md", "nothing.md", "nothing.md"),  # mkdocs then ends the build
    ],
)
def test_links_lead_to_the_places_on_the_site(here, link, expected):
    assert site_hooks.rewrite_links(f"see [this]({link}).", here, PAGES) == f"see [this]({expected})."


def test_code_and_other_hosts_are_left_alone():
    text = "[a](https://example.org/usage.md) [b](#here)"
    assert site_hooks.rewrite_links(text, "design.md", PAGES) == text


def test_a_notebook_becomes_a_page():
    cells = [{"cell_type": "markdown", "source": ["# A\n", "b"]}, {"cell_type": "code", "source": ["x = 1\n", "x"]}]
    assert site_hooks.notebook_page(json.dumps({"cells": cells})) == "# A\nb\n\n```python\nx = 1\nx\n```\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return folder


def test_all_names_and_commands_are_there(site):
    import carryforward as cf

    names = (site / "reference" / "python.html").read_text()
    missing = [name for name, home in cf._HOME.items() if f'id="carryforward.{home}.{name}"' not in names]
    assert missing == []
    commands = (site / "reference" / "commands.html").read_text()
    for name in ("train", "evaluate", "qa answer", "memory-tasks copy"):
        assert f'id="carryforward-{name.replace(" ", "-")}"' in commands, name
    assert "--max-new-tokens" in commands


def test_no_link_of_any_page_is_broken(site):
    """Also those that mkdocs does not look at: to code, figures and results."""
    broken = set()
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue
        for target in re.findall(r'(?:href|src)="([^"]+)"', page.read_text()):
            path, place = urldefrag(unquote(target))
            if re.match(r"\w+:|//", target) or (not path and not place):
                continue
            file = (page.parent / path).resolve() if path else page
            if not (file.exists() and (not place or file.suffix != ".html" or has_place(file, place))):
                broken.add((page.relative_to(site).as_posix(), target))
    assert broken == set()


def has_place(file, place):
    return place in places(file)


@cache
def places(file):
    return set(re.findall(r'(?:id|name)="?([^"\s>]+)', file.read_text()))
