# SPDX-License-Identifier: Apache-2.0
"""Forward hooks that insert the state into a base model and record its layers' outputs.

A carried vector becomes one more key and value of a layer's self-attention (figure 2 of the paper) without a change to
model code. One hook passes the vector through the layer's own norm and prepends it to the attention module's input; a
second hook drops its position from the output. The module's own projections make its key and value; the output of its
query is discarded. A slot costs the attention's projections, and no feed-forward network.

Carried keys and values enter inside the attention function (`attention`), where those of the window are recorded.
Embeddings enter in front of and behind the window's (`memory_positions`). A function of a layer's input can replace it.

What belongs to one call travels with the call, as the keyword argument `hook_context`, which transformers hands down to
every layer. Under gradient checkpointing a layer runs again during the backward pass and must see its own window's
state. The hooks hold no reference to a model, so copies and pickles of a model are independent of it.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import masking_utils

from . import layer_calls, memory_positions, own_attention
from .architectures import Architecture
from .attention import KV, AttentionContext, KVLink, attend_by_itself
from .kv_layout import KVLayout
from .memory_positions import MemoryPositions

_LEFT = "_arguments_of_recurrence"  # where they wait for an attention module
_GIVE_BACK = "_give_back_attention"  # where a function waits for the end of an attention module's call


class HookContext:
    """What the hooks of one call of the base model insert and record.

    Not a dataclass: FSDP copies dataclasses on their way to a layer, and outputs would be written to the copy.

    Attributes:
        slots: vectors to insert, by layer (counted from 1), each [B, S, k].
        past_kv: keys and values of earlier windows, by layer.
        past_visible: which of their positions each window that has a past sees, [b, S]; None: all.
        links: for a block of windows, by layer: what connects them; see `attention.KVLink`.
        num_first: in a block, the first so many windows see no other.
        before, after: memory positions in front of and behind the window's tokens, each [B, m, e].
        num_unseen: the last so many of those behind are not seen from other positions; the others carry the state.
        layer_inputs: by layer, a function that its input [B, n, k] passes through first.
        record_kv: whether to record the window's keys and values.
        record_attention: whether to record attention to the state (inside `attention.recording_attention`).
        kv_layouts: how the keys and values of each layer stand in a state; empty: as they are.
        attention_masks: in generation, each layer's attention mask over the cache; see `Architecture.cache_masks`.
        layer_outputs: output: each layer's output, [B, T, k].
        layer_after: output: the same for the memory positions behind the window, [B, m, k].
        last_after: output: the base model's last hidden states there, after its final norm.
        window_kv: output: each layer's keys and values.
        attention_to_state: output: by layer that receives a state, the attention paid to it, [B, heads, T].
    """

    def __init__(self) -> None:
        self.slots: dict[int, Tensor] = {}
        self.past_kv: dict[int, KV] = {}
        self.past_visible: Tensor | None = None
        self.links: dict[int, KVLink] = {}
        self.num_first = 0
        self.before: Tensor | None = None
        self.after: Tensor | None = None
        self.num_unseen = 0
        self.layer_inputs: dict[int, Callable[[Tensor], Tensor]] = {}
        self.record_kv = False
        self.record_attention = False
        self.kv_layouts: Sequence[KVLayout] = ()
        self.attention_masks: list[Tensor | None] = []
        self.layer_outputs: dict[int, Tensor] | None = {}
        self.layer_after: dict[int, Tensor] = {}
        self.last_after: Tensor | None = None
        self.window_kv: dict[int, KV] = {}
        self.attention_to_state: dict[int, Tensor] = {}

    @property
    def memory_positions(self) -> MemoryPositions | None:
        """How many memory positions there are; None for none."""
        before, after = (0 if part is None else part.shape[1] for part in (self.before, self.after))
        return MemoryPositions(before, after, self.num_unseen) if before + after else None

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

    def take_layer_after(self) -> list[Tensor]:
        """The outputs of layers 1 to L at the memory positions behind the window, once; none without such positions."""
        outputs, self.layer_after = self.layer_after, {}
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


def install(model: nn.Module, architecture: Architecture) -> None:
    """Register the hooks on a model, with or without its head, once. Calls without `hook_context` behave as before."""
    layer_calls.install(model, architecture)
    backbone = architecture.backbone_of(model)
    if getattr(backbone, "_has_recurrence_hooks", False):  # an earlier `add_recurrence` to the same model
        return
    backbone._has_recurrence_hooks = True  # type: ignore[assignment]
    core = backbone.get_submodule(architecture.core)
    core.register_forward_pre_hook(memory_positions.embed, with_kwargs=True)
    core.register_forward_hook(memory_positions.strip, with_kwargs=True)
    for number, layer in enumerate(architecture.layer_list(backbone), start=1):
        # Partials of plain functions survive deepcopy and pickle; closures over a module would not.
        norm = architecture.norm if getattr(layer, "do_layer_norm_before", True) else None  # OPT-350m: after it
        layer.register_forward_pre_hook(partial(_enter_layer, number, norm), with_kwargs=True)
        layer.register_forward_hook(partial(_record_layer, number), with_kwargs=True)
        attention = layer.get_submodule(architecture.attention)
        if not architecture.causal and not hasattr(attention, "is_causal"):
            attention.is_causal = False  # type: ignore[assignment]  # attention functions take it for causal otherwise
        if not architecture.hands_down:
            layer.register_forward_pre_hook(partial(_leave_for_attention, architecture.attention), with_kwargs=True)
            attention.register_forward_pre_hook(_take_what_was_left, with_kwargs=True)
        names = tuple(inspect.signature(type(attention).forward).parameters)[1:]
        attention.register_forward_pre_hook(partial(_prepend_slots, names), with_kwargs=True)
        if architecture.own_attention:
            attention.register_forward_pre_hook(partial(_take_over, architecture.own_attention), with_kwargs=True)
            attention.register_forward_hook(_give_back)
            # After an error, too. Not of the attention module: a compiler would then compile every layer by itself.
            layer.register_forward_hook(partial(_give_back_in, architecture.attention), always_call=True)
        attention.register_forward_hook(_drop_slots, with_kwargs=True)


def _enter_layer(number: int, norm: str | None, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Pass a layer's share of the context on to its attention; slots go through the layer's norm.

    Args:
        number: which layer it is, unless its call says so (`layer_calls`).
    """
    context: HookContext | None = kwargs.get("hook_context")
    if context is None:
        return None
    number = kwargs.get("layer_number", number)
    extra: dict[str, Any] = {}
    if number in context.layer_inputs:
        change = context.layer_inputs[number]
        if args:
            args = change(args[0]), *args[1:]
        else:
            extra["hidden_states"] = change(kwargs["hidden_states"])
    if context.attention_masks:
        extra["cache_mask"] = context.attention_masks[number - 1]
    if number in context.slots:
        hidden = args[0] if args else kwargs["hidden_states"]
        extra["slots"] = _normed(layer, norm, context.slots[number].to(hidden.dtype))
    has_kv = number in context.past_kv or number in context.links
    positions = None if context.attention_masks else context.memory_positions  # masks over a cache allow for them
    has_state = number in context.slots or has_kv or (positions is not None and positions.num_read > 0)
    record_attention = context.record_attention and has_state
    if context.record_kv or has_kv or positions is not None or record_attention:
        num_slots = extra["slots"].shape[1] if "slots" in extra else 0
        extra["attention_context"] = AttentionContext(
            context.past_kv.get(number), num_slots, context.record_kv, record_attention,
            context.links.get(number), context.num_first, context.past_visible, positions,
            context.kv_layouts[number - 1] if context.kv_layouts else None,
        )  # fmt: skip
    return args, {**kwargs, **extra}


