# SPDX-License-Identifier: Apache-2.0
"""Accuracy and macro-F1 of classifiers of documents and of words, which read documents of any length whole."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..backbones.modes import eval_mode
from ..data.labelled import TOKEN_CLASSIFICATION, LabelledDocuments
from ..data.samples import batch_by_length, pad
from ..distributed.work_map import WorkMap
from ..models import argument_checks
from ..models.encoders import RecurrentForSequenceClassification, RecurrentForTokenClassification
from ..utils.checks import check_callable, check_count, check_flag
from ..utils.peft import get_recurrent_model
from ..windows import IGNORE


@dataclass(frozen=True, eq=False)
class ClassificationScore:
    """Sums over a set of documents or words. Results can be added with +.

    Attributes:
        confusion: how many of each class (rows) were predicted as each class (columns), [C, C].
        nats: their summed negative log-likelihood.
    """

    confusion: np.ndarray
    nats: float = 0.0

    def __add__(self, other: "ClassificationScore") -> "ClassificationScore":
        return ClassificationScore(self.confusion + other.confusion, self.nats + other.nats)

    @property
    def scored(self) -> int:
        """The number of documents or words."""
        return int(self.confusion.sum())

    @property
    def loss(self) -> float | None:
        return self.nats / self.scored if self.scored else None

    @property
    def accuracy(self) -> float | None:
        return accuracy(self.confusion)

    @property
    def macro_f1(self) -> float | None:
        return macro_f1(self.confusion)


def accuracy(confusion: np.ndarray) -> float | None:
    """The share that was predicted right; None if there is nothing.

    >>> accuracy(np.array([[2, 1], [0, 1]]))
    0.75
    """
    total = confusion.sum()
    return float(np.trace(confusion) / total) if total else None


def macro_f1(confusion: np.ndarray) -> float | None:
    """The mean F1 of the classes that occur, or were predicted: each counts the same, however rare it is.

    The F1 of a class is 2 · right / (occurrences + predictions).

    >>> round(macro_f1(np.array([[2, 1, 0], [0, 1, 0], [0, 0, 0]])), 4)  # 4/5 and 2/3
    0.7333
    """
    counts = confusion.sum(axis=0) + confusion.sum(axis=1)
    seen = counts > 0
    return float((2 * np.diag(confusion)[seen] / counts[seen]).mean()) if seen.any() else None


def classification_score(
    model: Any,
    documents: LabelledDocuments,
    *,
    overlap: int | None = None,
    use_state: bool = True,
    batch_size: int = 8,
    progress: Callable[[int], object] = lambda read: None,
    predictions: list[np.ndarray] | None = None,
    work_map: WorkMap | None = None,
) -> ClassificationScore:
    """Score a classifier of documents or of tokens.

    Args:
        model: a recurrent sequence classifier or token classifier.
        documents: from `load_labelled`, with the model's classes.
        overlap: tokens that consecutive windows share; by default that of the config.
        use_state: False removes the state: the control.
        batch_size: documents in a batch.
        progress: called with the number of tokens read.
        predictions: a list that is filled with the class of each document, [1], or of each of its tokens, [N].
        work_map: divides the batches among processes, and keeps their results for a restart.
    """
    model = get_recurrent_model(model)
    check_classifier(model, documents)
    argument_checks.check_overlap(model.config, overlap)
    check_count("batch_size", batch_size)
    check_flag("use_state", use_state)
    check_callable("progress", progress)
    batches = batch_by_length(documents.lengths.tolist(), batch_size)

    def work(i: int) -> tuple[list[list[int]], float]:
        """The classes that are predicted for a batch, and the negative log-likelihood of its labels."""
        batch = pad([torch.from_numpy(documents[row]) for row in batches[i]])
        logits = model(**batch, overlap=overlap, use_state=use_state).logits.double().cpu().numpy()
        progress(sizes[i])
        classes: list[list[int]] = []
        nats = 0.0
        for row, scores in zip(batches[i], logits, strict=True):
            scores = scores[: len(documents[row])] if documents.task == TOKEN_CLASSIFICATION else scores[None]
            labels = documents.labels[row]
            classes.append(scores.argmax(axis=-1).tolist())
            scored = labels != IGNORE
            picked = scores[scored, labels[scored]]
            nats += float((np.logaddexp.reduce(scores[scored], axis=-1) - picked).sum())
        return classes, nats

    sizes = [int(documents.lengths[rows].sum()) for rows in batches]
    with eval_mode(model), torch.inference_mode():
        parts = (work_map or WorkMap())(sizes, work, progress=progress)
    predicted: list[np.ndarray] = [np.empty(0, np.int64)] * len(documents)
    confusion = np.zeros((len(documents.classes),) * 2, dtype=np.int64)
    for rows, (classes, _) in zip(batches, parts, strict=True):
        for row, own in zip(rows, classes, strict=True):
            predicted[row], labels = np.array(own, np.int64), documents.labels[row]
            np.add.at(confusion, (labels[labels != IGNORE], predicted[row][labels != IGNORE]), 1)
    if predictions is not None:
        predictions[:] = predicted
    return ClassificationScore(confusion, sum(nats for _, nats in parts))


def check_classifier(model: Any, documents: Any, name: str = "documents") -> None:
    """Refuse a model that is no classifier, and documents that are not labelled with its classes."""
    tasks = {
        RecurrentForTokenClassification: TOKEN_CLASSIFICATION,
        RecurrentForSequenceClassification: "classification",
    }
    task = next((task for cls, task in tasks.items() if isinstance(model, cls)), None)
    if task is None:
        raise ValueError(f"model: a recurrent classifier of documents or tokens is needed, not {type(model).__name__}.")
    if not isinstance(documents, LabelledDocuments):
        raise ValueError(f"{name} is a {type(documents).__name__}: give what load_labelled returns.")
    if documents.task != task:
        raise ValueError(f"{name} are labelled for {documents.task}, and the model is for {task}. Use another model.")
    if model.config.problem_type not in (None, "single_label_classification"):
        raise ValueError(
            f"model: its problem_type is {model.config.problem_type!r}. One label a document is learned and scored: "
            'use a model with "single_label_classification".'
        )
    own = class_names(model.config)
    if documents.classes != own:
        raise ValueError(
            f"{name} have the classes {', '.join(documents.classes)}, and the model {', '.join(own)}. Load them with "
            "load_labelled(..., classes=class_names(model.config))."
        )


def class_names(config: Any) -> tuple[str, ...]:
    """The names of a classifier's classes, in the order of their numbers."""
    return tuple(str(config.id2label[number]) for number in sorted(config.id2label))
