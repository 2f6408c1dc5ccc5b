# SPDX-License-Identifier: Apache-2.0
"""Attention functions that accept extra keys and values, and record those of the window.

Every attention module of transformers looks up its attention function by the name in its config and calls it with
queries, keys, values and all keyword arguments it received. The usual functions are registered here under a second
name, wrapped: the wrapper prepends the keys and values that are carried from earlier windows. (In generation they are
part of the cache instead: `models.window_cache.WindowCache.update`.)
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .split_windows import split_windows

KV = tuple[Tensor, Tensor]  # keys and values, each [B, heads, n, d]
# From a layer's keys and values of all windows of a block: those of the first ones, which see no past; those of the
# others; and what these see of their past, None if there are no others.
KVLink = Callable[[Tensor, Tensor], tuple[KV, KV, KV | None]]


class AttentionContext:
    """What one layer's attention takes in and records. Not a dataclass, for the reason given in `hooks.HookContext`.

    Attributes:
        past_kv: keys and values of earlier windows, visible to every query.
        link: in a block, finds in the windows' own keys and values what each window sees of its past.
        num_first: in a block, the first so many windows see no past.
        num_slots: how many of the input's first positions are inserted vectors, not tokens of the window.
        record_kv: whether to record the window's keys and values.
        record_attention: whether to record the attention that queries pay to the carried state.
        window_kv: output: the window's keys and values.
        attention_to_state: output: attention weights on everything carried, summed, [B, heads, T].
    """

    def __init__(
        self,
        past_kv: KV | None,
        num_slots: int,
        record_kv: bool,
        record_attention: bool = False,
        link: KVLink | None = None,
        num_first: int = 0,
    ):
        self.past_kv = past_kv
        self.link = link
        self.num_first = num_first
        self.num_slots = num_slots
        self.record_kv = record_kv
        self.record_attention = record_attention
        self.window_kv: KV | None = None
        self.attention_to_state: Tensor | None = None


def use_wrapped_attention(config: Any) -> None:
    """Switch a model's config to the wrapped version of its attention function."""
    implementation = config._attn_implementation
    if getattr(config, "reorder_and_upcast_attn", False):  # GPT-2 computes it only under the name "eager"
        raise ValueError("Keys and values cannot be carried or recorded with reorder_and_upcast_attn=True: use False.")
    if f"{_PREFIX}{implementation}" in _WRAPPERS:
        config._attn_implementation = f"{_PREFIX}{implementation}"
    elif implementation not in _WRAPPERS:
        raise ValueError(
            f"attn_implementation={implementation!r} cannot show carried keys and values to every query. "
            'Call set_attn_implementation("sdpa") ("eager" works too).'
        )


@contextlib.contextmanager
def recording_attention(config: Any) -> Iterator[None]:
    """Use the wrapped eager attention inside: the only one that returns attention weights."""
    implementation = config._attn_implementation
    config._attn_implementation = "eager"
    try:
        use_wrapped_attention(config)
        yield
    finally:
        config._attn_implementation = implementation


def unwrapped_name(implementation: str) -> str:
    """The name of an attention function without our prefix."""
    return implementation.removeprefix(_PREFIX)


def _sdpa(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    return _attend(sdpa_attention_forward, module, query, key, value, mask, **kwargs)


def _eager(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    model_files = (sys.modules[cls.__module__] for cls in type(module).__mro__)
    attend = next(file.eager_attention_forward for file in model_files if hasattr(file, "eager_attention_forward"))
    return _attend(attend, module, query, key, value, mask, **kwargs)


def _attend(
    attend: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    attention_context: AttentionContext | None = None,
    **kwargs: Any,
) -> Any:
    """Attention [B, T, heads, d] over the carried keys and values and the window's own."""
    context = attention_context
    if context is None:
        return attend(module, query, key, value, mask, **kwargs)
    if context.record_kv:
        context.window_kv = key[:, :, context.num_slots :], value[:, :, context.num_slots :]
    parts, attention = [], []
    for rows, queries, kv, past_kv in _groups(context, query, key, value):
        part_mask = mask if mask is None or len(mask) == 1 else mask[rows]
        part = _attend_past(attend, module, queries, *kv, part_mask, past_kv, **kwargs)
        parts.append(part)
        if context.record_attention:
            carried = context.num_slots + (0 if past_kv is None else past_kv[0].shape[2])  # come first
            attention.append(part[1][:, :, context.num_slots :, :carried].float().sum(dim=-1))
    if attention:
        context.attention_to_state = torch.cat(attention)
    if len(parts) == 1:
        return parts[0]
    return torch.cat([output for output, *_ in parts]), None


def _groups(
    context: AttentionContext, query: Tensor, key: Tensor, value: Tensor
) -> Iterator[tuple[slice, Tensor, KV, KV | None]]:
    """Windows that attend to as many positions: which they are, their queries, keys and values, and their past's."""
    if context.link is None:
        yield slice(None), query, (key, value), context.past_kv
        return
    first_queries, other_queries, _ = split_windows(query, context.num_first)
    first, others, past_kv = context.link(key, value)
    if context.num_first:
        yield slice(context.num_first), first_queries, first, None
    if past_kv is not None:
        yield slice(context.num_first, None), other_queries, others, past_kv


def _attend_past(
    attend: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    past_kv: KV | None,
    **kwargs: Any,
) -> Any:
    """Attention with `past_kv` in front, visible to every query."""
    if past_kv is None:
        return attend(module, query, key, value, mask, **kwargs)
    count = past_kv[0].shape[2]
    key, value = (torch.cat([past.to(new), new], dim=2) for past, new in zip(past_kv, (key, value), strict=True))
    if mask is not None:
        mask = pad(mask, (count, 0), value=True if mask.dtype == torch.bool else 0.0)
        return attend(module, query, key, value, mask, **kwargs)
    if not getattr(module, "is_causal", True):
        return attend(module, query, key, value, None, **kwargs)
    # A causal kernel without a mask aligns the first query with the first key: prepend as many dummy queries as there
    # are past keys, and drop their outputs.
    query = pad(query, (0, 0, count, 0))
    output, *rest = attend(module, query, key, value, None, **kwargs)
    return output[:, count:], *rest


_PREFIX = "carryforward_"
_WRAPPERS: dict[str, tuple[Callable, Callable]] = {
    f"{_PREFIX}sdpa": (_sdpa, masking_utils.sdpa_mask),
    f"{_PREFIX}eager": (_eager, masking_utils.eager_mask),
}
for _name, (_function, _mask) in _WRAPPERS.items():
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, _mask)
