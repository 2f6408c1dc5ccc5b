# SPDX-License-Identifier: Apache-2.0
"""Keys and values of earlier positions enter where attention is computed, and those of a window are noted there.

Every attention module of transformers calls a function that it finds by the name its config gives, with its queries,
keys and values and all keywords that came down to it. Under names of our own are the usual functions with a door.
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


class AttentionContext:
    """What passes in and out where one layer's attention is computed. Not a dataclass, as `insertion.HookContext`.

    Attributes:
        earlier: keys and values that every query sees.
        slots: how many of the positions are the state's, which are not the window's.
        noted: the window's keys and values, if `noting`.
        paid: the attention that each query pays to all that is carried, [B, heads, T], if `watching`.
    """

    def __init__(self, earlier: tuple[Tensor, Tensor] | None, slots: int, noting: bool, watching: bool = False):
        self.earlier = earlier
        self.slots = slots
        self.noting = noting
        self.watching = watching
        self.noted: tuple[Tensor, Tensor] | None = None
        self.paid: Tensor | None = None


def use_wrapped_attention(config: Any) -> None:
    """Let keys and values pass in and out: the model's attention by the name under which it has a door."""
    used = config._attn_implementation
    if getattr(config, "reorder_and_upcast_attn", False):  # which GPT-2 does under the name of eager alone
        raise ValueError("Keys and values cannot be carried or watched with reorder_and_upcast_attn=True: use False.")
    if f"{_DOOR}{used}" in _DOORS:
        config._attn_implementation = f"{_DOOR}{used}"
    elif used not in _DOORS:
        raise ValueError(
            f"attn_implementation={used!r} cannot show kept keys and values to every query. "
            'Call set_attn_implementation("sdpa") ("eager" works too).'
        )


@contextlib.contextmanager
def recording_attention(config: Any) -> Iterator[None]:
    """While attention is to be watched: the one of the model's own that says how much is paid to what, with a door."""
    used = config._attn_implementation
    config._attn_implementation = "eager"
    try:
        use_wrapped_attention(config)
        yield
    finally:
        config._attn_implementation = used


def unwrapped_name(implementation: str) -> str:
    """What an attention is called where it has no door."""
    return implementation.removeprefix(_DOOR)


def _sdpa(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    return _attend(sdpa_attention_forward, module, query, key, value, mask, **kwargs)


def _eager(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    homes = (sys.modules[cls.__module__] for cls in type(module).__mro__)
    attend = next(home.eager_attention_forward for home in homes if hasattr(home, "eager_attention_forward"))
    return _attend(attend, module, query, key, value, mask, **kwargs)


def _attend(
    attend: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    door: AttentionContext | None = None,
    **kwargs: Any,
) -> Any:
    """Attention [B, T, heads, d], with what is at the door: keys and values in front that every query sees."""
    if door is None:
        return attend(module, query, key, value, mask, **kwargs)
    if door.noting:
        door.noted = key[:, :, door.slots :], value[:, :, door.slots :]
    output, weights, *rest = _attend_earlier(attend, module, query, key, value, mask, door.earlier, **kwargs)
    if door.watching:
        carried = door.slots + (0 if door.earlier is None else door.earlier[0].shape[2])  # they come first
        door.paid = weights[:, :, door.slots :, :carried].float().sum(dim=-1)
    return output, weights, *rest


def _attend_earlier(
    attend: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    earlier: tuple[Tensor, Tensor] | None,
    **kwargs: Any,
) -> Any:
    if earlier is None:
        return attend(module, query, key, value, mask, **kwargs)
    count = earlier[0].shape[2]
    key, value = (torch.cat([old.to(new), new], dim=2) for old, new in zip(earlier, (key, value), strict=True))
    if mask is not None:
        mask = pad(mask, (count, 0), value=True if mask.dtype == torch.bool else 0.0)
        return attend(module, query, key, value, mask, **kwargs)
    if not getattr(module, "is_causal", True):
        return attend(module, query, key, value, None, **kwargs)
    # Without a mask the first query sees the first key: as many queries that nobody reads as there are keys in front.
    query = pad(query, (0, 0, count, 0))
    output, *rest = attend(module, query, key, value, None, **kwargs)
    return output[:, count:], *rest


_DOOR = "carryforward_"
_DOORS: dict[str, tuple[Callable, Callable]] = {
    f"{_DOOR}sdpa": (_sdpa, masking_utils.sdpa_mask),
    f"{_DOOR}eager": (_eager, masking_utils.eager_mask),
}
for _name, (_function, _mask) in _DOORS.items():
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, _mask)
