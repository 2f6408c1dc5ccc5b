# SPDX-License-Identifier: Apache-2.0
"""Discovery of positions, keys and values: how a model rotates keys, or counts learned positions, and what shape they
have in its layers and in its cache. `discovery` has found the modules."""

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from .architectures import Architecture
from .modes import eval_mode
from .observation import ModuleCall, Observation, observed_attention
from .rotations import LAYOUTS, rotate_keys

TOKENS = 6  # of the calls that are observed
_TOLERANCE = 1e-3  # of the largest number: what differs, differs by far more
_ROTATION_TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 0.03}  # rounded before and after a rotation


class NotUnderstood(ValueError):
    """What of a model stands in the way of recurrence, in a sentence."""


def with_positions(
    architecture: Architecture, backbone: PreTrainedModel, calls: list[ModuleCall], observation: Observation
) -> Architecture:
    """An architecture with what is found of positions, keys and values.

    Args:
        calls: of each layer's attention module.
        observation: which they were made in.
    """
    table = _rotation_table(backbone, architecture, calls, observation)
    rotary = bool(table) or any(call.kwargs.get("position_embeddings") is not None for call in calls)
    architecture = dataclasses.replace(architecture, rotary=rotary, rotation_table=table)
    architecture = dataclasses.replace(architecture, kv_shapes=_kv_shapes(architecture, backbone, observation))
    if architecture.rotary:
        architecture = _with_rotation(architecture, backbone, calls, observation)
    else:
        architecture = dataclasses.replace(architecture, offset_positions=_are_positions_offset(backbone, observation))
        architecture = _with_state_size(architecture, backbone, _shapes(observation))
    return dataclasses.replace(architecture, kv_repeats=_kv_repeats(architecture, backbone, observation))


def _rotation_table(
    backbone: PreTrainedModel, architecture: Architecture, calls: list[ModuleCall], observation: Observation
) -> str:
    """The name of the table from which attention modules that get position ids take their rotations, if they do."""
    if any("position_embeddings" in call.kwargs or call.kwargs.get("position_ids") is None for call in calls):
        return ""
    moved = _keys_one_position_back(backbone, architecture, calls[0], "position_ids")
    if is_close(moved, observation.attention[0].key):
        return ""
    tables = [name for name, buffer in calls[0].module.named_buffers(recurse=False)
              if buffer.ndim == 2 and buffer.is_floating_point()]  # fmt: skip
    if not tables:
        raise NotUnderstood("its attention rotates keys by itself, and not with a table")
    return tables[0]


def _with_rotation(
    architecture: Architecture, backbone: PreTrainedModel, calls: list[ModuleCall], observation: Observation
) -> Architecture:
    """How keys are rotated: the layout that predicts them one position further back, in every layer that rotates."""
    rotary = getattr(backbone, "rotary_emb", None)
    if rotary is None and not architecture.rotation_table:
        raise NotUnderstood("its rotations are not made by a module rotary_emb")
    by_type = rotary is not None and "layer_type" in inspect.signature(type(rotary).forward).parameters
    keys, shapes = [call.key for call in observation.attention], _shapes(observation)
    given = "position_ids" if architecture.rotation_table else "position_embeddings"
    moved = [_keys_one_position_back(backbone, architecture, call, given) for call in calls]
    unrotated = tuple(number for number, (key, back) in enumerate(zip(keys, moved, strict=True), start=1)
                      if is_close(back[:, :, 1:], key[:, :, 1:]))  # fmt: skip
    architecture = dataclasses.replace(architecture, rotary_by_type=by_type, unrotated=unrotated)
    for name in LAYOUTS:
        found = dataclasses.replace(architecture, rotation_layout=name)
        sizes = found.rotated_sizes(backbone)
        if any(size > key.shape[-1] or size % 2 for size, key in zip(sizes, keys, strict=True)):
            continue
        found = _with_state_size(found, backbone, shapes)
        if _predicts(found, backbone, keys, moved):
            return found
    raise NotUnderstood("its keys are rotated in a way that is not known, or changed after their rotation")


@torch.no_grad()
def _predicts(architecture: Architecture, backbone: PreTrainedModel, keys: list[Tensor], moved: list[Tensor]) -> bool:
    layouts = architecture.kv_layouts(backbone)
    cos, sin = architecture.rotation(backbone, 1, TOKENS, keys[0], len(keys))
    for layer, (key, back) in enumerate(zip(keys, moved, strict=True)):
        key, back = (layouts[layer].keys(x) if layouts else x for x in (key, back))
        rotated = rotate_keys(key.float(), cos[:, layer, None, None], sin[:, layer, None, None])
        if not is_close(rotated[:, :, 1:], back[:, :, 1:], _ROTATION_TOLERANCE.get(backbone.dtype, _TOLERANCE)):
            return False
    return True