def _leave_for_attention(path: str, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Leave the arguments of a layer that does not hand them on to its attention with the attention module."""
    names = ("slots", "attention_context", "cache_mask")
    layer.get_submodule(path).__dict__[_LEFT] = {name: kwargs[name] for name in names if name in kwargs}


def _take_what_was_left(attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    return args, {**kwargs, **attention.__dict__.pop(_LEFT, {})}


def _take_over(call: str, attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Let what an attention module calls by itself see what is carried."""
    context = kwargs.get("attention_context")
    if context is not None:
        attend = partial(attend_by_itself, call, context)
        attention.__dict__[_GIVE_BACK] = own_attention.take_over(attention, call, attend)


def _give_back(attention: nn.Module, args: tuple, output: Any) -> None:
    give_back = attention.__dict__.pop(_GIVE_BACK, None)
    if give_back is not None:
        give_back()


def _give_back_in(path: str, layer: nn.Module, args: tuple, output: Any) -> None:
    _give_back(layer.get_submodule(path), (), None)


def _normed(layer: nn.Module, norm: str | None, slots: Tensor) -> Tensor:
    weight = next(layer.parameters())
    if weight.device.type != "meta":  # offloaded weights move to the input's device by themselves
        slots = slots.to(weight.device)
    if norm is not None:
        slots = layer.get_submodule(norm)(slots)
    return slots


def _record_layer(number: int, layer: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """Record a layer's output, its keys and values, and the attention paid to the state."""
    context: HookContext | None = kwargs.get("hook_context")
    if context is None or context.layer_outputs is None:
        return
    number = kwargs.get("layer_number", number)
    hidden = output if isinstance(output, Tensor) else output[0]  # some layers give out more
    context.layer_outputs[number] = hidden
    positions = context.memory_positions
    if positions is not None:
        context.layer_outputs[number], context.layer_after[number] = positions.split(hidden)
    attention_context = kwargs.get("attention_context")
    if context.record_kv:
        context.window_kv[number] = attention_context.window_kv  # type: ignore[union-attr]
    if attention_context is not None and attention_context.record_attention:
        context.attention_to_state[number] = attention_context.attention_to_state


def _prepend_slots(names: tuple[str, ...], attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Put the slots in front of an attention module's input, and the mask over a cache in its place.

    Args:
        names: of the arguments of its forward pass.
    """
    if "cache_mask" not in kwargs and "slots" not in kwargs:
        return None
    same = ["hidden_states"]  # arguments that are the hidden states: in CTRL three of them
    if len(args) > 1:  # some layers give masks and rotations by position
        more = dict(zip(names[1:], args[1:], strict=False))
        same += [name for name, value in more.items() if value is args[0]]
        args, kwargs = args[:1], {**kwargs, **more}
    hidden = args[0] if args else kwargs["hidden_states"]
    if "cache_mask" in kwargs:
        mask = kwargs["cache_mask"]
        kwargs = {**kwargs, "attention_mask": mask if mask is None else mask.to(hidden.device)}
    slots = kwargs.get("slots")
    if slots is None:
        return args, kwargs
    count = slots.shape[1]
    longer = torch.cat([slots.to(hidden.device, hidden.dtype), hidden], dim=1)
    grown: dict[str, Any] = {"attention_mask": _grow_mask(kwargs.get("attention_mask"), count)}
    rotations, positions = kwargs.get("position_embeddings"), kwargs.get("position_ids")
    if isinstance(rotations, Tensor):
        grown["position_embeddings"] = _repeat_first(rotations, count)
    elif rotations is not None:
        grown["position_embeddings"] = tuple(_repeat_first(x, count) for x in rotations)
    if isinstance(positions, Tensor):
        grown["position_ids"] = _repeat_first(positions, count)
    grown |= {name: longer for name in same if name in kwargs}
    return (longer,) if args else args, {**kwargs, **grown}


def _drop_slots(attention: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Drop the slots' positions from an attention module's output: they are keys and values, never queries."""
    slots = kwargs.get("slots")
    if slots is None:
        return None
    count = slots.shape[1]
    return output[:, count:] if isinstance(output, Tensor) else (output[0][:, count:], *output[1:])


def _grow_mask(mask: Tensor | None, count: int) -> Tensor | None:
    """Let every query see the slots. Without a mask, a causal window sees what stands in front of it anyway."""
    if mask is None:
        return None
    assert mask.ndim == 4, f"a mask [B, heads, queries, keys] was expected, got {tuple(mask.shape)}"
    rows = count if mask.shape[2] > 1 else 0  # one row may serve all queries
    return pad(mask, (count, 0, rows, 0), value=True if mask.dtype == torch.bool else 0.0)


def _repeat_first(positions: Tensor, count: int) -> Tensor:
    """Positions, or rotations, [B, n, ...], in which slots stand at a window's first one: they are not rotated (but
    scaled as the others are)."""
    return torch.cat([positions[:, :1].expand(-1, count, *positions.shape[2:]), positions], dim=1)
