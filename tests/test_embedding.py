# SPDX-License-Identifier: Apache-2.0
"""Vectors of whole documents: the same as from one forward call, aligned to the text, and files that resume."""

import json

import numpy as np
import prose
import pytest
import tiny
import torch

import carryforward as cf
from carryforward import embedding_files
from carryforward.cli import main
from carryforward.embedding import encode

TOKENIZER = prose.tokenizer()
PROSE = "".join(prose.TOPICS[:3])
TEXTS = ["A few words.", "", PROSE[:900], PROSE[50:110], PROSE[100:2600]]


def model_of(name, head=None, **fields):
    """A tiny model with room for the vocabulary of `TOKENIZER`."""
    settings = {"vocab_size": len(TOKENIZER)}
    model = tiny.recurrent(name, head, settings=settings, **fields)
    return model.eval()


def whole(model, text, **arguments):
    """Token vectors from one call over the whole document."""
    ids = torch.tensor([TOKENIZER(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        return model(ids, **arguments).last_hidden_state[0].numpy()


@pytest.mark.parametrize("overlap", [None, 0, 3])
@pytest.mark.parametrize("name", ["bert", "modernbert", "gpt2", "llama"])
def test_token_vectors_equal_those_of_one_call(name, overlap):
    model = model_of(name, "none")
    found = encode(model, TEXTS, TOKENIZER, output="tokens", overlap=overlap, batch_size=2)
    for text, one in zip(TEXTS, found, strict=True):
        if text:
            np.testing.assert_allclose(one.vectors, whole(model, text, overlap=overlap), rtol=1e-4, atol=1e-5)
        else:
            assert one.vectors.shape == (0, model.config.base_config.hidden_size)


def test_offsets_point_at_the_tokens_text():
    found = encode(model_of("bert", "none"), TEXTS, TOKENIZER, output="tokens")
    for text, one in zip(TEXTS, found, strict=True):
        assert "".join(text[a:b] for a, b in one.offsets) == text
        assert len(one.offsets) == len(one.vectors)


def test_a_documents_vector_is_the_mean_of_its_tokens():
    model = model_of("bert", "none")
    tokens = encode(model, TEXTS, TOKENIZER, output="tokens")
    found = encode(model, TEXTS, TOKENIZER)
    assert found.dtype == np.float32
    assert not found[1].any(), "nothing to embed"
    for one, vector in zip(tokens, found, strict=True):
        if len(one.vectors):
            np.testing.assert_allclose(vector, one.vectors.mean(axis=0), rtol=1e-4, atol=1e-6)


def test_states_are_those_that_pass_between_windows():
    model = model_of("gpt2", "none", overlap=2, slots=2)
    text = TEXTS[2]
    ids = torch.tensor([TOKENIZER(text, add_special_tokens=False)["input_ids"]])
    expected = []
    with torch.no_grad():
        for end in range(9, ids.shape[1] + 1, 6):  # windows of 8 that move by 6, complete with the token behind them
            expected.append(model(ids[:, :end]).state.carried[0].numpy())
    states = encode(model, [text, "x"], TOKENIZER, output="windows")
    np.testing.assert_allclose(states[0], np.stack(expected), rtol=1e-4, atol=1e-5)
    assert states[1].shape == (0, 1, 2, 16)
    last = encode(model, [text, "x"], TOKENIZER, pooling="state")
    np.testing.assert_allclose(last[0], states[0][-1].flatten(), rtol=1e-5, atol=1e-6)
    assert not last[1].any()


def test_without_the_state_windows_are_the_base_models():
    model = model_of("bert", "none", overlap=0)
    (one,) = encode(model, TEXTS[2:3], TOKENIZER, output="tokens", use_state=False)
    ids = TOKENIZER(TEXTS[2], add_special_tokens=False)["input_ids"]
    prefix, suffix = list(model.config.recurrence.prefix), list(model.config.recurrence.suffix)
    with torch.no_grad():
        for start in range(0, len(ids), 8):
            window = torch.tensor([prefix + ids[start : start + 8] + suffix])
            vectors = model.base(window).last_hidden_state[0, len(prefix) : -len(suffix)].numpy()
            np.testing.assert_allclose(one.vectors[start : start + 8], vectors, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "head"), [("gpt2", "causal"), ("bert", "masked")])
def test_a_head_is_left_out(name, head):
    model = model_of(name, head).train()
    found = encode(model, TEXTS[:1], TOKENIZER)
    assert found.shape == (1, model.config.base_config.hidden_size)
    assert model.training
    bare = cf.RecurrentModel(model.config, base=model.base.base_model)
    bare.recurrence = model.recurrence
    model.eval()
    np.testing.assert_allclose(found, encode(bare.eval(), TEXTS[:1], TOKENIZER), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output": "vector"}, "output='vector' must be one of 'document', 'tokens', 'windows'"),
        ({"pooling": "max"}, "pooling='max' must be one of"),
        ({"pooling": "state", "use_state": False}, "needs the state that use_state=False removes"),
        ({"texts": "one text"}, "texts is one string"),
        ({"model": tiny.base("gpt2")}, "make it recurrent with add_recurrence"),
    ],
)
def test_what_cannot_be_embedded_is_refused(arguments, message):
    given = {"model": model_of("gpt2", "none"), "texts": TEXTS, "tokenizer": TOKENIZER} | arguments
    with pytest.raises(ValueError, match=message):
        encode(given.pop("model"), given.pop("texts"), given.pop("tokenizer"), **given)


# --- files ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    model = model_of("bert", "none")
    model.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    rows = [{"id": f"doc {i}", "text": PROSE[i * 50 : i * 50 + 40 + 13 * i]} for i in range(9)]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path, model, rows


def run(folder, *arguments):
    """The command line; its exit code."""
    with pytest.raises(SystemExit) as end:
        main(["embed", str(folder / "model"), str(folder / "docs.jsonl"), "--device", "cpu", *map(str, arguments)])
    return end.value.code


@pytest.mark.parametrize("suffix", [".parquet", ".npy", ".safetensors"])
def test_every_format_holds_the_vectors_and_ids(saved, suffix, monkeypatch):
    folder, model, rows = saved
    monkeypatch.setattr(embedding_files, "DOCUMENTS_PER_PART", 4)
    out = folder / f"vectors{suffix}"
    assert run(folder, "--out", out) == 0
    expected = encode(model, [row["text"] for row in rows], TOKENIZER)
    if suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        table = parquet.read_table(out)
        ids, vectors = table["id"].to_pylist(), np.array(table["vector"].to_pylist())
    else:
        ids = json.loads((folder / "vectors.ids.json").read_text())
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
    for row, one in zip(table, expected, strict=True):
        np.testing.assert_allclose(np.reshape(row["vectors"], row["shape"]), one.vectors, rtol=1e-4, atol=1e-5)
        assert row["offsets"] == one.offsets.tolist()


def test_a_stopped_run_goes_on_where_it_was(saved, monkeypatch, capsys):
    folder, _, rows = saved
    monkeypatch.setattr(embedding_files, "DOCUMENTS_PER_PART", 2)
    calls = []

    def failing(model, texts, *args, **kwargs):
        calls.append(len(texts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(model, texts, *args, **kwargs)

    monkeypatch.setattr(embedding_files, "encode", failing)
    assert run(folder, "--out", folder / "v.npy") == 130
    assert not (folder / "v.npy").exists()
    assert run(folder, "--out", folder / "v.npy") == 0
    assert calls == [2, 2, 2, 2, 2, 1], "the first two parts are not embedded again"
    assert json.loads((folder / "v.ids.json").read_text()) == [row["id"] for row in rows]
    assert len(np.load(folder / "v.npy")) == len(rows)


def test_other_settings_do_not_go_on_with_a_stopped_run(saved, monkeypatch, capsys):
    folder, _, _ = saved
    monkeypatch.setattr(embedding_files, "encode", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run(folder, "--out", folder / "v.npy") == 130
    assert run(folder, "--out", folder / "v.npy", "--overlap", "1") == 2
    assert "begun with another model, source or settings" in capsys.readouterr().err


def test_a_line_that_cannot_be_read_is_fatal_or_skipped(saved, capsys):
    folder, _, _ = saved
    lines = (folder / "docs.jsonl").read_bytes().splitlines(keepends=True)
    bad = [b"{oops\n", b'{"id": "y", "txt": "a"}\n', b'{"text": "\xff"}\n', b"[1]\n"]
    (folder / "docs.jsonl").write_bytes(b"".join([lines[0], *bad, b"\n", *lines[1:]]))
    assert run(folder, "--out", folder / "v.npy") == 2
    assert "line 2: it is not JSON" in capsys.readouterr().err
    assert run(folder, "--out", folder / "v.npy", "--on-error", "skip", "--json") == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == {"documents": 9, "skipped": [2, 3, 4, 5], "out": str(folder / "v.npy")}
    assert "line 3 is skipped: it has no text in 'text' (it has: id, txt)" in told.err
    assert "line 4 is skipped: it is not UTF-8" in told.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "v.txt"], "must end in .parquet, .npy, .safetensors"),
        (["--out", "v.npy", "--what", "tokens"], "takes one vector per document; for tokens use .parquet"),
        (["--out", "v.npy", "--on-error", "cry"], "it must be stop or skip"),
        (["--out", "v.npy", "--window", "9"], "reads 11 at once"),
    ],
)
def test_bad_usage_says_what_to_do(saved, arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(saved[0])
    assert run(saved[0], *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_plain_encoder_is_read_in_windows_that_stand_alone(saved, capsys):
    folder, _, rows = saved
    settings = {"vocab_size": len(TOKENIZER)}
    tiny.base("bert", "none", **settings).save_pretrained(folder / "model")
    assert run(folder, "--out", folder / "v.npy", "--window", "9") == 0
    assert len(np.load(folder / "v.npy")) == len(rows)


def test_sentence_transformers_reads_whole_documents(saved, tmp_path):
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    folder, model, rows = saved
    texts = [row["text"] for row in rows]
    module = cf.RecurrentTransformer(str(folder / "model"))
    pipeline = SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension())], device="cpu")
    expected = encode(model, texts, TOKENIZER)
    np.testing.assert_allclose(pipeline.encode(texts), expected, rtol=1e-4, atol=1e-5)
    pipeline.save(str(tmp_path / "pipeline"))
    again = SentenceTransformer(str(tmp_path / "pipeline"), device="cpu", trust_remote_code=True)
    np.testing.assert_allclose(again.encode(texts), expected, rtol=1e-4, atol=1e-5)
