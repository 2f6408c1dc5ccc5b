# SPDX-License-Identifier: Apache-2.0
"""Text to token documents: what a source is, its exact text and cuts, the cache, and what each error says. Offline."""

import errno
import hashlib
import json
import logging
import os
import sys
import threading
import types
from pathlib import Path
from pydoc_data import topics

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from carryforward.data import cache as cache_folders
from carryforward.data import documents, texts
from carryforward.data.corpora import available_splits, has_own_splits, open_corpus, usual_split
from carryforward.data.documents import Documents, tokenise
from carryforward.data.texts import Corpus, Text
from carryforward.utils import progress

REAL = Path(__file__).resolve().parents[3] / "shared" / "corpora"
PROSE = list(topics.topics.values())


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level BPE whose post-processor trims offsets, as those of several published models do."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # tokens may end in "\n"
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        PROSE[:8], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", model_max_length=10)


class Characters(PreTrainedTokenizer):
    """A slow tokenizer: one token a character."""

    def __init__(self, **kwargs):
        self.ids = {chr(i): i for i in range(300)}
        super().__init__(**kwargs)

    vocab_size = property(lambda self: len(self.ids))
    get_vocab = lambda self: dict(self.ids)  # noqa: E731
    _tokenize = lambda self, text, **kwargs: list(text)  # noqa: E731
    _convert_token_to_id = lambda self, token: self.ids.get(token, 0)  # noqa: E731
    _convert_id_to_token = lambda self, index: chr(index)  # noqa: E731
    convert_tokens_to_string = lambda self, tokens: "".join(tokens)  # noqa: E731


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(folder)


def contents(source, split="train", **kwargs):
    return {text.name: text.text for text in open_corpus(str(source), split, **kwargs)}


def corpus_of(*strings, size=None, max_tokens=None, key="k"):
    return Corpus("c", "train", lambda: (Text(str(i), s) for i, s in enumerate(strings)), lambda: key, size, max_tokens)


# --- WikiText


@pytest.mark.parametrize(
    ("split", "file", "words", "with_line_ends"),
    [("validation", "valid", 213_886, 217_646), ("test", "test", 241_211, 245_569)],
)
@pytest.mark.parametrize("prefix", ["", "wikitext-103="])
def test_wikitext_has_its_articles_and_words(split, file, words, with_line_ends, prefix):
    folder = REAL / "wikitext"
    if not folder.is_dir():
        pytest.skip("WikiText-103 is not here")
    corpus = open_corpus(f"{prefix}{folder}", split)
    found = list(corpus)
    assert (corpus.name, corpus.split, len(found)) == ("wikitext-103", split, 60)
    assert "".join(text.text for text in found).encode() == (folder / f"wiki.{file}.raw").read_bytes()
    assert sum(len(text.text.split()) for text in found) == words
    assert sum(len(text.text.split()) + text.text.count("\n") for text in found) == with_line_ends
    assert available_splits(str(folder)) == ("validation", "test")


WIKI = (
    " \n = A = \n \n text \n = not a title = \n more \n \n = = Section = = \n \n t\x85\u2028u \n \n"
    " = E = mc2 = \n \n x \n \n = = = Deeper = = = \n \n = C = \n \n"
)


def test_only_a_title_between_blank_lines_starts_an_article(tmp_path):
    write(tmp_path, {"wiki.valid.raw": WIKI})
    found = contents(tmp_path, "validation")
    assert list(found) == ["A", "E = mc2", "C"]
    assert "".join(found.values()) == WIKI
    assert list(texts.articles([])) == []
    assert [a.name for a in texts.articles([" no title \n", " \n", " = A = "])] == ["untitled", "A"]


# --- folders and files


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
    """The fixed rule, written again."""
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
        assert usual_split(str(source), "test") == "test"
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
    assert usual_split(str(tmp_path / "a.txt"), "test") == "all"
    assert [text.name for text in open_corpus(str(tmp_path), "all")] == ["a.txt", "b.txt"]
    assert usual_split(str(tmp_path), "test") == "test"  # which it has not: training text is not scored unasked
    with pytest.raises(ValueError, match="no split 'validation', only 'train'"):
        open_corpus(str(tmp_path), "validation")


