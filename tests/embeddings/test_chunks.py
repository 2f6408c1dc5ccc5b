# SPDX-License-Identifier: Apache-2.0
"""Vectors of chunks: pooled from tokens that were read with the whole document, whatever the batch and the pieces."""

import numpy as np
import pytest
import torch
from helpers import tiny
from helpers.embedding import PROSE, TEXTS, TOKENIZER, model_of

import carryforward as cf
from carryforward.embeddings.encode import encode

KV = {"slots": 0, "recent": 3, "sinks": 1}
KEPT = cf.KVMemoryConfig(recent=3, sinks=1)
SPANS = [[(0, 5), (3, 12)], [], [(0, 1), (250, 251), (7, 700), (2, 900), (400, 640)], [(10, 60)], [(1399, 1400)]]


def whole(model, text, **arguments):
    """Token vectors from one call over the whole document, and the tokens' characters."""
    encoded = TOKENIZER(text, add_special_tokens=False, return_offsets_mapping=True)
    with torch.no_grad():
        vectors = model(torch.tensor([encoded["input_ids"]]), **arguments).last_hidden_state[0].numpy()
    return vectors, encoded["offset_mapping"]


@pytest.mark.parametrize(
    ("name", "fields", "overlap"),
    [("bert", {}, 0), ("bert", KV, 3), ("modernbert", KV, 0), ("gpt2", {}, 3), ("gpt2", KV, 0)],
)
def test_a_chunk_is_the_mean_of_the_tokens_that_end_in_it(name, fields, overlap):
    model = model_of(name, "none", **fields)
    chunks = encode(model, TEXTS, TOKENIZER, output="chunks", chunks=SPANS, overlap=overlap, batch_size=2)
    for text, spans, result in zip(TEXTS, SPANS, chunks, strict=True):
        assert result.vectors.shape == (len(spans), 16)
        assert result.spans.tolist() == [list(span) for span in spans]
        vectors, offsets = whole(model, text, overlap=overlap) if text else (None, [])
        for (start, stop), vector in zip(spans, result.vectors, strict=True):
            inside = [i for i, (_, end) in enumerate(offsets) if start < end <= stop]
            expected = vectors[inside].mean(axis=0) if inside else np.zeros(16)
            np.testing.assert_allclose(vector, expected, rtol=1e-4, atol=1e-5)


