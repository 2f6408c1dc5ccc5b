# SPDX-License-Identifier: Apache-2.0
"""Samples cover every target of every document exactly once, in an order that processes share."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from carryforward import windows
from carryforward.data.documents import Documents
from carryforward.data.encoder_samples import MaskedSampler, MaskedSamples
from carryforward.data.masking import Masking
from carryforward.data.samples import EpochSampler, Samples, collate, encoder_sample_spans, sample_spans

SHAPES = st.integers(1, 12).flatmap(lambda window: st.tuples(st.just(window), st.integers(0, window - 1)))


@given(st.integers(0, 90), SHAPES, st.integers(1, 5))
def test_every_target_is_scored_once(length, shape, windows_per_sample):
    window, overlap = shape
    scored = [
        target
        for start, stop, score_from in sample_spans(length, window, overlap, windows_per_sample)
        for target in range(score_from, stop)
    ]
    assert scored == list(range(1, length))


@given(st.integers(2, 90), SHAPES, st.integers(1, 5))
def test_a_sample_is_read_in_the_documents_own_windows(length, shape, windows_per_sample):
    window, overlap = shape
    whole = [(w.start, w.end) for w in windows.schedule(length, window, overlap)]
    pieces = [
        (start + w.start, start + w.end)
        for start, stop, _ in sample_spans(length, window, overlap, windows_per_sample)
        for w in windows.schedule(stop - start, window, overlap)
    ]
    assert pieces == whole


def test_labels_leave_out_what_an_earlier_sample_scored():
    samples = Samples([np.arange(25)], window=10, overlap=3, windows_per_sample=2)
    assert len(samples) == 2
    assert samples[1]["input_ids"].tolist() == list(range(14, 25))
    assert samples[1]["labels"].tolist() == [-100] * 4 + list(range(18, 25))
    assert samples.targets.tolist() == [17, 7]


def test_documents_without_a_target_give_no_sample():
    samples = Samples([[1], [], [1, 2], [3]], 10, 3, 2)
    assert len(samples) == 1
    with pytest.raises(ValueError, match="none of the 2 documents has a second token"):
        Samples([[1], [2]], 10, 3, 2)
    with pytest.raises(ValueError, match="windows_per_sample=0 must be at least 1"):
        Samples([[1, 2]], 10, 3, 0)


def test_a_sample_knows_where_it_comes_from():
    documents = Documents.of([[1, 2, 3], [4] * 30], names=["first", "second"])
    assert Samples(documents, 10, 0, 2).name(2) == "second, tokens 20-30"


def test_batches_are_padded_on_the_right():
    batch = collate([{"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([-100, 2])},
                     {"input_ids": torch.tensor([3]), "labels": torch.tensor([-100])}])  # fmt: skip
    assert batch["input_ids"].tolist() == [[1, 2], [3, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert batch["labels"].tolist() == [[-100, 2], [-100, -100]]


def test_an_epoch_has_every_sample_once_and_is_filled_up():
    order = EpochSampler(10, multiple=4, seed=3)
    first = list(order)
    assert sorted(first) == [*range(10), 10, 10]
    assert len(order) == 12
    assert first[-2:] == [10, 10], "the empty sample"
    order.set_epoch(1)
    assert list(order) != first
    assert list(EpochSampler(10, 4, seed=4)) != first
    assert list(EpochSampler(10, 4, seed=3)) == first
    # two processes that take batches in turn, as Accelerate has them do, see what one sees
    assert list(EpochSampler(10, 2 * 2, seed=3)) == first


def test_the_empty_sample_scores_nothing():
    samples = Samples([[1, 2]], 10, 0, 2)
    assert (samples[1]["labels"] == -100).all()
    assert len(samples[1]["input_ids"]) == 1


# --- encoders --------------------------------------------------------------------------------------------------------

SPECIAL = {"prefix": 1, "suffix": 2}


@given(st.integers(0, 90), SHAPES, st.integers(1, 5))
def test_encoders_score_every_token_once_and_read_the_documents_own_windows(length, shape, windows_per_sample):
    capacity, overlap = shape
    whole = list(windows.encoder_schedule(length, capacity + 3, overlap, **SPECIAL))
    pieces, scored = [], []
    for start, stop, score_from, score_to in encoder_sample_spans(whole, windows_per_sample):
        own = list(windows.encoder_schedule(stop - start, capacity + 3, overlap, **SPECIAL))
        for w in own:  # what the sample's labels leave of a window
            begin, end = max(start + w.score_from, score_from), min(start + w.score_to, score_to)
            pieces.append(windows.Window(start + w.start, start + w.end, begin, end))
        scored += range(score_from, score_to)
    assert pieces == whole, "each token is scored in the window that scores it in the whole document"
    assert scored == list(range(length))


def test_parts_of_a_document_share_its_corruption():
    """With an overlap, two samples read the same tokens: as the whole document's corruption has them."""
    document = np.random.default_rng(0).integers(5, 60, size=50)
    masking = Masking(4, (0, 1, 2, 3, 4), 60, probability=0.5)

    def cut(length):
        return encoder_sample_spans(windows.encoder_schedule(length, 13, 4, **SPECIAL), 2)

    samples = MaskedSamples([[9], document], cut, masking, seed=5)
    for epoch in (0, 2):
        read, labels = masking.corrupt(document, 5, 1, epoch=epoch)
        found = np.full(50, -100)
        for index, (number, start, stop, score_from, score_to) in enumerate(samples.spans.tolist()):
            if number == 1:
                sample = samples[epoch, index]
                assert sample["input_ids"].tolist() == read[start:stop].tolist()
                own = sample["labels"].numpy()
                assert (own[: score_from - start] == -100).all()
                assert (own[score_to - start :] == -100).all()
                found[score_from:score_to] = own[score_from - start : score_to - start]
        assert found.tolist() == labels.tolist()
    assert samples[0, 1]["input_ids"].tolist() != samples[1, 1]["input_ids"].tolist()
    assert (samples[0, len(samples)]["labels"] == -100).all()


def test_the_order_of_masked_samples_names_the_epoch():
    order = MaskedSampler(5, 2, seed=1)
    order.set_epoch(3)
    assert list(order) == [(3, index) for index in order.indices(3)]


@given(st.integers(0, 90), st.integers(1, 12), st.integers(2, 4), st.integers(1, 5))
def test_groups_of_windows_are_not_cut(length, capacity, group, windows_per_sample):
    """A sample read by itself has the groups that it has in the whole document, and every token is scored once."""
    whole = list(windows.grouped_schedule(length, capacity + 3, group, **SPECIAL))
    pieces, scored = [], []
    for start, stop, score_from, score_to in encoder_sample_spans(whole, windows_per_sample):
        own = windows.grouped_schedule(stop - start, capacity + 3, group, **SPECIAL)
        pieces += [(start + w.start, start + w.end, start + w.group) for w in own]
        scored += range(score_from, score_to)
    assert pieces == [(w.start, w.end, w.group) for w in whole]
    assert scored == list(range(length))
