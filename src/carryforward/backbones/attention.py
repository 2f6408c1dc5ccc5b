# SPDX-License-Identifier: Apache-2.0
"""Attention functions that accept extra keys and values, and record those of the window.

Attention modules of transformers look up their attention function by the name in their config and call it with
queries, keys, values and all keyword arguments they received. The usual functions are registered here under a second
name, wrapped: the wrapper prepends the keys and values that are carried from earlier windows. Modules that call
something else get the same wrapper around it (`attend_by_itself`, `own_attention`). (In generation carried keys and
values are part of the cache instead: `models.generation.cache_rows.CacheRows.update`.)
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

from . import own_attention
from .architectures import architecture_of
from .kv_layout import KVLayout
from .memory_positions import MemoryPositions
from .split_windows import split_windows

KV = tuple[Tensor, Tensor]  # keys and values, each [B, heads, n, d]
# From a layer's queries, keys and values of all windows of a block, and what scores are multiplied by (None: the usual
# number): the keys and values of the first windows, which see no past; those of the others; and what these see of their
# past, None if there are no others.
KVLink = Callable[[Tensor, Tensor, Tensor, float | None], tuple[KV, KV, KV | None]]


class AttentionContext:
    """What one layer's attention takes in and records. Not a dataclass, for the reason given in `hooks.HookContext`.

    Attributes:
        past_kv: keys and values of other windows, visible to every query: of earlier ones, or of both neighbours.
        past_visible: for each window that has a past, which of its positions are visible, [b, S]; None: all.
        link: in a block, finds in the windows' own keys and values what each window sees of its past.
        num_first: in a block, the first so many windows see no other.
        num_slots: how many of the input's first positions are inserted vectors, not tokens of the window.
        positions: memory positions in front of the window's and behind them, if there are any.
        record_kv: whether to record the window's keys and values.
        record_attention: whether to record the attention that queries pay to the carried state.
        layout: how the layer's keys and values stand in a state; None: as they are.
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
        past_visible: Tensor | None = None,
        positions: MemoryPositions | None = None,
        layout: KVLayout | None = None,
    ):
        self.past_kv = past_kv
        self.positions = positions
        self.past_visible = past_visible
        self.link = link
        self.num_first = num_first
        self.num_slots = num_slots
        self.record_kv = record_kv
        self.record_attention = record_attention
        self.layout = layout
        self.window_kv: KV | None = None
        self.attention_to_state: Tensor | None = None


def use_wrapped_attention(config: Any) -> None:
    """Switch a model's config to the wrapped version of its attention function."""
    implementation, own = config._attn_implementation, architecture_of(config).own_attention
    if own == own_attention.FUNCTION:  # which some models call under this name only
        config._attn_implementation = "sdpa"
    if own:
        return
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
    try:
        if not architecture_of(config).own_attention:
            config._attn_implementation = "eager"
        use_wrapped_attention(config)
        yield
    finally:
        config._attn_implementation = implementation


def unwrapped_name(implementation: str) -> str:
    """The name of an attention function without our prefix."""
    return implementation.removeprefix(_PREFIX)


