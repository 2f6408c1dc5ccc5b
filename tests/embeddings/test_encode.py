# SPDX-License-Identifier: Apache-2.0
"""Vectors of whole documents: the same as from one forward call, aligned to the text, and files that resume."""

import json
import sys
import unicodedata

import numpy as np
import pytest
import torch
from helpers import prose, tiny
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import carryforward as cf
from carryforward import windows
from carryforward.backbones import hooks
from carryforward.cli.main import main
from carryforward.embeddings import embed
from carryforward.embeddings.encode import encode
from carryforward.utils import files, progress

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


def wordpiece():
    """BERT's: lower case, no accents, and what it does not know is one token."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer, trainers.WordPieceTrainer(vocab_size=90, special_tokens=["[UNK]"], show_progress=False)


def roberta():
    """RoBERTa's: bytes, several to a character, and a space that belongs to the next word but not to its offsets."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)


@pytest.mark.parametrize("kind", [wordpiece, roberta])
def test_offsets_are_characters_whatever_the_tokens_are_made_of(kind):
    text = "  Ça, cafe\u0301 et été\u00a0: naïve 🙂🙂 Zoë’s 👩\u200d👧 café — 日本 fin."
    tokenizer, trainer = kind()
    tokenizer.train_from_iterator(["café été ça naïve zoe's et fin"] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    model = tiny.recurrent("bert", "none", settings={"vocab_size": len(tokenizer)})
    (one,) = encode(model, [text], tokenizer, output="tokens")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).last_hidden_state[0].numpy()
    np.testing.assert_allclose(one.vectors, expected, rtol=1e-4, atol=1e-5)
    assert len(ids) > 2 * 8, "several windows"
    covered = {i for begin, end in one.offsets for i in range(begin, end)}
    assert covered >= {i for i, c in enumerate(text) if not c.isspace() and not unicodedata.combining(c)}
    assert (np.diff(one.offsets, axis=0) >= 0).all()
    plain = {}
    for token, (begin, end) in zip(tokenizer.convert_ids_to_tokens(ids), one.offsets, strict=True):
        folded = unicodedata.normalize("NFD", text[begin:end].lower())
        plain.setdefault("".join(c for c in folded if not unicodedata.combining(c)), token)
    known = {"cafe": "cafe", "ete": "ete", "naive": "naive"} if kind is wordpiece else {"cafe": "ĠcafÃ©", "🙂": "ð"}
    assert plain.items() >= known.items()


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
    text = TEXTS[2][:300]
    ids = torch.tensor([TOKENIZER(text, add_special_tokens=False)["input_ids"]])
    expected = []
    with torch.no_grad():
        for end in range(9, ids.shape[1] + 1, 6):  # windows of 8 that move by 6, complete with the token behind them
            expected.append(model(ids[:, :end]).state.carried[0].numpy())
    states = encode(model, [text, "x"], TOKENIZER, output="windows")
    np.testing.assert_allclose(states[0], np.stack(expected), rtol=1e-4, atol=1e-5)
    assert states[1].shape == (0, 1, 2, 16)


def numbers(texts, **kwargs):
    """A tokenizer of token ids in digits: documents of exactly so many tokens."""
    return {"input_ids": [[int(number) for number in text.split()] for text in texts]}


def state_after(model, ids, overlap):
    """The state of a whole document, window by window with the base model alone."""
    recurrence, carry = model.config.recurrence, hooks.HookContext()
    prefix, suffix = recurrence.prefix, recurrence.suffix
    room = recurrence.window - len(prefix) - len(suffix)
    for start in range(0, len(ids), room - overlap):
        window = ids[start : start + room]
        last = start + room >= len(ids)
        model.base(torch.tensor([[*prefix, *window, *suffix]]), carry=carry)
        pooled = len(window) - (0 if last else max(overlap - recurrence.overlap, 0))
        state = model.recurrence(carry.take_outputs(), windows.Span(len(prefix), len(prefix) + pooled, 0))
        if last:
            return state.flatten().numpy()
        carry = hooks.HookContext()
        carry.slots = model._slots(state.unflatten(1, model.config.state_shape))


