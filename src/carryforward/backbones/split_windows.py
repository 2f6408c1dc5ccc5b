# SPDX-License-Identifier: Apache-2.0
"""Overlapping parts of one tensor, whose gradients are added in place.

Autograd widens the gradient of each part to the whole with zeros and adds them. A compiler evaluates all of these sums
at every element of whatever reads the gradient: on a GPU that took ten times as long as copying it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def split_windows(x: Tensor, count: int, *ranges: tuple[int, int]) -> tuple[Tensor, ...]:
    """Of windows [n, heads, T, d]: the first `count`, the others, and ranges of positions [begin, stop) of all of
    them."""
    return _Split.apply(x, count, *ranges)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *ranges: tuple[int, int]) -> tuple[Tensor, ...]:
        ctx.begins = [begin for begin, _ in ranges]
        return x[:count], x[count:], *(x[:, :, begin:stop] for begin, stop in ranges)

    @staticmethod
    def backward(ctx: Any, first: Tensor, others: Tensor, *parts: Tensor) -> Any:  # type: ignore[override]
        total = _add_parts(first, others, parts, ctx.begins) if parts else torch.cat([first, others])
        return total, None, *(None for _ in parts)


@torch.library.custom_op("carryforward::add_parts", mutates_args=())
def _add_parts(first: Tensor, others: Tensor, parts: Sequence[Tensor], begins: Sequence[int]) -> Tensor:
    """The gradient of windows from those of their parts. One operation for a compiler."""
    total = _empty_windows(first, others)
    total[: len(first)].copy_(first)
    total[len(first) :].copy_(others)
    for part, begin in zip(parts, begins, strict=True):
        total[:, :, begin : begin + part.shape[2]] += part
    return total


@_add_parts.register_fake
def _empty_windows(first: Tensor, others: Tensor, *rest: Any) -> Tensor:
    return first.new_empty(len(first) + len(others), *first.shape[1:])


def _keep_sizes(ctx: Any, inputs: tuple[Tensor, Tensor, Sequence[Tensor], Sequence[int]], output: Tensor) -> None:
    first, _, parts, begins = inputs
    ctx.count = len(first)
    ctx.ranges = [(begin, begin + part.shape[2]) for part, begin in zip(parts, begins, strict=True)]


def _split_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, list[Tensor], None]:
    """For second derivatives."""
    first, others, *parts = split_windows(gradient, ctx.count, *ctx.ranges)
    return first, others, parts, None


_add_parts.register_autograd(_split_gradient, setup_context=_keep_sizes)
