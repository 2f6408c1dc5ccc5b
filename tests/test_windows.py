# SPDX-License-Identifier: Apache-2.0
"""The window schedule: the paper's worked example, and what holds for every length, window and overlap."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carryforward.windows import Window, encoder_schedule, grouped_schedule, schedule

sizes = st.integers(1, 40)
lengths = st.integers(0, 300)


def test_the_papers_example():
    windows = list(schedule(25, window=10, overlap=3))
    assert windows == [Window(0, 10, 1, 11), Window(7, 17, 11, 18), Window(14, 24, 18, 25)]


@settings(deadline=None, max_examples=300)
@given(lengths, sizes, st.data())
def test_every_target_is_scored_exactly_once(length, window, data):
    overlap = data.draw(st.integers(0, window - 1))
    scored = []
    for n, w in enumerate(schedule(length, window, overlap)):
        assert w.start == n * (window - overlap)
        assert 0 < w.end - w.start <= window
        assert w.start < w.score_from < w.score_to == w.end + 1, "a target is predicted from a token that was read"
        scored += range(w.score_from, w.score_to)
    assert scored == list(range(1, length))


@settings(deadline=None, max_examples=300)
@given(lengths, sizes, st.data())
def test_all_windows_but_the_last_are_full(length, window, data):
    overlap = data.draw(st.integers(0, window - 1))
    windows = list(schedule(length, window, overlap))
    assert all(w.end - w.start == window for w in windows[:-1])


@settings(deadline=None, max_examples=300)
@given(lengths, sizes, st.data())
def test_a_schedule_can_be_resumed_anywhere(length, window, data):
    """Cut anywhere: the unfinished window is read again, and no target is scored twice or left out."""
    overlap = data.draw(st.integers(0, window - 1))
    cut = data.draw(st.integers(0, length))
    before = list(schedule(cut, window, overlap))
    start = max((w.start for w in schedule(cut + 1, window, overlap)), default=0)
    after = list(schedule(length, window, overlap, start=start, score_from=max(cut, 1)))
    scored = [i for w in (*before, *after) for i in range(w.score_from, w.score_to)]
    assert scored == list(range(1, length))
    ends = {w.start: w.end for w in schedule(length, window, overlap)}
    assert all(ends[w.start] == w.end for w in after)


@settings(deadline=None, max_examples=300)
@given(lengths, sizes, st.integers(0, 3), st.integers(0, 3), st.data())
def test_an_encoder_outputs_every_token_once_and_far_from_edges(length, capacity, prefix, suffix, data):
    overlap = data.draw(st.integers(0, capacity - 1))
    windows = list(encoder_schedule(length, capacity + prefix + suffix, overlap, prefix=prefix, suffix=suffix))
    assert [i for w in windows for i in range(w.score_from, w.score_to)] == list(range(length))

    def depth(w: Window, i: int) -> int:
        """The distance of a token from the nearest edge; the document's own ends do not count."""
        left = i - w.start if w.start else length
        right = w.end - 1 - i if w.end < length else length
        return min(left, right)

    for w in windows:
        assert w.start <= w.score_from < w.score_to <= w.end <= w.start + capacity
        for i in range(w.score_from, w.score_to):
            here = depth(w, i)
            assert all(depth(v, i) <= here for v in windows if v.start <= i < v.end)


@settings(deadline=None, max_examples=300)
@given(lengths, sizes, st.data())
def test_a_streaming_encoder_reads_the_same_windows(length, window, data):
    overlap = data.draw(st.integers(0, window - 1))
    cut = data.draw(st.integers(0, length))
    whole = list(encoder_schedule(length, window, overlap))
    before = list(encoder_schedule(cut, window, overlap, final=False))
    start = before[-1].start + window - overlap if before else 0
    after = list(encoder_schedule(length, window, overlap, start=start))
    assert before + after == whole


@settings(deadline=None, max_examples=300)
@given(lengths, st.integers(1, 20), st.integers(2, 7), st.integers(0, 3), st.integers(0, 3))
def test_groups_read_their_last_window_again_and_give_every_token_out_once(length, capacity, group, prefix, suffix):
    windows = list(grouped_schedule(length, capacity + prefix + suffix, group, prefix=prefix, suffix=suffix))
    assert [i for w in windows for i in range(w.score_from, w.score_to)] == list(range(length))
    again = [w for w in windows if w.is_read_again]
    assert all(w.score_from == w.start and (w.end - w.start) == capacity for w in again)
    groups = [list(members) for _, members in itertools.groupby(windows, key=lambda w: w.group)]
    assert all(len(members) == group for members in groups[:-1])
    assert not groups or 1 < len(groups[-1]) <= group or len(windows) == 1
    for members in groups:
        assert [w.begins_group for w in members] == [True] + [False] * (len(members) - 1)
        assert [w.is_read_again for w in members] == [False] * (len(members) - 1) + [members is not groups[-1]]
        assert all(a.sees_next(b) and a.end == b.start for a, b in itertools.pairwise(members))
    for members, following in itertools.pairwise(groups):
        assert (members[-1].start, members[-1].end) == (following[0].start, following[0].end)
        assert not members[-1].sees_next(following[0])


@settings(deadline=None, max_examples=300)
@given(lengths, st.integers(1, 20), st.integers(2, 7), st.data())
def test_a_streaming_encoder_reads_the_same_groups(length, window, group, data):
    cut = data.draw(st.integers(0, length))
    whole = list(grouped_schedule(length, window, group))
    before = list(grouped_schedule(cut, window, group, final=False))
    start = before[-1].start if before else 0
    assert before + list(grouped_schedule(length, window, group, start=start)) == whole


def test_a_group_has_a_window_and_its_right_neighbour():
    with pytest.raises(ValueError, match="group=1 must be at least 2 windows"):
        list(grouped_schedule(30, 10, 1))


@pytest.mark.parametrize(("window", "overlap"), [(10, 10), (10, 11), (10, -1), (0, 0)])
def test_windows_that_cannot_move_forward_are_refused(window, overlap):
    with pytest.raises(ValueError, match="overlap=" if window else "window="):
        list(schedule(30, window, overlap))


def test_special_tokens_must_leave_room():
    with pytest.raises(ValueError, match="no room"):
        list(encoder_schedule(30, 3, prefix=1, suffix=2))
    with pytest.raises(ValueError, match="smaller than the 2 document tokens"):
        list(encoder_schedule(30, 5, 2, prefix=1, suffix=2))
