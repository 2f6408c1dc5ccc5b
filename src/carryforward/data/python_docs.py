# SPDX-License-Identifier: Apache-2.0
"""The built-in corpus `python-docs`: the documentation that every Python installation carries, read from there.

The language reference is that of `help()`; the standard library's docstrings make one document a module. Modules are
parsed, never imported. Other versions of Python have other text, so figures name the version.
"""

import ast
import functools
import sysconfig
from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path

from .texts import SPLITS, Corpus, Splits, Text

_LEAST = 200  # words of a document
_RUN = 13  # words: as many in the same order are a quotation, not chance
_QUOTED = 0.2  # of a document found in longer ones: it would leak from one split to another
# tests, programs, copies of other projects' packages, and what belongs to one platform's building
_OTHERS = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "ensurepip", "site-packages",
           "dist-packages", "__pycache__"}  # fmt: skip


def splits() -> Splits:
    """Four fifths for training, a tenth each for validation and test, by a hash of a document's name."""
    return {split: partial(_corpus, split) for split in SPLITS}


def _corpus(split: str) -> Corpus:
    texts = [text for text in documents() if _split(text.name) == split]
    digest = blake2b(repr(texts).encode(), digest_size=16).hexdigest()
    return Corpus("python-docs", split, lambda: iter(texts), lambda: digest, sum(len(t.text.encode()) for t in texts))


def _split(name: str) -> str:
    return {0: "validation", 1: "test"}.get(blake2b(name.encode()).digest()[0] % 10, "train")


@functools.cache
def documents() -> tuple[Text, ...]:
    """All documents by name. Several topics contain others whole: of what stands twice, the longer is kept."""
    seen: set[tuple[str, ...]] = set()
    kept = []
    for text in sorted([*_topics(), *_modules()], key=lambda text: (-len(text.text), text.name)):
        words = text.text.split()
        runs = [tuple(words[i : i + _RUN]) for i in range(len(words) - _RUN + 1)]
        if len(words) >= _LEAST and sum(run in seen for run in runs) <= _QUOTED * len(runs):
            seen.update(runs)
            kept.append(text)
    return tuple(sorted(kept, key=lambda text: text.name))


def _topics() -> Iterator[Text]:
    from pydoc_data.topics import topics  # type: ignore[import-untyped]

    for name, text in topics.items():
        yield Text(f"reference/{name}", text)


def _modules() -> Iterator[Text]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if not _OTHERS.isdisjoint(parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # an installation may hold templates and other versions' files
            continue
        docstrings = "\n\n".join(_docstrings(tree, ""))
        yield Text(f"library/{'.'.join(parts).removesuffix('.__init__')}", docstrings + "\n")


def _docstrings(node: ast.Module | ast.ClassDef, within: str) -> Iterator[str]:
    """Of a module and what it defines, in the order of the source, each under its name."""
    if isinstance(node, ast.Module) and (own := ast.get_docstring(node)):
        yield own
    for child in node.body:
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if own := ast.get_docstring(child):
            yield f"{within}{child.name}\n\n{own}"
        if isinstance(child, ast.ClassDef):
            yield from _docstrings(child, f"{within}{child.name}.")
