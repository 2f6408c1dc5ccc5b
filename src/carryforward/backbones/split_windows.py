# SPDX-License-Identifier: Apache-2.0
"""Overlapping parts of one tensor, whose gradients are added in place.

Autograd widens the gradient of each part to the whole with zeros and adds them. A compiler evaluates all of these sums
at every element of whatever reads the gradient: on a GPU that took ten times as long as copying it.
"""

from typing import Any

import torch
from torch import Tensor


def split_windows(x: Tensor, count: int, begin: int = 0, stop: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Of windows [n, heads, T, d]: the first `count`, the others, and positions `begin` to `stop` of all of them."""
    return _Split.apply(x, count, begin, stop)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, begin: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.begin = begin
        return x[:count], x[count:], x[:, :, begin:stop]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _add_parts(*gradients, ctx.begin), None, None, None


@torch.library.custom_op("carryforward::add_parts", mutates_args=())
def _add_parts(first: Tensor, others: Tensor, between: Tensor, begin: int) -> Tensor:
    """The gradient of windows from those of their parts. One operation for a compiler."""
    total = _empty_windows(first, others)
    total[: len(first)].copy_(first)
    total[len(first) :].copy_(others)
    total[:, :, begin : begin + between.shape[2]] += between
    return total


@_add_parts.register_fake
def _empty_windows(first: Tensor, others: Tensor, *rest: Any) -> Tensor:
    return first.new_empty(len(first) + len(others), *first.shape[1:])


def _keep_sizes(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
    first, _, between, begin = inputs
    ctx.sizes = len(first), begin, begin + between.shape[2]


def _split_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    """For second derivatives."""
    return *split_windows(gradient, *ctx.sizes), None


_add_parts.register_autograd(_split_gradient, setup_context=_keep_sizes)
