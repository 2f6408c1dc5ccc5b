# SPDX-License-Identifier: Apache-2.0
"""Rotary positions: how models write rotations down, and how keys are rotated.

Two numbers of a key turn together, and models differ in which. Here it is always number i of the first half and of the
second. A model that turns neighbours has its keys reordered where they leave its attention; its queries are reordered
alike, so that scores stay the same (`halves_first`).

Shapes: d numbers of a key, of which the first d' are rotated.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class RotationLayout:
    """How a model writes its rotations down.

    Attributes:
        neighbours: numbers 2i and 2i + 1 turn together, not numbers i and i + d' / 2.
        angles: each angle's cosine stands in both halves ("halves"), twice in a row ("neighbours"), or once ("once").
        backwards: the sine has the other sign.
    """

    neighbours: bool = False
    angles: Literal["halves", "neighbours", "once"] = "halves"
    backwards: bool = False

    def in_halves(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """A model's cosine and sine [..., n] as `rotate_keys` expects them, each [..., d']."""
        if self.angles == "neighbours":
            cos, sin = cos[..., ::2], sin[..., ::2]
        if self.angles != "halves":
            cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)
        return cos, -sin if self.backwards else sin


LAYOUTS = {
    "halves": RotationLayout(),  # Llama and most others
    "halves backwards": RotationLayout(backwards=True),
    "halves, angles once": RotationLayout(angles="once"),
    "neighbours": RotationLayout(neighbours=True, angles="neighbours"),
    "neighbours, angles in halves": RotationLayout(neighbours=True),
    "neighbours, angles once": RotationLayout(neighbours=True, angles="once"),
}


def rotate_keys(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate keys [..., d] by angles whose cosine and sine [..., d'] are given; d' < d: only the first d' numbers."""
    rotary, rest = keys[..., : cos.shape[-1]], keys[..., cos.shape[-1] :]  # some models rotate a part only
    half = rotary.shape[-1] // 2
    swapped = torch.cat([-rotary[..., half:], rotary[..., :half]], dim=-1)
    return torch.cat([(rotary * cos + swapped * sin).to(keys.dtype), rest], dim=-1)


def halves_first(x: Tensor, rotated: int) -> Tensor:
    """Reorder queries or keys [..., d] of a model that turns neighbours: of the first `rotated` numbers those at even
    places come first, then those at odd ones."""
    return _transposed(x, rotated, (-1, 2))


def neighbours_first(x: Tensor, rotated: int) -> Tensor:
    """Undo `halves_first`."""
    return _transposed(x, rotated, (2, -1))


def _transposed(x: Tensor, count: int, shape: tuple[int, int]) -> Tensor:
    """x [..., d] with its first `count` numbers, as a matrix of that shape, transposed."""
    part = x[..., :count].unflatten(-1, shape).transpose(-1, -2).flatten(-2)
    return part if count == x.shape[-1] else torch.cat([part, x[..., count:]], dim=-1)
