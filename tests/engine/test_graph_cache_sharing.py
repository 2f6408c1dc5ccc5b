# SPDX-License-Identifier: Apache-2.0
"""Which windows are captured, which graphs serve several shapes, and the memory that graphs take."""

import contextlib

import pytest
import torch
from helpers import tiny
from helpers.fast_path import (
    IDS,
    RAGGED_ROWS,
    Letters,
    answers,
    asked,
    assert_same_answers,
    both,
    learn,
    recordings_of,
    step,
)
from torch.testing import assert_close

import carryforward as cf
from carryforward.engine import activation_budget, bptt, cuda_graphs, graph_cache


@pytest.mark.parametrize(("name", "training"), [("gpt2", False), ("llama", True)])
def test_rows_of_different_lengths_use_the_recordings_of_full_windows(name, training, recordings):
    plain, fast = both(name, training, keep_windows=0)
    for _ in range(4):
        step(fast)
    made = len(recordings)
    lengths = torch.tensor([45, 41, 30])
    short = (torch.arange(45) < lengths[:, None]).long()
    for mask in (short, short.flip(1)):
        expected, slow = step(plain, attention_mask=mask)
        out, quick = step(fast, attention_mask=mask)
        assert_close(out.loss, expected.loss)
        tiny.assert_same_gradients(slow, quick)
    assert len(recordings) == made, "short windows and fewer rows were recorded anew"


def test_questions_of_other_lengths_are_not_recorded_anew(recordings):
    model = tiny.answering("bert", keep_windows=0)
    for seed, questions in enumerate([tiny.QUESTIONS, [[5], [6, 7, 8, 9], [10, 11]], [[5, 6]] * 3]):
        learn(model, seed, mask=torch.ones_like(RAGGED_ROWS), questions=questions)
    made = [one.work for some in model.graph_cache._recordings.values() for one in some]
    full = [work for work in made if work.ids.shape == (3, 14) and work.mask is None and work.pooled]
    assert len(full) == 4, "with and without gradients, with and without a state"


def test_full_windows_do_not_go_by_a_recording_with_a_mask(recordings):
    model = tiny.answering("bert")
    mask = (torch.arange(45) < torch.tensor([[45], [4], [45]])).long()
    with torch.no_grad():
        for _ in range(4):
            model(IDS, attention_mask=mask, question_ids=tiny.QUESTIONS)
        for _ in range(4):
            model(IDS[:, :21], question_ids=[[5, 6, 7]] * 3)
    shapes = {(one.work.ids.shape, one.work.mask is None) for one in recordings_of(model)}
    assert any(bare for _, bare in shapes)


def test_encoding_again_uses_what_was_recorded(recordings):
    model, texts = tiny.recurrent("bert"), ["a" * 45, "b" * 45, "c" * 45]
    for _ in range(3):
        cf.encode(model, texts, Letters(), batch_size=3)
    made = len(recordings)
    assert made
    cf.encode(model, texts, Letters(), batch_size=3)
    assert len(recordings) == made


def test_documents_that_end_one_after_the_other_share_few_recordings(recordings, monkeypatch):
    """Windows of fewer and fewer rows: no two of them have as many."""
    monkeypatch.setattr(graph_cache, "RECORD_AFTER", 2)
    documents = [tiny.documents(1, length, length)[0].tolist() for length in range(20, 260, 6)]
    plain, fast = both("llama")
    plainly = []
    fast._measured_window = lambda work: plainly.append(work) or type(fast)._measured_window(fast, work)
    expected, found = (cf.perplexity(model, documents, batch_size=100) for model in (plain, fast))
    assert found.nats == pytest.approx(expected.nats, rel=1e-6)
    made = recordings_of(fast)
    assert len(made) <= 6
    assert min(len(one.work.ids) for one in made) <= 6, "those that are left at the end, too"
    assert fast.graph_cache._replayed > 2 * len(plainly)


def test_of_ragged_documents_only_the_largest_windows_are_compiled_at_once(recordings, monkeypatch):
    compiled = []
    monkeypatch.setattr(graph_cache, "RECORD_AFTER", 100)
    monkeypatch.setattr(graph_cache, "compiled", lambda model: compiled.append(1) or contextlib.nullcontext())
    plain, fast = answers("bert", training=True, keep_windows=0)
    fast.fast_path = "compiled"
    for seed, length in enumerate((31, 33, 35, 36)):
        mask = (torch.arange(45) < torch.tensor([45, 38, length])[:, None]).long()
        (expected, slow), (out, quick) = learn(plain, seed, mask), learn(fast, seed, mask)
        assert_same_answers(out, expected)
        tiny.assert_same_gradients(slow, quick)
    made = [one.work for some in fast.graph_cache._recordings.values() for one in some]
    assert len(compiled) == len(made)
    assert {work.ids.shape for work in made} == {(3, 14)}
    assert fast.graph_cache._replayed > 16