@pytest.mark.parametrize("name", ["validation", "valid", "val", "dev"])
def test_files_that_are_called_as_splits_are_splits(tmp_path, name):
    write(tmp_path, {"train.txt": "a", f"{name}.txt": "b", "test.txt": "c"})
    source = str(tmp_path)
    found = {split: [text.text for text in open_corpus(source, split)] for split in available_splits(source)}
    assert found == {"train": ["a"], "validation": ["b"], "test": ["c"]}
    assert has_own_splits(source)
    write(tmp_path, {"other.txt": "d"})  # now they are texts among others
    assert not has_own_splits(source)
    assert sorted(text.text for text in open_corpus(source, "all")) == ["a", "b", "c", "d"]


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
    """What comes later is not looked at before it is asked for."""
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
        ("x.csv", "x.csv is neither a folder nor a .txt or .jsonl file"),
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
        (f"pg19={tmp_path}/empty", "holds none of train/ validation/ test/ of NUMBER.txt"),
        (f"wikitext-103={tmp_path}/empty", "holds none of wiki"),
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


# --- PG-19


def list_books(folder, split, books):
    lines = [f"{split}/{n}\t{len(b)}\t{hashlib.sha256(b).hexdigest()}\n" for n, b in books.items()]
    write(folder, {f"{split}_bytes_sha256.tsv": "".join(lines)})
    return folder


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


# --- the Hub, played by a module of our own


class Rows:
    """What the library's data sets can do; notes which rows are read."""

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
        (FileNotFoundError("no"), "owner/name is neither a file or folder here nor a data set"),
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
    with pytest.raises(ValueError, match=r"pip install carryforward\[hub\]"):
        open_corpus("wikitext-103", "train")


# --- documents


def test_documents_in_memory():
    made = Documents.of([[1, 2, 3], [], [70_000]], words=[2, 0, 1], names=["a", "b", "c"])
    assert [list(document) for document in made] == [[1, 2, 3], [], [70_000]]
    assert made[0].base is not None, "a view"
    assert made[0].dtype == np.uint32
    assert Documents.of([[1]])[0].dtype == np.uint16
    assert list(made.lengths) == [3, 0, 1]
    assert list(made.words) == [2, 0, 1]
    assert list(made.bytes) == list(made.line_ends) == [0, 0, 0]
    chosen = made.select([2, 0])
    assert [list(document) for document in chosen] == [[70_000], [1, 2, 3]]
    assert (chosen.names, list(chosen.words)) == (["c", "a"], [1, 2])
    assert [list(document) for document in made[1:]] == [[], [70_000]]
    assert list(made[-1]) == [70_000]
    assert len(Documents.of([])) == 0
    with pytest.raises(IndexError):
        made[3]
    with pytest.raises(ValueError, match="words has 1 entries for 2 documents"):
        Documents.of([[1], [2]], words=[1])
    with pytest.raises(ValueError, match="token ids are 0 to"):
        Documents.of([[-1]])


def test_tokens_are_the_tokenizers_own_and_come_from_a_map(tokenizer, tmp_path):
    strings = [PROSE[9], "ä\r\n\n 漢字 \n", "", PROSE[10]]
    before = tokenizer.backend_tokenizer.to_str()
    made = tokenise(corpus_of(*strings), tokenizer, cache=tmp_path)
    kept = [s for s in strings if s]
    assert [d.tolist() for d in made] == [
        tokenizer.backend_tokenizer.encode(s, add_special_tokens=False).ids for s in kept
    ]
    assert isinstance(made[0], np.memmap)
    assert made[0].dtype == np.uint16
    assert list(made.words) == [len(s.split()) for s in kept]
    assert list(made.bytes) == [len(s.encode()) for s in kept]
    assert list(made.line_ends) == [s.count("\n") for s in kept]
    assert (made.names, made.name, made.split) == (["0", "1", "3"], "c", "train")
    assert json.loads((tmp_path / made.key / "meta.json").read_text())["left_out"] == 1
    assert tokenizer.backend_tokenizer.to_str() == before
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("cut", [1, 2, 7, 50, 51, 52, 53, 54, 300])
def test_a_cut_document_counts_the_words_of_its_cut_text(tokenizer, tmp_path, cut):
    strings = [PROSE[11].encode("ascii", "ignore").decode() + "\n\n", "short\n", "one.\n\n\ntwo  \n three\r\n" * 9]
    made = tokenise(corpus_of(*strings, max_tokens=9999), tokenizer, cache=tmp_path, max_tokens=cut)
    for i, string in enumerate(strings):
        ids = tokenizer.backend_tokenizer.encode(string, add_special_tokens=False).ids[:cut]
        used = tokenizer.backend_tokenizer.decode(ids)  # exactly the text: it is ASCII
        assert string.startswith(used)
        assert made[i].tolist() == ids
        assert (made.words[i], made.bytes[i], made.line_ends[i]) == (len(used.split()), len(used), used.count("\n"))


