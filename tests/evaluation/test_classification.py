# SPDX-License-Identifier: Apache-2.0
"""Accuracy and macro-F1 against cases worked by hand, and predictions of documents of any length."""

import numpy as np
import pytest
import torch
from helpers import encoders, tiny
from helpers.encoders import labelled

from carryforward.data.labelled import LabelledDocuments
from carryforward.evaluation.classification import (
    ClassificationScore,
    accuracy,
    classification_score,
    macro_f1,
)


@pytest.mark.parametrize(
    ("confusion", "right", "f1"),
    [
        ([[3, 0], [0, 1]], 1.0, 1.0),
        ([[0, 2], [2, 0]], 0.0, 0.0),
        ([[5, 1], [2, 2]], 0.7, (10 / 13 + 4 / 7) / 2),  # 2·5 / (6 + 7), 2·2 / (4 + 3)
        ([[2, 0, 0], [0, 0, 0], [0, 0, 2]], 1.0, 1.0),  # a class that neither occurs nor is predicted does not count
        ([[2, 1, 0], [0, 0, 0], [0, 0, 2]], 0.8, (4 / 5 + 0 + 1) / 3),  # one that was predicted wrongly does
        ([[4, 0], [1, 0]], 0.8, (8 / 9 + 0) / 2),  # one that was never predicted does too
        ([[0, 0], [0, 0]], None, None),
    ],
)
def test_hand_worked_cases(confusion, right, f1):
    score = ClassificationScore(np.array(confusion))
    assert (score.accuracy, score.macro_f1) == (pytest.approx(right), pytest.approx(f1))
    assert (accuracy(np.array(confusion)), macro_f1(np.array(confusion))) == (score.accuracy, score.macro_f1)


@pytest.mark.parametrize("fields", [{}, encoders.KV], ids=["vector", "kv"])
@pytest.mark.parametrize(("head", "task"), [("sequence", "classification"), ("token", "token-classification")])
def test_documents_are_read_whole(head, task, fields):
    """Batched and alone, and as the model's own call has it; a state that begins anew in every window does worse."""
    model, documents, predictions = encoders.model("bert", head, **fields), labelled(task), []
    score = classification_score(model, documents, batch_size=3, predictions=predictions)
    assert score.scored == sum(int((labels != -100).sum()) for labels in documents.labels)
    nats = right = 0
    with torch.no_grad():
        for ids, labels, predicted in zip(documents, documents.labels, predictions, strict=True):
            logits = model(torch.from_numpy(ids)[None]).logits[0]
            logits = logits if task == "token-classification" else logits[None]
            target = torch.from_numpy(labels)
            nats += torch.nn.functional.cross_entropy(logits, target, reduction="sum").item()
            assert predicted.tolist() == logits.argmax(-1).tolist()
            right += int((logits.argmax(-1) == target).sum())
    assert score.nats == pytest.approx(nats, rel=1e-5)
    assert score.accuracy == right / score.scored
    halves = classification_score(model, documents[:4]) + classification_score(model, documents[4:])
    assert halves.confusion.tolist() == score.confusion.tolist()
    assert abs(classification_score(model, documents, use_state=False).nats - score.nats) > 1e-3


def test_predictions_have_no_padding():
    documents, predictions = labelled("token-classification"), []
    classification_score(encoders.model("bert", "token"), documents, predictions=predictions)
    assert [len(predicted) for predicted in predictions] == [len(ids) for ids in documents]


def test_refusals():
    documents = labelled("classification")
    with pytest.raises(ValueError, match="a recurrent classifier of documents or tokens is needed"):
        classification_score(tiny.recurrent("gpt2"), documents)
    regression = encoders.model("bert", "sequence")
    regression.config.problem_type = "regression"
    with pytest.raises(ValueError, match="its problem_type is 'regression'"):
        classification_score(regression, documents)
    with pytest.raises(ValueError, match="documents are labelled for classification, and the model is for token-class"):
        classification_score(encoders.model("bert", "token"), documents)
    with pytest.raises(ValueError, match="documents is a list: give what load_labelled returns"):
        classification_score(encoders.model("bert", "sequence"), encoders.TRAIN)
    with pytest.raises(ValueError, match="have the classes a, b, c, and the model LABEL_0, LABEL_1, LABEL_2"):
        classification_score(
            encoders.model("bert", "sequence"), LabelledDocuments(
                documents.ids, documents.labels, ("a", "b", "c"), "classification", documents.texts
            )
        )  # fmt: skip
