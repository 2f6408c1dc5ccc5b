# SPDX-License-Identifier: Apache-2.0
"""Corpora and documents to embed in Parquet and JSON: against JSON lines, and against the library `datasets`."""

import json
import tracemalloc

import numpy as np
import pytest
from helpers import prose
from helpers.cli_runner import invoke
from helpers.embedding import TOKENIZER, model_of

from carryforward.data import hub, row_files
from carryforward.data.corpora import available_splits, open_corpus
from carryforward.data.documents import load_documents

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = [text[:300] for text in prose.TOPICS[:30]]


def save(path, texts=TEXTS, **columns):
    """Write texts to a file of rows, with numbers beside them."""
    rows = {"text": texts, "number": list(range(len(texts))), **columns}
    if path.suffix == ".parquet":
        parquet.write_table(arrow.table(rows), path, row_group_size=7)
    else:
        objects = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
        lines = "".join(json.dumps(row) + "\n" for row in objects)
        path.write_text(lines if path.suffix == ".jsonl" else json.dumps(objects))
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".json"])
def test_files_of_rows_hold_the_texts_of_json_lines(tmp_path, suffix):
    path, lines = save(tmp_path / f"rows{suffix}"), save(tmp_path / "lines.jsonl")
    texts = {split: list(open_corpus(str(path), split)) for split in ("train", "validation", "test", "all")}
    assert [text.text for text in texts["all"]] == TEXTS
    assert [text.name for text in texts["all"]] == [f"row-{i}" for i in range(30)]
    parts = [text.name for split in ("train", "validation", "test") for text in texts[split]]
    assert sorted(parts) == sorted(f"row-{i}" for i in range(30))
    assert all(texts.values())
    ours, theirs = (load_documents(str(one), "all", TOKENIZER) for one in (path, lines))
    assert ours.words.tolist() == theirs.words.tolist()
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("suffix", [".parquet", ".json"])
def test_a_folder_with_a_file_for_each_split(tmp_path, suffix):
    save(tmp_path / f"train{suffix}")
    save(tmp_path / f"dev{suffix}", TEXTS[:2], body=["a", "b"])
    assert available_splits(str(tmp_path)) == ("train", "validation")
    assert [text.text for text in open_corpus(str(tmp_path), "validation")] == TEXTS[:2]
    assert [text.text for text in open_corpus(str(tmp_path), "validation", text_field="body")] == ["a", "b"]


def test_empty_cells_of_parquet_are_skipped(tmp_path):
    path = save(tmp_path / "rows.parquet", ["a", None, "c"])
    assert [(text.name, text.text) for text in open_corpus(str(path), "all")] == [("row-0", "a"), ("row-2", "c")]


def test_parquet_is_read_as_a_stream(tmp_path):
    """Memory for some rows and a page of a row group that has many, and for none of the other columns."""
    texts = [str(i) + "x" * 100_000 for i in range(400)]
    path = tmp_path / "rows.parquet"
    table = arrow.table({"text": texts, "other": texts})
    parquet.write_table(table, path, compression="none", use_dictionary=False, write_batch_size=16)
    del table
    corpus = open_corpus(str(path), "all")
    assert corpus.size > 40_000_000
    before = arrow.total_allocated_bytes()
    tracemalloc.start()
    most = max(arrow.total_allocated_bytes() for _ in corpus) - before
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0 < most < 25_000_000
    assert python < 15_000_000


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: save(path), r"no field 'body': set text_field to one of 'text', 'number'\."),
        (lambda path: save(path, body=[[1]] * 30), "text_field='body' must be a column of strings, not of list"),
        (lambda path: save(path, body=[3] * 30), "row 0: text_field='body' must be a string, not int"),
        (lambda path: path.write_text("no"), r"rows\.parquet is not a Parquet file, or it is damaged"),
        (lambda path: save(path, [], body=[]), r"rows\.parquet is empty: there is no document in it"),
    ],
)
def test_bad_parquet_is_refused(tmp_path, write, message):
    write(tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=message):
        list(open_corpus(str(tmp_path / "rows.parquet"), "train", text_field="body"))


