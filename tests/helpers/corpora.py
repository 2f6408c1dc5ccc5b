# SPDX-License-Identifier: Apache-2.0
"""Corpora in folders and in memory, and tokenizers, for the tests of `carryforward.data`."""

import hashlib
from pydoc_data import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from carryforward.data.corpora import open_corpus
from carryforward.data.texts import Corpus, Text

PROSE = list(topics.topics.values())


def byte_level_tokenizer():
    """Return a byte-level BPE tokenizer whose post-processor trims offsets, as some published ones do."""
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
    """A slow tokenizer with one token per character."""

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
    """Write files, given as names and contents, to a folder; return its path as a string."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(folder)


def contents(source, split="train", **kwargs):
    """Return the names and texts of a corpus."""
    return {text.name: text.text for text in open_corpus(str(source), split, **kwargs)}


def corpus_of(*strings, size=None, max_tokens=None, key="k"):
    """Return a corpus of texts in memory; `key` is its fingerprint."""
    return Corpus("c", "train", lambda: (Text(str(i), s) for i, s in enumerate(strings)), lambda: key, size, max_tokens)


# WikiText of three articles, with lines that only look like titles
WIKI = (
    " \n = A = \n \n text \n = not a title = \n more \n \n = = Section = = \n \n t\x85\u2028u \n \n"
    " = E = mc2 = \n \n x \n \n = = = Deeper = = = \n \n = C = \n \n"
)


def list_books(folder, split, books):
    """Write a list of checksums of books; return its folder."""
    lines = [f"{split}/{n}\t{len(b)}\t{hashlib.sha256(b).hexdigest()}\n" for n, b in books.items()]
    write(folder, {f"{split}_bytes_sha256.tsv": "".join(lines)})
    return folder