def test_a_character_that_is_cut_through_counts_whole(tokenizer, tmp_path):
    made = tokenise(corpus_of("漢" * 4, max_tokens=1), tokenizer, cache=tmp_path)
    assert (made.lengths[0], made.bytes[0]) == (1, 3)


def test_slow_tokenizers_bos_and_what_was_set_before(tokenizer, tmp_path, caplog):
    slow = Characters(model_max_length=2)
    with caplog.at_level(logging.WARNING):
        made = tokenise(corpus_of("ab c\nd", "xy"), slow, cache=tmp_path, max_tokens=5)
    assert not caplog.records, "no warning about long sequences"
    assert [d.tolist() for d in made] == [[ord(c) for c in "ab c\n"], [ord(c) for c in "xy"]]
    assert (list(made.words), list(made.bytes), list(made.line_ends)) == ([2, 1], [5, 2], [1, 0])
    with pytest.raises(ValueError, match="bos=True, but Characters has no BOS token"):
        tokenise(corpus_of("a"), slow, cache=tmp_path, bos=True)
    plain = tokenise(corpus_of("a b c d", max_tokens=2), tokenizer, cache=tmp_path)
    tokenizer("a b c", truncation=True, max_length=1)
    try:
        assert tokenizer.backend_tokenizer.truncation is not None
        again = tokenise(corpus_of("a b c d", max_tokens=2), tokenizer, cache=tmp_path, bos=True)
        assert again[0].tolist() == [tokenizer.bos_token_id, *plain[0]]
        assert tokenise(corpus_of("a b c d", max_tokens=2), tokenizer, cache=tmp_path).key == plain.key
        assert tokenizer.backend_tokenizer.truncation is not None, "left as it was"
    finally:
        tokenizer.backend_tokenizer.no_truncation()
    with pytest.raises(ValueError, match="max_tokens=0 must be at least 1"):
        tokenise(corpus_of("a"), tokenizer, cache=tmp_path, max_tokens=0)


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
    assert cache_folders.root(None) == tmp_path / "xdg" / "carryforward"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folders.root(None) == Path.home() / ".cache" / "carryforward"


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
    young, old = (tmp_path / f".{key}.{age}.tmp" for age in ("young", "old"))
    for left in (young, old):
        write(left, {"tokens.bin": "x"})
    for path in (old / "tokens.bin", old):
        os.utime(path, (1, 1))
    assert tokenise(corpus_of("a"), tokenizer, cache=tmp_path).key == key
    assert young.exists(), "somebody may be writing to it"
    assert not old.exists()


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
    """Each is held until all have read the corpus, so all come to put their entry in place."""
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


@pytest.mark.parametrize(
    ("fast", "expected"),
    [(False, [(2, 10, 30), (4, 20, 30), (6, 30, 30)]), (True, [(4, 10, 30), (6, 20, 30), (6, 30, 30)])],
)
def test_tokenising_streams_and_reports(tokenizer, tmp_path, monkeypatch, fast, expected):
    """Two documents at a time; with two threads, which are for one core, two more are read meanwhile."""
    monkeypatch.setattr(documents, "_BATCH", 10)
    monkeypatch.setattr(documents, "_AHEAD", 10)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    used, given, seen = tokenizer if fast else Characters(), [], []

    def strings():
        for i in range(6):
            given.append(str(i) * 5)
            yield Text(str(i), given[-1])

    corpus = Corpus("c", "train", strings, lambda: "k", size=30)
    made = tokenise(corpus, used, cache=tmp_path, progress=lambda done, total: seen.append((len(given), done, total)))
    assert seen == expected
    assert [used.decode(tokens) for tokens in made] == given


def test_a_bar_on_a_terminal(tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress.time, "monotonic", iter(range(0, 10_000, 2)).__next__)
    tokenise(corpus_of("a b", size=3), tokenizer, cache=tmp_path)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "tokenising c (train)" in captured.err


def test_nothing_to_tokenise(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="every document is empty"):
        tokenise(corpus_of("", " "), tokenizer, cache=tmp_path)

    class Deaf(Characters):
        def _tokenize(self, text, **kwargs):
            return []

    with pytest.raises(ValueError, match="no document has a token"):
        tokenise(corpus_of("a"), Deaf(), cache=tmp_path)
    assert not list(tmp_path.iterdir())
