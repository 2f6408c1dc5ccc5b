# SPDX-License-Identifier: Apache-2.0
"""Training samples of encoders: parts of documents with the labels of their tokens, or whole documents with one label.

A part is cut from its document where windows begin and end (`samples.encoder_sample_spans`). Each token is scored by
one sample, though samples that overlap may both read it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..windows import IGNORE
from .labelled import LabelledDocuments
from .masking import Masking
from .samples import DocumentSamples, EpochSampler, pad
from .tokenization import token_array

Cut = Callable[[int], Iterator[tuple[int, ...]]]  # from the length of a document to its spans


class MaskedSamples(DocumentSamples):
    """Samples of a masked language model. They are corrupted anew in each epoch, so a key is (epoch, index)."""

    def __init__(self, documents: Sequence[Any], cut: Cut, masking: Masking, seed: int):
        super().__init__(documents, cut, "a token to predict")
        self.masking, self.seed = masking, seed

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Tensor]:
        epoch, index = key
        if index == len(self):
            return self.empty()
        document, start, stop, score_from, score_to = self.spans[index].tolist()
        part = self.documents[document][start:stop]
        read, labels = self.masking.corrupt(part, self.seed, document, epoch=epoch, start=start)
        labels[: score_from - start] = labels[score_to - start :] = IGNORE
        return {"input_ids": torch.from_numpy(read), "labels": torch.from_numpy(labels)}


class MaskedSampler(EpochSampler):
    """As `EpochSampler`, with the epoch beside each index, so that workers that load samples need not be told it."""

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        return ((epoch, index) for index in self.indices(epoch).tolist())


class TokenLabelSamples(DocumentSamples):
    """Samples of a token classifier."""

    documents: LabelledDocuments

    def __init__(self, documents: LabelledDocuments, cut: Cut):
        super().__init__(documents, cut, "a token")

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == len(self):
            return self.empty()
        document, start, stop, score_from, score_to = self.spans[index].tolist()
        labels = torch.from_numpy(self.documents.labels[document][start:stop].copy())
        labels[: score_from - start] = labels[score_to - start :] = IGNORE
        return {"input_ids": _tokens(self.documents, document, start, stop), "labels": labels}


class LabelSamples(DocumentSamples):
    """Samples of a classifier: whole documents, since the label is one of all windows."""

    documents: LabelledDocuments

    def __init__(self, documents: LabelledDocuments):
        super().__init__(documents, lambda length: [(0, length, 0, length)] if length else [], "a token")

    def empty(self) -> dict[str, Tensor]:
        return {"input_ids": torch.zeros(1, dtype=torch.long), "labels": torch.tensor(IGNORE)}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == len(self):
            return self.empty()
        document, start, stop, *_ = self.spans[index].tolist()
        label = torch.tensor(int(self.documents.labels[document][0]))
        return {"input_ids": _tokens(self.documents, document, start, stop), "labels": label}


def collate_labels(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a right-padded batch with `input_ids`, `attention_mask` and one label a row."""
    batch = pad([sample["input_ids"] for sample in samples])
    return batch | {"labels": torch.stack([sample["labels"] for sample in samples])}


def _tokens(documents: LabelledDocuments, document: int, start: int, stop: int) -> Tensor:
    return torch.from_numpy(token_array(documents[document][start:stop], "documents"))
