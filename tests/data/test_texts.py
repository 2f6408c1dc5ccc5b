# SPDX-License-Identifier: Apache-2.0
"""Texts of files: exact decoding, articles, JSON lines, streaming, fingerprints, and errors."""

import errno
import os

import pytest
from helpers.corpora import WIKI, contents, write

from carryforward.data import texts
from carryforward.data.corpora import available_splits, open_corpus


def test_only_a_title_between_blank_lines_starts_an_article(tmp_path):
    write(tmp_path, {"wiki.valid.raw": WIKI})
    found = contents(tmp_path, "validation")
    assert list(found) == ["A", "E = mc2", "C"]
    assert "".join(found.values()) == WIKI
    assert list(texts.split_articles([])) == []
    assert [a.name for a in texts.split_articles([" no title \n", " \n", " = A = "])] == ["untitled", "A"]


def test_json_lines(tmp_path):
    row = '{"body": "x\\r\\n\\u00e4", "id": 1}\n'
    write(tmp_path, {"train.jsonl": "\ufeff" + row + "\n" + row, "val.jsonl": row, "LICENSE.txt": "l"})
    assert contents(tmp_path, text_field="body") == {"line-1": "x\r\nä", "line-3": "x\r\nä"}
    assert available_splits(str(tmp_path)) == ("train", "validation")
    assert (
        open_corpus(str(tmp_path), "train").fingerprint()
        != open_corpus(str(tmp_path), "train", text_field="id").fingerprint()
    )
    with pytest.raises(
        ValueError, match="train.jsonl, line 1 has no field 'text': set text_field to one of 'body', 'id'"
    ):
        contents(tmp_path)
    with pytest.raises(ValueError, match="line 1: text_field='id' must be a string, not int"):
        contents(tmp_path, text_field="id")
    for bad, message in (
        ("{oops}", "line 2 is not valid JSON .*one object on each line"),
        ("[1]", "line 2 is not a JSON object but list"),
        ('{"text": "\\ud800"}', "line 2: half a surrogate pair at character 0"),
    ):
        write(tmp_path, {"bad.jsonl": '{"text": "fine"}\n' + bad})
        with pytest.raises(ValueError, match=message):
            contents(tmp_path / "bad.jsonl")


def test_a_corpus_is_streamed(tmp_path):
    """Later documents are not read before they are needed."""
    write(tmp_path, {"train.jsonl": '{"text": "a"}\n{"text": "b"}\nbroken\n'})
    write(tmp_path / "t", {"train/1.txt": "a", "train/2.txt": b"\xff"})
    for source, message in ((tmp_path, "line 3"), (tmp_path / "t", "2.txt is not UTF-8")):
        documents_of = iter(open_corpus(str(source), "train"))
        assert next(documents_of).text == "a"
        with pytest.raises(ValueError, match=message):
            list(documents_of)


def test_text_that_is_not_there(tmp_path, monkeypatch):
    for name in ("empty", "d"):
        (tmp_path / name).mkdir()
    write(tmp_path, {"blank/a.txt": " \n", "x.csv": "x", "e.jsonl": "\n", "latin.txt": "ab\xe4".encode("latin1")})
    write(tmp_path, {"wide.txt": "ab".encode("utf-16"), "d/l.jsonl": "{}"})
    for source, message in (
        ("empty", "empty: there is no text in this folder. Accepted: .*jsonl"),
        ("d", "there is no text in this folder"),
        ("blank", "blank, split 'train': every document is empty or only white space"),
        ("x.csv", "x.csv is neither a folder nor a .txt, .jsonl, .json or .parquet file"),
        ("e.jsonl", "e.jsonl is empty"),
        ("none.txt", "none.txt: no such file or folder"),
        ("a/b/c", "c: no such file or folder"),
        ("latin.txt", "latin.txt is not UTF-8 .byte 0xe4 at offset 2.*iconv -f ENCODING -t UTF-8"),
        ("wide.txt", "offset 0.; it looks like UTF-16. Convert it: iconv -f UTF-16"),
    ):
        with pytest.raises(ValueError, match=message):
            contents(tmp_path / source)
    for source, message in (
        (f"pg19={tmp_path}/none", "none is not a folder"),
        (f"pg19={tmp_path}/empty", "contains none of train/ validation/ test/ of NUMBER.txt"),
        (f"wikitext-103={tmp_path}/empty", "contains none of wiki"),
    ):
        with pytest.raises(ValueError, match=message):
            open_corpus(source, "train")
    with pytest.raises(ValueError, match="checksums='sums' are for pg19"):
        open_corpus(str(tmp_path), "train", checksums="sums")

    def closed(path, onerror, **kwargs):
        onerror(PermissionError(errno.EACCES, "Permission denied", str(path)))

    monkeypatch.setattr(os, "walk", closed)
    with pytest.raises(ValueError, match="empty cannot be read .Permission denied.. Check the path"):
        open_corpus(str(tmp_path / "empty"), "train")


def test_the_fingerprint_is_of_names_and_bytes(tmp_path):
    def fingerprint(files):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return open_corpus(write(folder, files), "train").fingerprint()

    same = {"train/a.txt": "ab", "train/b.txt": "c"}
    assert fingerprint(same) == fingerprint(same)
    others = [
        {"train/a.txt": "a", "train/b.txt": "bc"},
        {"train/a.txt": "ab", "train/c.txt": "c"},
        {"train/a.txt": "ab"},
    ]
    assert len({fingerprint(files) for files in [same, *others]}) == 4
