# SPDX-License-Identifier: Apache-2.0
"""What a message advises to install is what the project declares."""

import sys
import tomllib
from pathlib import Path

import pytest

import carryforward
from carryforward.utils.install import PACKAGES, install_hint


def test_the_packages_are_those_of_the_extras():
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    assert {extra: project["optional-dependencies"][extra] for extra in PACKAGES} == {
        extra: list(packages) for extra, packages in PACKAGES.items()
    }
    assert install_hint("topics") == 'pip install "scikit-learn>=1.5" "scipy>=1.11"'


def test_without_sentence_transformers_the_module_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    for name in [*sys.modules]:
        if name.startswith("sentence_transformers."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "carryforward.embeddings.sentence_transformers", raising=False)
    with pytest.raises(ImportError, match='RecurrentTransformer needs sentence-transformers: pip install "sentence-tr'):
        _ = carryforward.RecurrentTransformer
