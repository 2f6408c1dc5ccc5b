# SPDX-License-Identifier: Apache-2.0
"""The loss of a window without its logits: projection onto the vocabulary and cross-entropy in one, piece by piece.

The gradient of a summed cross-entropy is known as soon as the logits are: it is taken from each piece of them while
it is there, so that neither logits nor their gradient ever exist as a whole. That is no more arithmetic than the
usual way, and less memory. `torch.nn.functional.linear_cross_entropy` is too new to be relied on, and the libraries
that do this (Liger, CCE) need a GPU.
"""

import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..windows import IGNORE

PIECE = {"cpu": 64 << 20, "cuda": 512 << 20}  # bytes of float32 logits at a time; more is faster on a GPU

FUSED: ContextVar[Callable | None] = ContextVar("FUSED", default=None)  # `fusable`, compiled


def nll_sum(scores: Tensor, targets: Tensor) -> Tensor:
    """The summed negative log-likelihood of targets [b, n] under logits [b, n, V], in float32 at least."""
    scores = exact(scores).flatten(0, 1)
    return F.cross_entropy(scores, targets.to(scores.device).flatten(), ignore_index=IGNORE, reduction="sum")


def exact(scores: Tensor) -> Tensor:
    """In float32 at least."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def projected_nll_sum(hidden: Tensor, projection: nn.Linear, targets: Tensor) -> Tensor:
    """The same for the logits that a linear layer makes of hidden states [b, n, k]."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else projection.weight.dtype
    inputs = hidden.flatten(0, 1), projection.weight, projection.bias
    # which gradients are wanted: the function itself would be told of all that exist, also where none are computed
    wanted = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]
    return _ProjectedLoss.apply(*inputs, targets.to(hidden.device).flatten(), dtype, wanted)


class _ProjectedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        dtype: torch.dtype,
        wanted: list[bool],
    ):
        exact = torch.promote_types(dtype, torch.float32)
        with_gradient, device = any(wanted), hidden.device
        inputs, vocabulary = hidden.to(dtype), len(weight)
        matrix, offset = (_aligned(x, dtype) for x in (weight, bias))
        assert matrix is not None
        score = FUSED.get() or loss_and_gradient
        of_hidden = torch.empty_like(inputs) if wanted[0] else None
        of_weight: Tensor | None = None
        of_bias: Tensor | None = None
        total = torch.zeros((), dtype=exact, device=device)
        rows = max(1, PIECE.get(device.type, PIECE["cpu"]) // (4 * vocabulary))
        with torch.autocast(device.type, enabled=False):
            for begin in range(0, len(inputs) or 1, rows):  # of nothing too, whose gradients are zeros
                piece = inputs[begin : begin + rows]
                logits = F.linear(piece, matrix, offset)
                nll, of_logits = score(logits, targets[begin : begin + rows], vocabulary, with_gradient)
                total += nll
                if of_hidden is not None:
                    torch.mm(of_logits, matrix, out=of_hidden[begin : begin + rows])
                if wanted[1]:
                    of_weight = _added(of_weight, of_logits.T @ piece)
                if offset is not None and wanted[2]:
                    of_bias = _added(of_bias, of_logits.sum(dim=0, dtype=exact))
        ctx.save_for_backward(of_hidden, *(None if x is None else x[:vocabulary] for x in (of_weight, of_bias)))
        ctx.dtypes = hidden.dtype, weight.dtype, weight.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        # the factor must not be rounded to less than float32
        scaled = [None if x is None else x.to(gradient.dtype) * gradient for x in ctx.saved_tensors]
        found = [None if x is None else x.to(dtype) for x, dtype in zip(scaled, ctx.dtypes, strict=True)]
        return *found, None, None, None


def _added(total: Tensor | None, more: Tensor) -> Tensor:
    """A sum over pieces, in float32 at least. A single one stays as it is: a vocabulary's gradient is large, and every
    pass over it counts."""
    if total is None:
        return more
    exact = torch.promote_types(more.dtype, torch.float32)
    return total.add_(more) if total.dtype == exact else total.to(exact).add_(more)


def _aligned(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """For each token of the vocabulary, and on a GPU for a few more that do not exist: its fast kernels want the size
    of a matrix to be a multiple of 8, and GPT-2's 50,257 costs half the speed."""
    if x is None or x.device.type == "cpu" or len(x) % 64 == 0:
        return None if x is None else x.to(dtype)
    padded = x.new_empty(math.ceil(len(x) / 64) * 64, *x.shape[1:], dtype=dtype)
    padded[: len(x)], padded[len(x) :] = x, 0
    return padded


def loss_and_gradient(logits: Tensor, targets: Tensor, vocabulary: int, with_gradient: bool) -> tuple[Tensor, Any]:
    """The summed negative log-likelihood of targets [n] under the first `vocabulary` logits [n, V], and the gradient of
    these if it is wanted. In few passes, each in the place of the one before."""
    exact = torch.promote_types(logits.dtype, torch.float32)
    logits[:, vocabulary:] = -torch.inf
    scores = F.log_softmax(logits, dim=1, dtype=exact)
    scored, wanted = targets != IGNORE, targets.clamp(min=0)[:, None]
    nll = -torch.where(scored, scores.gather(1, wanted)[:, 0], 0).sum()
    if not with_gradient:
        return nll, None
    gradient = scores.exp_().scatter_add_(1, wanted, torch.full_like(wanted, -1, dtype=exact)).mul_(scored[:, None])
    return nll, gradient.to(logits.dtype)


def fusable(logits: Tensor, targets: Tensor, vocabulary: int, with_gradient: bool) -> tuple[Tensor, Any]:
    """The same for a compiler, which makes one pass of many as long as nothing is written in between."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scored, column = targets != IGNORE, torch.arange(logits.shape[1], device=logits.device)
    if logits.shape[1] > vocabulary:
        exact = torch.where(column < vocabulary, exact, -torch.inf)
    total = exact.logsumexp(dim=1, keepdim=True)
    picked = exact.gather(1, targets.clamp(min=0)[:, None])
    nll = torch.where(scored, (total - picked)[:, 0], 0).sum()
    if not with_gradient:
        return nll, None
    gradient = ((exact - total).exp() - (column == targets[:, None]).to(exact.dtype)) * scored[:, None]
    return nll, gradient.to(logits.dtype)
