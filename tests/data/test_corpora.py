# SPDX-License-Identifier: Apache-2.0
"""Local sources and their splits: folders, files, WikiText-103 and PG-19."""

import hashlib
import json
from pathlib import Path

import pytest
from helpers.corpora import contents, list_books, write

from carryforward.data.corpora import available_splits, default_split, has_own_splits, open_corpus

REAL = Path(__file__).resolve().parents[3] / "shared" / "corpora"


def test_folders_of_splits_keep_every_byte(tmp_path):
    write(tmp_path, {"train/b.txt": "b\r\n", "train/a/10.txt": "\ufeffä\n", "train/a/9.txt": "9", "dev/v.txt": "v"})
    write(tmp_path, {"train/._b.txt": b"\xff", "train/notes.md": "no"})
    assert contents(tmp_path) == {"train/a/10.txt": "ä\n", "train/a/9.txt": "9", "train/b.txt": "b\r\n"}
    assert list(contents(tmp_path)) == sorted(contents(tmp_path))
    assert contents(tmp_path, "validation") == contents(tmp_path, "valid") == {"dev/v.txt": "v"}
    assert available_splits(str(tmp_path)) == ("train", "validation")
    assert open_corpus(str(tmp_path), "train").size == 3 + 6 + 1
    with pytest.raises(ValueError, match="has no split 'test', only 'train', 'validation'.*--split"):
        open_corpus(str(tmp_path), "test")
    write(tmp_path, {"valid/v.txt": "v"})
    with pytest.raises(ValueError, match="both valid/ and dev/ hold the validation split"):
        open_corpus(str(tmp_path), "train")


def test_txt_files_beside_split_folders_are_mentioned(tmp_path, caplog):
    write(tmp_path, {"test/a.txt": "a", "README.txt": "r"})
    assert contents(tmp_path, "test") == {"test/a.txt": "a"}
    assert "1 .txt files beside" in caplog.text


