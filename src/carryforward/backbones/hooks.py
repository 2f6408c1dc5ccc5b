# SPDX-License-Identifier: Apache-2.0
"""How the state enters a base model and how its layers' outputs are read: the only file that knows a model's inside.

The state becomes one more key and value of a layer's self-attention (figure 2 of the paper) without a line of model
code: a hook puts the state, passed through the layer's own norm, in front of the attention module's input, and a
second one takes its positions off the output. The module's own projections make its keys and values; its queries
give results nobody reads. That costs a slot the attention's projections, and no feed-forward network.

Keys and values of earlier positions enter where they are used, and those of the window are noted there (`doors`).

What belongs to one call travels with the call, as the keyword `carry`, which transformers hands down to every layer:
under gradient checkpointing a layer runs again during the backward pass and must meet its own window's state. The
hooks themselves hold no reference to any model, so copies and pickles of a model are independent of it.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import masking_utils

from .architectures import HIDDEN, Architecture
from .attention import AttentionContext


class HookContext:
    """What one call of the base model takes in and gives out beside its own arguments.

    Not a dataclass: FSDP copies those on their way to a layer, and outputs would be written to the copy.

    Attributes:
        slots: for each layer the state enters (counted from 1), the vectors it receives, [B, S, k].
        earlier: for each layer, keys and values of earlier positions, each [B, heads, n, d].
        before: the same as the state has them.
        noting: whether keys and values of the window are wanted.
        watching: whether it is wanted how much attention is paid to what enters (within `doors.recording_attention`).
        held: in generation, for each layer, how many of a cache's first places are the state's.
        seen: [B]; which rows see those.
        outputs: filled by the call: each layer's output [B, T, k].
        noted: filled by the call: each layer's keys and values, each [B, heads, T, d].
        paid: filled by the call: for each layer that something enters, the attention paid to it, [B, heads, T].
    """

    def __init__(self) -> None:
        self.slots: dict[int, Tensor] = {}
        self.earlier: dict[int, tuple[Tensor, Tensor]] = {}
        self.before: Tensor | None = None
        self.noting = False
        self.watching = False
        self.held: dict[int, int] = {}
        self.seen: Tensor | None = None
        self.outputs: dict[int, Tensor] | None = {}
        self.noted: dict[int, tuple[Tensor, Tensor]] = {}
        self.paid: dict[int, Tensor] = {}

    def take_outputs(self) -> list[Tensor]:
        """The outputs of layers 1 to L, once; layers that are run again for the backward pass find no room to write."""
        assert self.outputs is not None, "outputs were taken before"
        outputs, self.outputs = self.outputs, None
        return [outputs[layer] for layer in sorted(outputs)]

    def take_noted(self) -> list[tuple[Tensor, Tensor]]:
        """The keys and values of layers 1 to L, once: a graph that is kept keeps this too."""
        noted, self.noted = self.noted, {}
        return [noted[layer] for layer in sorted(noted)]


@contextlib.contextmanager
def plain_masks() -> Iterator[None]:
    """Without padding a window is one causal stretch, and attention needs no mask. While a CUDA graph is captured,
    transformers does not look whether several texts share a row or whether a mask hides nothing, and makes one that
    costs the fast kernels."""
    traced, needless = masking_utils.is_tracing, masking_utils._ignore_causal_mask_sdpa

    def is_tracing(tensor: Any = None) -> bool:  # with a mask it would read it, which cannot be captured
        return tensor is not None and traced(tensor)

    def _ignore_causal_mask_sdpa(padding_mask: Tensor | None, *args: Any, **kwargs: Any) -> bool:
        return needless(None, *args, **kwargs)

    def find_packed_sequence_indices(position_ids: Tensor) -> None:
        return None

    with contextlib.ExitStack() as patches:
        for function in (is_tracing, _ignore_causal_mask_sdpa, find_packed_sequence_indices):
            patches.enter_context(mock.patch.object(masking_utils, function.__name__, function))
        yield


def install(body: nn.Module, architecture: Architecture) -> None:
    """Hook a model without its head, once. Calls without `carry` behave as before."""
    if getattr(body, "_takes_carry", False):  # by an earlier `add_recurrence` to the same model
        return
    body._takes_carry = True  # type: ignore[assignment]
    for number, layer in enumerate(architecture.layer_list(body), start=1):
        # Partials of plain functions survive deepcopy and pickle; closures over a module would not.
        norm = architecture.norm if getattr(layer, "do_layer_norm_before", True) else None  # OPT-350m: behind it
        layer.register_forward_pre_hook(partial(_enter, number, norm), with_kwargs=True)
        layer.register_forward_hook(partial(_collect, number), with_kwargs=True)
        attention = layer.get_submodule(architecture.attention)
        attention.register_forward_pre_hook(_prepend, with_kwargs=True)
        attention.register_forward_hook(_drop, with_kwargs=True)


def _enter(number: int, norm: str | None, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Hand what is a layer's on to its attention; slots through its own norm."""
    carry = kwargs.get("carry")
    if carry is None:
        return None
    more: dict[str, Any] = {}
    if carry.held.get(number):
        more["held"] = carry.held[number], carry.seen
    if number in carry.slots:
        hidden = args[0] if args else kwargs["hidden_states"]
        more["slots"] = _normed(layer, norm, carry.slots[number].to(hidden.dtype))
    entered = number in carry.slots or number in carry.earlier
    if carry.noting or number in carry.earlier or (carry.watching and entered):
        count = more["slots"].shape[1] if "slots" in more else 0
        more["door"] = AttentionContext(carry.earlier.get(number), count, carry.noting, carry.watching and entered)
    return args, {**kwargs, **more}


