# SPDX-License-Identifier: Apache-2.0
"""Which document holds a sentence? Documents of a length, each with one sentence about a person and that query.

After the passkey task of LongEmbed, with other texts: books, or Python's documentation. A document is found if its own
vector, or its best chunk's, is the nearest of all documents of that length.
"""

import random
from itertools import product
from typing import Any

import numpy as np
from arms import Reader
from ranking import rankings, word_spans

from carryforward.data.corpora import open_corpus

NAMES = ("Ada", "Boris", "Clara", "Dmitri", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Lothar")
SURNAMES = ("Abbott", "Becker", "Castle", "Draper", "Ellison", "Fowler", "Garnett", "Holloway", "Ingram", "Jarvis",
            "Keating", "Lambert")  # fmt: skip
NEEDLE = "The pass key of {name} is {key}. Remember it: {key} is the pass key of {name}."
QUERY = "What is the pass key of {name}?"


def documents_of(
    filler: str, tokenizer: Any, length: int, settings: dict[str, Any], seed: int
) -> list[tuple[str, str]]:
    """Documents of `length` tokens and the query of each. Fillers of a document do not overlap those of others while
    the text is long enough."""
    rng = random.Random(f"{seed} {length}")
    people = rng.sample([" ".join(pair) for pair in product(NAMES, SURNAMES)], settings["documents"])
    encoded = tokenizer(filler, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = encoded["offset_mapping"]
    result = []
    for number, name in enumerate(people):
        needle = NEEDLE.format(name=name, key=rng.randrange(10_000, 100_000))
        own = len(tokenizer(f" {needle} ", add_special_tokens=False)["input_ids"])
        size = max(length - own, 0)
        first = (number * size) % max(len(offsets) - size, 1)
        words = filler[offsets[first][0] : offsets[first + size - 1][1]].split() if size else []
        depth = rng.randrange(len(words) + 1)
        result.append((" ".join([*words[:depth], needle, *words[depth:]]), QUERY.format(name=name)))
    return result


def filler_of(corpus: str, words: int) -> str:
    """So many words of the validation split of a corpus, from the middle of each text in turn."""
    texts, count = [], 0
    for text in open_corpus(corpus, "validation"):
        own = text.text.split()
        piece = own[len(own) // 4 : len(own) // 4 + words // 8 + 1]
        texts.append(" ".join(piece))
        count += len(piece)
        if count >= words:
            break
    return " ".join(texts)


def measure(reader: Reader, filler: str, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    """Accuracy at rank 1 of whole documents and of best chunks, by length."""
    lengths: dict[str, Any] = {}
    for length in settings["lengths"]:
        texts, queries = zip(*documents_of(filler, reader.tokenizer, length, settings, seed), strict=True)
        asked = reader.encode(queries)
        spans = [word_spans(text, settings["words_per_chunk"]) for text in texts]
        owners = np.repeat(np.arange(len(texts)), [len(one) for one in spans])
        if reader.arm.alone:
            found = {"best chunk": nearest(asked, reader.chunks(texts, spans), owners)}
        else:  # the document is one more chunk, so that it is read once
            wholes = [[*one, (0, len(text))] for one, text in zip(spans, texts, strict=True)]
            vectors = reader.chunks(texts, wholes)
            last = np.cumsum([len(one) for one in wholes]) - 1
            found = {"document": nearest(asked, vectors[last], np.arange(len(texts)))}
            found["best chunk"] = nearest(asked, np.delete(vectors, last, axis=0), owners)
        lengths[str(length)] = found
    return {"lengths": lengths}


def nearest(queries: np.ndarray, vectors: np.ndarray, owners: np.ndarray) -> list[bool]:
    """Whether the nearest vector of each query is its own document's."""
    return (owners[rankings(queries, vectors, 1)[:, 0]] == np.arange(len(queries))).tolist()
