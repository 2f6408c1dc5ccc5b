# SPDX-License-Identifier: Apache-2.0
"""What is read in place of which tokens: shares, seeds, and that a part is corrupted as in the whole."""

import numpy as np
import pytest
from helpers import encoders, prose, tiny
from helpers.encoders import MASK, SPECIAL

from carryforward.data.masking import MaskedDocuments, Masking, mask_documents

LONG = np.random.default_rng(1).integers(0, tiny.VOCABULARY, size=200_000)
MASKING = Masking(MASK, SPECIAL, tiny.VOCABULARY)


def test_shares():
    read, labels = MASKING.corrupt(LONG, seed=0, document=0)
    ordinary, chosen = ~np.isin(LONG, SPECIAL), labels != -100
    assert (labels[chosen] == LONG[chosen]).all()
    assert (read[~chosen] == LONG[~chosen]).all()
    assert chosen[ordinary].mean() == pytest.approx(0.15, abs=0.005)
    masked = chosen & (read == MASK)
    changed = chosen & (read != LONG) & ~masked
    assert masked.sum() / chosen.sum() == pytest.approx(0.8, abs=0.01)
    random = 0.1 * (1 - 1 / (tiny.VOCABULARY - len(SPECIAL)))  # some random tokens are the token itself
    assert changed.sum() / chosen.sum() == pytest.approx(random, abs=0.01)
    counts = np.bincount(read[changed], minlength=tiny.VOCABULARY)
    assert counts[list(SPECIAL)].sum() == 0
    assert counts[len(SPECIAL) :].min() > 0.5 * counts[len(SPECIAL) :].mean(), "all ordinary tokens are drawn"


def test_special_tokens_are_never_chosen():
    read, labels = Masking(MASK, SPECIAL, tiny.VOCABULARY, probability=1.0).corrupt(LONG, seed=0, document=0)
    special = np.isin(LONG, SPECIAL)
    assert (labels[special] == -100).all()
    assert (read[special] == LONG[special]).all()
    assert (labels[~special] != -100).all()


@pytest.mark.parametrize("epoch", [None, 0, 3])
def test_a_part_is_corrupted_as_in_the_whole(epoch):
    read, labels = MASKING.corrupt(LONG[:500], seed=3, document=7, epoch=epoch)
    for start, stop in ((0, 500), (1, 2), (123, 400), (499, 500), (17, 17)):
        part = MASKING.corrupt(LONG[start:stop], seed=3, document=7, epoch=epoch, start=start)
        assert part[0].tolist() == read[start:stop].tolist()
        assert part[1].tolist() == labels[start:stop].tolist()


def test_corruption_depends_on_place_seed_epoch_and_document_alone():
    """Not on tokens: another text has its masks at the same places."""
    draws = {
        key: MASKING.corrupt(np.full(400, 9), **dict(zip(("seed", "document", "epoch"), key, strict=True)))[0].tolist()
        for key in ((0, 0, None), (0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 1, 0), (0, 1, None))
    }
    assert len({tuple(draw) for draw in draws.values()}) == len(draws)
    other, labels = MASKING.corrupt(np.full(400, 11), 0, 0)
    masks = [token == MASK for token in draws[0, 0, None]]
    assert (other == MASK).tolist() == masks
    assert 30 < (labels != -100).sum() < 90


def test_documents_keep_their_corruption_when_they_are_selected():
    documents = encoders.masked(encoders.TRAIN)
    every_second = documents[1::2]
    for i in range(len(every_second)):
        for mine, theirs in zip(every_second[i], documents[2 * i + 1], strict=True):
            assert mine.tolist() == theirs.tolist()
    assert [read.tolist() for read, _ in documents] == [read.tolist() for read, _ in encoders.masked(encoders.TRAIN)]


def test_the_masking_of_a_tokenizer():
    masking = Masking.of(encoders.tokenizer())
    assert masking == Masking(MASK, SPECIAL, tiny.VOCABULARY, 0.15)
    assert Masking.of(encoders.tokenizer(), vocabulary=60).vocabulary == 60
    documents = mask_documents([[5, 6, 7]], encoders.tokenizer(), probability=0.5, seed=2)
    assert (documents.masking.probability, documents.seed) == (0.5, 2)


def test_what_cannot_be_masked_is_refused():
    with pytest.raises(ValueError, match="has no mask token, which masked language models need"):
        Masking.of(prose.tokenizer())
    for share in (0, -0.1, 1.1, True, "0.1"):
        with pytest.raises(ValueError, match="probability=.* must be a number above 0 and at most 1"):
            mask_documents([[5]], encoders.tokenizer(), probability=share)
    with pytest.raises(ValueError, match="all of its tokens are special"):
        Masking(4, (0, 1, 4), 2).corrupt([5] * 999, 0, 0)
    with pytest.raises(ValueError, match="documents is a str"):
        MaskedDocuments("text", MASKING)
