# SPDX-License-Identifier: Apache-2.0
"""The token cache: keys, damaged entries, crashes, full disks, several writers at once."""

import errno
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers.corpora import Characters, byte_level_tokenizer, corpus_of, write

from carryforward.data import documents
from carryforward.data.cache import cache_root
from carryforward.data.documents import tokenise
from carryforward.data.texts import Corpus, Text
from carryforward.utils.digests import digest_file


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


FILES = ["tokens.bin", "index.npz", "names.json", "meta.json"]
DAMAGES = {
    "shorter": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "flipped": lambda path: path.write_bytes(path.read_bytes()[:-20] + b"#" + path.read_bytes()[-19:]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_entry_is_made_again(tokenizer, tmp_path, caplog, file, damage):
    text = "a b c" * 30
    made = tokenise(corpus_of(text), tokenizer, cache=tmp_path)
    tokens, path = made[0].tolist(), tmp_path / made.key / file
    whole = path.read_bytes()
    damage(path)
    again = tokenise(corpus_of(text), tokenizer, cache=tmp_path)
    assert "is damaged" in caplog.text
    assert again[0].tolist() == tokens
    assert path.stat().st_size == len(whole)
    assert [p.name for p in tmp_path.iterdir()] == [made.key]


def test_changed_bits_are_noticed(tokenizer, tmp_path):
    key = tokenise(corpus_of("a b c"), tokenizer, cache=tmp_path).key
    for file in FILES:
        path = tmp_path / key / file
        whole = path.read_bytes()
        for i in range(0, len(whole), 3):
            path.write_bytes(whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :])
            assert documents._open_entry(tmp_path / key) is None, (file, i)
        path.write_bytes(whole)
    assert documents._open_entry(tmp_path / key) is not None


def test_any_record_of_an_entry_is_read_without_a_traceback(tokenizer, tmp_path, caplog):
    """Also those whose digests are right."""
    made = tokenise(corpus_of("a b c"), tokenizer, cache=tmp_path)
    folder, tokens = tmp_path / made.key, made[0].tolist()
    meta = json.loads((folder / "meta.json").read_text())
    others = [None, True, 3, "text", [], {}, {"a": None}, -1, 1e400, [[]]]
    records = [*others, *({**meta, name: other} for name in meta for other in others)]
    records += [{key: value for key, value in meta.items() if key != name} for name in meta]
    texts = ["[" * 100_000, '{"a":' * 100_000, "{}x", "\ufeff{}"]
    for record in records:
        texts.append(json.dumps(record))
        if isinstance(record, dict):
            record = {name: value for name, value in record.items() if name != "digest"}
            texts.append(json.dumps({**record, "digest": documents._digest(record)}))
    for text in texts:
        (folder / "meta.json").write_text(text)
        opened = documents._open_entry(folder)
        assert opened is None or opened[0].tolist() == tokens
    assert tokenise(corpus_of("a b c"), tokenizer, cache=tmp_path)[0].tolist() == tokens
    assert "is damaged" in caplog.text


def test_nothing_is_unpickled(tokenizer, tmp_path):
    made = tokenise(corpus_of("a b c"), tokenizer, cache=tmp_path)
    folder = tmp_path / made.key

    class Evil:
        def __reduce__(self):
            return (tmp_path / "ran").touch, ()

    np.savez(folder / "index.npz", **dict.fromkeys(documents._COUNTS, np.array([Evil()], dtype=object)))
    meta = json.loads((folder / "meta.json").read_text())
    del meta["digest"]
    meta["digests"]["index.npz"] = digest_file(folder / "index.npz")
    (folder / "meta.json").write_text(json.dumps({**meta, "digest": documents._digest(meta)}))
    assert documents._open_entry(folder) is None
    assert not (tmp_path / "ran").exists()


def test_a_cache_folder_that_cannot_be(tokenizer, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="cache='' is empty: give a folder"):
        tokenise(corpus_of("a"), tokenizer, cache="")
    monkeypatch.setenv("CARRYFORWARD_CACHE", "~nobody-of-this-name/cache")
    with pytest.raises(
        ValueError, match="~nobody-of-this-name/cache: there is no such home folder.*CARRYFORWARD_CACHE"
    ):
        cache_root(None)


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
