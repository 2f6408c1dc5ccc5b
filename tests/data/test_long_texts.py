# SPDX-License-Identifier: Apache-2.0
"""Long texts in pieces: the same tokens, offsets and counts as those of the whole text, in bounded memory."""

import os
import subprocess
import sys

import numpy as np
import pytest
from helpers.corpora import PROSE, Characters
from helpers.fast_tokenizers import KINDS, fast_tokenizer, hard_text, huggingface_tokenizer

from carryforward.data import texts, tokenization
from carryforward.data.long_texts import LongTextTokenizer
from carryforward.data.texts import count_text, find_surrogate
from carryforward.data.tokenization import Encoder, check_text, tokenise_texts

RUNS = [
    "a", "ab", "aab", " ", "\r\n", "1", "-", "漢", "e\u0301",
    "👩‍👩‍👧‍👦", "\u0301", "<pad>", " <pad>", "x ", "<|end|",
]  # fmt: skip


class Recorded(LongTextTokenizer):
    """Records the characters of the longest piece."""

    longest = 0

    def _encode(self, text, begin, stop, offsets):
        self.longest = max(self.longest, stop - begin)
        return super()._encode(text, begin, stop, offsets)


def assert_exact(tokenizer, text, size, overlap):
    """Compare with the whole text; return the number of pieces and the characters of the longest one."""
    whole, long = tokenizer.encode(text, add_special_tokens=False), Recorded(tokenizer, size, overlap)
    pieces = list(long.encode(text, offsets=True))
    assert np.concatenate([piece.ids for piece in pieces]).tolist() == whole.ids
    assert np.concatenate([piece.offsets for piece in pieces]).tolist() == list(map(list, whole.offsets))
    assert [piece.ids.tolist() for piece in long.encode(text)] == [piece.ids.tolist() for piece in pieces]
    assert [piece.start for piece in pieces[1:]] == [piece.stop for piece in pieces[:-1]]
    assert (pieces[0].start, pieces[-1].stop) == (0, len(text))
    assert all(len(piece.ids) for piece in pieces) or len(pieces) == 1
    return len(pieces), long.longest


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_tokens_of_the_whole_text(kind):
    tokenizer, pieces, simply_cut = fast_tokenizer(kind), 0, 0
    for seed in range(20):
        text = hard_text(seed, 500 + 100 * seed)
        for overlap in (32, 128):
            pieces += assert_exact(tokenizer, text, 4 * overlap, overlap)[0]
        parts = [text[start : start + 128] for start in range(0, len(text), 128)]
        ids = [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False).ids]
        simply_cut += ids != tokenizer.encode(text, add_special_tokens=False).ids
    assert pieces > 40, "more than one a text and overlap"
    assert simply_cut > 12, "the texts are hard to cut"


