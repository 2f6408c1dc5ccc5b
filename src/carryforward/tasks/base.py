# SPDX-License-Identifier: Apache-2.0
"""What a task that needs memory is: documents with answers, generated from seeds.

A task makes documents of any size: so many pairs, symbols or tokens. Only the answers are scored. A model that reads
window by window can know an answer only through what passes from a window to the next.

Shapes: B documents of N tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..models.causal_lm import RecurrentForCausalLM
from ..utils.checks import check_count
from ..windows import IGNORE

TRAIN, VALIDATION, TEST = range(3)  # the three sources of seeds


@dataclass(frozen=True)
class Samples:
    """Documents of equal length, with the answers to be found.

    Attributes:
        input_ids: the documents with their answers, [B, N].
        labels: the tokens of the answers, -100 elsewhere, [B, N].
        depths: where the fact that is asked for stands, from 0 (at the start) to 1 (at the end), [B]; None if answers
            need all of a document.
    """

    input_ids: Tensor
    labels: Tensor
    depths: Tensor | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, rows: slice) -> "Samples":
        return Samples(self.input_ids[rows], self.labels[rows], None if self.depths is None else self.depths[rows])

    def batches(self, size: int) -> Iterator["Samples"]:
        """Pieces of at most `size` documents, in order."""
        return (self[start : start + size] for start in range(0, len(self), size))


class Task(ABC):
    """A task that needs memory.

    Attributes:
        name: as on the command line.
        unit: what sizes count.
        vocabulary: the name of each token, of tasks with symbols of their own; None if a tokenizer makes the tokens.
        window: the window that models must have; None if any will do.
        chance: the share of answers that guessing finds.
        train_sizes: the sizes of a curriculum, in its order.
        test_sizes: the sizes to be tested.
        whole_answers: accuracy is the share of answers of which every token is right, not of tokens.
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    whole_answers: ClassVar[bool] = True
    vocabulary: tuple[str, ...] | None = None
    window: int | None = None
    chance: float
    train_sizes: tuple[int, ...]
    test_sizes: tuple[int, ...]

    @abstractmethod
    def samples(self, size: int, count: int, seed: Sequence[int]) -> Samples:
        """Documents of a size. The same seed makes the same ones; see `sample_seed`."""

    @abstractmethod
    def length(self, size: int) -> int:
        """The tokens of a document of a size."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What the task was made with, as JSON."""

    def check_model(self, model: RecurrentForCausalLM) -> None:
        """Refuse a model that cannot read this task."""
        if not isinstance(model, RecurrentForCausalLM):
            raise ValueError(
                f"model is a {type(model).__name__}: give a recurrent causal language model; see add_recurrence."
            )
        recurrence = model.config.recurrence
        if self.window is not None and (recurrence.window, recurrence.overlap) != (self.window, 0):
            raise ValueError(
                f"model reads windows of {recurrence.window} tokens with an overlap of {recurrence.overlap}, and "
                f"{self.name} is cut into windows of {self.window} without overlap. Use a model made for it."
            )
        if self.vocabulary is not None and model.config.vocab_size != len(self.vocabulary):
            raise ValueError(
                f"model has {model.config.vocab_size:,} tokens and {self.name} has {len(self.vocabulary)}. Use a model "
                "made for it: tasks.models.make_model."
            )


def sample_seed(source: int, seed: int, *numbers: int) -> tuple[int, ...]:
    """The seed of some samples. Those of training, validation and test never agree.

    Args:
        source: TRAIN, VALIDATION or TEST.
        seed: of the run.
        numbers: what tells these samples from others of the source, such as the step.
    """
    return (source, seed, *numbers)


def generator(seed: Sequence[int]) -> np.random.Generator:
    """The random numbers of a seed."""
    return np.random.default_rng(list(seed))


def label_answers(ids: np.ndarray, answers: np.ndarray) -> tuple[Tensor, Tensor]:
    """Token ids [B, N] and labels, which are ids where `answers` [B, N] or [N] is true."""
    labels = np.where(answers, ids, IGNORE)
    return torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(labels.astype(np.int64))


def check_size(task: Task, size: int, count: int, least: int = 1) -> None:
    """Refuse sizes and numbers of samples that cannot be."""
    check_count(f"size (of {task.name}, in {task.unit})", size, least)
    check_count("count", count)