@pytest.mark.parametrize(("overlap", "slots"), [(2, 1), (2, 3), (0, 1), (4, 1)])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_the_state_of_a_document_is_that_after_all_of_it(name, overlap, slots):
    model = tiny.recurrent(name, "none", slots=slots)  # windows of 8 tokens, made for an overlap of 2
    lengths = [1, 2, 3, 7, 8, 9, 13, 14, 15, 50, 65, 130]
    documents = [tiny.documents(1, n, seed=n)[0].tolist() for n in lengths]
    texts = [" ".join(map(str, ids)) for ids in documents]
    found = encode(model, texts, numbers, pooling="state", overlap=overlap, batch_size=5)
    for n, ids, text, vector in zip(lengths, documents, texts, found, strict=True):
        with torch.no_grad():
            expected = state_after(model, ids, overlap)
        np.testing.assert_allclose(vector, expected, rtol=1e-4, atol=1e-5, err_msg=f"{n} tokens")
        assert np.isfinite(vector).all()
        assert vector.any()
        (alone,) = encode(model, [text], numbers, pooling="state", overlap=overlap)
        np.testing.assert_allclose(vector, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_document_of_full_windows_has_the_state_it_would_pass_on(name):
    model = tiny.recurrent(name, "none")
    ids = tiny.documents(1, 21)
    for n in (8, 14, 20):
        passed_on = model.advance_state(ids[:, : n + 1]).carried.flatten().numpy()
        (found,) = encode(model, [" ".join(map(str, ids[0, :n].tolist()))], numbers, pooling="state")
        np.testing.assert_array_equal(found, passed_on)


def test_there_is_nothing_to_go_on_with_after_a_whole_document():
    model = tiny.recurrent("gpt2", "none")
    state = model.advance_state(tiny.documents(1, 5), final=True)
    with pytest.raises(ValueError, match="read to their end"):
        model.advance_state(tiny.documents(1, 5), state=state)


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


def test_a_model_and_its_surroundings_stay_as_they_are():
    model = model_of("bert", "masked").train()
    model.base.bert.embeddings.eval()
    modes, random = [module.training for module in model.modules()], torch.get_rng_state()
    encode(model, TEXTS[:1], TOKENIZER)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)


def test_documents_may_come_from_a_generator():
    model = model_of("bert", "none")
    np.testing.assert_array_equal(encode(model, iter(TEXTS[:2]), TOKENIZER), encode(model, TEXTS[:2], TOKENIZER))


def test_no_documents_have_vectors_of_the_same_width():
    model = model_of("bert", "none", slots=2)
    assert encode(model, [], TOKENIZER).shape == (0, 16)
    assert encode(model, [], TOKENIZER, pooling="state").shape == (0, 32)


def test_progress_is_reported_or_shown(monkeypatch, capsys):
    model, seen = model_of("bert", "none"), []
    encode(model, TEXTS, TOKENIZER, progress=lambda done, total: seen.append((done, total)))
    total = sum(len(TOKENIZER(text)["input_ids"]) for text in TEXTS)
    assert seen == sorted(seen)
    assert len(seen) > len(TEXTS)
    assert seen[-1] == (total, total)
    encode(model, TEXTS[:1], TOKENIZER)
    assert not capsys.readouterr().err, "no terminal, no bar"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    encode(model, TEXTS[:1], TOKENIZER)
    assert not capsys.readouterr().err, "it takes no time"
    monkeypatch.setattr(progress.time, "monotonic", iter(range(0, 10**6, 3)).__next__)
    encode(model, TEXTS[:1], TOKENIZER)
    assert "embedding" in capsys.readouterr().err


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
        ({"pooling": "state", "use_state": False}, 'pooling="state" needs the state, which use_state=False'),
        ({"output": "windows", "use_state": False}, 'output="windows" needs the state, which use_state=False'),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"batch_size": -1}, "batch_size=-1 must be at least 1"),
        ({"overlap": 99, "texts": []}, "overlap=99 must be at least 0"),
        ({"texts": "one text"}, "texts is one string"),
        ({"texts": ["good", "a\ud800"]}, r"texts\[1\] is not Unicode: character 1 is '\\ud800'"),
        ({"texts": [None]}, r"texts\[0\] is of type NoneType"),
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
    monkeypatch.setattr(embed, "DOCUMENTS_PER_PART", 4)
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
    for row, one in zip(table, expected, strict=True):
        np.testing.assert_allclose(np.reshape(row["vectors"], row["shape"]), one.vectors, rtol=1e-4, atol=1e-5)
        assert row["offsets"] == one.offsets.tolist()


def stop_at(monkeypatch, part):
    """Parts of two documents, and an interruption while this one is embedded. Gives the sizes of all parts begun."""
    monkeypatch.setattr(embed, "DOCUMENTS_PER_PART", 2)
    calls = []

    def failing(model, texts, *args, **kwargs):
        calls.extend([len(texts)] * bool(texts))  # without texts it only checks
        if len(calls) == part:
            calls.append(0)
            raise KeyboardInterrupt
        return encode(model, texts, *args, **kwargs)

    monkeypatch.setattr(embed, "encode", failing)
    return calls


