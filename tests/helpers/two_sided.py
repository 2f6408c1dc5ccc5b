# SPDX-License-Identifier: Apache-2.0
"""References for windows that see both neighbours. Nothing here calls the library's own code that runs windows.

`masked_pass` is one pass of the unmodified base model over all readings of a document, one after the other in one long
row, with a mask that says what each reading sees and position ids that say where its tokens stand. It is exact where
keys and values need not be moved: with rotary positions without sinks, and with learned ones if position offsets are
zero. `bert_loop` goes through BERT layer by layer and reading by reading, and moves keys and values by position
offsets.
"""

import math
from dataclasses import dataclass

import torch

from helpers import tiny

LOCAL = {"modernbert": 2}  # layers with a sliding window see so many tokens to either side
OFFSET = {"roberta": 2, "xlm-roberta": 2, "camembert": 2}  # of the first position id


@dataclass(frozen=True)
class Sizes:
    """Document tokens of a window, windows of a group, positions that are seen, and the special tokens."""

    group: int
    capacity: int = 8
    left: int = 3
    right: int = 4
    sinks: int = 0
    prefix: tuple[int, ...] = (2,)
    suffix: tuple[int, ...] = (3, 3)


@dataclass
class Reading:
    """A reading of a window: the tokens it reads, the readings whose positions it sees, and whether it is given out."""

    start: int
    stop: int
    number: int
    left: int | None = None
    right: int | None = None
    given: bool = True
    begins_group: bool = False


def readings(length, sizes):
    """All readings of a document, group by group, from the definition: a group's last window is read again."""
    starts = [*range(0, length, sizes.capacity)]
    found, begin, left = [], 0, None
    while True:
        members, first = [*range(len(starts))][begin : begin + sizes.group], len(found)
        for place, number in enumerate(members):
            one = Reading(starts[number], min(starts[number] + sizes.capacity, length), number)
            one.begins_group = place == 0
            one.left = left if place == 0 else first + place - 1
            one.right = first + place + 1 if number != members[-1] else None
            found.append(one)
        if members[-1] == len(starts) - 1:
            return found
        found[-1].given = False
        left, begin = len(found) - 2, members[-1]


def masked_pass(name, model, ids, sizes):
    """The outputs of a base model for a document's tokens [N] as they are given out, each [N, ...]."""
    document, rotary = readings(len(ids), sizes), name not in tiny.LEARNED
    assert not (rotary and sizes.sinks), "rotary sinks would have to stand in two places"
    tokens, positions, owner, place = [], [], [], []
    for number, one in enumerate(document):
        before, size, after = len(sizes.prefix), one.stop - one.start, len(sizes.suffix)
        tokens += [*sizes.prefix, *ids[one.start : one.stop].tolist(), *sizes.suffix]
        begin = before + (0 if one.left is None else sizes.left + sizes.sinks)
        behind = 0 if one.right is None else min(sizes.right, document[one.right].stop - document[one.right].start)
        end = begin + size + behind
        here = [*range(before), *range(begin, begin + size), *range(end, end + after)]
        # Only differences of rotary positions count.
        positions += [one.start - before + i for i in range(before + size + after)] if rotary else here
        owner += [number] * (before + size + after)
        place += [-1] * before + [*range(size)] + [-1] * after
    owner, place, positions = torch.tensor(owner), torch.tensor(place), torch.tensor(positions)
    inputs = {"position_ids": positions[None] + OFFSET.get(name, 0), "attention_mask": _masks(name, document, owner,
              place, positions, sizes)}  # fmt: skip
    if name not in ("distilbert", "modernbert"):
        inputs["token_type_ids"] = torch.zeros(1, len(owner), dtype=torch.long)
    given = torch.tensor([one.given for one in document])[owner] & (place >= 0)
    return [value[0, given] for value in model(torch.tensor(tokens)[None], **inputs).to_tuple()]


