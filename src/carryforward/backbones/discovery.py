# SPDX-License-Identifier: Apache-2.0
"""Discovery: the `Architecture` of a base model that is not in the table, from calls on six tokens.

Which modules reach transformers' attention interface says where layers and attention are; whose output enters
attention, where the norm is; keys at other positions, how they are rotated. What is found may still be wrong in what no
small call shows: `models.verification` holds it against the model itself.
"""

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import quantization
from .architectures import Architecture
from .hooks import HookContext
from .modes import eval_mode
from .observation import ModuleCall, Observation, call_backbone, observe, observed_attention
from .rotations import LAYOUTS, rotate_keys

_TOKENS = 6
_TOLERANCE = 1e-3  # of the largest number: what differs, differs by far more
_ROTATION_TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 0.03}  # rounded before and after a rotation


class NotUnderstood(ValueError):
    """What of a model stands in the way of recurrence, in a sentence."""


def discover(model: PreTrainedModel) -> Architecture:
    """The architecture of a model; a `NotUnderstood` says what is not as it must be."""
    quantization.prepare(model)
    path, backbone = _backbone(model)
    ids = probe_ids(model, _TOKENS)
    context = HookContext()
    try:
        observation = observe(backbone, ids, hook_context=context)
    except TypeError as error:
        raise NotUnderstood(f"its forward pass takes no further keyword arguments ({error})") from error
    except Exception as error:  # whatever a model does that needs more than token ids
        raise NotUnderstood(f"it does not read token ids alone ({type(error).__name__}: {error})") from error
    layers_path, layers = _layer_list(backbone, observation)
    calls = [_attention_call(layer, number, observation, context) for number, layer in enumerate(layers, start=1)]
    attention = _same(layers, [call.module for call in calls], "attention")
    causal = _is_causal(observation)
    hidden = observation.output.last_hidden_state
    architecture = Architecture(
        causal=causal,
        layers=layers_path,
        norm=_norm(layers, calls, observation),
        attention=attention,
        hands_down=all(any(value is context for value in call.kwargs.values()) for call in calls),
        core=_core(backbone, observation),
        backbone=path,
        rotary=any(call.kwargs.get("position_embeddings") is not None for call in calls),
        masks_by_type=_takes_masks_by_type(backbone, ids),
        plain_head=not causal or _is_plain_head(model, ids, hidden),
        takes_embeddings=_takes_embeddings(backbone, ids, hidden),
    )
    architecture = dataclasses.replace(architecture, kv_shapes=_kv_shapes(architecture, backbone, observation))
    if architecture.rotary:
        architecture = _with_rotation(architecture, backbone, calls, observation)
    else:
        architecture = dataclasses.replace(architecture, offset_positions=_are_positions_offset(backbone, observation))
        architecture = _with_state_size(architecture, backbone, _shapes(observation))
    return architecture