@pytest.mark.parametrize("kind", KINDS)
def test_runs_and_long_words(kind):
    tokenizer, prose = fast_tokenizer(kind), hard_text(1, 300)
    for run in RUNS:
        for text in (run * (3000 // len(run)), prose + run * (1500 // len(run)) + "Y " + prose):
            assert_exact(tokenizer, text, 256, 64)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_stay_small_where_they_can(kind):
    prose = "".join(text for text in PROSE if len(text) < 10_000)[:50_000]
    pieces, longest = assert_exact(fast_tokenizer(kind), prose, 2048, 512)
    if kind == "unsplit unigram":  # the best path is that of the whole text
        assert longest >= len(prose)
    else:
        assert longest == 2048
        assert pieces > len(prose) / 2048
    if kind in ("gpt2", "llama3", "unsplit bytes"):
        for run in ("a", "ab", "1", "漢"):
            assert assert_exact(fast_tokenizer(kind), run * (30_000 // len(run)), 2048, 512)[1] == 2048


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(tokenization, "SIZE", 256)
    monkeypatch.setattr(tokenization, "OVERLAP", 64)


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama2"])
@pytest.mark.parametrize("bos", [None, 7])
def test_the_encoder_truncates_and_counts_as_on_the_whole_text(kind, bos, request, monkeypatch):
    strings = [hard_text(seed, 3000) for seed in range(3)] + ["", "short", "   "]
    lengths = [len(fast_tokenizer(kind).encode(text, add_special_tokens=False).ids) for text in strings]
    limits = [None, 1, 2, 50, 51, 52, 53, *(length + more for length in lengths[:3] for more in (-1, 0, 1))]
    whole = {limit: list(Encoder(huggingface_tokenizer(kind), limit, bos).encode(strings)) for limit in limits}
    strings_of = {limit: Encoder(huggingface_tokenizer(kind), limit).encode_pieces(strings[0]) for limit in limits}
    request.getfixturevalue("small_pieces")
    for limit in limits:
        encoder = Encoder(huggingface_tokenizer(kind), limit, bos)
        for expected, actual in zip(whole[limit], encoder.encode(strings), strict=True):
            assert actual.ids.tolist() == expected.ids.tolist()
            assert actual.ids.dtype == expected.ids.dtype
            assert (actual.words, actual.bytes, actual.line_ends) == (
                expected.words,
                expected.bytes,
                expected.line_ends,
            )
        ids, pieces = Encoder(huggingface_tokenizer(kind), limit).encode_pieces(strings[0])
        assert ids.tolist() == strings_of[limit][0].tolist()
        assert pieces == strings_of[limit][1]
    assert len(list(Encoder(huggingface_tokenizer(kind)).encode_parts(strings[0]))) > 1


def test_only_the_beginning_of_a_text_that_is_truncated_is_tokenised(small_pieces, monkeypatch):
    read = []
    original = LongTextTokenizer._encode
    monkeypatch.setattr(LongTextTokenizer, "_encode", lambda *args: read.append(args[3]) or original(*args))
    text = "one two three " * 10_000
    (encoded,) = Encoder(huggingface_tokenizer("gpt2"), max_tokens=20).encode([text])
    assert len(encoded.ids) == 20
    assert max(read) < 1000


@pytest.mark.parametrize("kind", ["roberta", "bert", "unigram"])
@pytest.mark.parametrize("offsets", [False, True])
def test_texts_with_offsets(kind, offsets, small_pieces):
    tokenizer, strings = huggingface_tokenizer(kind), ["short", hard_text(2, 2000), "", hard_text(3, 3000), "a b"]
    made = list(tokenise_texts(tokenizer, strings, offsets))
    assert len(made) == len(strings)
    for text, (ids, spans) in zip(strings, made, strict=True):
        expected = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        assert ids.tolist() == expected["input_ids"]
        assert ids.dtype == np.int32
        assert (spans is None) != offsets
        if offsets:
            assert (spans.dtype, spans.shape) == (np.int64, (len(ids), 2))
            assert spans.tolist() == list(map(list, expected["offset_mapping"]))


def test_slow_tokenizers_get_the_whole_text(small_pieces):
    text = "a b\n" * 200
    (encoded,) = Encoder(Characters()).encode([text])
    assert (len(encoded.ids), encoded.words, encoded.bytes, encoded.line_ends) == (800, 400, 800, 200)
    assert [len(ids) for ids, _ in tokenise_texts(Characters(), [text, "ab"], offsets=False)] == [800, 2]


def test_counts_are_those_of_the_whole_text(monkeypatch):
    monkeypatch.setattr(texts, "_COUNTED", 7)
    spaces = "".join(chr(i) for i in range(0x3001) if chr(i).isspace())
    for text in [*(hard_text(seed, 400) for seed in range(40)), "", " ", spaces, f"a{spaces}b", "x" * 50, "a " * 50]:
        for stop in {0, len(text) // 3, len(text)}:
            used = text[:stop]
            expected = len(used.split()), len(used.encode()), used.count("\n")
            assert count_text(text, 0, stop) == expected
            parts = [count_text(text, 0, stop // 2), count_text(text, stop // 2, stop)]
            assert tuple(map(sum, zip(*parts, strict=True))) == expected


def test_halves_of_surrogate_pairs_are_found():
    assert find_surrogate("é👍") is None
    assert find_surrogate("\ud800") == 0
    with pytest.raises(ValueError, match=r"it is not Unicode: character 2 is '\\udfff'"):
        check_text("it", "é👍\udfff")


def test_memory_does_not_grow_with_the_text(tmp_path):
    """The whole text of 8 million characters would take over 1 GB."""
    code = """
import resource, sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from carryforward.data.tokenization import Encoder, tokenise_texts

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
bpe = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=bpe))
text = "one two three " * 600_000
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (20 if sys.platform == "darwin" else 10)
before = peak()
assert sum(len(part.ids) for part in encoder.encode_parts(text)) == len(text)
print(peak() - before)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 400
