# SPDX-License-Identifier: Apache-2.0
"""When was a book's author born? A linear classifier on frozen vectors of documents, tested on held-out authors.

The encoder is not trained. A document's vector is the largest value of each number over its token vectors (max
pooling); the classifier is ridge regression to one-hot classes, with one penalty for all arms.
"""

import csv
import random
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from arms import Reader

from carryforward.data.texts import read_text


def read_books(books: Path, table: Path, authors: Path, settings: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """Stretches of books whose author's year of birth is known: text, class, author and fold.

    Args:
        books: a folder of `<id>.txt`.
        table: the corpus's CSV, with id and author.
        authors: YAML: year of birth by author.
    """
    born = yaml.safe_load(authors.read_text())
    rows: dict[str, list[str]] = {}
    for row in csv.DictReader(table.read_text(encoding="utf-8").splitlines()):
        if row["author"] in born and (books / f"{row['id']}.txt").exists():
            rows.setdefault(row["author"], []).append(row["id"])
    rng, result = random.Random(seed), []
    names = sorted(rows)
    rng.shuffle(names)
    names.sort(key=lambda name: class_of(born[name], settings))  # classes are spread over the folds
    for place, name in enumerate(names):
        for number in rng.sample(sorted(rows[name]), min(settings["books"], len(rows[name]))):
            words = read_text(books / f"{number}.txt").split()
            start = max(0, (len(words) - settings["words"]) // 2)
            result.append({
                "text": " ".join(words[start : start + settings["words"]]), "author": name,
                "class": class_of(born[name], settings), "fold": place % settings["folds"],
            })  # fmt: skip
    return result


def class_of(year: int, settings: dict[str, Any]) -> int:
    """How many borders a year lies behind."""
    return sum(year >= border for border in settings["borders"])


def measure(reader: Reader, books: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    """Whether the class of each book is found by a classifier that has not seen its author."""
    vectors = reader.encode([book["text"] for book in books], pooling="max", special_tokens=False, normalize=False)
    classes, folds = (np.array([book[name] for book in books]) for name in ("class", "fold"))
    count = len(settings["borders"]) + 1
    right = np.zeros(len(books), dtype=bool)
    for fold in range(settings["folds"]):
        train, test = folds != fold, folds == fold
        if test.any():
            right[test] = (
                predict(vectors[train], classes[train], vectors[test], count, settings["ridge"]) == classes[test]
            )
    # books of a class weigh as much as those of another, whatever their number
    weights = len(books) / (len(np.unique(classes)) * np.bincount(classes, minlength=count)[classes])
    return {
        "books": len(books), "score": float((right * weights).mean()), "accuracy": float(right.mean()),
        "scores": [round(float(one), 4) for one in right * weights], "groups": [book["author"] for book in books],
        "classes": np.bincount(classes, minlength=count).tolist(),
    }  # fmt: skip


def predict(train: np.ndarray, classes: np.ndarray, test: np.ndarray, count: int, penalty: float) -> np.ndarray:
    """The classes of test vectors, by ridge regression to one-hot classes that weigh the same."""
    mean, spread = train.mean(axis=0), train.std(axis=0) + 1e-6
    train, test = (np.concatenate([(x - mean) / spread, np.ones((len(x), 1))], axis=1) for x in (train, test))
    weights = 1 / np.bincount(classes, minlength=count)[classes][:, None]
    targets = np.eye(count)[classes]
    ridge = penalty * np.eye(train.shape[1]) / len(train)
    ridge[-1, -1] = 0
    return (test @ np.linalg.solve(train.T @ (weights * train) + ridge, train.T @ (weights * targets))).argmax(axis=1)