def probe_ids(model: PreTrainedModel, count: int, rows: int = 1) -> Tensor:
    """Token ids [rows, count] from all over the vocabulary, without padding and special tokens."""
    special: set[int] = set()
    for name, value in model.config.to_dict().items():
        if name.endswith("_token_id") and value is not None:
            special.update(value if isinstance(value, list) else [value])
    try:
        vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr, index]
    except (AttributeError, NotImplementedError) as error:
        raise NotUnderstood("it has no embeddings of tokens") from error
    usable = [token for token in range(min(vocabulary, 10_000)) if token not in special]
    chosen = [usable[(2 * i + 1) * len(usable) // (2 * rows * count)] for i in range(rows * count)]
    return torch.tensor(chosen, device=model.device).view(count, rows).T.contiguous()


# --- modules ---------------------------------------------------------------------------------------------------------


def _backbone(model: PreTrainedModel) -> tuple[str, PreTrainedModel]:
    """The model without its head, and the path to it if it is not `base_model`."""
    if model.base_model is not model or model.get_output_embeddings() is None:
        return "", model.base_model  # type: ignore[return-value]
    for name, module in model.named_children():
        if isinstance(module, PreTrainedModel):
            return name, module
    return "", model


def _layer_list(backbone: PreTrainedModel, observation: Observation) -> tuple[str, nn.ModuleList]:
    """The list of layers: each of its items computes attention once, and nothing else does."""
    modules = {call.module for call in observation.attention}
    if not modules:
        raise NotUnderstood("its attention is not computed by transformers' AttentionInterface")
    expected = backbone.config.num_hidden_layers
    partial = ""
    for name, module in backbone.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        counts = [sum(part in modules for part in layer.modules()) for layer in module]
        if not any(counts):
            continue
        if len(module) == expected and sum(counts) == len(modules) and {*counts} == {1}:
            if len(observation.attention) > len(modules):
                raise NotUnderstood("a layer computes attention more than once")
            return name, module
        missing = counts.count(0)
        if len(module) == expected and missing:
            partial = f"{missing} of its {expected} layers have no attention of that kind (a recurrent state, say)"
        partial = partial or f"{name} has {len(module)} layers, and its config says {expected}"
    raise NotUnderstood(partial or "its layers are not a list of modules with weights of their own")


def _attention_call(layer: nn.Module, number: int, observation: Observation, context: HookContext) -> ModuleCall:
    """The call of a layer's attention module, which must take hidden states and hand keyword arguments on."""
    (attending,) = (call for call in observation.attention if call.module in {*layer.modules()})
    (call,) = observation.of(attending.module)
    (entered,) = observation.of(layer)
    for name, hidden in (("takes in", entered.hidden), ("'s attention takes in", call.hidden),
                         ("gives out", entered.hidden_output)):  # fmt: skip
        if hidden is None or hidden.ndim != 3 or hidden.shape[1] != _TOKENS:
            raise NotUnderstood(f"layer {number} {name} something else than hidden states".replace(" '", "'"))
    if not any(value is context for value in entered.kwargs.values()):
        raise NotUnderstood(f"keyword arguments are not handed on to layer {number}")
    return call


def _same(layers: nn.ModuleList, modules: list[nn.Module], what: str) -> str:
    """The path from a layer to its part, which must be the same in all layers."""
    paths = {next(name for name, part in layer.named_modules() if part is module)
             for layer, module in zip(layers, modules, strict=True)}  # fmt: skip
    if len(paths) > 1:
        raise NotUnderstood(f"{what} is in different places of its layers: {', '.join(sorted(paths))}")
    return paths.pop()


def _norm(layers: nn.ModuleList, calls: list[ModuleCall], observation: Observation) -> str | None:
    """The path from a layer to the norm in front of attention: what gives out the hidden states that attention takes
    in. None if these are the layer's own input."""
    paths: set[str | None] = set()
    for layer, call in zip(layers, calls, strict=True):
        (entered,) = observation.of(layer)
        assert call.hidden is not None
        assert entered.hidden is not None
        if call.hidden is entered.hidden:
            paths.add(None)
            continue
        names = {module: name for name, module in layer.named_modules()}
        inside = [one for one in observation.modules if one.module in names and one.module is not layer]
        made = [one for one in inside if one.output is call.hidden] or [
            one for one in inside if isinstance(one.output, Tensor) and one.output.shape == call.hidden.shape
            and one is not call and torch.equal(one.output, call.hidden)
        ]  # fmt: skip
        if not made and not torch.equal(call.hidden, entered.hidden):
            raise NotUnderstood("no module of a layer gives out what its attention takes in")
        paths.add(names[made[-1].module] if made else None)
    if None in paths and len(paths) == 2:  # a norm that does nothing gives out what it took in
        (path,) = paths - {None}
        paths = {path} if any(_is_identity(layer, path) for layer in layers) else paths
    if len(paths) > 1:
        raise NotUnderstood(f"norms are in different places of its layers: {', '.join(sorted(map(str, paths)))}")
    return paths.pop()


def _is_identity(layer: nn.Module, path: str | None) -> bool:
    return path is not None and isinstance(layer.get_submodule(path), nn.Identity)


def _core(backbone: nn.Module, observation: Observation) -> str:
    """The path from the model without its head to the innermost module that takes token ids and gives hidden states."""
    names = {module: name for name, module in backbone.named_modules()}
    inner = [call.module for call in observation.modules
             if "input_ids" in call.kwargs and call.kwargs["input_ids"] is not None
             and hasattr(call.output, "last_hidden_state")]  # fmt: skip
    return names[inner[-1]] if inner else ""


def _is_causal(observation: Observation) -> bool:
    """Whether no token attends to a later one, in any layer: read off what attention is given, since outputs may hide
    it (weights that are nearly zero)."""
    sees_ahead = {bool(call.visible().triu(1).any()) for call in observation.attention}
    if len(sees_ahead) > 1:
        raise NotUnderstood("some of its layers are causal, others are not")
    return sees_ahead == {False}


@torch.no_grad()
def _takes_masks_by_type(backbone: PreTrainedModel, ids: Tensor) -> bool:
    """Whether the model takes a dictionary of masks, one for each type of its layers: asked by trying."""
    config, length = backbone.config, ids.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()[None, None]
    if config._attn_implementation.endswith("eager"):
        mask = torch.zeros(mask.shape, dtype=backbone.dtype, device=ids.device)
    types = {"full_attention", "sliding_attention", *(getattr(config, "layer_types", None) or ())}
    try:
        with eval_mode(backbone):
            call_backbone(backbone, ids, attention_mask=dict.fromkeys(types, mask))
    except Exception:  # whatever a model does with an argument that it does not expect
        return False
    return True


@torch.no_grad()
def _takes_embeddings(backbone: PreTrainedModel, ids: Tensor, hidden: Tensor) -> bool:
    """Whether the embeddings of tokens do what their ids do (`hidden`), and others are taken, too: some models leave
    out positions or norms, or look up which tokens they are."""
    embedded = backbone.get_input_embeddings()(ids)  # type: ignore[operator]
    try:
        with eval_mode(backbone):
            given = call_backbone(backbone, None, inputs_embeds=torch.cat([embedded, embedded / 2])).last_hidden_state
    except Exception:  # whatever a model does with an argument that it does not expect
        return False
    return _is_close(given[:1], hidden)


@torch.no_grad()
def _is_plain_head(model: PreTrainedModel, ids: Tensor, hidden: Tensor) -> bool:
    """Whether logits are the output layer of the last hidden states, and nothing else is done to them."""
    head = model.get_output_embeddings()
    if head is None:
        return True
    with eval_mode(model):
        return _is_close(head(hidden), call_backbone(model, ids).logits)


# --- positions -------------------------------------------------------------------------------------------------------


def _with_rotation(
    architecture: Architecture, backbone: PreTrainedModel, calls: list[ModuleCall], observation: Observation
) -> Architecture:
    """How keys are rotated: the layout that predicts them one position further back, in every layer that rotates."""
    rotary = getattr(backbone, "rotary_emb", None)
    if rotary is None:
        raise NotUnderstood("its rotations are not made by a module rotary_emb")
    by_type = "layer_type" in inspect.signature(type(rotary).forward).parameters
    keys, shapes = [_key(observation, call) for call in calls], _shapes(observation)
    moved = [_keys_one_position_back(backbone, call) for call in calls]
    unrotated = tuple(number for number, (key, back) in enumerate(zip(keys, moved, strict=True), start=1)
                      if _is_close(back[:, :, 1:], key[:, :, 1:]))  # fmt: skip
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
    cos, sin = architecture.rotation(backbone, 1, _TOKENS, keys[0], len(keys))
    for layer, (key, back) in enumerate(zip(keys, moved, strict=True)):
        key, back = (layouts[layer].keys(x) if layouts else x for x in (key, back))
        rotated = rotate_keys(key.float(), cos[:, layer, None, None], sin[:, layer, None, None])
        if not _is_close(rotated[:, :, 1:], back[:, :, 1:], _ROTATION_TOLERANCE.get(backbone.dtype, _TOLERANCE)):
            return False
    return True


@torch.no_grad()
def _keys_one_position_back(backbone: PreTrainedModel, call: ModuleCall) -> Tensor:
    """The keys [1, heads, n, d] of an attention module if every position is rotated as the one before it."""
    rotations = call.kwargs.get("position_embeddings")
    if rotations is None:
        return _key_of_rerun(backbone, call, call.kwargs)
    if not isinstance(rotations, tuple) or len(rotations) != 2:
        raise NotUnderstood("its rotations are not a cosine and a sine")
    rolled = tuple(x.roll(1, dims=1) for x in rotations)
    return _key_of_rerun(backbone, call, {**call.kwargs, "position_embeddings": rolled})


def _key_of_rerun(backbone: PreTrainedModel, call: ModuleCall, kwargs: dict[str, Any]) -> Tensor:
    observation = Observation()
    with eval_mode(backbone), observed_attention(backbone, observation):
        call.module(*call.args, **kwargs)
    return observation.attention[0].key


def _key(observation: Observation, call: ModuleCall) -> Tensor:
    return next(one.key for one in observation.attention if one.module is call.module)


def _are_positions_offset(backbone: PreTrainedModel, observation: Observation) -> bool:
    """Whether learned positions are counted from behind the padding id. They must be positions that can be given."""
    if "position_ids" not in inspect.signature(type(backbone).forward).parameters:
        raise NotUnderstood("its positions are neither rotations nor given as position_ids")
    pad = getattr(backbone.config, "pad_token_id", None)
    for call in observation.modules:
        given = call.args[0] if isinstance(call.module, nn.Embedding) and call.args else None
        if isinstance(given, Tensor) and not given.is_floating_point() and given.numel() == _TOKENS:
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


def _is_close(x: Tensor, expected: Tensor, tolerance: float = _TOLERANCE) -> bool:
    x, expected = x.float(), expected.float()
    return x.shape == expected.shape and bool((x - expected).abs().max() <= tolerance * expected.abs().max())