def attend_by_itself(
    call: str, context: AttentionContext, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    mask: Tensor | None = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """Attention of a module that does not use the interface.

    Args:
        call: what it calls instead, see `own_attention.take_over`.
    """
    if call == own_attention.METHOD:
        attend: Callable[..., Any] = own_attention.method_attention
    else:
        attend = own_attention.attention_with_weights if context.record_attention else sdpa_attention_forward
    return _attend(attend, module, query, key, value, mask, context, **kwargs)


def _sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> Any:
    return _attend(sdpa_attention_forward, module, query, key, value, attention_mask, **kwargs)


def _eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> Any:
    return _attend(eager_attention_of(module), module, query, key, value, attention_mask, **kwargs)


def eager_attention_of(module: nn.Module) -> Callable[..., Any]:
    """The eager attention function of the file in which an attention module is defined."""
    model_files = (sys.modules[cls.__module__] for cls in type(module).__mro__)
    return next(file.eager_attention_forward for file in model_files if hasattr(file, "eager_attention_forward"))


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
    layout, query_heads = context.layout, query.shape[1]
    if layout is not None:
        if kwargs.get("scaling") is None:
            kwargs["scaling"] = query.shape[-1] ** -0.5
        query, key, value = layout.keys(query), layout.keys(key), layout.values(value)
    if context.record_kv:
        context.window_kv = key[:, :, context.num_slots :], value[:, :, context.num_slots :]
    causal = getattr(module, "is_causal", True)
    if context.positions is not None and mask is not None:
        mask = context.positions.open_mask(mask.expand(-1, -1, query.shape[2], -1), causal)  # one row may serve all
    parts, attention = [], []
    for rows, queries, kv, past_kv in _groups(context, query, key, value, kwargs.get("scaling")):
        part_mask = mask if mask is None or len(mask) == 1 else mask[rows]
        part = _attend_unseen(context, attend, module, queries, *kv, part_mask, past_kv, **kwargs)
        parts.append(part)
        if context.record_attention:
            num_past = 0 if past_kv is None else past_kv[0].shape[2]
            attention.append(_attention_to_state(context, part[1], num_past, causal))
    if attention:
        context.attention_to_state = torch.cat(attention)
    output, *rest = parts[0] if len(parts) == 1 else (torch.cat([output for output, *_ in parts]), None)
    return output if layout is None else layout.layer_output(output, query_heads), *rest


def _groups(
    context: AttentionContext, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> Iterator[tuple[slice, Tensor, KV, KV | None]]:
    """Windows that attend to as many positions: which they are, their queries, keys and values, and their past's."""
    if context.link is None:
        yield slice(None), query, (key, value), context.past_kv
        return
    first_queries, other_queries = split_windows(query, context.num_first)
    first, others, past_kv = context.link(query, key, value, scaling)
    if context.num_first:
        yield slice(context.num_first), first_queries, first, None
    if past_kv is not None:
        yield slice(context.num_first, None), other_queries, others, past_kv


def _attend_unseen(
    context: AttentionContext,
    attend: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    past_kv: KV | None,
    **kwargs: Any,
) -> Any:
    """Attention in which an encoder's last memory positions see all others, and are not seen from them."""
    unseen = 0 if context.positions is None or getattr(module, "is_causal", True) else context.positions.unseen
    visible = context.past_visible
    if not unseen:
        return _attend_past(attend, module, query, key, value, mask, past_kv, visible, **kwargs)
    stop = query.shape[2] - unseen
    seen_mask, unseen_mask = (None, None) if mask is None else (mask[..., :stop, :stop], mask[..., stop:, :])
    seen_kv = key[:, :, :stop], value[:, :, :stop]
    seen = _attend_past(attend, module, query[:, :, :stop], *seen_kv, seen_mask, past_kv, visible, **kwargs)
    others = _attend_past(attend, module, query[:, :, stop:], key, value, unseen_mask, past_kv, visible, **kwargs)
    return torch.cat([seen[0], others[0]], dim=1), seen[1]


def _attention_to_state(context: AttentionContext, weights: Tensor, num_past: int, causal: bool) -> Tensor:
    """The attention that the window's tokens pay to all that is carried, [B, heads, T], from attention weights: carried
    keys come first, then inserted vectors and memory positions, then the window; an encoder reads some behind it, too.
    """
    before, after, unseen = context.positions or (0, 0, 0)
    first, behind = context.num_slots + before, after if causal else after - unseen
    weights = weights[:, :, first : weights.shape[2] - behind].float()
    to_state = weights[..., : num_past + first].sum(dim=-1)
    return to_state if causal or not behind else to_state + weights[..., -behind:].sum(dim=-1)


def _attend_past(
    attend: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    past_kv: KV | None,
    visible: Tensor | None,
    **kwargs: Any,
) -> Any:
    """Attention with `past_kv` in front, visible to every query, or as far as `visible` says."""
    if past_kv is None:
        return attend(module, query, key, value, mask, **kwargs)
    count, causal = past_kv[0].shape[2], getattr(module, "is_causal", True)
    key, value = (torch.cat([past.to(new), new], dim=2) for past, new in zip(past_kv, (key, value), strict=True))
    if mask is None and (visible is not None or (causal and count > query.shape[2])):
        # With many past keys, dummy queries (below) cost more than a mask.
        mask = _window_mask(query, causal, as_bool=attend is sdpa_attention_forward)
    if mask is not None:
        mask = _mask_past(mask, count, visible)
    if mask is not None or not causal:
        return attend(module, query, key, value, mask, **kwargs)
    # A causal kernel without a mask aligns the first query with the first key: prepend as many dummy queries as there
    # are past keys, and drop their outputs.
    query = pad(query, (0, 0, count, 0))
    output, *rest = attend(module, query, key, value, None, **kwargs)
    return output[:, count:], *rest


def _window_mask(query: Tensor, causal: bool, as_bool: bool) -> Tensor:
    """What the queries of a window see of it, [1, 1, T, T], where transformers has made no mask: truth values, or
    numbers that are added to scores, as eager attention needs them."""
    visible = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device)
    visible = (visible.tril() if causal else visible)[None, None]
    if as_bool:
        return visible
    return torch.zeros_like(visible, dtype=query.dtype).masked_fill(~visible, torch.finfo(query.dtype).min)


def _mask_past(mask: Tensor, count: int, visible: Tensor | None) -> Tensor:
    """A mask [1 or b, 1, T, T] with columns in front for so many positions of the past; `visible` ones are, [b, S]."""
    if visible is None:
        return pad(mask, (count, 0), value=True if mask.dtype == torch.bool else 0.0)
    past = visible.to(mask.device)[:, None, None].expand(-1, 1, mask.shape[2], -1)
    if mask.dtype != torch.bool:
        past = torch.zeros_like(past, dtype=mask.dtype).masked_fill(~past, torch.finfo(mask.dtype).min)
    return torch.cat([past, mask.expand(len(visible), -1, -1, -1)], dim=-1)


_PREFIX = "carryforward_"
_WRAPPERS: dict[str, tuple[Callable, Callable]] = {
    f"{_PREFIX}sdpa": (_sdpa, masking_utils.sdpa_mask),
    f"{_PREFIX}eager": (_eager, masking_utils.eager_mask),
}
for _name, (_function, _mask) in _WRAPPERS.items():
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, _mask)
