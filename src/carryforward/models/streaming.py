# SPDX-License-Identifier: Apache-2.0
"""Read whole documents in batches, a few windows per call, and carry the state from call to call.

Memory depends on the batch size and the windows per call, not on the length of the documents.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..data.samples import batch_by_length
from ..state import State
from .outputs import RecurrentOutput


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of B documents, read in one call.

    Attributes:
        documents: the index of each row's document, B of them.
        start, stop: the token range; a document may end before `stop`.
        final: whether all of these documents end in this piece.
    """

    documents: list[int]
    start: int
    stop: int
    final: bool


def stream_documents(
    read: Callable[[Piece, State | None], RecurrentOutput],
    lengths: Sequence[int],
    *,
    stride: int,
    overlap: int,
    windows_per_call: int,
    batch_size: int,
    min_length: int = 1,
    separate_final: bool = False,
) -> Iterator[tuple[Piece, RecurrentOutput]]:
    """Read documents of similar length in one batch, piece by piece; rows leave the batch when their document ends.

    Args:
        read: runs the model on a piece. It receives the state of the piece's rows (None at the start of the documents)
            and returns the model's output with the state after the piece.
        lengths: tokens of each document.
        stride: tokens from the start of a window to the start of the next.
        overlap: tokens that consecutive windows share.
        windows_per_call: windows of each document in a piece.
        batch_size: documents in a batch.
        min_length: documents with fewer tokens are skipped.
        separate_final: read the rows that end in a call of their own, before the others, for models that must be told
            with `final` that documents end. By default rows that end and rows that continue share a call.

    Yields:
        Each piece and the output of its call, in order. The documents of a batch are complete before the next batch
        starts.
    """
    for documents in batch_by_length(lengths, batch_size, min_length):
        state: State | None = None
        start, stop = 0, windows_per_call * stride + overlap + 1  # a window is complete once the next token is known
        while documents:
            ending = [row for row, i in enumerate(documents) if lengths[i] <= stop]
            continuing = [row for row, i in enumerate(documents) if lengths[i] > stop]
            for rows in (ending, continuing) if separate_final else ([*range(len(documents))],):
                if rows:
                    piece = Piece([documents[row] for row in rows], start, stop, final=rows == ending)
                    out = read(piece, _select(state, rows))
                    yield piece, out
            documents, state = [documents[row] for row in continuing], _select(out.state, continuing)
            start, stop = stop, stop + windows_per_call * stride


def _select(state: State | None, rows: list[int]) -> State | None:
    """The given rows of a state; the state itself, not a copy, if these are all of its rows."""
    return state if state is None or len(state) == len(rows) else state[rows]
