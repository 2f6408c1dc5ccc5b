# SPDX-License-Identifier: Apache-2.0
"""Attention that models compute themselves, instead of calling transformers' attention interface.

Their attention modules make queries, keys and values, and then call something with them and a mask: a method `_attn`
(GPT-J), or torch's own function (Falcon). This call can be taken over while a module runs: then a function gets what it
would have got, in the form of the interface, and everything that is known of the interface holds. What surrounds the
call is the model's own, and so is the function that finally attends.

That a module hides keys by itself, whatever the mask says (GPT-Neo), is found out by trying (`sees_all`).

Shapes: B rows, h heads, n queries, d numbers of a key.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

METHOD, FUNCTION = "_attn", "scaled_dot_product_attention"
CALLS = (METHOD, FUNCTION)
# A function of the attention interface: from a module, queries, keys, values and a mask, an output [B, n, h, d] and
# attention weights, or None.
Attend = Callable[..., Any]


def modules_with_method(model: nn.Module) -> list[nn.Module]:
    """The modules that attend by a method of their own."""
    return [module for module in model.modules() if callable(getattr(type(module), METHOD, None))]


def take_over(module: nn.Module, call: str, attend: Attend) -> Callable[[], None]:
    """Take over what an attention module calls to attend; a function that undoes it."""
    if call == FUNCTION:
        mode = _FunctionTakenOver(partial(attend, module))
        mode.__enter__()
        return partial(mode.__exit__, None, None, None)
    before = {METHOD: module.__dict__[METHOD]} if METHOD in module.__dict__ else {}
    module.__dict__[METHOD] = partial(_called_as_method, partial(attend, module))
    return partial(_restore, module, before)


@torch.no_grad()
def sees_all(module: nn.Module, call: str, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether every query sees every key if there is no mask: the last value changes the first query's output."""
    if call != METHOD:  # torch's function masks nothing by itself
        return True
    other = value.clone()
    other[:, :, -1] += 1
    one, two = (method_attention(module, query, key, x, None)[0] for x in (value, other))
    return not torch.equal(one[:, 0], two[:, 0])


def _restore(module: nn.Module, before: dict[str, Any]) -> None:
    del module.__dict__[METHOD]
    module.__dict__.update(before)


def _called_as_method(
    attend: Attend, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    output, weights = attend(query, key, value, attention_mask)
    return output.transpose(1, 2), weights


class _FunctionTakenOver(TorchFunctionMode):
    """Inside, another function attends where torch's is called."""

    def __init__(self, attend: Attend):
        super().__init__()
        self._attend = attend

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not scaled_dot_product_attention:
            return function(*args, **kwargs)
        return self._instead(*args, **kwargs)

    def _instead(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        output, _ = self._attend(query, key, value, attn_mask, dropout=dropout_p, scaling=scale, is_causal=is_causal)
        return output.transpose(1, 2)


def method_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """A module's own method, as a function of the interface."""
    output, weights = getattr(type(module), METHOD)(module, query, key, value, mask)
    return output.transpose(1, 2), weights


def attention_with_weights(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What torch's function computes, with its attention weights."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2), weights