def test_windows_first_met_after_others_were_compiled_are_compiled_too(recordings, monkeypatch):
    made = []
    monkeypatch.setattr(graph_cache, "compiled", lambda model: made.append(1) or contextlib.nullcontext())
    monkeypatch.setattr(graph_cache, "COMPILE_AFTER", 60)
    monkeypatch.setattr(graph_cache, "COMMON", 3)
    plain, model = both("gpt2", keep_windows=0)
    for _ in range(15):
        step(model)
    trained = len(made)
    assert trained > 0
    with torch.no_grad():
        for _ in range(30):
            found = model(IDS, labels=IDS).nll_sum
        assert_close(found, plain(IDS, labels=IDS).nll_sum)
    assert len(made) > trained
    assert all(one.compiled for one in recordings_of(model))


@pytest.mark.parametrize("keep", [0, 2])
def test_ragged_batches_do_not_fill_the_memory_with_recordings(keep, recordings):
    model = tiny.recurrent("gpt2", keep_windows=keep).train()  # with dropout no recording serves another shape
    generator = torch.Generator().manual_seed(0)
    for seed in range(60):
        lengths = torch.randint(2, 46, (3, 1), generator=generator)
        step(model, seed=seed, attention_mask=(torch.arange(45) < lengths).long())
    places = [one.work.ids.numel() for one in recordings_of(model, cuda_graphs.CapturedForwardBackward)]
    assert places
    assert sum(places) <= (keep + activation_budget.SPARE) * 3 * 8


def test_what_is_replayed_takes_no_room_and_is_not_taken_for_small(recordings, monkeypatch):
    monkeypatch.setattr(activation_budget, "available", lambda device: 0)
    model = tiny.recurrent("llama", keep_windows="auto").train()
    for _ in range(4):
        step(model)
    assert recordings
    made = len(recordings)
    for _ in range(4):
        step(model, IDS[:2])  # served by recordings of three rows
    assert len(recordings) == made
    assert all(model.activation_budget._sizes.values())
    model.fast_path = "off"
    step(model)
    assert not any(model.activation_budget._ready.values()), "places that are gone"


def test_what_a_replayed_window_gives_out_is_not_taken_for_all_it_holds(recordings, monkeypatch):
    monkeypatch.setattr(activation_budget, "available", lambda device: 0)
    model, plain = (tiny.answering("modernbert", keep_windows="auto").train() for _ in range(2))
    plain.fast_path = "off"
    for one in (model, plain):
        for questions in (tiny.QUESTIONS, tiny.QUESTIONS[:2]):
            for seed in range(4):
                learn(one, seed, questions=questions)
    assert recordings
    for kind, size in model.activation_budget._sizes.items():
        assert size == plain.activation_budget._sizes[kind], kind


def test_what_is_never_pulled_through_is_free_again(recordings):
    model = tiny.answering("bert", keep_windows=100)
    for seed in range(3):
        asked(model, seed)
    made = len(recordings)
    out = asked(model)
    busy = [one.busy for some in model.graph_cache._recordings.values() for one in some]
    assert any(busy)
    del out
    assert not any(one.busy for some in model.graph_cache._recordings.values() for one in some)
    asked(model)
    assert len(recordings) == made


def test_places_of_windows_that_are_needed_still_are_not_free(recordings, monkeypatch):
    """Several calls before one backward pass keep no more than one call would, where there is no more room."""
    model, kept = tiny.answering("bert", keep_windows="auto"), []
    keep = bptt._Sweep._keep
    monkeypatch.setattr(bptt._Sweep, "_keep", lambda sweep, i, table: kept.append(i) or keep(sweep, i, table))
    for seed in range(4):
        learn(model, seed)
    monkeypatch.setattr(activation_budget, "available", lambda device: 0)
    held, counts = [], []
    for _ in range(3):
        kept.clear()
        held.append(model(IDS, question_ids=tiny.QUESTIONS, start_positions=torch.zeros(3, dtype=torch.long),
                          end_positions=torch.zeros(3, dtype=torch.long)))  # fmt: skip
        counts.append(len(kept))
    assert counts[0] > 0
    assert counts[1:] == [0, 0]
    sum(out.loss for out in held).backward()