def test_chunks_alone_equal_chunks_in_a_batch():
    model = model_of("bert", "none")
    together = encode(model, TEXTS, TOKENIZER, output="chunks", chunks=7)
    for text, chunks in zip(TEXTS, together, strict=True):
        (alone,) = encode(model, [text], TOKENIZER, output="chunks", chunks=7)
        np.testing.assert_allclose(chunks.vectors, alone.vectors, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(chunks.spans, alone.spans)


@pytest.mark.parametrize("size", [1, 5, 10**6])
def test_chunks_of_a_size_divide_a_document(size):
    """Their spans, given back, are the same chunks; and together they are the document."""
    model = model_of("gpt2", "none")
    documents = encode(model, TEXTS, TOKENIZER)
    chunks = encode(model, TEXTS, TOKENIZER, output="chunks", chunks=size)
    again = encode(model, TEXTS, TOKENIZER, output="chunks", chunks=[one.spans.tolist() for one in chunks])
    for text, document, one, two in zip(TEXTS, documents, chunks, again, strict=True):
        count = len(TOKENIZER(text)["input_ids"])
        assert len(one.vectors) == -(-count // size)
        assert "".join(text[start:stop] for start, stop in one.spans) == text
        np.testing.assert_array_equal(one.vectors, two.vectors)
        if text:
            tokens = np.minimum(size, count - size * np.arange(len(one.vectors)))
            np.testing.assert_allclose(tokens @ one.vectors / count, document, rtol=1e-4, atol=1e-6)
    if size > 900:
        np.testing.assert_array_equal(chunks[2].vectors[0], documents[2])


def test_a_chunk_without_tokens_is_zero_and_is_reported(caplog):
    model = model_of("bert", "none")
    (result,) = encode(model, ["one two"], TOKENIZER, output="chunks", chunks=[[(0, 1), (0, 7)]], normalize=True)
    ends = {end for _, end in TOKENIZER("one two", return_offsets_mapping=True)["offset_mapping"]}
    assert 1 not in ends
    assert not result.vectors[0].any()
    assert np.linalg.norm(result.vectors[1]) == pytest.approx(1)
    assert "1 chunks have no tokens" in caplog.text


@pytest.mark.parametrize("output", ["document", "chunks", "tokens"])
def test_a_prompt_is_read_but_is_no_part_of_the_text(output):
    model, prompt = model_of("bert", "none"), "query: "
    chunks = {"chunks": SPANS[2:4]} if output == "chunks" else {}
    shifted = {"chunks": [[(a + 7, b + 7) for a, b in spans] for spans in SPANS[2:4]]} if chunks else {}
    prompted = encode(model, TEXTS[2:4], TOKENIZER, output=output, prompt=prompt, **chunks)
    longer = encode(model, [prompt + text for text in TEXTS[2:4]], TOKENIZER, output=output, **shifted)
    for text, one, two in zip(TEXTS[2:4], prompted, longer, strict=True):
        if output == "document":
            np.testing.assert_array_equal(one, two)
        elif output == "chunks":
            np.testing.assert_array_equal(one.vectors, two.vectors)
        else:
            own = two.offsets[:, 1] > len(prompt)
            assert not own.all()
            np.testing.assert_array_equal(one.vectors, two.vectors[own])
            assert "".join(text[a:b] for a, b in one.offsets) == text


def window_vectors(model, ids):
    """The base model's vectors of each window of a document, with those of its special tokens: prefix, own, suffix."""
    recurrence = model.config.recurrence
    p, s = len(recurrence.prefix), len(recurrence.suffix)
    size = recurrence.window - p - s
    for start in range(0, len(ids), size):
        window = [*recurrence.prefix, *ids[start : start + size], *recurrence.suffix]
        with torch.no_grad():
            hidden = model.base(torch.tensor([window])).last_hidden_state[0]
        yield hidden[:p], hidden[p : len(window) - s], hidden[len(window) - s :]


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_special_tokens_count_in_every_window(name):
    model = model_of(name, "none", overlap=0)
    pool = {"use_state": False, "batch_size": 3}
    mean = encode(model, TEXTS, TOKENIZER, special_tokens=True, **pool)
    most = encode(model, TEXTS, TOKENIZER, pooling="max", special_tokens=True, **pool)
    most_own = encode(model, TEXTS, TOKENIZER, pooling="max", **pool)
    first = encode(model, TEXTS, TOKENIZER, pooling="cls", **pool)
    for i, text in enumerate(TEXTS):
        windows = list(window_vectors(model, TOKENIZER(text)["input_ids"]))
        if not windows:
            assert not np.stack([mean[i], most[i], most_own[i], first[i]]).any()
            continue
        everything = torch.cat([part for window in windows for part in window])
        own = torch.cat([own for _, own, _ in windows])
        first_tokens = torch.cat([prefix[:1].expand(len(own), -1) for prefix, own, _ in windows])
        np.testing.assert_allclose(mean[i], everything.mean(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(most[i], everything.amax(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(most_own[i], own.amax(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(first[i], first_tokens.mean(0), rtol=1e-4, atol=1e-5)


def test_chunks_with_special_tokens_add_up_to_the_document():
    model = model_of("bert", "none", overlap=0)
    text, size, special = TEXTS[2], 8, 3  # windows of 8 tokens between 1 + 2 special ones
    (chunks,) = encode(model, [text], TOKENIZER, output="chunks", chunks=size, special_tokens=True)
    (document,) = encode(model, [text], TOKENIZER, special_tokens=True)
    count = len(TOKENIZER(text)["input_ids"])
    weights = np.minimum(size, count - size * np.arange(len(chunks.vectors))) + special
    np.testing.assert_allclose(weights @ chunks.vectors / weights.sum(), document, rtol=1e-4, atol=1e-6)


def test_a_plain_encoder_is_read_in_independent_windows():
    plain = tiny.base("bert", "none", vocab_size=len(TOKENIZER))
    made = cf.add_recurrence(plain, tokenizer=TOKENIZER, window=40, memory="vector")
    random = torch.get_rng_state()
    vectors = encode(plain, TEXTS, TOKENIZER, pooling="max")
    assert torch.equal(torch.get_rng_state(), random)
    np.testing.assert_array_equal(vectors, encode(made, TEXTS, TOKENIZER, pooling="max", use_state=False))
    masked = tiny.base("bert", "masked", vocab_size=len(TOKENIZER))
    assert encode(masked, TEXTS[:1], TOKENIZER).shape == (1, 16), "its head is not used"


@pytest.mark.parametrize("output", ["document", "chunks", "tokens"])
def test_vectors_of_an_untrained_state_are_refused(output):
    base = tiny.base("bert", "none", vocab_size=len(TOKENIZER))
    chunks = {"chunks": 4} if output == "chunks" else {}
    model = cf.add_recurrence(base, prefix=(2,), suffix=(3,), window=16, memory="vector")
    with pytest.raises(ValueError, match=r"memory \(vector\) is untrained.*use_state=False \(--no-state\)"):
        encode(model, TEXTS, TOKENIZER, output=output, **chunks)
    assert len(encode(model, TEXTS, TOKENIZER, output=output, use_state=False, **chunks)) == len(TEXTS)
    kept = cf.add_recurrence(base, prefix=(2,), suffix=(3,), window=16, memory=KEPT, documents=tiny.TEXT)
    assert len(encode(kept, TEXTS, TOKENIZER, output=output, **chunks)) == len(TEXTS), "works without training"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, 'chunks=None: output="chunks" needs the tokens of a chunk'),
        ({"chunks": 0}, "chunks=0: "),
        ({"chunks": True}, "chunks=True: "),
        ({"chunks": "all"}, "chunks='all': "),
        ({"chunks": [[(0, 3)]]}, "chunks has the spans of 1 texts, and there are 2"),
        ({"chunks": [[(0, 3)], 5]}, r"chunks\[1\] is of type int: give a list"),
        ({"chunks": [[(0, 3)], [5]]}, r"chunks\[1\]\[0\]=5 must be two integers, 0 <= start < stop <= 40"),
        ({"chunks": [[(0, 3)], [(0, 4, 5)]]}, r"chunks\[1\]\[0\]=\(0, 4, 5\) must be two integers"),
        ({"chunks": [[(3, 3)], []]}, r"chunks\[0\]\[0\]=\(3, 3\) must be two integers"),
        ({"chunks": [[(-1, 3)], []]}, r"chunks\[0\]\[0\]=\(-1, 3\) must be two integers"),
        ({"chunks": [[], [(0, 41)]]}, r"chunks\[1\]\[0\]=\(0, 41\) must be .* <= 40"),
        ({"chunks": [[(0, 1.0)], []]}, r"chunks\[0\]\[0\]=\(0, 1.0\) must be two integers"),
        ({"chunks": 5, "output": "tokens"}, "chunks is given, but output='tokens'"),
        ({"chunks": 5, "pooling": "state"}, 'pooling="state": a chunk has no state of its own'),
        ({"output": "document", "pooling": "state", "special_tokens": True}, 'special_tokens=True: pooling="state"'),
        ({"chunks": 5, "normalize": 1}, "normalize=1 must be True or False, or None"),
        ({"chunks": 5, "prompt": "\ud800"}, "prompt is not Unicode"),
        ({"chunks": 5, "tokenizer": None}, "tokenizer is missing"),
        ({"chunks": 5, "model": "bundled"}, "tokenizer is given, and the model 'bundled' has its own"),
        ({"chunks": 5, "pooling": "cls", "model": model_of("gpt2", "none")}, 'pooling="cls": no special token'),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    kwargs = {"model": model_of("bert", "none"), "tokenizer": TOKENIZER, "output": "chunks"} | arguments
    with pytest.raises(ValueError, match=message):
        encode(kwargs.pop("model"), [PROSE[:30], PROSE[:40]], kwargs.pop("tokenizer"), **kwargs)
