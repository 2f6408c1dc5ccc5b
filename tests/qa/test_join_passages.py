# SPDX-License-Identifier: Apache-2.0
"""Joining passages to long documents, and holding questions out."""

import json
from dataclasses import replace

import pytest

from carryforward.qa.dataset import Answer, Question, read_questions, write_questions
from carryforward.qa.join_passages import join_files, join_passages


def test_passages_are_joined_around_the_answer():
    texts = [f"Passage {n} has the word w{n}x and some more words to be long." for n in range(20)]
    questions = [
        Question(f"q{n}", "Which word?", text, (Answer(f"w{n}x", text.index(f"w{n}x")),), "span", "squad")
        for n, text in enumerate(texts)
    ]
    joined = join_passages(questions, 60, seed=3)
    for before, after in zip(questions, joined, strict=True):
        assert after.document[slice(*after.answer_span)] == before.answers[0].text
        assert 60 <= len(after.document.split()) < 60 + 12
        assert len(set(after.document.split("\n\n"))) == len(after.document.split("\n\n"))
    assert len({question.answer_span for question in joined}) > 5, "not always in the same place"
    assert join_passages(questions, 60, seed=3) == joined
    assert join_passages(questions, 60, seed=4) != joined
    same = [*questions[:3], Question("other", "?", "Another W1X here.", (Answer("W1X", 8),), "span", "squad")]
    assert "Another W1X" not in join_passages(same, 500)[1].document, "it contains the answer"
    yes_or_no = [replace(questions[0], answers=(Answer("has"),), kind="no"), *questions[1:]]
    assert len(join_passages(yes_or_no, 60)[0].document.split()) >= 60, (
        "passages that contain the words of a yes/no answer are allowed"
    )


def test_held_out_sets_share_no_passage(tmp_path):
    files = []
    for name in "ab":
        files.append(tmp_path / f"{name}.json")
        passages = [f"Passage {name}{n} has the word w{name}{n}x in it." for n in range(20)]
        paragraphs = [
            {"context": text, "qas": [{"id": f"{name}{n}{i}", "question": "Which?", "answers": [
                {"text": f"w{name}{n}x", "answer_start": text.index("w" + name)}]} for i in range(3)]}
            for n, text in enumerate(passages)
        ]  # fmt: skip
        files[-1].write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}), encoding="utf-8")
    train, test, validation = sets = join_files(files, 30, set_aside=(31, 14), seed=2)
    assert (len(train), len(test), len(validation)) == (120 - 33 - 15, 33, 15), "passages stay whole"
    for members in sets:
        write_questions(members, tmp_path / "out.json")
        assert read_questions(tmp_path / "out.json") == sorted(
            members, key=lambda q: [other.document for other in members].index(q.document)
        )
        assert all(q.document[slice(*q.answer_span)] == f"w{q.id[:-1]}x" for q in members)
        assert not any(f"wa{n}x" in q.document for q in members for n in range(20) if q.id[0] == "b"), (
            "each file on its own"
        )
    shared = [{part for question in members for part in question.document.split("\n\n")} for members in sets]
    assert sum(map(len, shared)) == len(set.union(*shared)) == 40
    assert [len(members) for members in join_files(files, 30)] == [120]
    for counts in ((118,), (60, 58), (121,)):
        with pytest.raises(ValueError, match="too few to set"):
            join_files(files, 30, set_aside=counts)
    with pytest.raises(ValueError, match="several questions have the id a00"):
        write_questions([*train, *join_files(files, 30)[0]], tmp_path / "out.json")
    with pytest.raises(ValueError, match="question q: SQuAD format has no answer 'yes'"):
        write_questions([Question("q", "?", "Text.", (Answer("yes"),), "yes", "hotpotqa")], tmp_path / "out.json")
