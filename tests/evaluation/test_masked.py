# SPDX-License-Identifier: Apache-2.0
"""Scores of masked tokens: against a reading window by window, and that no arm sees what is under a mask."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import encoders, tiny
from helpers.encoders import HELD_OUT, KV, TRAIN, TWO_SIDED

from carryforward.distributed.journal import Journal
from carryforward.distributed.work_map import WorkMap
from carryforward.evaluation.masked import MaskedScore, Sums, masked_score

FAMILIES = ["bert", "roberta", "modernbert", "distilbert"]
ARMS = {
    "disjoint": ({}, {"overlap": 0, "use_state": False}),
    "overlap": ({}, {"overlap": 3, "use_state": False}),
    "vector": ({"overlap": 0}, {"overlap": 0}),
    "vector, overlap": ({}, {"overlap": 2}),
    "kv": (KV | {"overlap": 0}, {"overlap": 0}),
    "kv, overlap": (KV, {"overlap": 2}),
    "kv, far": ({"slots": 0, "recent": 10, "sinks": 1}, {"overlap": 0}),
    "two-sided": (TWO_SIDED, {}),
    "kv, without state": (KV, {"overlap": 2, "use_state": False}),
}


def assert_same(one: MaskedScore, other: MaskedScore):
    assert len(one.groups) == len(other.groups)
    for mine, theirs in zip(one.groups, other.groups, strict=True):
        assert (mine.targets, mine.correct) == (theirs.targets, theirs.correct)
        assert mine.nats == pytest.approx(theirs.nats, rel=1e-5, abs=1e-5)


# --- no arm sees what is under a mask --------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_under_a_mask_moves_no_output(name, arm):
    """Neither in its own window nor in an overlap or as a neighbour's key."""
    fields, arguments = ARMS[arm]
    model = encoders.model(name, **fields)
    (read, labels), length = encoders.masked([TRAIN[4]])[0], len(TRAIN[4])
    hidden = np.flatnonzero((labels != -100) & (read != labels))  # masked or replaced
    assert len(hidden) > 20
    other = TRAIN[4].copy()
    other[hidden] = 5 + (other[hidden] - 5 + 1 + np.arange(len(hidden)) % 30) % (tiny.VOCABULARY - 5)
    assert (other[hidden] != TRAIN[4][hidden]).all()
    again, changed_labels = encoders.masked([other])[0]
    assert (changed_labels[hidden] == other[hidden]).all()
    assert (again[hidden] == read[hidden]).all()
    with torch.no_grad():
        inputs = read, again, TRAIN[4]
        before, after, seen = (model(torch.from_numpy(ids)[None], **arguments).logits for ids in inputs)
    assert torch.equal(before, after)
    assert before.shape[1] == length
    assert (seen - before).abs().max() > 1e-3, "or this test could not fail"


# --- against a reading window by window ------------------------------------------------------------------------------


def reference(model, documents, overlap):
    """Sums by distance, from each window alone, without a state; a plain forward pass of the base model."""
    recurrence, groups = model.config.recurrence, {}
    prefix, suffix = (torch.tensor(one) for one in (recurrence.prefix, recurrence.suffix))
    capacity = recurrence.window - len(prefix) - len(suffix)
    for read, labels in documents:
        length, begin, scored = len(read), 0, 0
        while scored < length:
            end = min(begin + capacity, length)
            until = length if end == length else end - overlap // 2
            ids = torch.cat([prefix, torch.from_numpy(read[begin:end]), suffix])
            logits = model.base(ids[None]).logits[0, len(prefix) : len(prefix) + end - begin]
            for token in range(scored, until):
                if labels[token] == -100:
                    continue
                borders = [token - begin] * (begin > 0) + [end - 1 - token] * (end < length)
                row = logits[token - begin]
                key = min(borders) if borders else None
                targets, nats, correct = groups.get(key, (0, 0.0, 0))
                nats += F.cross_entropy(row, torch.tensor(labels[token])).item()
                groups[key] = targets + 1, nats, correct + int(row.argmax() == labels[token])
            scored, begin = until, begin + capacity - overlap
    return groups