def test_a_stopped_run_goes_on_where_it_was(saved, monkeypatch, capsys):
    folder, _, rows = saved
    calls = stop_at(monkeypatch, 3)
    assert run(folder, "--out", folder / "v.npy") == 130
    assert not (folder / "v.npy").exists()
    assert run(folder, "--out", folder / "v.npy") == 0
    assert calls == [2, 2, 2, 0, 2, 2, 1], "the first two parts are not embedded again"
    assert json.loads((folder / "v.npy.ids.json").read_text()) == [row["id"] for row in rows]
    assert len(np.load(folder / "v.npy")) == len(rows)


def test_a_run_that_stops_while_it_puts_parts_together_can_be_finished(saved, monkeypatch):
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_settings, "begun with another model or other settings"),
        (another_model, "begun with another model or other settings"),
        (another_first_line, "has changed in lines that were embedded already"),
    ],
)
def test_what_is_no_longer_the_same_does_not_go_on(saved, monkeypatch, capsys, change, message):
    folder, _, _ = saved
    stop_at(monkeypatch, 3)
    assert run(folder, "--out", folder / "v.npy") == 130
    assert run(folder, "--out", folder / "v.npy", *change(folder)) == 2
    assert message in capsys.readouterr().err


def test_what_was_not_embedded_yet_may_be_mended_and_grow(saved, monkeypatch, capsys):
    folder, _, rows = saved
    monkeypatch.setattr(embed, "DOCUMENTS_PER_PART", 2)
    good = (folder / "docs.jsonl").read_text()
    (folder / "docs.jsonl").write_text(good.replace('{"id": "doc 5"', '{"id" "doc 5"'))
    assert run(folder, "--out", folder / "v.npy") == 2
    assert "line 6: it is not JSON" in capsys.readouterr().err
    (folder / "docs.jsonl").write_text(good + '{"text": "one more"}\n')
    assert run(folder, "--out", folder / "v.npy") == 0
    ids = json.loads((folder / "v.npy.ids.json").read_text())
    assert ids == [*(row["id"] for row in rows), "line-10"]


def test_a_corrected_command_is_not_refused(saved, capsys):
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
    monkeypatch.setattr(embed, "DOCUMENTS_PER_PART", 3)
    with (folder / "docs.jsonl").open("a") as file:
        file.write("oops\n")
    monkeypatch.chdir(folder)
    assert run(folder, "--out", *arguments, "--on-error", "skip", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"documents": 9, "skipped": [10], "out": arguments[0]}


def test_the_lines_skipped_before_a_stop_are_told_too(saved, monkeypatch, capsys):
    folder, _, _ = saved
    lines = (folder / "docs.jsonl").read_text()
    (folder / "docs.jsonl").write_text("oops\n" + lines + "oops\n")
    stop_at(monkeypatch, 3)
    assert run(folder, "--out", folder / "v.npy", "--on-error", "skip") == 130
    notes = [json.loads(path.read_text())["skipped"] for path in sorted((folder / "v.npy.parts").glob("part-*.json"))]
    assert notes == [[1], []], "each part notes its own"
    assert run(folder, "--out", folder / "v.npy", "--on-error", "skip", "--json") == 0
    assert json.loads(capsys.readouterr().out)["skipped"] == [1, 11]


def test_nothing_to_embed_leaves_nothing(saved, capsys):
    folder, _, _ = saved
    (folder / "docs.jsonl").write_text("oops\n")
    assert run(folder, "--out", folder / "v.npy", "--on-error", "skip") == 2
    assert "nothing to embed" in capsys.readouterr().err
    assert not list(folder.glob("v.npy*"))


def test_formats_do_not_share_their_ids(saved, capsys):
    folder, _, _ = saved
    assert run(folder, "--out", folder / "v.npy") == 0
    assert run(folder, "--out", folder / "v.safetensors") == 0
    assert (folder / "v.npy.ids.json").read_text() == (folder / "v.safetensors.ids.json").read_text()
    (folder / "v.npy").unlink()
    assert run(folder, "--out", folder / "v.npy") == 2
    assert "v.npy.ids.json exists already" in capsys.readouterr().err


