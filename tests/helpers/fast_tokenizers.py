# SPDX-License-Identifier: Apache-2.0
"""Small fast tokenizers of all common kinds, and texts that are hard to tokenise in pieces."""

import random
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from .corpora import PROSE

_PROSE = PROSE[:12]
_ALPHABET = [*"abcdefghijklmnopqrstuvwxyzABCXYZ0123456789 \n.,'-é漢字한"]
_LLAMA3 = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ADDED = [
    AddedToken("<|end|>", special=True),
    AddedToken("<pad>", special=True, lstrip=True, rstrip=True),
    AddedToken("aab", normalized=True),
    AddedToken("ing", normalized=False, single_word=True),
]
_PARTS = [
    "the house, the shed", "Straße ÉCOLE naïve", "it's they'll 'S", "\r\n", "\n\n", "    ", "\t \n ", " ", "<|end|>",
    "<pad>", " <pad>  ", "aab", "ing", " ing ", "<|en", "12345678", "3.14159", "漢字漢字", "한국어", "각",
    "e\u0301e\u0301", "o\u0308\u0323", "👩‍👩‍👧‍👦", "🇩🇪🇫🇷", "👍🏽", "ﬁﬂ", "①½", "\u00a0", "\u200b", "\u3000", "\ufeff",
    "İ", "ß", "Ω", "…", "--------", "ab", "ba", "aa", "a", "x", "", "=", "_", "▁", "Ġ", "\x00", "\x85", "\u2028",
]  # fmt: skip


def _trained(model, trainer, normalizer=None, pre_tokenizer=None, post_processor=None, added=_ADDED, **kwargs):
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    rows = [line for text in _PROSE for line in text.splitlines()]
    rows += ["a" * 40, "ab" * 20, "-" * 40, "漢字한국어", "👍🏽 é", "0123456789" * 3]
    tokenizer.train_from_iterator(rows, trainer(vocab_size=500, show_progress=False, **kwargs))
    tokenizer.add_tokens(added)
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    return tokenizer


def _byte_level(pattern=None, prefix=False, normalizer=None, trim=False):
    own = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=pattern is None)
    split = pattern and pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), own])
    return _trained(
        models.BPE(), trainers.BpeTrainer, normalizer, split or own,
        processors.ByteLevel(trim_offsets=True) if trim else None,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip


def _sentencepiece_bpe():
    """As Llama 2's: no pre-tokenizer, spaces are letters, unknown characters are bytes."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return _trained(
        models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True), trainers.BpeTrainer, normalizer,
        special_tokens=special, initial_alphabet=_ALPHABET, limit_alphabet=60,
    )  # fmt: skip


def _unigram(split):
    normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    return _trained(
        models.Unigram(), trainers.UnigramTrainer, normalizer, pre_tokenizers.Metaspace(split=split),
        unk_token="<unk>", special_tokens=["<unk>"], initial_alphabet=_ALPHABET,
    )  # fmt: skip


_KINDS = {
    "gpt2": lambda: _byte_level(),
    "roberta": lambda: _byte_level(prefix=True, trim=True),
    "llama3": lambda: _byte_level(_LLAMA3),
    "unsplit bytes": lambda: _byte_level(r"\A\z"),
    "normalized bytes": lambda: _byte_level(
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()])
    ),
    "bert": lambda: _trained(
        models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=20), trainers.WordPieceTrainer,
        normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer(), special_tokens=["[UNK]"],
    ),
    "llama2": _sentencepiece_bpe,
    "unigram": lambda: _unigram(split=True),
    "unsplit unigram": lambda: _unigram(split=False),
    "words": lambda: _trained(
        models.WordLevel(unk_token="[UNK]"), trainers.WordLevelTrainer,
        normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
        pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]),
        special_tokens=["[UNK]"],
    ),
    "unknown characters": lambda: _trained(
        models.BPE(unk_token="[UNK]", fuse_unk=True, end_of_word_suffix="</w>"), trainers.BpeTrainer,
        normalizers.Lowercase(), pre_tokenizers.WhitespaceSplit(), special_tokens=["[UNK]"], end_of_word_suffix="</w>",
        limit_alphabet=30,
    ),
}  # fmt: skip
KINDS = list(_KINDS)


@cache
def fast_tokenizer(kind):
    """Return a small tokenizer of one of the `KINDS`, trained on prose, with added tokens."""
    return _KINDS[kind]()


def huggingface_tokenizer(kind):
    """Return such a tokenizer for `transformers`."""
    return PreTrainedTokenizerFast(tokenizer_object=fast_tokenizer(kind), bos_token="<|end|>", model_max_length=10)


def hard_text(seed, length):
    """Return a text of about `length` characters in which runs, periods, words and odd characters take turns."""
    draw = random.Random(seed)
    parts = draw.sample(_PARTS, draw.randint(1, len(_PARTS)))
    text = ""
    while len(text) < length:
        prose = draw.choice(_PROSE)
        start = draw.randrange(len(prose))
        text += draw.choice([
            draw.choice(parts), draw.choice(parts) * draw.choice([1, 3, 20]), "".join(draw.choices(parts, k=10)),
            prose[start : start + draw.choice([5, 80, 400])],
        ])  # fmt: skip
    return text
