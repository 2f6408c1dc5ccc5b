# SPDX-License-Identifier: Apache-2.0
"""Labels of documents and words, read from JSON lines and put at tokens."""

import json

import pytest
from helpers import encoders, prose

from carryforward.data.labelled import labelled_task, load_labelled

TOKENIZER = encoders.tokenizer()


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_splits(folder, **splits):
    for split, rows in splits.items():
        write(folder / f"{split}.jsonl", rows)
    return str(folder)


TEXTS = [{"text": "w5 w6 w7", "label": "b"}, {"text": "w8", "label": "a"}, {"text": " ", "label": "a"}]
WORDS = [{"tokens": ["w5", "w6", "w7"], "labels": ["X", None, "O"]}]


def test_a_label_a_document(tmp_path):
    documents = load_labelled(write_splits(tmp_path, train=TEXTS), "train", TOKENIZER)
    assert documents.task == labelled_task(str(tmp_path)) == "classification"
    assert documents.classes == ("a", "b")
    assert [ids.tolist() for ids in documents] == [[5, 6, 7], [8]], "a text without a token is left out"
    assert [labels.tolist() for labels in documents.labels] == [[1], [0]]
    assert documents.names == ["line-1", "line-2"]
    assert (documents.about()["tokens"], documents.about()["words"], documents.about()["labels"]) == (4, 4, 2)
    assert documents[1:].names == ["line-2"]
    again = documents.renumbered(["b", "c", "a"])
    assert [labels.tolist() for labels in again.labels] == [[0], [2]]
    assert again.key != documents.key == load_labelled(str(tmp_path), "train", TOKENIZER).key


def test_a_label_a_word(tmp_path):
    source = write_splits(tmp_path, train=WORDS)
    documents = load_labelled(source, "train", TOKENIZER)
    assert documents.task == labelled_task(source) == "token-classification"
    assert documents.classes == ("O", "X")
    assert documents.labels[0].tolist() == [1, -100, 0]
    assert documents.renumbered(["X", "O"]).labels[0].tolist() == [0, -100, 1]
    short = load_labelled(source, "train", TOKENIZER, max_tokens=2)
    assert (short.labels[0].tolist(), short.first_tokens[0].tolist()) == ([1, -100], [0, 1, -1])
    assert short.words_without_token == 1


def test_a_words_first_token_has_its_label(tmp_path):
    """With tokens that are pieces of words: by their text, independently of how they are found."""
    tokenizer = prose.tokenizer()
    words = prose.TOPICS[3].split()[:200]
    labels = [f"{number % 7}" for number in range(len(words))]
    source = write_splits(tmp_path, train=[{"tokens": words, "labels": labels}])
    documents = load_labelled(source, "train", tokenizer)
    pieces, text = tokenizer.convert_ids_to_tokens(documents[0].tolist()), " ".join(words)
    assert tokenizer.decode(documents[0]) == text, "the tokens are those of the text"
    number, expected, after_space = 0, [], True
    for piece in pieces:  # a space is "Ġ"; where it is a token of its own, the word begins with the next one
        begins, after_space = piece != "Ġ" and (after_space or piece[0] == "Ġ"), piece == "Ġ"
        expected.append(int(labels[number]) if begins else -100)
        number += begins
    assert number == len(words)
    assert documents.labels[0].tolist() == expected
    assert documents.words_without_token == 0


def test_a_single_file_is_divided_and_its_classes_are_those_of_training(tmp_path):
    source = write(tmp_path / "all.jsonl", [{"text": f"w{5 + i}", "label": i % 3 + 9} for i in range(40)])
    parts = {split: load_labelled(source, split, TOKENIZER, classes=("9", "10", "11")) for split in
             ("train", "validation", "test", "all")}  # fmt: skip
    assert [len(part) for part in parts.values()] == [36, 2, 2, 40]
    names = [name for split in ("train", "validation", "test") for name in parts[split].names]
    assert sorted(names) == sorted(parts["all"].names)
    assert load_labelled(source, "all", TOKENIZER).classes == ("9", "10", "11"), "sorted as numbers"
    with pytest.raises(ValueError, match=r"line-\d+: the label 9 is not one of .* classes \(10, 11\)"):
        load_labelled(source, "all", TOKENIZER, classes=("10", "11"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "w5"}], "its rows have no labels"),
        ([*TEXTS, {"text": "w5"}], "line 4 has no label"),
        ([{"text": "w5", "label": 0.5}], "label 0.5 is neither a text nor an integer"),
        ([{"text": "w5", "label": True}], "label true is neither"),
        ([{"text": "w5", "label": 1}, {"text": "w5", "label": "1"}], "some labels are texts and others integers"),
        ([{"tokens": ["w5"], "labels": []}], "must have as many labels as tokens"),
        ([{"tokens": [5], "labels": ["a"]}], "a word is of type int"),
        ([{"tokens": ["w5"], "labels": [None]}], "no document has a label"),
        ([{"label": "a"}], "has no field 'text'"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        load_labelled(write_splits(tmp_path, train=rows), "train", TOKENIZER)


def test_sources_that_cannot_be_used(tmp_path):
    source = write_splits(tmp_path, train=TEXTS)
    with pytest.raises(ValueError, match="has no split 'test', only 'train'"):
        load_labelled(source, "test", TOKENIZER)
    (tmp_path / "a.txt").write_text("a text")
    assert labelled_task(str(tmp_path / "a.txt")) is None
    with pytest.raises(ValueError, match="labelled documents are read from a .jsonl file"):
        load_labelled(str(tmp_path / "a.txt"), "train", TOKENIZER)
