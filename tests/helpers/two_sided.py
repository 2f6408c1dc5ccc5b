# SPDX-License-Identifier: Apache-2.0
"""A reference for windows that see both neighbours: one masked pass of the base model over all readings of a document.

The readings of all windows stand one after the other in one long row, a window that is read twice there twice, each
with its own special tokens. A mask says what the tokens of each reading see, and position ids where they stand. Layer
by layer this is what the library computes window by window. It is exact where keys and values need not be moved: with
rotary positions (without sinks, which would stand in two places), and with learned ones if position offsets are zero.
"""

from dataclasses import dataclass

import torch

from helpers import tiny

LOCAL = {"modernbert": 2}  # layers with a sliding window see so many tokens to either side
OFFSET = {"roberta": 2, "xlm-roberta": 2, "camembert": 2}  # of the first position id


@dataclass
class Reading:
    """A reading of a window: the tokens it reads, the readings whose positions it sees, and what it gives out."""

    start: int
    stop: int
    left: int | None = None
    right: int | None = None
    given: bool = True


def readings(length, capacity, group):
    """All readings of a document, group by group, from the definition: a group's last window is read again."""
    windows = [(start, min(start + capacity, length)) for start in range(0, length, capacity)]
    found, begin, left = [], 0, None
    while True:
        members = list(range(begin, min(begin + group, len(windows))))
        first = len(found)
        for place, number in enumerate(members):
            one = Reading(*windows[number])
            one.left = left if place == 0 else first + place - 1
            one.right = first + place + 1 if place + 1 < len(members) else None
            found.append(one)
        if members[-1] == len(windows) - 1:
            return found
        found[-1].given = False
        left, begin = len(found) - 2, members[-1]


def masked_pass(name, base, ids, *, capacity, group, left, right, sinks=0, prefix=(2,), suffix=(3, 3)):
    """The base model's logits for each token of documents [B, N], as groups of windows give them out."""
    rotary = name not in tiny.LEARNED
    assert not (rotary and sinks), "rotary sinks would have to stand in two places"
    tokens, positions, owner, place, given = [], [], [], [], []
    all_readings = readings(ids.shape[1], capacity, group)
    for number, one in enumerate(all_readings):
        size = one.stop - one.start
        has_left = one.left is not None
        behind = 0 if one.right is None else min(right, all_readings[one.right].stop - all_readings[one.right].start)
        parts = [torch.tensor(side, dtype=torch.long).expand(len(ids), -1) for side in (prefix, suffix)]
        tokens.append(torch.cat([parts[0], ids[:, one.start : one.stop], parts[1]], dim=1))
        if rotary:  # only differences count: the special tokens of neighbours do not see each other
            where = one.start - len(prefix) + torch.arange(len(prefix) + size + len(suffix))
        else:
            shift = (left + sinks) if has_left else 0
            inside = len(prefix) + shift + torch.arange(size)
            after = len(prefix) + shift + size + behind + torch.arange(len(suffix))
            where = torch.cat([torch.arange(len(prefix)), inside, after])
        positions.append(where)
        owner += [number] * (len(prefix) + size + len(suffix))
        place += [-1] * len(prefix) + [*range(size)] + [-1] * len(suffix)
        given += [False] * len(prefix) + [one.given] * size + [False] * len(suffix)
    owner, place, given = torch.tensor(owner), torch.tensor(place), torch.tensor(given)
    seen, local = _masks(name, all_readings, owner, place, torch.cat(positions), capacity, left, right, sinks)
    inputs = {"position_ids": torch.cat(positions)[None] + OFFSET.get(name, 0)}
    inputs["attention_mask"] = seen[None, None]
    if name in LOCAL:
        inputs["attention_mask"] = {"full_attention": seen[None, None], "sliding_attention": local[None, None]}
    if name not in ("distilbert", "modernbert"):
        inputs["token_type_ids"] = torch.zeros(1, len(owner), dtype=torch.long)
    return base(torch.cat(tokens, dim=1), **inputs).logits[:, given]


def _masks(name, all_readings, owner, place, position, capacity, left, right, sinks):
    """What each token sees, [T, T], in layers that see everything and in those with a sliding window."""
    size = len(owner)
    own = owner[:, None] == owner[None]
    other = torch.zeros(size, size, dtype=torch.bool)
    for number, one in enumerate(all_readings):
        visible = torch.zeros(size, dtype=torch.bool)
        if one.left is not None:
            visible |= (owner == one.left) & (place >= capacity - left)
            visible |= (owner == 0) & (place >= 0) & (place < sinks)
        if one.right is not None:
            visible |= (owner == one.right) & (place >= 0) & (place < right)
        other[owner == number] = visible
    near = (position[:, None] - position[None]).abs() <= LOCAL.get(name, 0)
    return own | other, (own & near) | other
