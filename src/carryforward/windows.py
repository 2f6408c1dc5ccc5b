# SPDX-License-Identifier: Apache-2.0
"""How a document is cut into windows: integers in, integers out (sections 4.2 and 5.4 of the paper).

Indices count the document's own tokens from 0 and every range is half-open. A window knows the tokens it reads and
the tokens it scores, so training, evaluation at any overlap and streaming share one loop. Nothing here knows about
tensors, models or padding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

IGNORE = -100  # the label of a target that is not scored, as everywhere in Hugging Face


@dataclass(frozen=True, slots=True)
class Window:
    """One window of a document.

    Attributes:
        start, end: the tokens that are read.
        score_from, score_to: the tokens this window scores, and no other does. For a causal model these are
            *targets*: token ``i`` is predicted from ``i - 1``. For an encoder they are the positions themselves.
        group: the token at which its group starts (`grouped_schedule`); None where windows have no groups.
    """

    start: int
    end: int
    score_from: int
    score_to: int
    group: int | None = None

    @property
    def begins_group(self) -> bool:
        """Whether it is the first window of its group. Without groups, every window is one by itself."""
        return self.group is None or self.group == self.start

    @property
    def is_read_again(self) -> bool:
        """Whether the next group reads the same window again. Then nothing of this reading is given out."""
        return self.score_from == self.score_to

    def sees_next(self, following: "Window") -> bool:
        """Whether it sees its right neighbour, the window that follows it in the schedule."""
        return self.group is not None and self.group == following.group


class WindowGroup(NamedTuple):
    """Windows of an encoder that see their right neighbours, too.

    Attributes:
        size: windows of a group.
        right: first positions of its right neighbour that a window sees.
    """

    size: int
    right: int

    @property
    def advance(self) -> int:
        """Windows from the start of a group to the start of the next: its last one is read again."""
        return self.size - 1


class Span(NamedTuple):
    """The positions of a window that its state is made of.

    Attributes:
        start, stop: the pooled positions; a start of None means after each row's own prefix.
        next_start: the position at which the next window starts.
    """

    start: int | None
    stop: int
    next_start: int


def schedule(length: int, window: int, overlap: int = 0, *, start: int = 0, score_from: int = 1) -> Iterator[Window]:
    """Windows in which a causal model predicts every token of a document but the first, each exactly once.

    The paper's example, ten tokens a window with an overlap of three, on 25 tokens:

    >>> [(w.start, w.end) for w in schedule(25, window=10, overlap=3)]
    [(0, 10), (7, 17), (14, 24)]
    >>> [(w.score_from, w.score_to) for w in schedule(25, window=10, overlap=3)]
    [(1, 11), (11, 18), (18, 25)]

    The last token is only ever a target. To have an output at the last token too, ask for ``length + 1``.

    Args:
        length: number of tokens in the document.
        window: tokens read at once (the paper's T).
        overlap: tokens two consecutive windows share.
        start, score_from: where to continue in a document that has been read in part.
    """
    check(window, overlap)
    while score_from < length:
        end = min(start + window, length - 1)
        yield Window(start, end, score_from, end + 1)
        score_from = end + 1
        start += window - overlap


def encoder_schedule(
    length: int,
    window: int,
    overlap: int = 0,
    *,
    prefix: int = 0,
    suffix: int = 0,
    start: int = 0,
    final: bool = True,
) -> Iterator[Window]:
    """Windows in which an encoder gives every token of a document one vector, each exactly once.

    A window is prefix + stretch + suffix (``[CLS]`` ... ``[SEP]``). ``window`` counts all of it; ``overlap`` and the
    indices count the document's own tokens. Where windows overlap, a token belongs to the one in which it lies
    farthest from an edge.

    >>> [(w.start, w.end, w.score_from, w.score_to) for w in encoder_schedule(17, 10, 4, prefix=1, suffix=1)]
    [(0, 8, 0, 6), (4, 12, 6, 10), (8, 16, 10, 14), (12, 17, 14, 17)]

    Args:
        start: first token of the next window, in a document that has been read in part.
        final: whether the document ends at ``length``. If not, a window is returned only once the text that follows
            cannot change it any more.
    """
    capacity = check(window, overlap, prefix, suffix)
    ahead = (overlap + 1) // 2  # shared tokens that lie farther from an edge in the earlier window
    score_from = start + ahead if start else 0
    while score_from < length:
        end = min(start + capacity, length)
        complete = end < length or final or (end - start == capacity and overlap == 0)
        if not complete:
            return
        score_to = length if end == length else start + capacity - overlap + ahead
        yield Window(start, end, score_from, score_to)
        score_from = score_to
        start += capacity - overlap


def grouped_schedule(
    length: int,
    window: int,
    group: int,
    *,
    prefix: int = 0,
    suffix: int = 0,
    start: int = 0,
    final: bool = True,
) -> Iterator[Window]:
    """Windows of an encoder that also sees its right neighbours, in groups of so many windows.

    A window sees the one after it only inside its group. So a group's last window sees nothing on its right, unless
    the document ends there. The next group therefore begins with the same window, and only this second reading is
    given out.

    >>> [(w.start, w.end, w.score_from, w.score_to) for w in grouped_schedule(7, 4, 3, prefix=1, suffix=1)]
    [(0, 2, 0, 2), (2, 4, 2, 4), (4, 6, 4, 4), (4, 6, 4, 6), (6, 7, 6, 7)]

    Args:
        group: windows of a group, at least 2.
        start: first token of the next group, in a document that has been read in part.
        final: whether the document ends at ``length``. If not, a group is returned only once a token after it is known:
            until then its last window may be the document's last.
    """
    capacity = check(window, 0, prefix, suffix)
    if group < 2:
        raise ValueError(f"group={group} must be at least 2 windows: a window and its right neighbour.")
    stop = start + group * capacity
    while start < length and (final or stop < length):
        for begin in range(start, min(stop, length), capacity):
            end = min(begin + capacity, length)
            is_read_again = end == stop < length
            yield Window(begin, end, begin, begin if is_read_again else end, start)
        if stop >= length:
            return
        start, stop = stop - capacity, stop + (group - 1) * capacity


def check(window: int, overlap: int, prefix: int = 0, suffix: int = 0) -> int:
    """Refuse windows that cannot move forward; return a window's capacity, its number of document tokens."""
    for name, value in (("window", window), ("overlap", overlap)):
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be an integer, a number of tokens.")
    capacity = window - prefix - suffix
    if capacity < 1:
        special = f" after {prefix + suffix} special tokens" if prefix + suffix else ""
        raise ValueError(f"window={window} leaves no room for the document{special}: use a larger window.")
    if not 0 <= overlap < capacity:
        raise ValueError(
            f"overlap={overlap} must be at least 0 and smaller than the {capacity} document tokens of a window "
            f"(window={window}): use a smaller overlap or a larger window."
        )
    return capacity
