# SPDX-License-Identifier: Apache-2.0
"""The loss of a window, which a model's head calls (`models.token_model`, `models.causal_lm`).

The chunked loss does without the full logits: vocabulary projection and cross-entropy in one, chunk by chunk.

The gradient of a summed cross-entropy is known as soon as the logits are. It is computed from each chunk of logits
while the chunk exists, so that neither logits nor their gradient are ever stored whole, unless they are fewer numbers
than the gradient of the vocabulary projection [V, k]: then that is left to the backward pass. That is no more
arithmetic than the usual way, and less memory. `torch.nn.functional.linear_cross_entropy` is too new to rely on, and
the libraries that do this (Liger, CCE) need a GPU.
"""

import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..windows import IGNORE

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}  # of float32 logits at a time; more is faster on a GPU

COMPILED_LOSS: ContextVar[Callable | None] = ContextVar("COMPILED_LOSS", default=None)  # `fusable_loss`, compiled


def nll_sum(scores: Tensor, targets: Tensor) -> Tensor:
    """The summed negative log-likelihood of targets [b, n] under logits [b, n, V], in float32 at least."""
    scores = to_float32(scores).flatten(0, 1)
    return F.cross_entropy(scores, targets.to(scores.device).flatten(), ignore_index=IGNORE, reduction="sum")


def to_float32(scores: Tensor) -> Tensor:
    """Scores in float32 at least."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def projected_nll_sum(hidden: Tensor, projection: nn.Linear, targets: Tensor) -> Tensor:
    """The summed negative log-likelihood from hidden states [b, n, k] and the output layer, instead of logits."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else projection.weight.dtype
    inputs = hidden.flatten(0, 1), projection.weight, projection.bias
    # autograd.Function reports all gradients that could exist, even if none are computed: pass on which are needed
    needed = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]
    return _ProjectedLoss.apply(*inputs, targets.to(hidden.device).flatten(), dtype, needed)


class _ProjectedLoss(torch.autograd.Function):
    """Summed cross-entropy of a linear layer's output; the gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        dtype: torch.dtype,
        needed: list[bool],
    ):
        exact = torch.promote_types(dtype, torch.float32)
        with_gradient, device = any(needed), hidden.device
        inputs, vocabulary = hidden.to(dtype), len(weight)
        matrix, offset = (_aligned(x, dtype) for x in (weight, bias))
        assert matrix is not None
        loss_of = COMPILED_LOSS.get() or loss_and_gradient
        grad_hidden = torch.empty_like(inputs) if needed[0] else None
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        factors: tuple[Tensor, ...] = ()
        total = torch.zeros((), dtype=exact, device=device)
        rows = max(1, CHUNK_BYTES.get(device.type, CHUNK_BYTES["cpu"]) // (4 * vocabulary))
        in_backward = needed[1] and len(inputs) < min(inputs.shape[1], rows + 1)
        with torch.autocast(device.type, enabled=False):
            for begin in range(0, len(inputs) or 1, rows):  # an empty input has gradients too: zeros
                chunk = inputs[begin : begin + rows]
                logits = F.linear(chunk, matrix, offset)
                nll, grad_logits = loss_of(logits, targets[begin : begin + rows], vocabulary, with_gradient)
                total += nll
                if grad_hidden is not None:
                    torch.mm(grad_logits, matrix, out=grad_hidden[begin : begin + rows])
                if in_backward:
                    factors = grad_logits, chunk
                elif needed[1]:
                    grad_weight = _added(grad_weight, grad_logits.T @ chunk)
                if offset is not None and needed[2]:
                    grad_bias = _added(grad_bias, grad_logits.sum(dim=0, dtype=exact))
        ctx.vocabulary, ctx.dtypes = vocabulary, (hidden.dtype, weight.dtype, weight.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias, *factors)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        grad_hidden, grad_weight, grad_bias, *factors = ctx.saved_tensors
        if factors:
            grad_logits, inputs = factors
            with torch.autocast(inputs.device.type, enabled=False):
                grad_weight = grad_logits.T @ inputs
        of_vocabulary = (None if x is None else x[: ctx.vocabulary] for x in (grad_weight, grad_bias))
        # In float32 at least: in bfloat16 the upstream gradient, such as 1/num_tokens, would be rounded.
        scaled = [None if x is None else x.to(gradient.dtype) * gradient for x in (grad_hidden, *of_vocabulary)]
        gradients = [None if x is None else x.to(dtype) for x, dtype in zip(scaled, ctx.dtypes, strict=True)]
        return *gradients, None, None, None


def _added(total: Tensor | None, more: Tensor) -> Tensor:
    """A sum over chunks, in float32 at least. A single chunk is not converted: every pass over a vocabulary's gradient
    costs time."""
    if total is None:
        return more
    exact = torch.promote_types(more.dtype, torch.float32)
    return total.add_(more) if total.dtype == exact else total.to(exact).add_(more)


def _aligned(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Pad the vocabulary to a multiple of 64 on a GPU: fast kernels need aligned matrices, and GPT-2's 50,257 rows
    would cost half the speed."""
    if x is None or x.device.type == "cpu" or len(x) % 64 == 0:
        return None if x is None else x.to(dtype)
    padded = x.new_empty(math.ceil(len(x) / 64) * 64, *x.shape[1:], dtype=dtype)
    padded[: len(x)], padded[len(x) :] = x, 0
    return padded


def loss_and_gradient(logits: Tensor, targets: Tensor, vocabulary: int, with_gradient: bool) -> tuple[Tensor, Any]:
    """The summed negative log-likelihood of targets [n] under the first `vocabulary` logits [n, V], and their
    gradient if it is needed. Few passes, each in place."""
    exact = torch.promote_types(logits.dtype, torch.float32)
    logits[:, vocabulary:] = -torch.inf
    scores = F.log_softmax(logits, dim=1, dtype=exact)
    scored, column = targets != IGNORE, targets.clamp(min=0)[:, None]
    nll = -torch.where(scored, scores.gather(1, column)[:, 0], 0).sum()
    if not with_gradient:
        return nll, None
    gradient = scores.exp_().scatter_add_(1, column, torch.full_like(column, -1, dtype=exact)).mul_(scored[:, None])
    return nll, gradient.to(logits.dtype)


def fusable_loss(logits: Tensor, targets: Tensor, vocabulary: int, with_gradient: bool) -> tuple[Tensor, Any]:
    """As `loss_and_gradient`, without in-place operations: a compiler can fuse it into one pass."""
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
