# SPDX-License-Identifier: Apache-2.0
"""Token documents: tokens and counts, tokenizers, truncation, progress."""

import json
import logging
import os
import sys

import numpy as np
import pytest
from helpers.corpora import PROSE, Characters, byte_level_tokenizer, corpus_of, write
from helpers.fast_tokenizers import hard_text, huggingface_tokenizer

from carryforward.data import documents, tokenization
from carryforward.data.documents import Documents, load_documents, tokenise
from carryforward.data.texts import Corpus, Text
from carryforward.utils import progress


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level_tokenizer()


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


@pytest.mark.parametrize(
    ("fast", "expected"),
    [(False, [(2, 10, 30), (4, 20, 30), (6, 30, 30)]), (True, [(4, 10, 30), (6, 20, 30), (6, 30, 30)])],
)
def test_tokenising_streams_and_reports(tokenizer, tmp_path, monkeypatch, fast, expected):
    """Two documents per batch; with the two threads of one core, another batch is read ahead."""
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


def test_a_long_document_is_written_and_reported_part_by_part(tmp_path, monkeypatch):
    tokenizer = huggingface_tokenizer("gpt2")
    strings = ["short", hard_text(5, 5000), "b", hard_text(6, 4000)]
    expected = tokenise(corpus_of(*strings), tokenizer, cache=tmp_path / "whole")
    monkeypatch.setattr(tokenization, "SIZE", 256)
    monkeypatch.setattr(tokenization, "OVERLAP", 64)
    monkeypatch.setattr(documents, "_ALONE", 1000)
    seen, size = [], sum(len(text.encode()) for text in strings)
    made = tokenise(
        corpus_of(*strings, size=size), tokenizer, cache=tmp_path, progress=lambda done, total: seen.append(done)
    )
    assert [ids.tolist() for ids in made] == [ids.tolist() for ids in expected]
    assert made.about() == expected.about()
    assert made.names == expected.names
    assert seen == sorted(seen)
    assert seen[-1] == size
    assert len(seen) > 20, "several times within a document"


def test_a_bar_on_a_terminal(tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress.time, "monotonic", iter(range(0, 10_000, 3)).__next__)
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


def test_a_corpus_is_opened_and_tokenised_in_one_call(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("CARRYFORWARD_CACHE", str(tmp_path / "cache"))
    source = write(tmp_path / "source", {"train.jsonl": '{"body": "a b c"}\n', "test.jsonl": '{"body": "a"}\n'})
    loaded = load_documents(source, "train", tokenizer, text_field="body", max_tokens=3, require_targets=True)
    expected = tokenise(corpus_of("a b c"), tokenizer, max_tokens=3)
    assert (loaded[0].tolist(), loaded.max_tokens, loaded.split) == (expected[0].tolist(), 3, "train")
    assert len(load_documents(source, "test", tokenizer, text_field="body")[0]) == 1
    with pytest.raises(ValueError, match="split 'test': no document has a second token to predict"):
        load_documents(source, "test", tokenizer, text_field="body", require_targets=True)
    with pytest.raises(ValueError, match="checksums='sums' are for pg19"):
        load_documents(source, "train", tokenizer, text_field="body", checksums="sums")
