# SPDX-License-Identifier: Apache-2.0
"""Reading documents in batches, piece by piece: every token once, each row with its own state."""

import pytest
import torch

from carryforward.models.outputs import RecurrentOutput
from carryforward.models.streaming import stream_documents
from carryforward.state import State

LENGTHS = [40, 1, 0, 9, 2, 17, 8, 41, 18]
STRIDE, OVERLAP = 6, 2  # of windows of 8 tokens


def pieces(**kwargs):
    """The pieces that are read; checks that each row continues where its document stopped."""

    def read(piece, state):
        """A state that holds the index of each document and how many of its tokens were read."""
        if state is None:
            assert piece.start == 0
        else:
            assert state.tokens[:, 0].tolist() == piece.documents
            assert state.read.tolist() == [piece.start] * len(piece.documents)
        counts = torch.tensor([min(LENGTHS[i], piece.stop) for i in piece.documents])
        index = torch.tensor(piece.documents)[:, None]
        return RecurrentOutput(
            state=State({"vector": index.float()}, counts > 0, index, torch.ones_like(counts), counts)
        )

    streamed = stream_documents(read, LENGTHS, stride=STRIDE, overlap=OVERLAP, **kwargs)
    return [piece for piece, _ in streamed]


@pytest.mark.parametrize("separate_final", [False, True])
@pytest.mark.parametrize(("windows_per_call", "batch_size"), [(1, 1), (1, 3), (2, 4), (16, 100)])
def test_every_token_is_read_once_and_in_order(windows_per_call, batch_size, separate_final):
    tokens = {i: [] for i, length in enumerate(LENGTHS) if length}
    for piece in pieces(windows_per_call=windows_per_call, batch_size=batch_size, separate_final=separate_final):
        assert len(piece.documents) <= batch_size
        ends = [LENGTHS[i] <= piece.stop for i in piece.documents]
        assert piece.final == all(ends)
        if separate_final:
            assert len(set(ends)) == 1
        for i in piece.documents:
            tokens[i] += range(piece.start, min(LENGTHS[i], piece.stop))
    assert tokens == {i: list(range(length)) for i, length in enumerate(LENGTHS) if length}


def test_pieces_end_one_token_after_a_window():
    (first, *later) = pieces(windows_per_call=2, batch_size=1)[:4]
    assert (first.documents, first.start, first.stop) == ([7], 0, 2 * STRIDE + OVERLAP + 1)
    assert [(piece.start, piece.stop) for piece in later] == [(15, 27), (27, 39), (39, 51)]


def test_short_documents_are_skipped():
    read = {i for piece in pieces(windows_per_call=1, batch_size=4, min_length=2) for i in piece.documents}
    assert read == {i for i, length in enumerate(LENGTHS) if length >= 2}
