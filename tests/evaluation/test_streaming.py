# SPDX-License-Identifier: Apache-2.0
"""Reading documents in batches, piece by piece: every token once, each row with its own state."""

import pytest
import torch

from carryforward.evaluation.streaming import stream_documents
from carryforward.models.outputs import RecurrentOutput
from carryforward.state import State
from carryforward.windows import WindowGroup

LENGTHS = [40, 1, 0, 9, 2, 17, 8, 41, 18]
STRIDE, OVERLAP = 6, 2  # of windows of 8 tokens


def pieces(**kwargs):
    """The pieces that are read; checks that each row continues where its document stopped."""

    def read(piece, state):
        """A state that holds the index of each document and how many of its tokens were read."""
        starts = [start for start, _ in piece.spans]
        if state is None:
            assert not any(starts)
        else:
            assert state.tokens[:, 0].tolist() == piece.documents
            assert state.read.tolist() == starts
        counts = torch.tensor([stop for _, stop in piece.spans])
        index = torch.tensor(piece.documents)[:, None]
        return RecurrentOutput(
            state=State({"vector": index.float()}, counts > 0, index, torch.ones_like(counts), counts)
        )

    streamed = stream_documents(read, LENGTHS, stride=STRIDE, overlap=OVERLAP, **kwargs)
    return [piece for piece, _ in streamed]


@pytest.mark.parametrize(("block_windows", "scans"), [(1, False), (1, True), (2, False), (3, False), (100, False),
                                                     (2, True), (100, True)])  # fmt: skip
@pytest.mark.parametrize("separate_final", [False, True])
@pytest.mark.parametrize(("windows_per_call", "batch_size"), [(1, 1), (1, 3), (2, 4), (16, 100)])
def test_every_token_is_read_once_and_in_order(windows_per_call, batch_size, separate_final, block_windows, scans):
    tokens = {i: [] for i, length in enumerate(LENGTHS) if length}
    for piece in pieces(windows_per_call=windows_per_call, batch_size=batch_size, separate_final=separate_final,
                        block_windows=block_windows, scans=scans):  # fmt: skip
        assert len(piece.documents) <= batch_size
        ends = [LENGTHS[i] == stop for i, (_, stop) in zip(piece.documents, piece.spans, strict=True)]
        assert piece.final == all(ends)
        in_blocks = block_windows > 1 and not scans
        if separate_final or in_blocks:
            assert len(set(ends)) == 1
        if in_blocks:
            windows = [-(-max(stop - start - OVERLAP, 1) // STRIDE) for start, stop in piece.spans]
            assert sum(windows) <= block_windows + len(windows), "a window more where a document goes on"
        for i, (start, stop) in zip(piece.documents, piece.spans, strict=True):
            tokens[i] += range(start, stop)
    assert tokens == {i: list(range(length)) for i, length in enumerate(LENGTHS) if length}


def test_pieces_end_one_token_after_a_window():
    (first, *later) = pieces(windows_per_call=2, batch_size=1)[:4]
    assert (first.documents, first.spans) == ([7], [(0, 2 * STRIDE + OVERLAP + 1)])
    assert [piece.spans for piece in later] == [[(15, 27)], [(27, 39)], [(39, 41)]]


def test_blocks_are_full_until_documents_end():
    """Long documents one after the other, then what is left of several."""
    spans = [(piece.documents, piece.spans) for piece in pieces(windows_per_call=2, batch_size=9, block_windows=3)]
    assert spans[:5] == [([7], [(0, 21)]), ([7], [(21, 39)]), ([0], [(0, 21)]), ([0], [(21, 39)]),
                         ([7, 0], [(39, 41), (39, 40)])]  # fmt: skip


def test_a_block_that_is_scanned_has_windows_of_all_documents():
    """As many of each as fit: two windows of each of seven documents, then three of each of the four that are left."""
    first, second, *_ = pieces(windows_per_call=9, batch_size=9, min_length=2, block_windows=14, scans=True)
    assert (len(first.documents), max(stop for _, stop in first.spans)) == (7, 2 * STRIDE + OVERLAP + 1)
    assert (len(second.documents), second.spans[0]) == (4, (15, 15 + 3 * STRIDE))


def test_a_piece_ends_one_token_after_a_group():
    """Groups of three windows, of which the last is read again: twice two windows, and the one that comes after."""
    group = WindowGroup(3, right=4)
    spans = [(piece.documents, piece.spans)
             for piece in pieces(windows_per_call=2, batch_size=9, block_windows=5, group=group)]  # fmt: skip
    assert spans[:3] == [([7], [(0, 5 * STRIDE + 1)]), ([0], [(0, 31)]), ([7, 0], [(31, 41), (31, 40)])]
    (first, *_) = pieces(windows_per_call=2, batch_size=1, block_windows=1, group=group)
    assert first.spans == [(0, 3 * STRIDE + 1)], "never less than a group"


def test_short_documents_are_skipped():
    read = {i for piece in pieces(windows_per_call=1, batch_size=4, min_length=2) for i in piece.documents}
    assert read == {i for i, length in enumerate(LENGTHS) if length >= 2}
