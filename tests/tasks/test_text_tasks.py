# SPDX-License-Identifier: Apache-2.0
"""Passkey and facts: documents are read again as text, and answers found by a simulator of its own."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest
from helpers.commands import fail, succeed

from carryforward.models.loading import load_bundled
from carryforward.tasks.base import TEST, TRAIN, VALIDATION, generator, sample_seed
from carryforward.tasks.facts import PLACES, Facts
from carryforward.tasks.filler import Filler, Sentences, split_sentences
from carryforward.tasks.passkey import PassKey
from carryforward.windows import IGNORE

PROSE = "The rain had not stopped since noon. Nobody spoke of it at all, {}! Was there anything left to say ({})? "


@pytest.fixture(scope="module")
def tokenizer():
    return load_bundled()[1]


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    """A folder with texts for training, validation and test, which name their split."""
    root = tmp_path_factory.mktemp("books")
    for split in ("train", "validation", "test"):
        (root / split).mkdir()
        text = "".join(PROSE.format(split, number) for number in range(60))
        (root / split / "book.txt").write_text(f"CHAPTER ONE\n\n{text}")
    return str(root)


@pytest.fixture(scope="module")
def filler(tokenizer, books):
    return Filler(tokenizer, books)


def texts(task, tokenizer, samples):
    """Each document without its answer, and the answer."""
    for ids, labels in zip(samples.input_ids, samples.labels, strict=True):
        scored = labels != IGNORE
        assert scored.nonzero()[:, 0].tolist() == [*range(len(ids) - int(scored.sum()), len(ids))], "the last tokens"
        assert labels[scored].tolist() == ids[scored].tolist()
        yield tokenizer.decode(ids[~scored]), tokenizer.decode(ids[scored]).strip()


def follow(text):
    """Where people and things are, from a document's text: an independent simulator."""
    where, holder = {}, {}
    go = r"(\w+) (?:walked to|set off for|has come to|hurried to) the (\w+)\."
    take = r"(\w+) (?:picked up|took along) the (\w+)\."
    drop = r"(\w+) (?:put down|left behind) the (\w+)\."
    events = sorted((match.start(), kind, *match.groups()) for kind, pattern in (("go", go), ("take", take),
                    ("drop", drop)) for match in re.finditer(pattern, text))  # fmt: skip
    for _, kind, person, other in events:
        if kind == "go":
            where[person] = other
        elif kind == "take":
            assert other not in holder, "only one can hold it"
            assert where.get(other, where[person]) == where[person], "it is taken where it lies"
            holder[other] = person
        else:
            assert holder.pop(other) == person, "only the holder can put it down"
        where |= {thing: where[one] for thing, one in holder.items()}
        if kind == "drop":
            where[other] = where[person]
    return where


@pytest.mark.parametrize("about", ["people", "things"])
def test_answers_follow_from_the_facts_in_the_text(tokenizer, filler, about):
    task = Facts(tokenizer, filler, about=about)
    samples = task.samples(700, 60, sample_seed(TEST, 0))
    assert samples.input_ids.shape == (60, 700)
    seen = set()
    for (text, answer), depth in zip(texts(task, tokenizer, samples), samples.depths, strict=True):
        story, _, question = text.rpartition(" Question: ")
        (asked,) = re.findall(r"^Where is (?:the )?(\w+)\? Answer: the$", question)
        where = follow(story)
        assert where[asked] == answer
        assert asked[0].isupper() == (about == "people")
        seen.add(answer)
        if about == "people":  # one fact is needed: the last one about the person
            last = [match.start() for match in re.finditer(rf"\b{asked} (?:walked|set|has|hurried)", story)][-1]
            tokens = len(tokenizer(story[:last].rstrip(), add_special_tokens=False)["input_ids"])
            assert abs(float(depth) * 700 - tokens) <= 3
    assert seen == set(PLACES)


def test_a_pass_key_stands_once_at_every_depth(tokenizer, filler):
    task = PassKey(tokenizer, filler, digits=4)
    samples = task.samples(900, 25, sample_seed(TEST, 3))
    for (text, answer), depth in zip(texts(task, tokenizer, samples), samples.depths, strict=True):
        (found,) = re.findall(r"The pass key is (\d+)\. Do not forget it: (\d+) is the pass key\.", text)
        assert found == (answer, answer)
        assert len(answer) == 4
        assert text.endswith("What is the pass key? The pass key is")
        before = text[: text.index("The pass key is")].rstrip()
        assert abs(len(tokenizer(before, add_special_tokens=False)["input_ids"]) - 900 * float(depth)) <= 3
    assert samples.depths.min() < 0.2
    assert samples.depths.max() > 0.8
    assert len({answer for _, answer in texts(task, tokenizer, samples)}) > 20
    assert task.chance == 1 / 9000