def by_rule(names):
    """Divide names into splits by the fixed rule, implemented a second time."""
    ranked = sorted(names, key=lambda name: hashlib.blake2b(name.encode()).digest())
    part = max(1, len(names) * 5 // 100)
    held_out = {"validation": ranked[:part], "test": ranked[part : 2 * part], "train": ranked[2 * part :]}
    return {split: [name for name in names if name in chosen] for split, chosen in held_out.items()}


@pytest.mark.parametrize("count", [3, 19, 45])
def test_sources_without_splits_are_cut_by_a_fixed_rule(tmp_path, count):
    names = sorted(f"{'sub/' * (i % 2)}{i}.txt" for i in range(count))
    write(tmp_path / "flat", {name: name for name in names})
    rows = [json.dumps({"text": f"{i}\n", "n": i}) for i in range(count)]
    write(tmp_path, {"rows.jsonl": "\n\n".join(rows)})
    lines = [f"line-{2 * i + 1}" for i in range(count)]
    for source, all_names in ((tmp_path / "flat", names), (tmp_path / "rows.jsonl", lines)):
        assert available_splits(str(source)) == ("train", "validation", "test")
        assert default_split(str(source), "test") == "test"
        for split, expected in by_rule(all_names).items():
            assert list(contents(source, split)) == expected
    fingerprints = {open_corpus(str(tmp_path / "rows.jsonl"), s).fingerprint() for s in ("train", "validation", "test")}
    assert len(fingerprints) == 3


def test_few_documents_are_all_for_training(tmp_path):
    write(tmp_path, {"a.txt": "a", "b.txt": "b"})
    assert contents(tmp_path) == {"a.txt": "a", "b.txt": "b"}
    assert contents(tmp_path / "a.txt") == {"a.txt": "a"}
    assert open_corpus(str(tmp_path / "a.txt"), "train").name == "a"
    assert available_splits(str(tmp_path)) == available_splits(str(tmp_path / "a.txt")) == ("train",)
    assert default_split(str(tmp_path / "a.txt"), "test") == "all"
    assert [text.name for text in open_corpus(str(tmp_path), "all")] == ["a.txt", "b.txt"]
    assert default_split(str(tmp_path), "test") == "test"  # missing here: never training text by default
    with pytest.raises(ValueError, match="no split 'validation', only 'train'"):
        open_corpus(str(tmp_path), "validation")


@pytest.mark.parametrize("name", ["validation", "valid", "val", "dev"])
def test_files_that_are_called_as_splits_are_splits(tmp_path, name):
    write(tmp_path, {"train.txt": "a", f"{name}.txt": "b", "test.txt": "c"})
    source = str(tmp_path)
    found = {split: [text.text for text in open_corpus(source, split)] for split in available_splits(source)}
    assert found == {"train": ["a"], "validation": ["b"], "test": ["c"]}
    assert has_own_splits(source)
    write(tmp_path, {"other.txt": "d"})  # now they are documents like any other
    assert not has_own_splits(source)
    assert sorted(text.text for text in open_corpus(source, "all")) == ["a", "b", "c", "d"]


# --- WikiText-103 and PG-19


@pytest.mark.parametrize(
    ("split", "file", "words", "with_line_ends"),
    [("validation", "valid", 213_886, 217_646), ("test", "test", 241_211, 245_569)],
)
@pytest.mark.parametrize("prefix", ["", "wikitext-103="])
def test_wikitext_has_its_articles_and_words(split, file, words, with_line_ends, prefix):
    folder = REAL / "wikitext"
    if not folder.is_dir():
        pytest.skip("needs the corpora beside the repository: WikiText-103")
    corpus = open_corpus(f"{prefix}{folder}", split)
    found = list(corpus)
    assert (corpus.name, corpus.split, len(found)) == ("wikitext-103", split, 60)
    assert "".join(text.text for text in found).encode() == (folder / f"wiki.{file}.raw").read_bytes()
    assert sum(len(text.text.split()) for text in found) == words
    assert sum(len(text.text.split()) + text.text.count("\n") for text in found) == with_line_ends
    assert available_splits(str(folder)) == ("validation", "test")


def test_pg19_is_the_papers_subset(tmp_path, caplog):
    books = {f"{i}.txt": f"book {i}" for i in range(1300)}
    write(
        tmp_path, {f"train/{name}": text for name, text in books.items()} | {"validation/7.txt": "v", "test/8.txt": "t"}
    )
    train = open_corpus(f"pg19={tmp_path}", "train")
    assert [book.name for book in train] == sorted(books)[:1250]
    assert "1300 books in train where 28602 are published" in caplog.text
    assert open_corpus(f"pg19={tmp_path}", "validation").max_tokens == 15_000
    assert train.max_tokens is open_corpus(f"pg19={tmp_path}", "test").max_tokens is None
    assert train.name == "pg19"


def test_books_are_checked(tmp_path):
    books = {"10.txt": b"ten\r\n", "9.txt": b"nine"}
    folder = f"pg19={write(tmp_path, {f'validation/{name}': book for name, book in [*books.items(), ('8.txt', '8')]})}"
    sums = list_books(tmp_path / "sums", "validation", books)
    checked = open_corpus(folder, "validation", checksums=sums)
    assert [book.text for book in checked] == ["ten\n", "nine"], "those of the list"
    assert checked.fingerprint() != open_corpus(folder, "validation").fingerprint(), "unchecked tokens are not reused"
    write(tmp_path, {"validation/9.txt": "Nine"})
    with pytest.raises(ValueError, match="pg19: 9.txt is not the published book: it has 4 bytes"):
        list(checked)
    list_books(sums, "validation", books | {"11.txt": b"x"})
    with pytest.raises(
        ValueError, match="1 of the 3 books of validation are missing, the first of them validation/11.txt"
    ):
        open_corpus(folder, "validation", checksums=sums)
    write(sums, {"validation_bytes_sha256.tsv": "9.txt 4"})
    with pytest.raises(ValueError, match="'9.txt 4' in validation_bytes_sha256.tsv is not name, bytes and SHA-256"):
        open_corpus(folder, "validation", checksums=sums)
    with pytest.raises(ValueError, match="validation_bytes_sha256.tsv cannot be read"):
        open_corpus(folder, "validation", checksums=tmp_path / "none")
