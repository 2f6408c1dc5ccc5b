# SPDX-License-Identifier: Apache-2.0
"""Corruption of documents for masked language models: which tokens are to be predicted, and what is read instead.

A share of the tokens is chosen. Of these, 80 % are read as the mask token, 10 % as a random token and 10 % as they are,
as in BERT. Special tokens are neither chosen nor drawn.

A document is corrupted before windows are cut, so that all readings of a token are the same: in its own window, in a
window that overlaps, as a neighbour's carried key. What happens to a token depends on the seed, the epoch, the number
of the document and the token's place in it alone: on nothing that was drawn before, and not on the tokens around it.
So any part of a document can be corrupted on its own, and a resumed run draws what one that never stopped draws.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..presets import MASK_PROBABILITY
from ..utils.checks import check_count
from ..windows import IGNORE
from .samples import check_documents
from .tokenization import token_array

_MASKED, _REPLACED = 0.8, 0.9  # of the chosen tokens, 80 % are masked, the next 10 % replaced


@dataclass(frozen=True)
class Masking:
    """How documents are corrupted.

    Attributes:
        mask_id: the mask token.
        special: ids that are neither chosen nor drawn as random tokens: special tokens, the mask token among them.
        vocabulary: random tokens are drawn from the ids below it.
        probability: the share of tokens that are chosen.
    """

    mask_id: int
    special: tuple[int, ...]
    vocabulary: int
    probability: float = MASK_PROBABILITY

    def __post_init__(self) -> None:
        check_probability("probability", self.probability)

    @classmethod
    def of(cls, tokenizer: Any, vocabulary: int | None = None, probability: float | None = None) -> "Masking":
        """The masking of a tokenizer.

        Args:
            vocabulary: the number of tokens that the model has an embedding for, if it has fewer.
            probability: the share of tokens that are chosen; by default 0.15.
        """
        mask = getattr(tokenizer, "mask_token_id", None)
        if mask is None:
            raise ValueError(
                f"tokenizer: {type(tokenizer).__name__} has no mask token, which masked language models need. Use the "
                "tokenizer of a masked language model, or set its mask_token."
            )
        count = min(len(tokenizer), vocabulary or len(tokenizer))
        special = tuple(sorted({*tokenizer.all_special_ids, mask}))
        return cls(mask, special, count, MASK_PROBABILITY if probability is None else probability)

    def corrupt(
        self, ids: Any, seed: int, document: int, *, epoch: int | None = None, start: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Corrupt a document, or a part of it.

        Args:
            ids: the token ids, [N].
            document: the document's number.
            epoch: of training, from 0; None for validation and evaluation, whose corruption is always the same.
            start: the place of the first of these tokens in the document.

        Returns:
            what is read, and the labels: the original id of each chosen token, -100 elsewhere; both int64 [N].
        """
        ids = token_array(ids, "ids")
        stream = np.random.SeedSequence((seed, 0 if epoch is None else epoch + 1, document))
        bits = np.random.Philox(key=stream.generate_state(2, np.uint64), counter=start)  # 4 numbers a token
        chance, kind, drawn, _ = (bits.random_raw(4 * len(ids)).reshape(-1, 4) >> np.uint64(11)).T * 2.0**-53
        chosen = (chance < self.probability) & ~np.isin(ids, self.special)
        read = np.where(chosen & (kind < _MASKED), self.mask_id, ids)
        replaced = chosen & (kind >= _MASKED) & (kind < _REPLACED)
        read[replaced] = self._ordinary[(drawn[replaced] * len(self._ordinary)).astype(np.int64)]
        return read, np.where(chosen, ids, IGNORE)

    @cached_property
    def _ordinary(self) -> np.ndarray:
        """The ids that random tokens are drawn from."""
        ids = np.setdiff1d(np.arange(self.vocabulary), self.special)
        if not len(ids):
            raise ValueError(f"vocabulary={self.vocabulary}: all of its tokens are special. Use another tokenizer.")
        return ids

    def to_dict(self) -> dict[str, Any]:
        """What results record."""
        return {"probability": self.probability, "mask_id": self.mask_id}


@dataclass(frozen=True)
class MaskedDocuments(Sequence[tuple[np.ndarray, np.ndarray]]):
    """Documents with a fixed corruption, for validation and evaluation: each is what is read, and the labels.

    Models that are compared get the same `MaskedDocuments`, and predict the same tokens from the same ones.

    Attributes:
        documents: token ids of each document.
        numbers: the documents' numbers, on which their corruption depends; by default their indices.
    """

    documents: Sequence[Any]
    masking: Masking
    seed: int = 0
    numbers: Sequence[int] = field(default=())

    def __post_init__(self) -> None:
        check_documents(self.documents)
        check_count("seed", self.seed, 0)
        if not len(self.numbers):
            object.__setattr__(self, "numbers", range(len(self.documents)))

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return MaskedDocuments(self.documents[index], self.masking, self.seed, self.numbers[index])
        return self.masking.corrupt(self.documents[index], self.seed, self.numbers[index])

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return (self[i] for i in range(len(self)))


def mask_documents(
    documents: Sequence[Any], tokenizer: Any, *, probability: float | None = None, seed: int = 0
) -> MaskedDocuments:
    """Corrupt documents for `masked_score`.

    Args:
        documents: token ids of each document, without special tokens, such as `tokenise` returns.
        tokenizer: the model's tokenizer, which knows the mask token and the special ones.
        probability: the share of tokens that are to be predicted; by default 0.15.
        seed: the same seed chooses the same tokens.
    """
    return MaskedDocuments(documents, Masking.of(tokenizer, probability=probability), seed)


def check_probability(name: str, value: Any) -> None:
    """Refuse anything but a share of tokens above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{name}={value!r} must be a number above 0 and at most 1.")
