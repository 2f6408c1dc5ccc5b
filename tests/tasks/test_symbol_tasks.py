# SPDX-License-Identifier: Apache-2.0
"""Retrieval, copy and reverse: what their documents hold, read symbol by symbol."""

import re

import pytest
import torch

from carryforward.tasks.base import TEST, TRAIN, VALIDATION, sample_seed
from carryforward.tasks.copying import Copy, Reverse
from carryforward.tasks.retrieval import Retrieval
from carryforward.windows import IGNORE, schedule


def names(task, ids):
    """The symbols of a document, as text."""
    return "".join(task.vocabulary[i] for i in ids.tolist())


def seed(number=0, source=TEST):
    return sample_seed(source, number)


@pytest.mark.parametrize(("mode", "window"), [("remember", None), ("remember", 8), ("rewrite", None), ("rewrite", 5)])
def test_each_pair_fills_a_window_and_the_latest_value_is_asked_for(mode, window):
    task, pairs = Retrieval(mode, window=window), 37
    samples = task.samples(pairs, 20, seed())
    assert samples.input_ids.shape == (20, task.length(pairs))
    for ids, labels, depth in zip(samples.input_ids, samples.labels, samples.depths, strict=True):
        cut = [names(task, ids[w.start : w.end]) for w in schedule(len(ids), task.window)]
        assert len(cut) == pairs + 1, "a window for each pair, and one for the question"
        known, number = {}, {}
        for i, pair in enumerate(cut[:-1]):
            key, value = pair.rstrip("-").split(":")
            assert len(pair) == task.window
            assert (len(key), len(value)) == (task.key_symbols, 1)
            assert mode == "rewrite" or key not in known, "keys to remember are unique"
            known[key], number[key] = value, i
        asked = cut[-1].removeprefix("?").removesuffix(":")
        assert names(task, ids[-1:]) == known[asked]
        assert depth == number[asked] / (pairs - 1)
        assert labels[-1] == ids[-1]
        assert set(labels[:-1].tolist()) == {IGNORE}, "only the answer is scored"


def test_every_key_is_asked_for():
    task = Retrieval("rewrite")
    asked = task.samples(100, 200, seed()).input_ids[:, -3]
    assert set(asked.tolist()) == set(range(16))


@pytest.mark.parametrize("make", [Copy, Reverse])
@pytest.mark.parametrize(("symbols", "windows"), [(24, 1), (24, 9), (120, 9), (360, 9), (8, 3)])
def test_a_sequence_and_its_repetition_take_the_stated_windows(make, symbols, windows):
    task = make(symbols, windows)
    samples = task.samples(symbols, 3, seed())
    assert len([*schedule(samples.input_ids.shape[1], task.window)]) == windows
    for ids, labels in zip(samples.input_ids, samples.labels, strict=True):
        first, second = names(task, ids).removeprefix("<").split(">")
        assert len(first) == symbols
        assert second == (first if make is Copy else first[::-1])
        assert labels[: symbols + 2].eq(IGNORE).all()
        assert torch.equal(labels[symbols + 2 :], ids[symbols + 2 :])


def test_the_curriculum_of_copy_grows_by_windows():
    task = Copy(120, 9)
    in_windows = [len([*schedule(task.length(size), task.window)]) for size in task.train_sizes]
    assert in_windows == sorted(in_windows)
    assert task.train_sizes[-1] == 120
    assert in_windows[-1] == 9


@pytest.mark.parametrize(
    "task", [Retrieval("remember"), Retrieval("rewrite"), Copy(10, 3)], ids=["remember", "rewrite", "copy"]
)
def test_samples_follow_from_seeds_and_sources_differ(task):
    one, same = (task.samples(10, 50, seed()) for _ in range(2))
    assert torch.equal(one.input_ids, same.input_ids)
    sources = [task.samples(10, 50, seed(7, source)).input_ids for source in (TRAIN, VALIDATION, TEST)]
    documents = {tuple(row) for ids in sources for row in ids.tolist()}
    assert len(documents) == 150, "none is drawn twice"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Retrieval("forget"), "mode='forget' must be one of remember, rewrite"),
        (lambda: Retrieval("rewrite", key_symbols=2), "key_symbols=2: the 16 keys of rewrite have one symbol"),
        (lambda: Retrieval("remember", window=4), "window=4: a pair has 5 tokens"),
        (lambda: Retrieval("remember", key_symbols=1).samples(17, 1, seed()), "there are only 16 different keys"),
        (lambda: Retrieval("rewrite").samples(0, 1, seed()), "size (of retrieval, in pairs)=0 must be at least 1"),
        (lambda: Copy(24, 8), "cannot be cut into so many equal windows. Use 7 or 9"),
        (lambda: Copy(0, 1), "symbols=0 must be at least 1"),
        (lambda: Copy(4, 2).samples(4, 0, seed()), "count=0 must be at least 1"),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
