# SPDX-License-Identifier: Apache-2.0
"""Odd but valid calls give what every document alone gives, one call for each.

A call is drawn at random: dtypes and memory layout of its tensors, padding on either side, overlap, columns to keep,
labels, and the pieces in which documents are read. Seeds are fixed. CARRYFORWARD_CAMPAIGNS=all draws more.
"""

import functools
import random
from itertools import pairwise

import pytest
import torch
from helpers import campaigns, tiny
from torch.testing import assert_close

CALLS = 60 if campaigns.full() else 12
KINDS = ["gpt2", "llama", "bert", "token", "sequence", "none"]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
MASKS = [torch.bool, *INTEGERS, torch.float16, torch.float32, torch.float64]


@functools.cache
def model(kind):
    if kind in tiny.CAUSAL:
        return tiny.recurrent(kind, recent=3, sinks=1) if kind == "llama" else tiny.recurrent(kind)
    return tiny.recurrent("bert", None if kind == "bert" else kind)


class Odd:
    """Rows of different lengths as one padded batch, with its dtypes and layout drawn at random."""

    def __init__(self, rng, rows):
        self.rng, self.rows = rng, rows
        self.width = max(map(len, rows)) + rng.choice([0, 0, 3])
        self.left = [rng.random() < 0.5 for _ in rows]

    def place(self, row):
        """The columns of a row's tokens."""
        length = len(self.rows[row])
        return slice(self.width - length, self.width) if self.left[row] else slice(0, length)

    def batch(self, values, fill, dtypes):
        """One value for each token, padded."""
        table = torch.full((len(self.rows), self.width), fill)
        for row, value in enumerate(values):
            table[row, self.place(row)] = value
        return self.layout(table.to(self.rng.choice(dtypes)))

    def layout(self, table):
        """The same tensor, contiguous or not."""
        kind = self.rng.choice(["plain", "transposed", "strided"])
        if kind == "plain":
            return table
        if kind == "transposed":
            return table.T.contiguous().T
        return torch.stack([table, table], dim=2)[:, :, 0]


def labels_of(kind, rng, row):
    labels = row.clone() % 3 if kind == "token" else row.clone()
    labels[torch.tensor([rng.random() < 0.3 for _ in row])] = -100
    return labels


def pieces(rng, length):
    """Where a document is cut: everywhere, nowhere, at random."""
    cuts = sorted(rng.sample(range(1, length), rng.choice([0, 1, 3]))) if length > 3 else []
    return [0, *cuts, length]


@pytest.mark.parametrize("seed", range(CALLS))
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_gives_what_its_documents_give_alone(kind, seed):
    rng, net = random.Random(f"{kind} {seed}"), model(kind)
    rows = [tiny.documents(1, rng.choice([1, 2, 7, 8, 9, 16, 23, 40]), rng.randrange(10**6))[0]
            for _ in range(rng.choice([1, 2, 4]))]  # fmt: skip
    options = {"overlap": rng.choice([None, 0, 2, 3]), "use_state": rng.random() < 0.8}
    scored = kind in ("gpt2", "llama", "bert", "token") and rng.random() < 0.6
    labels = [labels_of(kind, rng, row) for row in rows] if scored else None
    odd = Odd(rng, rows)
    ids = odd.batch(rows, rng.choice([0, 66]), INTEGERS)
    mask = odd.batch([torch.ones_like(row) for row in rows], 0, MASKS)
    padded = any(len(row) < odd.width for row in rows)
    arguments = {"attention_mask": mask if padded or rng.random() < 0.5 else None, **options}
    if scored:
        wide = [dtype for dtype in INTEGERS if dtype != torch.uint8]  # which has no -100
        arguments |= {"labels": odd.batch(labels, -100, wide), "return_logits": True}
    with torch.no_grad():
        together = net(ids, **arguments)
        alone = [
            net(row[None], **options, **({"labels": labels[i][None], "return_logits": True} if scored else {}))
            for i, row in enumerate(rows)
        ]
    for i, out in enumerate(alone):
        for name in ("logits", "last_hidden_state"):
            if getattr(out, name) is not None:
                values = getattr(together, name)[i]
                values = values if kind == "sequence" else values[odd.place(i)]
                assert_close(values, getattr(out, name)[0], rtol=1e-4, atol=1e-4)
    if scored:
        assert together.n_scored == sum(out.n_scored for out in alone)
        assert_close(together.nll_sum, sum(out.nll_sum for out in alone), rtol=1e-4, atol=1e-4)
    assert together.state.read.tolist() == [len(row) for row in rows]


@pytest.mark.parametrize("seed", range(CALLS))
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_columns_to_keep_are_those_of_all_columns(kind, seed):
    rng, net = random.Random(f"{kind} {seed}"), model(kind)
    width = rng.choice([1, 5, 8, 20, 33])
    ids = tiny.documents(2, width, seed)
    numbers = [rng.randrange(-width, width) for _ in range(rng.choice([1, 3, 6]))]
    chosen = torch.tensor([rng.random() < 0.4 for _ in range(width)])
    keep = rng.choice(
        [0, 1, 3, width, width + 5, torch.tensor(numbers), torch.tensor(numbers, dtype=torch.int32), chosen]
    )
    with torch.no_grad():
        every, some = net(ids).logits, net(ids, logits_to_keep=keep).logits
    expected = every[:, keep.long() if keep.dtype != torch.bool else keep] if isinstance(keep, torch.Tensor) else (
        every[:, -keep:] if keep else every
    )  # fmt: skip
    assert_close(some, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(CALLS))
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "none"])
def test_pieces_give_what_the_whole_gives(kind, seed, tmp_path):
    rng, net = random.Random(f"{kind} {seed}"), model(kind)
    ids = tiny.documents(2, rng.choice([2, 9, 17, 40]), seed)
    overlap = rng.choice([None, 0, 3])
    cuts, state, parts = pieces(rng, ids.shape[1]), None, []
    with torch.no_grad():
        whole = net(ids, overlap=overlap)
        for begin, end in pairwise(cuts):
            more = {} if kind in tiny.CAUSAL else {"final": end == ids.shape[1]}
            piece = ids[:, begin:end].to(rng.choice(INTEGERS))
            out = net(piece, state=state, overlap=overlap, **more)
            parts.append(out.logits if out.logits is not None else out.last_hidden_state)
            state = out.state
            if rng.random() < 0.5:
                state.save(tmp_path / "state")
                state = type(state).load(tmp_path / "state")
            if rng.random() < 0.5:
                state = type(state).cat(state.split())
    expected = whole.logits if whole.logits is not None else whole.last_hidden_state
    assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)