@torch.no_grad()
def _keys_one_position_back(
    backbone: PreTrainedModel, architecture: Architecture, call: ModuleCall, given: str
) -> Tensor:
    """The keys [1, heads, n, d] of an attention module if every position is rotated as the one before it.

    Args:
        given: the argument that says the positions, or their cosines and sines.
    """
    positions, kwargs = call.kwargs.get(given), call.kwargs
    if given == "position_ids" and isinstance(positions, Tensor):
        kwargs = {**kwargs, given: positions.roll(1, dims=1)}
    elif isinstance(positions, tuple) and len(positions) == 2:
        kwargs = {**kwargs, given: tuple(x.roll(1, dims=1) for x in positions)}
    elif positions is not None:
        raise NotUnderstood("its rotations are not a cosine and a sine")
    observation = Observation()
    with eval_mode(backbone), observed_attention(backbone, observation, architecture.own_attention):
        call.module(*call.args, **kwargs)
    return observation.attention[0].key


def _are_positions_offset(backbone: PreTrainedModel, observation: Observation) -> bool:
    """Whether learned positions are counted from behind the padding id. They must be positions that can be given."""
    if "position_ids" not in inspect.signature(type(backbone).forward).parameters:
        raise NotUnderstood("its positions are neither rotations nor given as position_ids")
    pad = getattr(backbone.config, "pad_token_id", None)
    for call in observation.modules:
        given = call.args[0] if isinstance(call.module, nn.Embedding) and call.args else None
        if isinstance(given, Tensor) and not given.is_floating_point() and given.numel() == TOKENS:
            first = given.flatten()[0].item()
            if pad is not None and first == pad + 1 and bool((given.flatten().diff() == 1).all()):
                return True
    return False


def _kv_shapes(
    architecture: Architecture, backbone: PreTrainedModel, observation: Observation
) -> tuple[tuple[int, int, int], ...]:
    """For each layer the number of key-value heads, the size of a key and that of a value; empty if the config says
    them."""
    if any(call.key.shape[1] != call.value.shape[1] for call in observation.attention):
        raise NotUnderstood("it has other numbers of keys than of values")
    shapes = _shapes(observation)
    try:
        heads, size = architecture.kv_heads(backbone.config)
    except Exception:  # a config that has one for each layer refuses to name one for all
        return shapes
    return () if {*shapes} == {(heads, size, size)} else shapes


def _shapes(observation: Observation) -> tuple[tuple[int, int, int], ...]:
    return tuple((call.key.shape[1], call.key.shape[3], call.value.shape[3]) for call in observation.attention)


def _with_state_size(
    architecture: Architecture, backbone: PreTrainedModel, shapes: tuple[tuple[int, int, int], ...]
) -> Architecture:
    """With the size that keys need in a state, where what is rotated stands in front, as wide as in any layer."""
    sizes = architecture.rotated_sizes(backbone)
    if not architecture.kv_shapes and len({*sizes}) == 1:
        return architecture
    needed = [max(max(sizes) + key - own, value) for (_, key, value), own in zip(shapes, sizes, strict=True)]
    return dataclasses.replace(architecture, kv_shapes=shapes, state_size=max(needed))


class _CacheProbe(Cache):
    """The keys that each attention module stores in a cache."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: dict[int, Tensor] = {}

    def update(  # type: ignore[override]
        self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys[layer_idx] = key
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


@torch.no_grad()
def _kv_repeats(architecture: Architecture, backbone: PreTrainedModel, observation: Observation) -> int:
    """How many times a causal model's attention repeats the keys that it has cached, in front of its attention
    function."""
    if not architecture.causal:
        return 1
    probe, repeats = _CacheProbe(), set()
    try:
        with eval_mode(backbone):
            backbone(input_ids=observation.ids, past_key_values=probe, use_cache=True, return_dict=True)
    except Exception as error:  # whatever a model does with a cache that is not its own
        raise NotUnderstood(f"it does not read with a cache ({type(error).__name__}: {error})") from error
    for number, call in enumerate(observation.attention):
        cached = probe.keys.get(number)
        if cached is None:
            raise NotUnderstood(f"layer {number + 1} stores no keys in a cache")
        repeats.add(call.key.shape[1] // cached.shape[1])
        if not is_close(cached.repeat(1, call.key.shape[1] // cached.shape[1], 1, 1), call.key):
            raise NotUnderstood("its cache holds something else than the keys that its attention function gets")
    if len(repeats) > 1:
        raise NotUnderstood("its layers repeat keys a different number of times")
    return repeats.pop()


def is_close(x: Tensor, expected: Tensor, tolerance: float = _TOLERANCE) -> bool:
    x, expected = x.float(), expected.float()
    return x.shape == expected.shape and bool((x - expected).abs().max() <= tolerance * expected.abs().max())