@pytest.mark.parametrize("overlap", [0, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_windows_that_stand_alone(name, overlap):
    model, documents = encoders.model(name), encoders.masked(TRAIN)
    score = masked_score(model, documents, overlap=overlap, use_state=False)
    with torch.no_grad():
        expected = reference(model, documents, overlap)
    assert score.total.targets == sum(int((labels != -100).sum()) for _, labels in documents)
    rows = {(row["from"], row["to"]): Sums(row["targets"], row["nats"], row["correct"]) for row in score.by_distance()}
    found = {(None, None): [None], (0, 0): [0], (1, 1): [1], (2, 3): [2, 3], (4, 7): [4, 5, 6, 7]}
    assert rows.keys() <= found.keys()
    assert sum(sums.targets for sums in rows.values()) == score.total.targets
    for key, sums in rows.items():
        parts = [expected[distance] for distance in found[key] if distance in expected]
        targets, nats, correct = (sum(column) for column in zip(*parts, strict=True))
        assert (sums.targets, sums.correct) == (targets, correct)
        assert sums.nats == pytest.approx(nats, rel=1e-5)


@pytest.mark.parametrize("fields", [{}, KV, TWO_SIDED], ids=["vector", "kv", "two-sided"])
def test_with_a_state_it_is_the_loss_of_the_model(fields):
    model, documents = encoders.model("roberta", **fields), encoders.masked(TRAIN)
    score, nats = masked_score(model, documents), 0.0
    with torch.no_grad():
        for read, labels in documents:
            nats += model(torch.from_numpy(read)[None], labels=torch.from_numpy(labels)[None]).nll_sum.item()
    assert score.total.nats == pytest.approx(nats, rel=1e-5)
    assert score.loss == pytest.approx(nats / score.total.targets)
    assert score.accuracy == score.total.correct / score.total.targets
    without = masked_score(model, documents, use_state=False)
    assert without.total.targets == score.total.targets
    assert abs(without.loss - score.loss) > 1e-3


@pytest.mark.parametrize("fields", [{}, KV, TWO_SIDED], ids=["vector", "kv", "two-sided"])
def test_batches_and_parts(fields):
    """A batch is its documents one by one, and the scores of two halves add up to that of the whole."""
    model, documents, progress = encoders.model("bert", **fields), encoders.masked(TRAIN), []
    whole = masked_score(model, documents, batch_size=8, progress=progress.append)
    assert_same(whole, masked_score(model, documents, batch_size=1))
    assert_same(whole, masked_score(model, documents[:3]) + masked_score(model, documents[3:]))
    assert sum(progress) == sum(map(len, TRAIN))
    assert whole.documents == len(TRAIN)


def test_all_arms_score_the_same_positions():
    documents, scored = encoders.masked(TRAIN), set()
    for fields, arguments in ARMS.values():
        scored.add(masked_score(encoders.model("bert", **fields), documents, **arguments).total.targets)
    assert len(scored) == 1


# --- small things ----------------------------------------------------------------------------------------------------


def test_sums():
    one, other = MaskedScore((Sums(2, 1.5, 1), Sums(4, 2.0, 3)), 1), MaskedScore((Sums(1, 0.5, 0),), 2)
    assert one + other == MaskedScore((Sums(3, 2.0, 1), Sums(4, 2.0, 3)), 3)
    assert (one.total, one.loss, one.accuracy) == (Sums(6, 3.5, 4), 3.5 / 6, 4 / 6)
    assert one.by_distance() == [
        {"from": None, "to": None, "targets": 2, "nats": 1.5, "correct": 1},
        {"from": 0, "to": 0, "targets": 4, "nats": 2.0, "correct": 3},
    ]
    nothing = MaskedScore()
    assert (nothing.loss, nothing.accuracy, nothing + one) == (None, None, one)
    assert nothing + nothing == nothing


def test_the_models_mode_is_kept():
    model = encoders.model("bert", settings=encoders.DROPOUT).train()
    first = masked_score(model, encoders.masked())
    assert model.training
    assert_same(first, masked_score(model, encoders.masked()))


def test_refusals():
    documents = encoders.masked(HELD_OUT)
    with pytest.raises(ValueError, match="a recurrent masked language model is needed, not RecurrentForCausalLM"):
        masked_score(tiny.recurrent("gpt2"), documents)
    with pytest.raises(ValueError, match="documents is a list: give what mask_documents returns"):
        masked_score(encoders.model(), HELD_OUT)
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        masked_score(encoders.model(), documents, batch_size=0)
    with pytest.raises(ValueError, match="overlap=8 must be at least 0"):
        masked_score(encoders.model(), documents, overlap=8)
    masking = dataclasses.replace(encoders.MASKING, probability=1e-9)
    assert masked_score(encoders.model(), dataclasses.replace(documents, masking=masking)).loss is None


def test_an_evaluation_is_divided_and_continued(tmp_path):
    """By batches of documents: what an earlier call has finished is not read again, and the sums are the same."""
    model, documents = encoders.model("bert", **KV), encoders.masked(TRAIN)
    whole = masked_score(model, documents, batch_size=2)
    journal = Journal(tmp_path, ["test"])
    first = masked_score(model, documents, batch_size=2, work_map=WorkMap(journal=journal, name="a"))
    read: list[int] = []
    model.run_window = lambda *args, **kwargs: read.append(1)  # never called
    again = Journal(tmp_path, ["test"])
    assert masked_score(model, documents, batch_size=2, work_map=WorkMap(journal=again, name="a")) == first == whole
    assert not read
