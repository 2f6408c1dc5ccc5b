# SPDX-License-Identifier: Apache-2.0
"""Forward hooks that insert the state into a base model and record its layers' outputs.

A carried vector becomes one more key and value of a layer's self-attention (figure 2 of the paper) without a change to
model code. One hook passes the vector through the layer's own norm and prepends it to the attention module's input; a
second hook drops its position from the output. The module's own projections make its key and value; the output of its
query is discarded. A slot costs the attention's projections, and no feed-forward network.

Carried keys and values enter inside the attention function (`attention`), where those of the window are recorded.

What belongs to one call travels with the call, as the keyword argument `hook_context`, which transformers hands down to
every layer. Under gradient checkpointing a layer runs again during the backward pass and must see its own window's
state. The hooks hold no reference to a model, so copies and pickles of a model are independent of it.
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

from .architectures import Architecture
from .attention import KV, AttentionContext, KVLink


class HookContext:
    """What the hooks of one call of the base model insert and record.

    Not a dataclass: FSDP copies dataclasses on their way to a layer, and outputs would be written to the copy.

    Attributes:
        slots: vectors to insert, by layer (counted from 1), each [B, S, k].
        past_kv: keys and values of earlier windows, by layer.
        links: for a block of windows, by layer: what connects them; see `attention.KVLink`.
        num_first: in a block, the first so many windows receive nothing.
        record_kv: whether to record the window's keys and values.
        record_attention: whether to record attention to the state (inside `attention.recording_attention`).
        attention_masks: in generation, each layer's attention mask over the cache; see `Architecture.cache_masks`.
        layer_outputs: output: each layer's output, [B, T, k].
        window_kv: output: each layer's keys and values.
        attention_to_state: output: by layer that receives a state, the attention paid to it, [B, heads, T].
    """

    def __init__(self) -> None:
        self.slots: dict[int, Tensor] = {}
        self.past_kv: dict[int, KV] = {}
        self.links: dict[int, KVLink] = {}
        self.num_first = 0
        self.record_kv = False
        self.record_attention = False
        self.attention_masks: list[Tensor | None] = []
        self.layer_outputs: dict[int, Tensor] | None = {}
        self.window_kv: dict[int, KV] = {}
        self.attention_to_state: dict[int, Tensor] = {}

    def add_slots(self, layer: int, vectors: Tensor) -> None:
        """Insert vectors [B, S, k] into a layer, after those of other memories."""
        others = self.slots.get(layer)
        self.slots[layer] = vectors if others is None else torch.cat([others, vectors], dim=1)

    def add_past_kv(self, layer: int, kv: KV) -> None:
        """Let a layer attend to keys and values, after those of other memories."""
        others = self.past_kv.get(layer)
        if others is not None:
            kv = torch.cat([others[0], kv[0]], dim=2), torch.cat([others[1], kv[1]], dim=2)
        self.past_kv[layer] = kv

    def take_layer_outputs(self) -> list[Tensor]:
        """The outputs of layers 1 to L, once. Layers that run again in the backward pass record nothing."""
        assert self.layer_outputs is not None, "layer outputs were taken before"
        outputs, self.layer_outputs = self.layer_outputs, None
        return [outputs[layer] for layer in sorted(outputs)]

    def take_window_kv(self) -> list[KV]:
        """The keys and values of layers 1 to L, once: a kept graph would otherwise keep them alive."""
        window_kv, self.window_kv = self.window_kv, {}
        return [window_kv[layer] for layer in sorted(window_kv)]


@contextlib.contextmanager
def maskless_attention() -> Iterator[None]:
    """Stop transformers from making an attention mask during CUDA-graph capture.

    A window without padding is one causal sequence and needs no mask. While a graph is captured, transformers cannot
    inspect its inputs and makes one to be safe, which rules out the fast attention kernels.
    """
    is_tracing_before, ignore_before = masking_utils.is_tracing, masking_utils._ignore_causal_mask_sdpa

    def is_tracing(tensor: Any = None) -> bool:  # reading a tensor cannot be captured
        return tensor is not None and is_tracing_before(tensor)

    def _ignore_causal_mask_sdpa(padding_mask: Tensor | None, *args: Any, **kwargs: Any) -> bool:
        return ignore_before(None, *args, **kwargs)

    def find_packed_sequence_indices(position_ids: Tensor) -> None:
        return None

    with contextlib.ExitStack() as patches:
        for function in (is_tracing, _ignore_causal_mask_sdpa, find_packed_sequence_indices):
            patches.enter_context(mock.patch.object(masking_utils, function.__name__, function))
        yield


def install(backbone: nn.Module, architecture: Architecture) -> None:
    """Register the hooks on a model without its head, once. Calls without `hook_context` behave as before."""
    if getattr(backbone, "_has_recurrence_hooks", False):  # an earlier `add_recurrence` to the same model
        return
    backbone._has_recurrence_hooks = True  # type: ignore[assignment]
    for number, layer in enumerate(architecture.layer_list(backbone), start=1):
        # Partials of plain functions survive deepcopy and pickle; closures over a module would not.
        norm = architecture.norm if getattr(layer, "do_layer_norm_before", True) else None  # OPT-350m: after it
        layer.register_forward_pre_hook(partial(_enter_layer, number, norm), with_kwargs=True)
        layer.register_forward_hook(partial(_record_layer, number), with_kwargs=True)
        attention = layer.get_submodule(architecture.attention)
        attention.register_forward_pre_hook(_prepend_slots, with_kwargs=True)
        attention.register_forward_hook(_drop_slots, with_kwargs=True)


def _enter_layer(number: int, norm: str | None, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Pass a layer's share of the context on to its attention; slots go through the layer's norm."""
    context: HookContext | None = kwargs.get("hook_context")
    if context is None:
        return None
    extra: dict[str, Any] = {}
    if context.attention_masks:
        extra["cache_mask"] = context.attention_masks[number - 1]
    if number in context.slots:
        hidden = args[0] if args else kwargs["hidden_states"]
        extra["slots"] = _normed(layer, norm, context.slots[number].to(hidden.dtype))
    has_state = number in context.slots or number in context.past_kv or number in context.links
    record_attention = context.record_attention and has_state
    if context.record_kv or number in context.past_kv or number in context.links or record_attention:
        num_slots = extra["slots"].shape[1] if "slots" in extra else 0
        extra["attention_context"] = AttentionContext(
            context.past_kv.get(number), num_slots, context.record_kv, record_attention,
            context.links.get(number), context.num_first,
        )  # fmt: skip
    return args, {**kwargs, **extra}