def test_a_part_of_token_vectors_is_closed_by_its_length(saved, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    folder, _, rows = saved
    monkeypatch.setitem(embed.CHARACTERS_PER_PART, "tokens", 150)
    seen, bars, show = [], [], embed.console.Bar.set

    def moving(self, done, remark=None):
        bars.append(done)
        show(self, done, remark)

    def counting(model, texts, *args, **kwargs):
        seen.append(sum(map(len, texts)))
        return encode(model, texts, *args, **kwargs)

    monkeypatch.setattr(embed, "encode", counting)
    monkeypatch.setattr(embed.console.Bar, "set", moving)
    assert run(folder, "--out", folder / "v.parquet", "--what", "tokens") == 0
    lengths = [len(row["text"]) for row in rows]
    assert seen[0] == 0, "first it only checks"
    assert sum(seen) == sum(lengths)
    assert len(seen) > 4
    assert max(seen) < 150 + max(lengths)
    assert parquet.ParquetFile(folder / "v.parquet").num_row_groups == len(rows)
    assert bars == sorted(bars)
    assert len(set(bars)) > len(seen), "the bar moves within a part"


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
    ("line", "message"),
    [
        (r'{"id": "s", "text": "a \ud800 b"}', "its 'text' is not Unicode: character 2 is '\\ud800'"),
        (r'{"id": "s \udfff", "text": "a"}', "its 'id' is not Unicode: character 2 is '\\udfff'"),
        ("[" * 100_000, "its JSON is nested too deeply"),
        ('{"id": [1], "text": "a"}', "its 'id' is of type list: use text or a number"),
        ('{"id": true, "text": "a"}', "its 'id' is of type bool: use text or a number"),
    ],
)
def test_a_line_that_only_looks_right_can_be_skipped(saved, capsys, line, message):
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
        (["--out", "v.npy", "--what", "tokens"], "takes one vector per document; for tokens use .parquet"),
        (["--out", "v.npy", "--what", "vec"], "'vec' must be one of 'document', 'tokens', 'windows'"),
        (["--out", "v.npy", "--pooling", "max"], "'max' must be one of 'mean', 'state'"),
        (["--out", "v.npy", "--batch-size", "0"], "--batch-size 0: it must be at least 1"),
        (["--out", "v.npy", "--no-state", "--pooling", "state"], "needs the state, which use_state=False (--no-state)"),
        (["--out", "v.npy", "--on-error", "cry"], "it must be stop or skip"),
        (["--out", "v.npy", "--window", "9"], "reads 11 tokens at once"),
    ],
)
def test_bad_usage_says_what_to_do(saved, arguments, message, capsys, monkeypatch):
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


