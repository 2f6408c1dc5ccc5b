# SPDX-License-Identifier: Apache-2.0
"""The token cache: keys, damaged entries, crashes, full disks, several writers at once."""

import errno
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers.corpora import Characters, byte_level_tokenizer, corpus_of, write

from carryforward.data import documents
from carryforward.data.cache import cache_root
from carryforward.data.documents import tokenise
from carryforward.data.texts import Corpus, Text


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level_tokenizer()


def test_the_cache_is_used_and_everything_that_matters_is_in_its_key(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("CARRYFORWARD_CACHE", str(tmp_path / "env"))
    first = tokenise(corpus_of("a b"), tokenizer)
    assert (tmp_path / "env" / first.key).is_dir()

    def never():
        raise AssertionError("read again")

    again = tokenise(Corpus("c", "train", never, lambda: "k"), tokenizer)
    assert again[0].tolist() == first[0].tolist()
    assert again.key == first.key != first.select([0]).key
    others = [
        tokenise(corpus_of("a b", key="other"), tokenizer),
        tokenise(corpus_of("a b"), tokenizer, max_tokens=1),
        tokenise(corpus_of("a b"), tokenizer, bos=True),
        tokenise(corpus_of("a b"), Characters()),
        tokenise(corpus_of("a b"), Characters(unk_token="a")),
    ]
    assert len({first.key, *(other.key for other in others)}) == 6
    monkeypatch.delenv("CARRYFORWARD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root(None) == tmp_path / "xdg" / "carryforward"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root(None) == Path.home() / ".cache" / "carryforward"


@pytest.mark.parametrize("file", ["tokens.bin", "index.npz", "names.json", "meta.json"])
def test_a_damaged_entry_is_made_again(tokenizer, tmp_path, caplog, file):
    made = tokenise(corpus_of("a b c"), tokenizer, cache=tmp_path)
    tokens, path = made[0].tolist(), tmp_path / made.key / file
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    again = tokenise(corpus_of("a b c"), tokenizer, cache=tmp_path)
    assert "is damaged" in caplog.text
    assert again[0].tolist() == tokens
    assert path.stat().st_size == len(whole)
    assert [p.name for p in tmp_path.iterdir()] == [made.key]


def test_a_crash_leaves_nothing_and_old_remains_are_removed(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_BATCH", 1)

    class Crash(Characters):
        def _tokenize(self, text, **kwargs):
            if text == "c":
                raise RuntimeError("crash")
            return list(text)

    with pytest.raises(RuntimeError, match="crash"):
        tokenise(corpus_of("a", "b", "c"), Crash(), cache=tmp_path)
    assert not list(tmp_path.iterdir())
    key = tokenise(corpus_of("a"), tokenizer, cache=tmp_path / "other").key
    left = tmp_path / f".{key}.0123abcd.tmp"
    write(left, {"tokens.bin": "x"})
    assert tokenise(corpus_of("a"), tokenizer, cache=tmp_path).key == key
    assert not left.exists()


def test_a_full_disk_says_how_much_and_where(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_BATCH", 1)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    text = "a b c " * 200_000
    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        with pytest.raises(
            OSError, match="disk is full: the tokens of c .train. need about ([0-9.]+) MB in .*CARRYFORWARD_CACHE"
        ):
            tokenise(corpus_of(text, size=2 * len(text)), tokenizer, cache=tmp_path)
    assert not list(tmp_path.iterdir())
    write(tmp_path, {"file": "x"})
    with pytest.raises(ValueError, match="cache='.*file' cannot be written to .*CARRYFORWARD_CACHE"):
        tokenise(corpus_of("a"), tokenizer, cache=tmp_path / "file")


def test_several_writers_at_once_all_end_well(tokenizer, tmp_path):
    """Each waits until all have read the corpus, so all try to create the same entry."""
    together, made = threading.Barrier(4), []

    def strings():
        yield Text("0", "a b c")
        together.wait(20)

    def work():
        made.append(tokenise(Corpus("c", "train", strings, lambda: "k"), tokenizer, cache=tmp_path))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert {tuple(documents_made[0].tolist()) for documents_made in made} == {tuple(made[0][0].tolist())}
    assert [path.name for path in tmp_path.iterdir()] == [made[0].key]