def _normed(layer: nn.Module, norm: str | None, slots: Tensor) -> Tensor:
    weight = next(layer.parameters())
    if weight.device.type != "meta":  # offloaded weights come to the input, others are met where they are
        slots = slots.to(weight.device)
    if norm is not None:
        slots = layer.get_submodule(norm)(slots)
    return slots


def _collect(number: int, layer: nn.Module, args: tuple, kwargs: dict[str, Any], output: Tensor) -> None:
    """Note a layer's output, and what went through its door."""
    carry = kwargs.get("carry")
    if carry is not None and carry.outputs is not None:
        carry.outputs[number] = output
        if carry.noting:
            carry.noted[number] = kwargs["door"].noted
        if carry.watching and "door" in kwargs and kwargs["door"].watching:
            carry.paid[number] = kwargs["door"].paid


def _prepend(attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Put the slots in front of an attention module's input."""
    if "held" in kwargs:
        kwargs = {**kwargs, "attention_mask": _show_held(kwargs["attention_mask"], *kwargs["held"])}
    slots = kwargs.get("slots")
    if slots is None:
        return args, kwargs
    count = slots.shape[1]
    hidden = args[0] if args else kwargs["hidden_states"]
    hidden = torch.cat([slots.to(hidden.device, hidden.dtype), hidden], dim=1)
    grown: dict[str, Any] = {"attention_mask": _grow_mask(kwargs.get("attention_mask"), count)}
    if kwargs.get("position_embeddings") is not None:
        grown["position_embeddings"] = tuple(_grow_rotation(x, count) for x in kwargs["position_embeddings"])
    if args:
        return (hidden, *args[1:]), {**kwargs, **grown}
    return args, {**kwargs, **grown, "hidden_states": hidden}


def _drop(attention: nn.Module, args: tuple, kwargs: dict[str, Any], output: tuple) -> Any:
    """Take the slots' positions off an attention module's output: they are keys and values, never queries."""
    slots = kwargs.get("slots")
    return None if slots is None else (output[0][:, slots.shape[1] :], *output[1:])


def _grow_mask(mask: Tensor | None, count: int) -> Tensor | None:
    """Let every query see the slots. No mask stays none: in front of a causal window the slots are seen anyway."""
    if mask is None:
        return None
    assert mask.ndim == 4, f"a mask [B, heads, queries, keys] was expected, got {tuple(mask.shape)}"
    rows = count if mask.shape[2] > 1 else 0  # one row may stand for all queries
    return pad(mask, (count, 0, rows, 0), value=True if mask.dtype == torch.bool else 0.0)


def _show_held(mask: Tensor, count: int, seen: Tensor) -> Tensor:
    """Columns for what a cache holds of the state, visible in the rows that have some."""
    visible = seen.to(mask.device)[:, None, None, None].expand(-1, 1, mask.shape[2], count)
    if mask.dtype != torch.bool:
        visible = torch.zeros_like(visible, dtype=mask.dtype).masked_fill(~visible, HIDDEN)
    return torch.cat([visible, mask], dim=-1)


def _grow_rotation(rotation: Tensor, count: int) -> Tensor:
    """Rotate the slots as a window's first position is: not at all (but scaled as the others are)."""
    return torch.cat([rotation[:, :1].expand(-1, count, -1), rotation], dim=1)
