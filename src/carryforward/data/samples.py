# SPDX-License-Identifier: Apache-2.0
"""Training samples: N consecutive windows of a document (section 4.2 of the paper), and their order.

An epoch scores every target of every document exactly once, including short documents and the ends of long ones. The
order depends only on the seed and the epoch, so any number of processes sees the same global batches.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Sampler

from .. import windows
from ..utils.checks import check_count
from ..windows import IGNORE, Window
from .tokenization import token_array


def sample_spans(length: int, window: int, overlap: int, windows_per_sample: int) -> Iterator[tuple[int, int, int]]:
    """Yield the (start, stop, score_from) of a document's samples: tokens [start, stop), targets from `score_from` on.

    The last token of a sample is only a target. With an overlap, a sample starts with tokens of the previous one, which
    it reads but does not score again.

    >>> list(sample_spans(25, window=10, overlap=3, windows_per_sample=2))
    [(0, 18, 1), (14, 25, 18)]
    """
    for first, last in _samples_of(windows.schedule(length, window, overlap), windows_per_sample):
        yield first.start, last.score_to, first.score_from


def encoder_sample_spans(schedule: Iterable[Window], windows_per_sample: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the (start, stop, score_from, score_to) of a document's samples for an encoder, from its windows: tokens
    [start, stop) are read, and [score_from, score_to) are scored. With an overlap, samples share tokens, each scored by
    one of them.

    >>> list(encoder_sample_spans(windows.encoder_schedule(17, 10, 4, prefix=1, suffix=1), 2))
    [(0, 12, 0, 10), (8, 17, 10, 17)]
    """
    for first, last in _samples_of(schedule, windows_per_sample):
        yield first.start, last.end, first.score_from, last.score_to


def _samples_of(schedule: Iterable[Window], windows_per_sample: int) -> Iterator[tuple[Window, Window]]:
    """The first and the last window of each sample. A group of windows that see both neighbours is never cut."""
    sample: list[Window] = []
    for window in schedule:
        if len(sample) >= windows_per_sample and window.begins_group:
            yield sample[0], sample[-1]
            sample = []
        sample.append(window)
    if sample:
        yield sample[0], sample[-1]


def make_sample(document: Any, start: int, stop: int, score_from: int) -> dict[str, Tensor]:
    """Return tokens [start, stop) of a document as `input_ids`, with `labels` from token `score_from` on."""
    ids = torch.from_numpy(token_array(document[start:stop], "documents"))
    labels = ids.clone()
    labels[: score_from - start] = IGNORE
    return {"input_ids": ids, "labels": labels}


def batch_by_length(lengths: Sequence[int], batch_size: int, min_length: int = 1) -> list[list[int]]:
    """Return batches of document indices, the longest documents first, without those shorter than `min_length`.

    >>> batch_by_length([3, 0, 9, 4], batch_size=2)
    [[2, 3], [0]]
    """
    check_count("batch_size", batch_size)
    order = sorted((i for i, length in enumerate(lengths) if length >= min_length), key=lambda i: -lengths[i])
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def check_documents(documents: Sequence[Any], name: str = "documents") -> None:
    """Raise a ValueError for anything but token ids of each document: for texts, and for rows of a data set, whose
    length would be the number of columns. Of each document, only the first token is looked at."""
    if hasattr(documents, "lengths"):  # `Documents`, checked when they were created
        return
    if isinstance(documents, str | Mapping) or not hasattr(documents, "__len__") or not hasattr(documents, "__iter__"):
        raise ValueError(f"{name} is a {type(documents).__name__}: give a list of token ids for each document.")
    for i, document in enumerate(documents):
        if isinstance(document, Mapping):
            raise ValueError(
                f'{name}: rows with columns are given. Give token ids alone, as dataset["input_ids"] does.'
            )
        if isinstance(document, str) or not hasattr(document, "__len__"):
            raise ValueError(f"{name}[{i}] is a {type(document).__name__}: give a list of token ids.")
        token_array(document[:1], f"{name}[{i}]")