def test_training_validation_and_test_have_sentences_of_their_own(tokenizer, filler):
    task = PassKey(tokenizer, filler)
    for source, split in ((TRAIN, "train"), (VALIDATION, "validation"), (TEST, "test")):
        (text,) = (text for text, _ in texts(task, tokenizer, task.samples(400, 1, sample_seed(source, 0))))
        assert f"at all, {split}!" in text
        assert not {"train", "validation", "test"} - {split} & set(re.findall(r"\w+", text))
    same = [task.samples(400, 3, sample_seed(TEST, 5)).input_ids for _ in range(2)]
    assert same[0].equal(same[1])


def test_sentences_follow_each_other_and_fill_a_length_exactly():
    rng = generator((0,))
    ids = np.arange(100)
    starts = np.array([0, 3, 40, 41, 90, 100])
    sentences = [[*range(a, b)] for a, b in pairwise(starts)]
    for tokens in (0, 1, 5, 99, 100, 101, 250):
        for _ in range(20):
            drawn = [part.tolist() for part in Sentences(ids, starts).draw(rng, tokens)]
            assert sum(map(len, drawn)) == tokens
            whole = [part for part in drawn if part in sentences]
            assert len(whole) >= len(drawn) - 1, "only one is cut"
            order = [sentences.index(part) for part in drawn[1:]]
            assert all(b == (a + 1) % 5 for a, b in pairwise(order))
            assert not drawn or any(drawn[0] == one[len(one) - len(drawn[0]) :] for one in sentences)


def test_headings_and_code_are_no_sentences():
    text = 'TITLE\n\nIt was the best of times.\nIt was "the worst of times!" No.\n\n>>> 1\n\nHe said "Go away now."'
    sentences = ["It was the best of times.", 'It was "the worst of times!"', 'He said "Go away now."']
    assert split_sentences(text) == sentences


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tokenizer, filler: Facts(tokenizer, filler, about="animals"), "about='animals' must be people or"),
        (lambda tokenizer, filler: PassKey(tokenizer, filler, digits=0), "digits=0 must be at least 1"),
        (lambda tokenizer, filler: PassKey(tokenizer, filler, digits=20), "digits=20: use at most 18"),
        (
            lambda tokenizer, filler: PassKey(tokenizer, filler).samples(20, 1, (TEST, 0)),
            "Use a larger size",
        ),
    ],
)
def test_bad_input_is_refused(tokenizer, filler, make, message):
    with pytest.raises(ValueError, match=message):
        make(tokenizer, filler)


def test_a_text_without_sentences_is_refused(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("no end")
    with pytest.raises(ValueError, match="has no sentences of 4 to 60 words"):
        Filler(tokenizer, str(tmp_path / "a.txt"))


SHORT = ["--window", 64, "--batch-size", 2, "--samples", 5, "--validation-samples", 2, "--train-sizes", 150,
         "--test-sizes", 150, 200, "--device", "cpu"]  # fmt: skip


def test_commands_train_test_and_continue(books, tmp_path):
    command = ["memory-tasks", "passkey", "--data", books, "--memory", "tokens", "--memory-tokens", 2, *SHORT]
    out = succeed(*command, "--digits", 3, "--steps", 1, "--out", tmp_path / "a").out
    assert "passkey (digits 3" in out
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    sizes = [(score["size"], score["length"], score["windows"]) for score in result["scores"]]
    assert sizes == [(150, 150, 3), (200, 200, 4)]
    assert all(sum(depth["samples"] for depth in score["by_depth"]) == 5 for score in result["scores"])
    again = ["memory-tasks", "facts", "--about", "things", "--data", books, "--model", tmp_path / "a" / "model"]
    sizes = ["--test-sizes", 500, "--samples", 2, "--batch-size", 2, "--device", "cpu"]
    result = json.loads(succeed(*again, *sizes, "--steps", 0, "--out", tmp_path / "b", "--json").out)
    assert result["about"] == {"about": "things", "text": books}
    assert result["model"]["recurrence"]["window"] == 64


def test_wrong_options_are_refused(tmp_path):
    message = fail("memory-tasks", "facts", "--about", "animals", "--out", tmp_path / "a", code=2)
    assert "--about animals: it must be people or things" in message