def test_a_damaged_page_is_refused(tmp_path):
    path = save(tmp_path / "rows.parquet")
    content = bytearray(path.read_bytes())
    content[4:40] = b"\xff" * 36
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"rows\.parquet is damaged from row 0 on"):
        list(open_corpus(str(path), "all"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": "b"}', r"not valid JSON.*one object on each line must be named \.jsonl"),
        ('{"text": "a"}', "must hold a list of objects"),
        ('["a"]', "must hold a list of objects"),
        ('[{"body": "a"}]', "row 0 has no field 'text': set text_field to one of 'body'"),
    ],
)
def test_bad_json_is_refused(tmp_path, content, message):
    (tmp_path / "rows.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        list(open_corpus(str(tmp_path / "rows.json"), "train"))


def test_without_pyarrow_the_error_says_what_to_install(tmp_path, monkeypatch):
    save(tmp_path / "rows.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r'a \.parquet file needs pyarrow: pip install "pyarrow'):
        open_corpus(str(tmp_path / "rows.parquet"), "train")


# --- commands --------------------------------------------------------------------------------------------------------


def test_embed_reads_parquet_as_json_lines(tmp_path, monkeypatch):
    model = model_of("llama")
    model.tokenizer = TOKENIZER
    model.save_pretrained(tmp_path / "model")
    monkeypatch.setattr("carryforward.embeddings.document_groups.DOCUMENTS_PER_GROUP", 4)
    names = [f"doc {i}" for i in range(9)]
    for suffix in (".jsonl", ".parquet"):
        save(tmp_path / f"docs{suffix}", TEXTS[:9], id=names)
    save(tmp_path / "nameless.parquet", TEXTS[:9])

    def embed(source, out):
        arguments = ("embed", tmp_path / "model", tmp_path / source, "--out", tmp_path / out, "--device", "cpu")
        result = invoke(*arguments, "--no-state", "--text-field", "text")
        assert result.exit_code == 0, result.output
        return parquet.read_table(tmp_path / out)

    expected = embed("docs.jsonl", "a.parquet")
    vectors = embed("docs.parquet", "b.parquet")
    assert vectors["id"].to_pylist() == expected["id"].to_pylist() == names
    assert vectors["vector"].to_pylist() == expected["vector"].to_pylist()
    assert "is finished already" in invoke(
        "embed", tmp_path / "model", tmp_path / "docs.parquet", "--out", tmp_path / "b.parquet", "--no-state"
    ).stderr  # fmt: skip
    assert embed("nameless.parquet", "c.parquet")["id"].to_pylist() == [f"row-{i}" for i in range(9)]
    failed = invoke(
        "embed", tmp_path / "model", tmp_path / "docs.parquet", "--out", tmp_path / "d.npy", "--text-field", "b"
    )
    assert failed.exit_code == 2
    assert "has no field 'b': set text_field to one of 'text', 'number', 'id'" in failed.stderr


# --- the library -----------------------------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="make test-all: it installs datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return datasets


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".txt"])
def test_data_sets_of_the_library_hold_the_same_texts(tmp_path, library, suffix):
    """A folder in the layout of the Hub, as its library and as `open_corpus` read it."""
    folder = tmp_path / "data"
    folder.mkdir()
    texts = [" ".join(text.split()) for text in TEXTS]  # of a .txt file, the library makes a row of each line
    if suffix == ".txt":
        (folder / "train.txt").write_text("\n".join(texts))
        texts_of_file = ["\n".join(texts)]
    else:
        save(folder / f"train{suffix}", texts)
        texts_of_file = texts
    assert hub.split_names(str(folder), None) == ["train"]
    rows = hub.load_rows(str(folder), None, "train", "text")
    assert [text.text for text in hub.read_texts("data", rows, "text")] == texts
    assert hub.size_in_bytes(rows, "train") > 0
    assert hub.digest_rows(rows, "train") == hub.digest_rows(hub.load_rows(str(folder), None, "train", "text"), "train")
    assert hub.digest_rows(rows, "train") != hub.digest_rows(rows.select(range(5)), "train")
    assert [text.text for text in open_corpus(str(folder), "train")] == texts_of_file
    with pytest.raises(ValueError, match="no field 'body': set text_field to one of 'text'"):
        hub.load_rows(str(folder), None, "train", "body")


def test_missing_data_sets_of_the_library_are_said_to_be_missing(library):
    with pytest.raises(ValueError, match="nobody/nothing (is neither|could not be loaded)"):
        hub.split_names("nobody/nothing", None)


def test_documents_of_the_library_are_trained_and_scored_as_lists(library):
    """`RecurrentTrainer` and `perplexity` take a column of token ids, as the library has it."""
    import carryforward as cf

    rows = library.Dataset.from_dict({"input_ids": [TOKENIZER(text)["input_ids"] for text in TEXTS[:4]]})
    model = model_of("gpt2")
    assert cf.perplexity(model, rows["input_ids"]) == cf.perplexity(model, list(rows["input_ids"]))
    with pytest.raises(ValueError, match=r'dataset\["input_ids"\]'):
        cf.perplexity(model, rows)


def test_formats_are_those_that_the_documentation_names():
    assert list(row_files.FORMATS) == [".jsonl", ".parquet", ".json"]