class DocumentSamples(Dataset):
    """Parts of documents that are trained on. Index `len(samples)` is an empty sample, which fills up the last batch.

    Attributes:
        spans: document, start, stop, `score_from` and `score_to` of each sample, [N, 5]: tokens [start, stop) are read,
            and [score_from, score_to) are scored.
        targets: the tokens that each sample may score, [N].
    """

    def __init__(self, documents: Sequence[Any], cut: Callable[[int], Iterable[tuple[int, ...]]], nothing: str):
        """
        Args:
            cut: the spans of a document of some length, without its index.
            nothing: what is wrong with documents that give no sample.
        """
        check_documents(documents)
        self.documents = documents
        spans = [(index, *span) for index, document in enumerate(documents) for span in cut(len(document))]
        if not spans:
            raise ValueError(f"Nothing to train on: none of the {len(documents)} documents has {nothing}.")
        self.spans = np.array(spans, dtype=np.int64)

    @property
    def targets(self) -> np.ndarray:
        return self.spans[:, 4] - self.spans[:, 3]

    def __len__(self) -> int:
        return len(self.spans)

    def empty(self) -> dict[str, Tensor]:
        """The empty sample: one token, without a label."""
        return {"input_ids": torch.zeros(1, dtype=torch.long), "labels": torch.full((1,), IGNORE)}

    def name(self, index: int) -> str:
        """Return the document and the tokens of a sample, for messages."""
        document, start, stop, *_ = self.spans[index].tolist()
        names = getattr(self.documents, "names", None)
        return f"{names[document] if names is not None else document}, tokens {start}-{stop}"


class Samples(DocumentSamples):
    """Samples of a causal language model."""

    def __init__(
        self, documents: Sequence[Any], window: int, overlap: int, windows_per_sample: int, *, carry_state: bool = False
    ):
        """
        Args:
            carry_state: the state is carried from sample to sample, so a sample starts where the previous one ended.
        """
        check_count("windows_per_sample", windows_per_sample)

        def cut(length: int) -> Iterator[tuple[int, ...]]:
            for start, stop, score_from in sample_spans(length, window, overlap, windows_per_sample):
                yield start, stop, score_from, stop

        super().__init__(documents, cut, "a second token to predict")
        if carry_state:  # the state contains the tokens that overlap with the previous sample
            later = self.spans[:, 1] > 0
            self.spans[later, 1] = self.spans[later, 3]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == len(self):
            return self.empty()
        document, start, stop, score_from, _ = self.spans[index].tolist()
        return make_sample(self.documents[document], start, stop, score_from)


def collate(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a right-padded batch with `input_ids`, `attention_mask` and `labels`."""
    batch = pad([sample["input_ids"] for sample in samples])
    labels = pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=IGNORE)
    return batch | {"labels": labels}


def pad(rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return token ids of different lengths and any integer type as a right-padded batch with its `attention_mask`."""
    ids = pad_sequence(list(rows), batch_first=True).long()
    lengths = torch.tensor([len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}


class EpochSampler(Sampler[int]):
    """The samples of an epoch, shuffled by seed and epoch, and filled up with empty samples to whole global batches."""

    def __init__(self, count: int, multiple: int, seed: int):
        self.count = count
        self.multiple = multiple
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def indices(self, epoch: int) -> np.ndarray:
        """Return the sample indices of an epoch in order; `count` is the empty sample."""
        shuffled = np.random.default_rng((self.seed, epoch)).permutation(self.count)
        return np.concatenate([shuffled, np.full(-self.count % self.multiple, self.count)])

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices(self.epoch).tolist())

    def __len__(self) -> int:
        return self.count + -self.count % self.multiple


class StatefulBatchSampler(EpochSampler):
    """A sampler for states that are carried from batch to batch: each row of the batches reads its documents one after
    another, sample by sample. Documents are assigned to rows once, to fill them evenly; in each row, their order is
    shuffled by seed and epoch."""

    def __init__(self, samples: DocumentSamples, rows: int, seed: int):
        super().__init__(len(samples), rows, seed)
        starts = np.flatnonzero(np.diff(samples.spans[:, 0], prepend=-1))
        self.documents = np.split(np.arange(self.count), starts[1:])  # the samples of each document
        self.rows: list[list[int]] = [[] for _ in range(rows)]  # the documents of each row
        fill = [0] * rows
        for document in sorted(range(len(self.documents)), key=lambda i: -len(self.documents[i])):
            row = fill.index(min(fill))
            self.rows[row].append(document)
            fill[row] += len(self.documents[document])
        self.steps = max(fill)

    def indices(self, epoch: int) -> np.ndarray:
        random = np.random.default_rng((self.seed, epoch))
        indices = np.full((self.steps, self.multiple), self.count)
        for row, documents in enumerate(self.rows):
            order = [self.documents[document] for document in random.permutation(documents)]
            indices[: sum(map(len, order)), row] = np.concatenate(order) if order else []
        return indices.flatten()

    def __len__(self) -> int:
        return self.steps * self.multiple
