# SPDX-License-Identifier: Apache-2.0
"""Read whole documents in batches, a few windows per call, and carry the state from call to call.

Memory depends on the windows and documents per call, not on the length of the documents. Where windows wait for each
other, a call reads a few windows of several documents. Where they run side by side, it reads a block of one document,
or what is left of several. Where they run side by side but for a scan, which takes the windows of a document one after
the other, a block has windows of as many documents as possible.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..data.samples import batch_by_length
from ..models.outputs import RecurrentOutput
from ..state import State
from ..windows import WindowGroup

Read = Callable[["Piece", State | None], RecurrentOutput]


@dataclass(frozen=True)
class Piece:
    """What one call reads of B documents.

    Attributes:
        documents: the index of each row's document, B of them.
        spans: for each row, the tokens [start, stop) of its document.
        final: whether all of these documents end in this piece.
    """

    documents: list[int]
    spans: list[tuple[int, int]]
    final: bool


def stream_documents(
    read: Read,
    lengths: Sequence[int],
    *,
    stride: int,
    overlap: int,
    windows_per_call: int,
    batch_size: int,
    min_length: int = 1,
    separate_final: bool = False,
    block_windows: int = 1,
    scans: bool = False,
    group: WindowGroup | None = None,
) -> Iterator[tuple[Piece, RecurrentOutput]]:
    """Read documents, the longest first, piece by piece.

    Args:
        read: runs the model on a piece. It receives the state of the piece's rows (None at the start of the documents)
            and returns the model's output with the state after the piece.
        lengths: tokens of each document.
        stride: tokens from the start of a window to the start of the next.
        overlap: tokens that consecutive windows share.
        windows_per_call: windows of each document in a piece, where windows wait for each other.
        batch_size: documents in a batch.
        min_length: documents with fewer tokens are skipped.
        separate_final: read the rows that end in a call of their own, before the others, for models that must be told
            with `final` that documents end. By default rows that end and rows that continue share a call. With blocks
            they never do.
        block_windows: windows that run side by side; 1 if they wait for each other.
        scans: within a block, something takes the windows of a document one after the other.
        group: the groups in which windows see their right neighbours, if they do. A piece ends with a group.

    Yields:
        Each piece and the output of its call. The pieces of a document come in order.
    """
    if group is not None:  # whose last window is read again, with the next piece
        overlap, block_windows = stride, max(block_windows // group.advance, 1) * group.advance
    size = {"stride": stride, "overlap": overlap}
    for documents in group_documents(
        lengths, batch_size=batch_size, min_length=min_length, block_windows=block_windows, scans=scans, **size
    ):
        if block_windows > 1 and not scans:
            yield from _stream_blocks(read, lengths, documents, block_windows=block_windows, **size)
            continue
        shared = block_windows if block_windows > 1 else None
        yield from _stream_batch(
            read, lengths, documents, windows_per_call=windows_per_call, shared_windows=shared,
            separate_final=separate_final, **size,
        )  # fmt: skip


def group_documents(
    lengths: Sequence[int],
    *,
    stride: int,
    overlap: int,
    batch_size: int,
    min_length: int = 1,
    block_windows: int = 1,
    scans: bool = False,
) -> list[list[int]]:
    """The documents that share calls of `stream_documents`, group by group, with its arguments.

    Nothing passes between groups. `stream_documents` reads a group alone exactly as among others, so that several
    processes can divide them.
    """
    batches = batch_by_length(lengths, batch_size, min_length)
    if block_windows == 1 or scans:
        return batches
    groups: list[list[int]] = []
    for is_new in (False, True):  # ends of long documents have a state, short documents have none
        group, windows = list[int](), 0
        for i in (i for batch in batches for i in batch):
            start = _start_of_end(lengths[i], stride, overlap, block_windows)
            if (start == 0) != is_new:
                continue
            more = -(-(lengths[i] - start) // stride)
            if group and (windows + more > block_windows or len(group) == batch_size):
                groups.append(group)
                group, windows = [], 0
            group.append(i)
            windows += more
        if group:
            groups.append(group)
    return groups


def _start_of_end(length: int, stride: int, overlap: int, block_windows: int) -> int:
    """The first token of a document that no full block reads."""
    block = block_windows * stride
    first = block + overlap + 1  # a window is complete once the next token is known
    return 0 if length <= first else first + (length - first - 1) // block * block


def _stream_batch(
    read: Read,
    lengths: Sequence[int],
    documents: list[int],
    *,
    stride: int,
    overlap: int,
    windows_per_call: int,
    shared_windows: int | None,
    separate_final: bool,
) -> Iterator[tuple[Piece, RecurrentOutput]]:
    """Read documents together, a few windows of each in a call: `windows_per_call`, or `shared_windows` in all."""

    def tokens(rows: int) -> int:
        """New tokens of each document in a call."""
        return stride * (windows_per_call if shared_windows is None else max(shared_windows // max(rows, 1), 1))

    state: State | None = None
    start, stop = 0, tokens(len(documents)) + overlap + 1
    while documents:
        ending = [row for row, i in enumerate(documents) if lengths[i] <= stop]
        continuing = [row for row, i in enumerate(documents) if lengths[i] > stop]
        for rows in (ending, continuing) if separate_final else ([*range(len(documents))],):
            if rows:
                chosen = [documents[row] for row in rows]
                piece = Piece(chosen, [(start, min(lengths[i], stop)) for i in chosen], final=rows == ending)
                out = read(piece, _select(state, rows))
                yield piece, out
        documents, state = [documents[row] for row in continuing], _select(out.state, continuing)
        start, stop = stop, stop + tokens(len(documents))


def _stream_blocks(
    read: Read, lengths: Sequence[int], documents: list[int], *, stride: int, overlap: int, block_windows: int
) -> Iterator[tuple[Piece, RecurrentOutput]]:
    """Read each document alone, a full block at a time, and then the ends of all together."""
    starts, states = [], list[State]()
    for i in documents:
        start, end, state = 0, _start_of_end(lengths[i], stride, overlap, block_windows), None
        while start < end:
            stop = start + block_windows * stride + (overlap + 1) * (start == 0)
            piece = Piece([i], [(start, stop)], final=False)
            out = read(piece, state)
            yield piece, out
            start, state = stop, out.state
        starts.append(start)
        states += [] if state is None else [state]
    spans = [(start, lengths[i]) for start, i in zip(starts, documents, strict=True)]
    piece = Piece(documents, spans, final=True)
    yield piece, read(piece, State.cat(states) if states else None)


def _select(state: State | None, rows: list[int]) -> State | None:
    """The given rows of a state; the state itself, not a copy, if these are all of its rows."""
    return state if state is None or len(state) == len(rows) else state[rows]
