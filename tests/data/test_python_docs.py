# SPDX-License-Identifier: Apache-2.0
"""The text of `python-docs`."""

import re
import sys
from itertools import combinations

from carryforward.data import python_docs
from carryforward.data.corpora import open_corpus


def test_documents_of_python():
    words = [len(text.text.split()) for text in python_docs.documents()]
    assert 150 < len(words) < 400
    assert 200_000 < sum(words) < 450_000
    assert min(words) >= 200
    assert 5_000 < max(words) < 20_000
    names = {text.name for text in python_docs.documents()}
    assert {"library/argparse", "reference/specialnames"} < names
    assert not {name for name in names if re.search(r"\btests?\b|site-packages", name)}


def test_splits_are_fixed_and_share_nothing():
    splits = {split: list(open_corpus("python-docs", split)) for split in ("train", "validation", "test")}
    runs = {}
    for split, texts in splits.items():
        found = set()
        for text in texts:
            words = text.text.split()
            found |= {tuple(words[i : i + 30]) for i in range(len(words) - 29)}
        runs[split] = found
    for one, other in combinations(runs, 2):
        assert len(runs[one] & runs[other]) < 0.02 * min(len(runs[one]), len(runs[other]))
    assert len(splits["train"]) > 3 * (len(splits["validation"]) + len(splits["test"]))
    for name, split in (("ast", "train"), ("argparse", "validation"), ("enum", "test")):
        assert python_docs._split(f"library/{name}") == split, "the rule must not change: figures depend on it"


def test_contained_topics_are_dropped():
    names = {text.name for text in python_docs.documents()}
    assert "reference/specialnames" in names
    assert "reference/customization" not in names
    assert "reference/sequence-types" not in names


def test_modules_are_not_imported():
    already = set(sys.modules)
    python_docs.documents.cache_clear()
    python_docs.documents()
    assert {name for name in set(sys.modules) - already if not name.startswith("pydoc_data")} == set()
    assert "antigravity" not in sys.modules
