# SPDX-License-Identifier: Apache-2.0
"""The corpus `python-docs`: the documentation that comes with every Python installation.

It consists of the language reference, as shown by `help()`, and of the docstrings of the standard library, one document
per module. Modules are parsed, not imported. The text depends on the version of Python, which results record.
"""

import ast
import functools
import sysconfig
from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path

from .texts import SPLITS, Corpus, Splits, Text

_MIN_WORDS = 200  # of a document
_NGRAM = 13  # words; two documents share so many in a row only if one quotes the other
_MAX_SHARED = 0.2  # share of a document's n-grams found in longer ones; more would leak text between splits
# tests, programs, packages of other projects, and files for building on one platform
_EXCLUDED = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "ensurepip", "site-packages",
             "dist-packages", "__pycache__"}  # fmt: skip


def splits() -> Splits:
    """Return the splits: 80 % train, 10 % validation, 10 % test, by a hash of the documents' names."""
    return {split: partial(_corpus, split) for split in SPLITS}


def _corpus(split: str) -> Corpus:
    texts = [text for text in documents() if _split(text.name) == split]
    digest = blake2b(repr(texts).encode(), digest_size=16).hexdigest()
    return Corpus("python-docs", split, lambda: iter(texts), lambda: digest, sum(len(t.text.encode()) for t in texts))


def _split(name: str) -> str:
    return {0: "validation", 1: "test"}.get(blake2b(name.encode()).digest()[0] % 10, "train")


@functools.cache
def documents() -> tuple[Text, ...]:
    """Return all documents, sorted by name. Some topics contain others; of duplicates, the longer one is used."""
    seen: set[tuple[str, ...]] = set()
    unique = []
    for text in sorted([*_topics(), *_modules()], key=lambda text: (-len(text.text), text.name)):
        words = text.text.split()
        ngrams = [tuple(words[i : i + _NGRAM]) for i in range(len(words) - _NGRAM + 1)]
        if len(words) >= _MIN_WORDS and sum(ngram in seen for ngram in ngrams) <= _MAX_SHARED * len(ngrams):
            seen.update(ngrams)
            unique.append(text)
    return tuple(sorted(unique, key=lambda text: text.name))


def _topics() -> Iterator[Text]:
    from pydoc_data.topics import topics  # type: ignore[import-untyped]

    for name, text in topics.items():
        yield Text(f"reference/{name}", text)


def _modules() -> Iterator[Text]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if not _EXCLUDED.isdisjoint(parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates, or files for other versions of Python
            continue
        docstrings = "\n\n".join(_docstrings(tree, ""))
        yield Text(f"library/{'.'.join(parts).removesuffix('.__init__')}", docstrings + "\n")


def _docstrings(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    """Yield the docstrings of a module and its definitions in source order, each after its name."""
    if isinstance(node, ast.Module) and (docstring := ast.get_docstring(node)):
        yield docstring
    for child in node.body:
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if docstring := ast.get_docstring(child):
            yield f"{prefix}{child.name}\n\n{docstring}"
        if isinstance(child, ast.ClassDef):
            yield from _docstrings(child, f"{prefix}{child.name}.")