def test_a_plain_encoder_is_read_in_windows_that_stand_alone(plain):
    folder, base, rows = plain
    assert run(folder, "--out", folder / "v.npy", "--window", "9", "--overlap", "2") == 0
    model = cf.add_recurrence(base, tokenizer=TOKENIZER, window=9)
    texts = [row["text"] for row in rows]
    expected = encode(model, texts, TOKENIZER, use_state=False, overlap=2)
    np.testing.assert_allclose(np.load(folder / "v.npy"), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # not so with a state
        model.recurrence.networks[0][-1].weight.normal_()
    assert not np.allclose(encode(model, texts, TOKENIZER, overlap=2), expected, atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [(["v.npy", "--pooling", "state"], "--pooling mean"), (["v.parquet", "--what", "windows"], "--what document")],
)
def test_a_plain_encoder_has_no_state(plain, capsys, monkeypatch, arguments, instead):
    monkeypatch.chdir(plain[0])
    assert run(plain[0], "--out", *arguments) == 2
    error = capsys.readouterr().err
    assert "is a plain model: its recurrence is untrained, so it has no state" in error
    assert f"Use {instead}" in error


# --- sentence-transformers -----------------------------------------------------------------------------------------


@pytest.fixture
def pipeline_of():
    """Makes a pipeline of a module and mean pooling."""
    transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from sentence_transformers.sentence_transformer.modules import Pooling

    def make(module, **settings):
        pooling = Pooling(module.get_embedding_dimension(), **settings)
        return transformers.SentenceTransformer(modules=[module, pooling], device="cpu")

    return make


def test_sentence_transformers_reads_whole_documents(saved, tmp_path, pipeline_of):
    from sentence_transformers import SentenceTransformer

    folder, model, rows = saved
    texts = [row["text"] for row in rows]
    pipeline = pipeline_of(cf.RecurrentTransformer(str(folder / "model")))
    expected = encode(model, texts, TOKENIZER)
    np.testing.assert_allclose(pipeline.encode(texts), expected, rtol=1e-4, atol=1e-5)
    pipeline.save(str(tmp_path / "pipeline"))
    again = SentenceTransformer(str(tmp_path / "pipeline"), device="cpu", trust_remote_code=True)
    np.testing.assert_allclose(again.encode(texts), expected, rtol=1e-4, atol=1e-5)
    settings = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
    other = SentenceTransformer(str(tmp_path / "pipeline"), device="cpu", trust_remote_code=True, model_kwargs=settings)
    assert other[0].auto_model.dtype == torch.bfloat16
    assert other[0].auto_model.base.config._attn_implementation != again[0].auto_model.base.config._attn_implementation


def test_a_pipeline_can_be_had_from_the_hub(saved, monkeypatch, pipeline_of):
    """As far as that can be tested without one: sentence-transformers' own loaders get what they need."""
    folder, _, _ = saved
    cf.RecurrentTransformer(str(folder / "model"), use_state=False).save(str(folder / "pushed"))
    asked = []

    def found(model_name_or_path, subfolder, **where):
        asked.append((model_name_or_path, subfolder, where))
        return str(folder / "pushed")

    from sentence_transformers.base.modules import module

    monkeypatch.setattr(module, "load_dir_path", found)
    monkeypatch.setattr(module, "load_file_path", lambda filename, **where: f"{found(**where)}/{filename}")
    where = {"token": "t", "cache_folder": "c", "revision": "r", "local_files_only": True}
    loaded = cf.RecurrentTransformer.load("me/my-pipeline", subfolder="", **where, trust_remote_code=True)
    assert asked == [("me/my-pipeline", "", where)] * 2
    assert loaded.use_state is False


def test_an_empty_text_in_a_batch_is_zero(saved, pipeline_of):
    folder, model, _ = saved
    pipeline = pipeline_of(cf.RecurrentTransformer(str(folder / "model")))
    found = pipeline.encode(["some words", "", PROSE[:90]])
    np.testing.assert_allclose(found, encode(model, ["some words", "", PROSE[:90]], TOKENIZER), rtol=1e-4, atol=1e-5)
    assert not found[1].any()
    assert not pipeline.encode([""]).any()


def test_a_prompt_can_be_left_out_of_the_mean(saved, pipeline_of):
    folder, model, _ = saved
    pipeline = pipeline_of(cf.RecurrentTransformer(str(folder / "model")), include_prompt=False)
    prompt, texts = "query: ", ["the statement", PROSE[:90]]
    found = pipeline.encode(texts, prompt=prompt)
    for vector, one in zip(found, encode(model, [prompt + t for t in texts], TOKENIZER, output="tokens"), strict=True):
        own = one.offsets[:, 1] >= len(prompt)  # the space between them is the text's, in its first word or alone
        assert not own.all()
        np.testing.assert_allclose(vector, one.vectors[own].mean(axis=0), rtol=1e-4, atol=1e-5)


def test_a_head_is_left_out_of_a_pipeline(tmp_path, pipeline_of, capfd):
    model = model_of("gpt2", "causal")
    model.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    pipeline = pipeline_of(cf.RecurrentTransformer(tmp_path / "model"))
    told = capfd.readouterr()
    assert not told.out + told.err
    expected = encode(model, TEXTS[2:4], TOKENIZER)
    np.testing.assert_allclose(pipeline.encode(TEXTS[2:4]), expected, rtol=1e-4, atol=1e-5)


def test_a_model_that_finds_answers_in_a_pipeline(tmp_path, pipeline_of):
    base = tiny.base("bert", "none", vocab_size=len(TOKENIZER))
    model = cf.add_recurrence(base, prefix=(1,), suffix=(2,), head="question-answering", window=16).eval()
    model.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    pipeline = pipeline_of(cf.RecurrentTransformer(tmp_path / "model"))
    expected = encode(model, TEXTS[2:4], TOKENIZER)
    np.testing.assert_allclose(pipeline.encode(TEXTS[2:4]), expected, rtol=1e-4, atol=1e-5)


def test_what_a_pipeline_cannot_do_is_refused(saved, pipeline_of):
    folder, model, _ = saved
    with pytest.raises(ValueError, match="window: the model is recurrent already"):
        cf.RecurrentTransformer(folder / "model", window=9)
    with pytest.raises(ValueError, match="needs a recurrent model and its tokenizer"):
        cf.RecurrentTransformer(model)
    pipeline = pipeline_of(cf.RecurrentTransformer(model, TOKENIZER))
    assert pipeline.max_seq_length is None
    with pytest.raises(ValueError, match="max_seq_length=20: no text is cut here"):
        pipeline.max_seq_length = 20
