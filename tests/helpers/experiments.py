# SPDX-License-Identifier: Apache-2.0
"""The modules of an experiment's folder, which are not a package, with pages and results in a temporary folder."""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace


@contextmanager
def experiment(monkeypatch, folder: Path, names: Sequence[str], results: Path) -> Iterator[SimpleNamespace]:
    """The modules of these names, `pages` among them. They are imported anew: other experiments use the same names."""
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.syspath_prepend(folder)
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    modules = SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    monkeypatch.setattr(modules.pages, "RESULTS", results / "results")
    monkeypatch.setattr(modules.pages, "HERE", results)
    write_page = lambda folder, lines: (folder / "README.md").write_text("\n".join(lines))  # noqa: E731
    monkeypatch.setattr(modules.pages, "write_page", write_page)
    yield modules
    for name in names:
        sys.modules.pop(name, None)
