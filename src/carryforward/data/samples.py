# SPDX-License-Identifier: Apache-2.0
"""Training samples: N consecutive windows of a document's own schedule (section 4.2 of the paper).

An epoch scores every target of every document exactly once, short documents and tails included, in an order that
depends on the seed and the epoch alone: any number of processes sees the same global batches.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Sampler

from .. import windows
from ..windows import IGNORE


def cut(length: int, window: int, overlap: int, windows_per_sample: int) -> Iterator[tuple[int, int, int]]:
    """The samples of one document: tokens [start, stop), scored on targets from `score_from` on.

    A sample's last token is only a target. The state starts empty, so a later sample reads the tokens its first
    window shares with the sample before, but does not score them again.

    >>> list(cut(25, window=10, overlap=3, windows_per_sample=2))
    [(0, 18, 1), (14, 25, 18)]
    """
    parts = list(windows.schedule(length, window, overlap))
    for i in range(0, len(parts), windows_per_sample):
        first, last = parts[i], parts[min(i + windows_per_sample, len(parts)) - 1]
        yield first.start, last.score_to, first.score_from


def sample(document: Any, start: int, stop: int, score_from: int) -> dict[str, Tensor]:
    """A stretch of a document, with labels from token `score_from` on."""
    ids = torch.from_numpy(np.asarray(document[start:stop]).astype(np.int64))
    labels = ids.clone()
    labels[: score_from - start] = IGNORE
    return {"input_ids": ids, "labels": labels}


def by_length(lengths: Sequence[int], batch_size: int, least: int = 1) -> list[list[int]]:
    """Documents to be read side by side, by number, the longest first; those shorter than `least` are left out.

    >>> by_length([3, 0, 9, 4], batch_size=2)
    [[2, 3], [0]]
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")
    order = sorted((i for i, length in enumerate(lengths) if length >= least), key=lambda i: -lengths[i])
    return [order[begin : begin + batch_size] for begin in range(0, len(order), batch_size)]


def check_documents(documents: Sequence[Any]) -> None:
    """Refuse rows of a data set, which are as long as they have columns."""
    if len(documents) and isinstance(documents[0], Mapping):
        raise ValueError('documents are rows with columns: give the token ids alone, as dataset["input_ids"] does.')


class Samples(Dataset):
    """All samples of a set of documents, in their order; the one past the end is empty and fills up a last batch."""

    def __init__(
        self, documents: Sequence[Any], window: int, overlap: int, windows_per_sample: int, *, in_pieces: bool = False
    ):
        """
        Args:
            in_pieces: a sample starts where the one before ended, for a state that is carried on from there.
        """
        if windows_per_sample < 1:
            raise ValueError(f"windows_per_sample={windows_per_sample} must be at least 1 (the paper uses 20).")
        check_documents(documents)
        self.documents = documents
        pieces = [
            (index, *sample)
            for index, document in enumerate(documents)
            for sample in cut(len(document), window, overlap, windows_per_sample)
        ]
        if not pieces:
            raise ValueError(
                f"Nothing to train on: none of the {len(documents)} documents has a second token to predict."
            )
        self.pieces = np.array(pieces, dtype=np.int64)  # document, start, stop, score_from
        if in_pieces:  # what the window shares with the one before is in the state
            later = self.pieces[:, 1] > 0
            self.pieces[later, 1] = self.pieces[later, 3]
        self.targets = self.pieces[:, 2] - self.pieces[:, 3]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == len(self):  # nothing to score: a token of the vocabulary, and no label
            return {"input_ids": torch.zeros(1, dtype=torch.long), "labels": torch.full((1,), IGNORE)}
        document, start, stop, score_from = self.pieces[index].tolist()
        return sample(self.documents[document], start, stop, score_from)

    def name(self, index: int) -> str:
        """Where a sample comes from, for messages."""
        document, start, stop, _ = self.pieces[index].tolist()
        names = getattr(self.documents, "names", None)
        return f"{names[document] if names is not None else document}, tokens {start}-{stop}"


def collate(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Right-padded batch; the mask says what is padding."""
    batch = pad([sample["input_ids"] for sample in samples])
    labels = pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=IGNORE)
    return batch | {"labels": labels}


def pad(rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """Token ids of different lengths as a right-padded batch with its mask."""
    ids = pad_sequence(list(rows), batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}


class Order(Sampler[int]):
    """The order of an epoch: shuffled by seed and epoch, filled up with the empty sample to whole global batches."""

    def __init__(self, count: int, multiple: int, seed: int):
        self.count = count
        self.multiple = multiple
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def indices(self, epoch: int) -> np.ndarray:
        """The samples of an epoch in order; `count` is the empty one."""
        shuffled = np.random.default_rng((self.seed, epoch)).permutation(self.count)
        return np.concatenate([shuffled, np.full(-self.count % self.multiple, self.count)])

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices(self.epoch).tolist())

    def __len__(self) -> int:
        return self.count + -self.count % self.multiple


class StatefulBatchSampler(Order):
    """An order for states that are carried on: each row of a batch reads its documents one after the other, sample by
    sample. Which documents share a row is fixed, to fill rows evenly; their order is shuffled by seed and epoch."""

    def __init__(self, samples: Samples, rows: int, seed: int):
        super().__init__(len(samples), rows, seed)
        starts = np.flatnonzero(np.diff(samples.pieces[:, 0], prepend=-1))
        self.documents = np.split(np.arange(self.count), starts[1:])  # the samples of each
        self.lanes: list[list[int]] = [[] for _ in range(rows)]
        fill = [0] * rows
        for document in sorted(range(len(self.documents)), key=lambda i: -len(self.documents[i])):
            row = fill.index(min(fill))
            self.lanes[row].append(document)
            fill[row] += len(self.documents[document])
        self.steps = max(fill)

    def indices(self, epoch: int) -> np.ndarray:
        random = np.random.default_rng((self.seed, epoch))
        table = np.full((self.steps, self.multiple), self.count)
        for row, lane in enumerate(self.lanes):
            order = [self.documents[document] for document in random.permutation(lane)]
            table[: sum(map(len, order)), row] = np.concatenate(order) if order else []
        return table.flatten()

    def __len__(self) -> int:
        return self.steps * self.multiple
