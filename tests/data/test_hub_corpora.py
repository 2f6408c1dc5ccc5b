# SPDX-License-Identifier: Apache-2.0
"""Corpora of the Hugging Face Hub, with a stand-in for the library `datasets`. Offline."""

import sys
import types

import pytest
from helpers.corpora import WIKI, list_books

from carryforward.data.corpora import available_splits, open_corpus


class Rows:
    """A stand-in for a data set; records which rows are read."""

    _fingerprint = "f00"

    def __init__(self, **columns):
        self.columns, self.column_names, self.read = columns, list(columns), []

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        if isinstance(key, str):
            assert key != "text", "all texts at once"
            return self.columns[key]
        if key >= len(self):
            raise IndexError
        self.read.append(key)
        return {name: column[key] for name, column in self.columns.items()}


@pytest.fixture
def hub(monkeypatch):
    module = types.ModuleType("datasets")
    module.sets = {}
    module.load_dataset = lambda path, config=None, split=None: module.sets[path, config][split]
    module.get_dataset_split_names = lambda path, config=None: list(module.sets[path, config])
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def test_wikitext_from_the_hub_is_the_same_text(hub):
    lines = WIKI.split("\n")[:-1]
    rows = Rows(text=[f"{line}\n" if line.strip() else "" for line in lines])
    hub.sets["Salesforce/wikitext", "wikitext-103-raw-v1"] = {"test": rows}
    corpus = open_corpus("wikitext-103", "test")
    assert [text.name for text in corpus] == ["A", "E = mc2", "C"]
    assert "".join(text.text for text in corpus) == WIKI
    assert available_splits("wikitext-103") == ("train", "validation", "test")


def test_pg19_from_the_hub_reads_only_the_books_it_uses(hub, tmp_path):
    numbers = [9, 10, 100, 8]
    rows = Rows(url=[f"http://www.gutenberg.org/ebooks/{n}" for n in numbers], text=[f"\ufeffb{n}\n" for n in numbers])
    hub.sets["emozilla/pg19", None] = {"validation": rows}
    sums = list_books(tmp_path, "validation", {f"{n}.txt": f"\ufeffb{n}\r\n".encode() for n in (9, 10, 100)})
    corpus = open_corpus("pg19", "validation", checksums=sums)
    assert rows.read == []
    assert [(b.name, b.text) for b in corpus] == [("10.txt", "b10\n"), ("100.txt", "b100\n"), ("9.txt", "b9\n")]
    assert rows.read == [1, 2, 0]
    assert corpus.max_tokens == 15_000
    rows.columns["text"][1] = "other"
    with pytest.raises(ValueError, match="10.txt is not the published book"):
        list(corpus)


def test_other_data_sets_of_the_hub(hub):
    rows = Rows(text=["a", None, "b"], label=[0, 1, 2])
    hub.sets["owner/name", "small"] = {"train": rows, "dev": rows}
    corpus = open_corpus("owner/name:small", "validation")
    assert (corpus.name, corpus.split) == ("owner/name:small", "dev")
    assert [(text.name, text.text) for text in corpus] == [("row-0", "a"), ("row-2", "b")]
    assert corpus.fingerprint() != open_corpus("owner/name:small", "train").fingerprint()
    assert available_splits("owner/name:small") == ("train", "dev")
    with pytest.raises(ValueError, match="no field 'body': set text_field to one of 'text', 'label'"):
        open_corpus("owner/name:small", "train", text_field="body")
    with pytest.raises(ValueError, match="no split 'test', only 'train', 'dev'"):
        open_corpus("owner/name:small", "test")
    hub.sets["name", None] = {"train": Rows(text=[])}
    with pytest.raises(ValueError, match="name, split 'train', is empty"):
        open_corpus("name", "train")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionError("offline"), "owner/name could not be loaded .*Check the connection.*ConnectionError: offline"),
        (FileNotFoundError("no"), "owner/name is neither a local file or folder nor a data set"),
    ],
)
def test_a_hub_that_does_not_answer(hub, error, message):
    def fail(*args, **kwargs):
        raise error

    hub.get_dataset_split_names = fail
    with pytest.raises(ValueError, match=message):
        open_corpus("owner/name", "train")


def test_the_hub_needs_a_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match='pip install "datasets'):
        open_corpus("wikitext-103", "train")