def _masks(name, document, owner, place, position, sizes):
    """What each token sees, [1, 1, T, T]: in layers that see everything, and in those with a sliding window."""
    own = owner[:, None] == owner
    other = torch.zeros_like(own)
    for number, one in enumerate(document):
        seen = torch.zeros_like(own[0])
        if one.left is not None:
            seen |= (owner == one.left) & (place >= sizes.capacity - sizes.left)
            seen |= (owner == 0) & (place >= 0) & (place < sizes.sinks)
        if one.right is not None:
            seen |= (owner == one.right) & (place >= 0) & (place < sizes.right)
        other[owner == number] = seen
    seen = (own | other)[None, None]
    if name not in LOCAL:
        return seen
    near = (position[:, None] - position).abs() <= LOCAL[name]
    return {"full_attention": seen, "sliding_attention": ((own & near) | other)[None, None]}


def bert_loop(bert, offsets, ids, sizes, bptt_windows=None, token_types=False):
    """The last hidden states of BERT as they are given out, of a document's tokens [N, k], and of windows' first ones.

    Args:
        offsets: position offsets, [L, 2, heads, positions, d].
        bptt_windows: truncated BPTT: what a group receives is detached if a multiple of so many windows lies between
            its first window and that of the group before.
        token_types: tokens behind the prefix have type 1.
    """
    document, carried = readings(len(ids), sizes), sizes.sinks + sizes.left
    before, end = len(sizes.prefix), len(sizes.prefix) + sizes.capacity
    shift = [0 if one.left is None else carried for one in document]
    behind = [0 if one.right is None else min(sizes.right, document[one.right].stop - document[one.right].start)
              for one in document]  # fmt: skip
    cut = [
        bptt_windows is not None and one.begins_group and one.left is not None
        and one.number // bptt_windows > (one.number - (sizes.group - 1)) // bptt_windows
        for one in document
    ]  # fmt: skip
    hidden = []
    for one, moved, extra in zip(document, shift, behind, strict=True):
        size = one.stop - one.start
        tokens = torch.tensor([*sizes.prefix, *ids[one.start : one.stop].tolist(), *sizes.suffix])
        last = before + moved + size + extra
        where = [*range(before), *range(before + moved, before + moved + size), *range(last, last + len(sizes.suffix))]
        types = (torch.arange(len(tokens)) >= before)[None].long() * int(token_types)
        hidden.append(bert.embeddings(tokens[None], position_ids=torch.tensor(where)[None], token_type_ids=types)[0])
    for number, layer in enumerate(bert.encoder.layer):
        own = layer.attention.self
        heads = [[split(part(x)) for part in (own.query, own.key, own.value)] for x in hidden]
        hidden = [
            _bert_layer(layer, hidden[i], _seen(heads, document, i, offsets[number], sizes, shift, before, end, cut))
            for i in range(len(document))
        ]
    given = [(x, one.stop - one.start) for x, one in zip(hidden, document, strict=True) if one.given]
    return torch.cat([x[before : before + size] for x, size in given]), torch.stack([x[0] for x, _ in given])


def _seen(heads, document, i, offsets, sizes, shift, before, end, cut):
    """The queries of a reading, and the keys and values that it sees."""
    one, (query, *own) = document[i], heads[i]
    seen = []
    for side in (0, 1):

        def moved(reading, begin, to, count, side=side):
            """Positions of a reading, moved from where they stand there to other places."""
            x, at = heads[reading][side + 1][:, begin : begin + count], begin + shift[reading]
            count = x.shape[1]
            return x + offsets[side, :, to : to + count] - offsets[side, :, at : at + count]

        parts = [own[side]]
        if one.left is not None:
            sinks = heads[0][side + 1][:, before : before + sizes.sinks]
            recent = moved(one.left, end - sizes.left, before + sizes.sinks, sizes.left)
            parts += [sinks.detach() if any(cut[: i + 1]) else sinks, recent.detach() if cut[i] else recent]
        if one.right is not None:
            size = min(sizes.right, document[one.right].stop - document[one.right].start)
            parts.append(moved(one.right, before, end + shift[i], size))
        seen.append(torch.cat(parts, dim=1))
    return query, *seen


def _bert_layer(layer, hidden, seen):
    query, key, value = seen
    weights = (query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])).softmax(-1)
    hidden = layer.attention.output((weights @ value).transpose(0, 1).flatten(1), hidden)
    return layer.output(layer.intermediate(hidden), hidden)


def split(x):
    """[T, heads * d] as [heads, T, d]."""
    return x.unflatten(-1, (tiny.HEADS, -1)).transpose(0, 1)