def _normed(layer: nn.Module, norm: str | None, slots: Tensor) -> Tensor:
    weight = next(layer.parameters())
    if weight.device.type != "meta":  # offloaded weights move to the input's device by themselves
        slots = slots.to(weight.device)
    if norm is not None:
        slots = layer.get_submodule(norm)(slots)
    return slots


def _record_layer(number: int, layer: nn.Module, args: tuple, kwargs: dict[str, Any], output: Tensor) -> None:
    """Record a layer's output, its keys and values, and the attention paid to the state."""
    context: HookContext | None = kwargs.get("hook_context")
    if context is None or context.layer_outputs is None:
        return
    context.layer_outputs[number] = output
    attention_context = kwargs.get("attention_context")
    if context.record_kv:
        context.window_kv[number] = attention_context.window_kv  # type: ignore[union-attr]
    if attention_context is not None and attention_context.record_attention:
        context.attention_to_state[number] = attention_context.attention_to_state


def _prepend_slots(attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Put the slots in front of an attention module's input, and the mask over a cache in its place."""
    hidden = args[0] if args else kwargs["hidden_states"]
    if "cache_mask" in kwargs:
        mask = kwargs["cache_mask"]
        kwargs = {**kwargs, "attention_mask": mask if mask is None else mask.to(hidden.device)}
    slots = kwargs.get("slots")
    if slots is None:
        return args, kwargs
    count = slots.shape[1]
    hidden = torch.cat([slots.to(hidden.device, hidden.dtype), hidden], dim=1)
    grown: dict[str, Any] = {"attention_mask": _grow_mask(kwargs.get("attention_mask"), count)}
    if kwargs.get("position_embeddings") is not None:
        grown["position_embeddings"] = tuple(_grow_rotation(x, count) for x in kwargs["position_embeddings"])
    if args:
        return (hidden, *args[1:]), {**kwargs, **grown}
    return args, {**kwargs, **grown, "hidden_states": hidden}


def _drop_slots(attention: nn.Module, args: tuple, kwargs: dict[str, Any], output: tuple) -> Any:
    """Drop the slots' positions from an attention module's output: they are keys and values, never queries."""
    slots = kwargs.get("slots")
    return None if slots is None else (output[0][:, slots.shape[1] :], *output[1:])


def _grow_mask(mask: Tensor | None, count: int) -> Tensor | None:
    """Let every query see the slots. Without a mask, a causal window sees what stands in front of it anyway."""
    if mask is None:
        return None
    assert mask.ndim == 4, f"a mask [B, heads, queries, keys] was expected, got {tuple(mask.shape)}"
    rows = count if mask.shape[2] > 1 else 0  # one row may serve all queries
    return pad(mask, (count, 0, rows, 0), value=True if mask.dtype == torch.bool else 0.0)


def _grow_rotation(rotation: Tensor, count: int) -> Tensor:
    """Rotate the slots like a window's first position: not at all (but scaled as the others are)."""
    return torch.cat([rotation[:, :1].expand(-1, count, -1), rotation], dim=1)
