# SPDX-License-Identifier: Apache-2.0
"""`carryforward embed`: formats of the vectors, interrupted runs that continue, and lines that cannot be read."""

import json

import numpy as np
import pytest
import torch
from helpers import tiny
from helpers.embedding import TOKENIZER, model_of

import carryforward as cf
from carryforward.cli.main import main
from carryforward.embeddings import document_groups, embed, vector_files
from carryforward.embeddings.encode import encode
from carryforward.utils import files
from carryforward.utils.progress import ProgressBar


def run(folder, *arguments):
    """Run the command; returns its exit code."""
    with pytest.raises(SystemExit) as end:
        main(["embed", str(folder / "model"), str(folder / "docs.jsonl"), "--device", "cpu", *map(str, arguments)])
    return end.value.code


@pytest.mark.parametrize("suffix", [".parquet", ".npy", ".safetensors"])
def test_every_format_holds_the_vectors_and_ids(saved, suffix, monkeypatch):
    folder, model, rows = saved
    monkeypatch.setattr(document_groups, "DOCUMENTS_PER_GROUP", 4)
    out = folder / f"vectors{suffix}"
    assert run(folder, "--out", out) == 0
    expected = encode(model, [row["text"] for row in rows], TOKENIZER)
    if suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        table = parquet.read_table(out)
        ids, vectors = table["id"].to_pylist(), np.array(table["vector"].to_pylist())
    else:
        ids = json.loads((folder / f"vectors{suffix}.ids.json").read_text())
        vectors = np.load(out) if suffix == ".npy" else _safetensors(out)
    assert ids == [row["id"] for row in rows]
    np.testing.assert_allclose(vectors, expected, rtol=1e-4, atol=1e-5)
    assert not (folder / f"vectors{suffix}.parts").exists()


def _safetensors(path):
    from safetensors.numpy import load_file

    return load_file(path)["vectors"]


def test_tokens_and_their_offsets_go_to_parquet(saved):
    parquet = pytest.importorskip("pyarrow.parquet")
    folder, model, rows = saved
    assert run(folder, "--out", folder / "tokens.parquet", "--what", "tokens") == 0
    table = parquet.read_table(folder / "tokens.parquet").to_pylist()
    expected = encode(model, [row["text"] for row in rows], TOKENIZER, output="tokens")
    for row, tokens in zip(table, expected, strict=True):
        np.testing.assert_allclose(np.reshape(row["vectors"], row["shape"]), tokens.vectors, rtol=1e-4, atol=1e-5)
        assert row["offsets"] == tokens.offsets.tolist()


