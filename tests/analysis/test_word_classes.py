# SPDX-License-Identifier: Apache-2.0
"""Kinds of words, and whether a word occurred before."""

import itertools

from carryforward.analysis import word_classes
from carryforward.windows import schedule


def test_kinds_of_words():
    pieces = ["Mar", "en", " waited", ".", " The", " 12", " men", " saw", " Mar", "en", "'s", " lamp", ",", " and",
              "\n\n", "Maren", " didn", "'t", " Waited", "—", "", " M", "ARK"]  # fmt: skip
    classes = word_classes.classify(pieces, list(schedule(len(pieces), 7)))
    kinds = [word_classes.KINDS[kind] for kind in classes.kinds]
    assert kinds == [
        "name", "inside a word", "other word", "punctuation", "function word", "number", "other word", "other word",
        "name", "inside a word", "inside a word", "other word", "punctuation", "function word", "space",
        "name", "function word", "inside a word", "other word", "punctuation", "punctuation", "name", "inside a word",
    ]  # fmt: skip
    assert classes.words[8:12] == ["Maren", "Maren", "Maren", "lamp"]
    seen = [word_classes.SEEN[index] for index in classes.seen]
    # the second window reads tokens 7 to 13 and predicts 8 to 14; the third reads from 14 on
    assert seen[:8] == ["new"] * 8
    assert seen[8:11] == ["in earlier windows only"] * 3
    assert seen[11:15] == ["new"] * 4
    assert seen[15] == seen[18] == "in earlier windows only"
    overlapping = word_classes.classify(pieces, list(schedule(len(pieces), 14, 7)))
    assert word_classes.SEEN[overlapping.seen[15]] == "in this window before", "its window reads from token 7 on"


def test_a_word_that_starts_inside_a_token_of_punctuation():
    classes = word_classes.classify(["Mar", "en", ' "M', "aren", '"'], [])
    assert [word_classes.KINDS[kind] for kind in classes.kinds[2:4]] == ["punctuation", "inside a word"]
    assert classes.seen.tolist() == [
        word_classes.NEW,
        word_classes.NEW,
        word_classes.NEW,
        word_classes.HERE,
        word_classes.NEW,
    ]


def test_the_first_word_of_a_sentence_is_not_a_name():
    text = "Rain fell. “Wind,” he said. Then rain. Wind and Halden, said Wind. Halden"
    classes = word_classes.classify(list(itertools.chain(*([w, " "] for w in text.split(" ")))), [])
    names = {word for word, kind in zip(classes.words, classes.kinds, strict=True) if kind == word_classes.NAME}
    assert names == {"Halden", "Wind"}  # Wind is once inside a sentence; rain is also written in lower case
