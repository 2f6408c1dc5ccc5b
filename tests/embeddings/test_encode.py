# SPDX-License-Identifier: Apache-2.0
"""Vectors of whole documents: equal to those of one forward call, and aligned to the text."""

import sys
import unicodedata

import numpy as np
import pytest
import torch
from helpers import encoders, tiny
from helpers.embedding import TEXTS, TOKENIZER, model_of
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import carryforward as cf
from carryforward.backbones import hooks
from carryforward.embeddings.encode import encode
from carryforward.utils import progress


def whole(model, text, **arguments):
    """Token vectors from one call over the whole document."""
    ids = torch.tensor([TOKENIZER(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        return model(ids, **arguments).last_hidden_state[0].numpy()


@pytest.mark.parametrize("overlap", [None, 0, 3])
@pytest.mark.parametrize("fields", [{}, {"slots": 0, "recent": 3, "sinks": 1}], ids=["vector", "kv"])
@pytest.mark.parametrize("name", ["bert", "modernbert", "gpt2", "llama"])
def test_token_vectors_equal_those_of_one_call(name, fields, overlap):
    model = model_of(name, "none", **fields)
    encoded = encode(model, TEXTS, TOKENIZER, output="tokens", overlap=overlap, batch_size=2)
    for text, tokens in zip(TEXTS, encoded, strict=True):
        if text:
            np.testing.assert_allclose(tokens.vectors, whole(model, text, overlap=overlap), rtol=1e-4, atol=1e-5)
        else:
            assert tokens.vectors.shape == (0, model.config.base_config.hidden_size)


def test_special_tokens_that_stand_in_a_text_are_part_of_it():
    """Also at its ends, where a call would take them for those that a tokenizer has put around the document."""
    model, tokenizer = tiny.recurrent("bert", "none", prefix=(2,), suffix=(3,)), encoders.tokenizer()
    texts = ["[CLS] w7 w8 w9 [SEP]", "[CLS] [SEP]", "w7 [SEP] w8", "[CLS]"]
    encoded = encode(model, texts, tokenizer, output="tokens")
    means = encode(model, texts, tokenizer)
    for text, tokens, mean in zip(texts, encoded, means, strict=True):
        ids = tokenizer(text)["input_ids"]  # one window, which is the base model's
        with torch.no_grad():
            expected = model.base(torch.tensor([ids])).last_hidden_state[0, 1:-1].numpy()
        assert len(tokens.offsets) == len(expected) == len(text.split())
        np.testing.assert_allclose(tokens.vectors, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(mean, expected.mean(axis=0), rtol=1e-4, atol=1e-5)


def test_offsets_point_at_the_tokens_text():
    encoded = encode(model_of("bert", "none"), TEXTS, TOKENIZER, output="tokens")
    for text, tokens in zip(TEXTS, encoded, strict=True):
        assert "".join(text[a:b] for a, b in tokens.offsets) == text
        assert len(tokens.offsets) == len(tokens.vectors)


def wordpiece():
    """Like BERT's: lower case, no accents, and one token for unknown words."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer, trainers.WordPieceTrainer(vocab_size=90, special_tokens=["[UNK]"], show_progress=False)


def roberta():
    """Like RoBERTa's: several bytes per character; a word's token has the space before it, but its offsets do not."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)


@pytest.mark.parametrize("kind", [wordpiece, roberta])
def test_offsets_are_characters_for_every_kind_of_tokenizer(kind):
    text = "  Ça, cafe\u0301 et été\u00a0: naïve 🙂🙂 Zoë’s 👩\u200d👧 café — 日本 fin."
    tokenizer, trainer = kind()
    tokenizer.train_from_iterator(["café été ça naïve zoe's et fin"] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    model = tiny.recurrent("bert", "none", settings={"vocab_size": len(tokenizer)})
    (encoded,) = encode(model, [text], tokenizer, output="tokens")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).last_hidden_state[0].numpy()
    np.testing.assert_allclose(encoded.vectors, expected, rtol=1e-4, atol=1e-5)
    assert len(ids) > 2 * 8, "several windows"
    covered = {i for begin, end in encoded.offsets for i in range(begin, end)}
    assert covered >= {i for i, c in enumerate(text) if not c.isspace() and not unicodedata.combining(c)}
    assert (np.diff(encoded.offsets, axis=0) >= 0).all()
    plain = {}
    for token, (begin, end) in zip(tokenizer.convert_ids_to_tokens(ids), encoded.offsets, strict=True):
        folded = unicodedata.normalize("NFD", text[begin:end].lower())
        plain.setdefault("".join(c for c in folded if not unicodedata.combining(c)), token)
    known = {"cafe": "cafe", "ete": "ete", "naive": "naive"} if kind is wordpiece else {"cafe": "ĠcafÃ©", "🙂": "ð"}
    assert plain.items() >= known.items()


def test_a_documents_vector_is_the_mean_of_its_tokens():
    model = model_of("bert", "none")
    tokens = encode(model, TEXTS, TOKENIZER, output="tokens")
    vectors = encode(model, TEXTS, TOKENIZER)
    assert vectors.dtype == np.float32
    assert not vectors[1].any(), "an empty document"
    for document, vector in zip(tokens, vectors, strict=True):
        if len(document.vectors):
            np.testing.assert_allclose(vector, document.vectors.mean(axis=0), rtol=1e-4, atol=1e-6)


def test_states_are_those_that_pass_between_windows():
    model = model_of("gpt2", "none", overlap=2, slots=2)
    text = TEXTS[2][:300]
    ids = torch.tensor([TOKENIZER(text, add_special_tokens=False)["input_ids"]])
    expected = []
    with torch.no_grad():
        for end in range(9, ids.shape[1] + 1, 6):  # windows of 8, stride 6, each complete with the next token
            expected.append(model(ids[:, :end]).state.memory["vector"][0].numpy())
    states = encode(model, [text, "x"], TOKENIZER, output="windows")
    np.testing.assert_allclose(states[0], np.stack(expected), rtol=1e-4, atol=1e-5)
    assert states[1].shape == (0, 1, 2, 16)


def numbers(texts, **kwargs):
    """A tokenizer for texts that are lists of token ids, so that a test chooses the number of tokens."""
    return {"input_ids": [[int(number) for number in text.split()] for text in texts]}


def state_after(model, ids, overlap):
    """The vector state of a whole document, computed window by window with the base model."""
    recurrence, memory, context = model.config.recurrence, model.memory.vector, hooks.HookContext()
    prefix, suffix = recurrence.prefix, recurrence.suffix
    capacity = recurrence.window - len(prefix) - len(suffix)
    for start in range(0, len(ids), capacity - overlap):
        window = ids[start : start + capacity]
        last = start + capacity >= len(ids)
        model.base(torch.tensor([[*prefix, *window, *suffix]]), hook_context=context)
        pooled = len(window) - (0 if last else max(overlap - recurrence.overlap, 0))
        layers = [hidden[:, len(prefix) : len(prefix) + pooled] for hidden in context.take_layer_outputs()]
        state = memory.feed_forward(memory.pool(layers))
        if last:
            return state.flatten().numpy()
        context = hooks.HookContext()
        memory.read(state, context)


@pytest.mark.parametrize(("overlap", "slots"), [(2, 1), (2, 3), (0, 1), (4, 1)])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_the_state_of_a_document_is_that_after_all_of_it(name, overlap, slots):
    model = tiny.recurrent(name, "none", slots=slots)  # windows of 8 tokens, overlap 2
    lengths = [1, 2, 3, 7, 8, 9, 13, 14, 15, 50, 65, 130]
    documents = [tiny.documents(1, n, seed=n)[0].tolist() for n in lengths]
    texts = [" ".join(map(str, ids)) for ids in documents]
    vectors = encode(model, texts, numbers, pooling="state", overlap=overlap, batch_size=5)
    for n, ids, text, vector in zip(lengths, documents, texts, vectors, strict=True):
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
        passed_on = model.advance_state(ids[:, : n + 1]).memory["vector"].flatten().numpy()
        (vector,) = encode(model, [" ".join(map(str, ids[0, :n].tolist()))], numbers, pooling="state")
        np.testing.assert_array_equal(vector, passed_on)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_memory_tokens_stand_for_a_document(name):
    """Documents that end at different places of a window are read in one batch."""
    model = tiny.recurrent(name, "none", memory=cf.TokenMemoryConfig(memory_tokens=3))
    documents = [tiny.documents(1, n, seed=n) for n in (3, 8, 15, 33)]
    texts = [" ".join(map(str, ids[0].tolist())) for ids in documents]
    vectors = encode(model, texts, numbers, pooling="state")
    for ids, vector in zip(documents, vectors, strict=True):
        expected = model.advance_state(ids, final=True).memory["tokens"]
        np.testing.assert_allclose(vector, expected.flatten(), rtol=1e-4, atol=1e-5)
    windows = encode(model, texts, numbers, output="windows")
    assert [states.shape for states in windows] == [(n, 3, tiny.WIDTH) for n in (0, 0, 2, 5)]
    first_two = model.advance_state(documents[3][:, :15]).memory["tokens"]
    np.testing.assert_allclose(windows[3][1], first_two[0], rtol=1e-4, atol=1e-5)


def test_states_hold_the_vectors_of_a_model_with_two_memories():
    """Keys and values are carried too, but are not part of an embedding."""
    model = model_of("llama", "none", slots=2, recent=3, sinks=1)
    text = TEXTS[2][:300]
    ids = torch.tensor([TOKENIZER(text, add_special_tokens=False)["input_ids"]])
    state = model.advance_state(ids, final=True)
    assert state.memory.keys() == {"vector", "kv"}
    (vector,) = encode(model, [text], TOKENIZER, pooling="state")
    np.testing.assert_allclose(vector, state.memory["vector"].flatten().numpy(), rtol=1e-4, atol=1e-5)
    (states,) = encode(model, [text], TOKENIZER, output="windows")
    passed_on = model.advance_state(ids[:, :9]).memory["vector"][0].numpy()  # complete with the next token
    np.testing.assert_allclose(states[0], passed_on, rtol=1e-4, atol=1e-5)


def test_the_state_of_a_whole_document_cannot_be_continued():
    model = tiny.recurrent("gpt2", "none")
    state = model.advance_state(tiny.documents(1, 5), final=True)
    with pytest.raises(ValueError, match="read to their end"):
        model.advance_state(tiny.documents(1, 5), state=state)


def test_without_the_state_windows_are_the_base_models():
    model = model_of("bert", "none", overlap=0)
    (tokens,) = encode(model, TEXTS[2:3], TOKENIZER, output="tokens", use_state=False)
    ids = TOKENIZER(TEXTS[2], add_special_tokens=False)["input_ids"]
    prefix, suffix = list(model.config.recurrence.prefix), list(model.config.recurrence.suffix)
    with torch.no_grad():
        for start in range(0, len(ids), 8):
            window = torch.tensor([prefix + ids[start : start + 8] + suffix])
            vectors = model.base(window).last_hidden_state[0, len(prefix) : -len(suffix)].numpy()
            np.testing.assert_allclose(tokens.vectors[start : start + 8], vectors, rtol=1e-4, atol=1e-5)


def test_training_modes_and_random_numbers_are_unchanged():
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
    assert not capsys.readouterr().err, "no bar for work of less than two seconds"
    monkeypatch.setattr(progress.time, "monotonic", iter(range(0, 10**6, 3)).__next__)
    encode(model, TEXTS[:1], TOKENIZER)
    assert "embedding" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "head"), [("gpt2", "causal"), ("bert", "masked")])
def test_a_head_is_not_used(name, head):
    model = model_of(name, head).train()
    vectors = encode(model, TEXTS[:1], TOKENIZER)
    assert vectors.shape == (1, model.config.base_config.hidden_size)
    assert model.training
    bare = cf.RecurrentModel(model.config, base=model.base.base_model)
    bare.memory = model.memory
    model.eval()
    np.testing.assert_allclose(vectors, encode(bare.eval(), TEXTS[:1], TOKENIZER), rtol=1e-5, atol=1e-6)


KV = model_of("llama", "none", slots=0, recent=3, sinks=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output": "vector"}, "output='vector' must be one of 'document', 'chunks', 'tokens'"),
        ({"pooling": "sum"}, "pooling='sum' must be one of"),
        ({"pooling": "state", "use_state": False}, 'pooling="state" needs the state, which use_state=False'),
        ({"output": "windows", "use_state": False}, 'output="windows" needs the state, which use_state=False'),
        ({"model": KV, "pooling": "state"}, "carries keys and values of .*, not vectors"),
        ({"model": KV, "output": "windows"}, "carries keys and values of .*, not vectors"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"batch_size": -1}, "batch_size=-1 must be at least 1"),
        ({"overlap": 99, "texts": []}, "overlap=99 must be at least 0"),
        ({"texts": "one text"}, "texts is one string"),
        ({"texts": ["good", "a\ud800"]}, r"texts\[1\] is not Unicode: character 1 is '\\ud800'"),
        ({"texts": [None]}, r"texts\[0\] is of type NoneType"),
        ({"model": torch.nn.Linear(2, 2)}, "model is a Linear: give a transformers model, or the name of one"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    kwargs = {"model": model_of("gpt2", "none"), "texts": TEXTS, "tokenizer": TOKENIZER} | arguments
    with pytest.raises(ValueError, match=message):
        encode(kwargs.pop("model"), kwargs.pop("texts"), kwargs.pop("tokenizer"), **kwargs)