@pytest.mark.parametrize("suffix", [".parquet", ".npy", ".safetensors"])
def test_files_of_chunks_have_a_row_for_each(saved, suffix, monkeypatch):
    folder, model, rows = saved
    monkeypatch.setattr(document_groups, "DOCUMENTS_PER_GROUP", 4)
    rows[5]["text"] = ""  # no chunks
    (folder / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = folder / f"chunks{suffix}"
    assert run(folder, "--out", out, "--what", "chunks", "--chunk-size", 9, "--normalize") == 0
    texts = [row["text"] for row in rows]
    expected = encode(model, texts, TOKENIZER, output="chunks", chunks=9, normalize=True)
    places = [(row["id"], *span) for row, one in zip(rows, expected, strict=True) for span in one.spans.tolist()]
    if suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        table = parquet.read_table(out)
        entries, vectors = table.select(["id", "start", "stop"]).to_pylist(), np.array(table["vector"].to_pylist())
    else:
        entries = json.loads((folder / f"chunks{suffix}.ids.json").read_text())
        vectors = np.load(out) if suffix == ".npy" else _safetensors(out)
    assert [tuple(entry.values()) for entry in entries] == places
    np.testing.assert_allclose(vectors, np.concatenate([one.vectors for one in expected]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)


def test_spans_come_from_the_file(saved, monkeypatch, capsys):
    """An interrupted run continues with the spans of its lines; a line with a bad span is an error or skipped."""
    folder, model, rows = saved
    spans = [[[0, 7], [3, len(row["text"])]] for row in rows]
    lines = [json.dumps({**row, "parts": own}) for row, own in zip(rows, spans, strict=True)]
    bad = json.dumps({"text": "short", "parts": [[0, 6]]})
    (folder / "docs.jsonl").write_text("\n".join([*lines, bad]))
    command = ["--out", folder / "v.npy", "--what", "chunks", "--chunks-field", "parts"]
    stop_at(monkeypatch, 3)
    assert run(folder, *command, "--on-error", "skip") == 130
    assert run(folder, *command) == 2
    assert "line 10: its 'parts'[0]=[0, 6] must be two integers, 0 <= start < stop <= 5" in capsys.readouterr().err
    assert run(folder, *command, "--on-error", "skip") == 0
    expected = encode(model, [row["text"] for row in rows], TOKENIZER, output="chunks", chunks=spans)
    expected = np.concatenate([one.vectors for one in expected])
    np.testing.assert_allclose(np.load(folder / "v.npy"), expected, rtol=1e-4, atol=1e-5)


def stop_at(monkeypatch, group):
    """Make groups of two documents and interrupt the run in this one. Returns the sizes of the groups begun."""
    monkeypatch.setattr(document_groups, "DOCUMENTS_PER_GROUP", 2)
    calls = []

    def failing(model, texts, *args, **kwargs):
        calls.extend([len(texts)] * bool(texts))  # a call without texts only checks the arguments
        if len(calls) == group:
            calls.append(0)
            raise KeyboardInterrupt
        return encode(model, texts, *args, **kwargs)

    monkeypatch.setattr(embed, "encode", failing)
    return calls


def test_an_interrupted_run_continues(saved, monkeypatch, capsys):
    folder, _, rows = saved
    calls = stop_at(monkeypatch, 3)
    assert run(folder, "--out", folder / "v.npy") == 130
    assert not (folder / "v.npy").exists()
    assert run(folder, "--out", folder / "v.npy") == 0
    assert calls == [2, 2, 2, 0, 2, 2, 1], "the first two parts are not embedded again"
    assert json.loads((folder / "v.npy.ids.json").read_text()) == [row["id"] for row in rows]
    assert len(np.load(folder / "v.npy")) == len(rows)


def test_a_run_interrupted_in_the_merge_can_be_finished(saved, monkeypatch):
    folder, _, rows = saved
    replace = files.os.replace

    def failing(beside, path):
        if path.name == "v.npy":
            raise KeyboardInterrupt
        replace(beside, path)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", failing)
        assert run(folder, "--out", folder / "v.npy") == 130
    assert run(folder, "--out", folder / "v.npy") == 0
    assert len(np.load(folder / "v.npy")) == len(rows)


def other_settings(folder):
    return ["--overlap", "1"]


def another_model(folder):
    model_of("bert", "none", seed=5).save_pretrained(folder / "model")
    return []


def another_first_line(folder):
    text = (folder / "docs.jsonl").read_text()
    (folder / "docs.jsonl").write_text(text.replace("doc 1", "doc X"))
    return []


@pytest.mark.parametrize("change", [other_settings, another_model])
def test_a_run_does_not_continue_with_other_settings(saved, monkeypatch, capsys, change):
    folder, _, _ = saved
    stop_at(monkeypatch, 3)
    assert run(folder, "--out", folder / "v.npy") == 130
    assert run(folder, "--out", folder / "v.npy", *change(folder)) == 2
    assert "begun with another model or other settings" in capsys.readouterr().err


@pytest.fixture
def stopped(saved, monkeypatch):
    """A run that was stopped after two of its parts, and the vectors of one that was not."""
    folder, _, _ = saved
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        assert run(folder, "--out", folder / "v.npy") == 130
    monkeypatch.setattr(document_groups, "DOCUMENTS_PER_GROUP", 2)
    assert run(folder, "--out", folder / "whole.npy") == 0
    return folder, np.load(folder / "whole.npy")


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("harm", [flip, lambda path: path.write_bytes(b""), lambda path: path.unlink()])
@pytest.mark.parametrize("file", ["part-00000000.npz", "part-00000000.json", "part-00000001.npz", "settings.json"])
def test_damaged_and_missing_parts_are_made_again(stopped, file, harm):
    folder, whole = stopped
    harm(folder / "v.npy.parts" / file)
    assert run(folder, "--out", folder / "v.npy") == 0
    np.testing.assert_array_equal(np.load(folder / "v.npy"), whole)


def test_intact_parts_are_not_made_again(stopped, monkeypatch):
    folder, whole = stopped
    embedded = []
    write = vector_files.Parts.write
    monkeypatch.setattr(vector_files.Parts, "write", lambda self, n, *args: (embedded.append(n), write(self, n, *args)))
    assert run(folder, "--out", folder / "v.npy") == 0
    assert embedded == [2, 3, 4]
    np.testing.assert_array_equal(np.load(folder / "v.npy"), whole)


def test_changed_lines_are_embedded_again(stopped):
    folder, _ = stopped
    another_first_line(folder)
    assert run(folder, "--out", folder / "v.npy") == 0
    assert run(folder, "--out", folder / "changed.npy") == 0
    np.testing.assert_array_equal(np.load(folder / "v.npy"), np.load(folder / "changed.npy"))
    ids = json.loads((folder / "v.npy.ids.json").read_text())
    assert ids == json.loads((folder / "changed.npy.ids.json").read_text())


def test_files_of_others_are_not_touched(saved, capsys):
    folder, _, _ = saved
    (folder / "v.npy.parts").mkdir()
    (folder / "v.npy.parts" / "part-1.csv").write_text("mine")
    assert run(folder, "--out", folder / "v.npy") == 2
    assert "v.npy.parts holds other files" in capsys.readouterr().err
    (folder / "w.npy.json").write_text('{"mine": 1}')
    assert run(folder, "--out", folder / "w.npy") == 2
    assert "is not a record of embed" in capsys.readouterr().err
    assert (folder / "v.npy.parts" / "part-1.csv").read_text() == "mine"
    assert (folder / "w.npy.json").read_text() == '{"mine": 1}'


def test_blank_lines_at_the_end_are_part_of_the_source(saved, monkeypatch):
    folder, _, rows = saved
    monkeypatch.setattr(document_groups, "DOCUMENTS_PER_GROUP", len(rows))
    with (folder / "docs.jsonl").open("a") as file:
        file.write("\n\n")
    assert run(folder, "--out", folder / "v.npy") == 0
    assert run(folder, "--out", folder / "v.npy") == 0, "it has not changed since"


def test_a_finished_output_is_not_made_again(saved, capsys):
    folder, _, rows = saved
    assert run(folder, "--out", folder / "v.npy") == 0
    written = (folder / "v.npy").stat().st_mtime_ns
    record = json.loads((folder / "v.npy.json").read_text())
    assert record["documents"] == len(rows)
    assert record["settings"]["pooling"] == "mean"
    assert run(folder, "--out", folder / "v.npy") == 0
    assert (folder / "v.npy").stat().st_mtime_ns == written
    assert "finished already" in capsys.readouterr().err
    assert run(folder, "--out", folder / "v.npy", "--overlap", 1) == 2
    assert "of another model or other settings" in capsys.readouterr().err
    flip(folder / "v.npy")
    assert run(folder, "--out", folder / "v.npy") == 2
    assert "v.npy is damaged or was changed" in capsys.readouterr().err
    another_first_line(folder)
    assert run(folder, "--out", folder / "v.npy") == 2
    assert "docs.jsonl has changed since" in capsys.readouterr().err
    (folder / "v.npy.json").unlink()
    assert run(folder, "--out", folder / "v.npy") == 2
    assert "exists already. Use another name" in capsys.readouterr().err


def test_later_lines_may_be_corrected_and_added(saved, monkeypatch, capsys):
    folder, _, rows = saved
    monkeypatch.setattr(document_groups, "DOCUMENTS_PER_GROUP", 2)
    good = (folder / "docs.jsonl").read_text()
    (folder / "docs.jsonl").write_text(good.replace('{"id": "doc 5"', '{"id" "doc 5"'))
    assert run(folder, "--out", folder / "v.npy") == 2
    assert "line 6: it is not JSON" in capsys.readouterr().err
    (folder / "docs.jsonl").write_text(good + '{"text": "one more"}\n')
    assert run(folder, "--out", folder / "v.npy") == 0
    ids = json.loads((folder / "v.npy.ids.json").read_text())
    assert ids == [*(row["id"] for row in rows), "line-10"]


def test_a_command_can_be_corrected(saved, capsys):
    folder, _, _ = saved
    assert run(folder, "--out", folder / "v.npy", "--overlap", "99") == 2
    assert not (folder / "v.npy.parts").exists()
    lines = (folder / "docs.jsonl").read_text()
    (folder / "docs.jsonl").write_text("oops\n")
    assert run(folder, "--out", folder / "v.npy") == 2
    (folder / "docs.jsonl").write_text(lines)
    assert run(folder, "--out", folder / "v.npy", "--overlap", "1") == 0


@pytest.mark.parametrize("arguments", [["v.parquet", "--what", "tokens"], ["v.npy", "--pooling", "state"]])
def test_a_run_may_end_with_skipped_lines(saved, monkeypatch, capsys, arguments):
    folder, _, _ = saved
    model_of("bert", "none", slots=2).save_pretrained(folder / "model")
    monkeypatch.setattr(document_groups, "DOCUMENTS_PER_GROUP", 3)
    with (folder / "docs.jsonl").open("a") as file:
        file.write("oops\n")
    monkeypatch.chdir(folder)
    assert run(folder, "--out", *arguments, "--on-error", "skip", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"documents": 9, "skipped": [10], "out": arguments[0]}


def test_lines_skipped_before_an_interruption_are_reported(saved, monkeypatch, capsys):
    folder, _, _ = saved
    lines = (folder / "docs.jsonl").read_text()
    (folder / "docs.jsonl").write_text("oops\n" + lines + "oops\n")
    stop_at(monkeypatch, 3)
    assert run(folder, "--out", folder / "v.npy", "--on-error", "skip") == 130
    notes = [json.loads(path.read_text())["skipped"] for path in sorted((folder / "v.npy.parts").glob("part-*.json"))]
    assert notes == [[1], []], "each part has its own"
    assert run(folder, "--out", folder / "v.npy", "--on-error", "skip", "--json") == 0
    assert json.loads(capsys.readouterr().out)["skipped"] == [1, 11]


def test_a_source_without_documents_leaves_no_files(saved, capsys):
    folder, _, _ = saved
    (folder / "docs.jsonl").write_text("oops\n")
    assert run(folder, "--out", folder / "v.npy", "--on-error", "skip") == 2
    assert "nothing to embed" in capsys.readouterr().err
    assert not list(folder.glob("v.npy*"))


def test_each_format_has_its_own_file_of_ids(saved, capsys):
    folder, _, _ = saved
    assert run(folder, "--out", folder / "v.npy") == 0
    assert run(folder, "--out", folder / "v.safetensors") == 0
    assert (folder / "v.npy.ids.json").read_text() == (folder / "v.safetensors.ids.json").read_text()
    (folder / "v.npy").unlink()
    (folder / "v.npy.json").unlink()
    assert run(folder, "--out", folder / "v.npy") == 2
    assert "v.npy.ids.json exists already" in capsys.readouterr().err


def test_groups_for_token_vectors_are_limited_in_characters(saved, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    folder, _, rows = saved
    monkeypatch.setitem(document_groups.CHARACTERS_PER_GROUP, "tokens", 150)
    seen, bars, update = [], [], ProgressBar.update

    def updating(bar, done, *args):
        if bar.unit == "bytes":
            bars.append(done)
        update(bar, done, *args)

    def counting(model, texts, *args, **kwargs):
        seen.append(sum(map(len, texts)))
        return encode(model, texts, *args, **kwargs)

    monkeypatch.setattr(embed, "encode", counting)
    monkeypatch.setattr(ProgressBar, "update", updating)
    assert run(folder, "--out", folder / "v.parquet", "--what", "tokens") == 0
    lengths = [len(row["text"]) for row in rows]
    assert seen[0] == 0, "the first call only checks the arguments"
    assert sum(seen) == sum(lengths)
    assert len(seen) > 4
    assert max(seen) < 150 + max(lengths)
    assert parquet.ParquetFile(folder / "v.parquet").num_row_groups == len(rows)
    assert bars == sorted(bars)
    assert len(set(bars)) > len(seen), "the bar moves within a part"


def test_a_line_that_cannot_be_read_is_an_error_or_skipped(saved, capsys):
    folder, _, _ = saved
    lines = (folder / "docs.jsonl").read_bytes().splitlines(keepends=True)
    bad = [b"{oops\n", b'{"id": "y", "txt": "a"}\n', b'{"text": "\xff"}\n', b"[1]\n"]
    (folder / "docs.jsonl").write_bytes(b"".join([lines[0], *bad, b"\n", *lines[1:]]))
    assert run(folder, "--out", folder / "v.npy") == 2
    assert "line 2: it is not JSON" in capsys.readouterr().err
    assert run(folder, "--out", folder / "v.npy", "--on-error", "skip", "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"documents": 9, "skipped": [2, 3, 4, 5], "out": str(folder / "v.npy")}
    assert "line 3 is skipped: it has no text in 'text' (it has: id, txt)" in captured.err
    assert "line 4 is skipped: it is not UTF-8" in captured.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (r'{"id": "s", "text": "a \ud800 b"}', "its 'text' is not Unicode: character 2 is '\\ud800'"),
        (r'{"id": "s \udfff", "text": "a"}', "its 'id' is not Unicode: character 2 is '\\udfff'"),
        ("[" * 100_000, "its JSON is nested too deeply"),
        ('{"id": [1], "text": "a"}', "its 'id' is of type list: use text or a number"),
        ('{"id": true, "text": "a"}', "its 'id' is of type bool: use text or a number"),
    ],
)
def test_a_bad_document_is_an_error_or_skipped(saved, capsys, line, message):
    folder, _, rows = saved
    with (folder / "docs.jsonl").open("a") as file:
        file.write(line + "\n")
    assert run(folder, "--out", folder / "v.npy") == 2
    assert f"line 10: {message}" in capsys.readouterr().err
    assert run(folder, "--out", folder / "v.npy", "--on-error", "skip") == 0
    assert len(np.load(folder / "v.npy")) == len(rows)


def test_ids_may_be_missing_and_a_file_may_have_a_byte_order_mark(saved):
    folder, _, _ = saved
    lines = ['{"id": 7, "text": "a"}', '{"id": null, "text": "b"}', '{"text": "c"}']
    (folder / "docs.jsonl").write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    assert run(folder, "--out", folder / "v.npy") == 0
    assert json.loads((folder / "v.npy.ids.json").read_text()) == ["7", "line-2", "line-3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "v.txt"], "must end in .parquet, .npy, .safetensors"),
        (["--out", "v.npy", "--what", "tokens"], "takes vectors of documents or chunks; for tokens use .parquet"),
        (["--out", "v.npy", "--what", "vec"], "'vec' must be one of 'document', 'chunks', 'tokens'"),
        (["--out", "v.npy", "--pooling", "sum"], "'sum' must be one of 'mean', 'max', 'cls', 'state'"),
        (["--out", "v.npy", "--batch-size", "0"], "--batch-size 0: it must be at least 1"),
        (["--out", "v.npy", "--no-state", "--pooling", "state"], "needs the state, which use_state=False (--no-state)"),
        (["--out", "v.npy", "--what", "chunks"], "--what chunks needs --chunk-size or --chunks-field"),
        (["--out", "v.npy", "--chunk-size", "9"], "--chunk-size is for --what chunks, not for --what document"),
        (["--out", "v.npy", "--what", "chunks", "--chunk-size", "0"], "--chunk-size 0: it must be at least 1"),
        (["--out", "v.npy", "--on-error", "cry"], "it must be stop or skip"),
        (["--out", "v.npy", "--window", "9"], "reads 11 tokens at once"),
    ],
)
def test_bad_arguments_say_what_to_do(saved, arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(saved[0])
    assert run(saved[0], *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.fixture
def plain(saved):
    """A plain encoder in place of the recurrent model."""
    folder, _, rows = saved
    base = tiny.base("bert", "none", vocab_size=len(TOKENIZER))
    base.save_pretrained(folder / "model")
    return folder, base, rows


def test_a_plain_encoder_reads_independent_windows(plain):
    folder, base, rows = plain
    assert run(folder, "--out", folder / "v.npy", "--window", "9", "--overlap", "2") == 0
    model = cf.add_recurrence(base, tokenizer=TOKENIZER, window=9, memory="vector")
    texts = [row["text"] for row in rows]
    expected = encode(model, texts, TOKENIZER, use_state=False, overlap=2)
    np.testing.assert_allclose(np.load(folder / "v.npy"), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # a state would change the vectors
        model.memory.vector.networks[0][-1].weight.normal_()
    assert not np.allclose(encode(model, texts, TOKENIZER, overlap=2), expected, atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [(["v.npy", "--pooling", "state"], 'pooling="mean"'), (["v.parquet", "--what", "windows"], 'output="tokens"')],
)
def test_a_plain_encoder_has_no_state(plain, capsys, monkeypatch, arguments, instead):
    monkeypatch.chdir(plain[0])
    assert run(plain[0], "--out", *arguments) == 2
    error = capsys.readouterr().err
    error = " ".join(error.split())
    assert "the model's memory is untrained, so its states mean nothing" in error
    assert f"use {instead}" in error
