# SPDX-License-Identifier: Apache-2.0
"""Discovery: the `Architecture` of a base model that is not in the table, from calls on six tokens.

Which modules reach transformers' attention interface says where layers and attention are; whose output enters
attention, where the norm is; keys at other positions, how they are rotated. What is found may still be wrong in what no
small call shows: `models.verification` holds it against the model itself.
"""

import contextlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import own_attention, quantization
from .architectures import Architecture
from .hooks import HookContext
from .modes import eval_mode
from .observation import ModuleCall, Observation, call_backbone, observe
from .position_discovery import TOKENS, NotUnderstood, is_close, with_positions

_ROUNDING = {torch.float16: 5e-3, torch.bfloat16: 0.03}  # of experts that are sent other tokens


def discover(model: PreTrainedModel) -> Architecture:
    """The architecture of a model; a `NotUnderstood` says what is not as it must be."""
    quantization.prepare(model)
    path, backbone = _backbone(model)
    ids = probe_ids(model, TOKENS)
    context = HookContext()
    own, observation = _observe(backbone, ids, context)
    layers_path, layers = _layer_list(backbone, observation)
    entered, calls = _layer_calls(layers, observation)
    _check_only_attention_passes_on(backbone, entered, calls)
    core, reaches_layers = _core(backbone, observation), _reaches_layers(entered, context)
    if core and not reaches_layers:
        raise NotUnderstood("keyword arguments are not handed on to its layers")
    causal, hidden = _is_causal(observation), observation.output.last_hidden_state
    order = tuple([*layers].index(call.module) for call in entered)
    architecture = Architecture(
        causal=causal,
        layers=layers_path,
        norm=_norm(entered, calls, observation),
        attention=_same(entered, calls),
        hands_down=_hands_down(calls, context),
        core=core,
        backbone=path,
        reaches_layers=reaches_layers,
        order=() if order == tuple(range(len(layers))) else order,
        own_attention=own,
        masks_by_type=_takes_masks_by_type(backbone, ids),
        plain_head=not causal or _is_plain_head(model, ids, hidden),
        takes_embeddings=_takes_embeddings(backbone, ids, hidden),
    )
    return with_positions(architecture, backbone, calls, observation)


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


def _observe(backbone: PreTrainedModel, ids: Tensor, context: HookContext) -> tuple[str, Observation]:
    """A call of the model, and what its attention modules call in place of the attention interface (see
    `own_attention`)."""
    try:
        observation = observe(backbone, ids, hook_context=context)
    except TypeError as error:
        raise NotUnderstood(f"its forward pass takes no further keyword arguments ({error})") from error
    except Exception as error:  # whatever a model does that needs more than token ids
        raise NotUnderstood(f"it does not read token ids alone ({type(error).__name__}: {error})") from error
    if observation.attention:
        return "", observation
    for own in own_attention.CALLS:
        with contextlib.suppress(Exception):  # whatever a model does with another attention function
            observation = observe(backbone, ids, own, hook_context=context)
        if observation.attention:
            _check_own_attention(own, observation)
            return own, observation
    raise NotUnderstood("its attention is not computed by transformers' AttentionInterface, nor by one call of its own")


def _check_own_attention(own: str, observation: Observation) -> None:
    for call in observation.attention:
        if not own_attention.sees_all(call.module, own, call.query, call.key, call.value):
            raise NotUnderstood("its attention function hides keys by itself, whatever mask it is given")


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
    """The list of layers: each of their calls computes attention once, and nothing else does."""
    modules = {call.module for call in observation.attention}
    expected = backbone.config.num_hidden_layers
    partial = ""
    for name, module in backbone.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        counts = [sum(part in modules for part in layer.modules()) for layer in module]
        if not any(counts):
            continue
        calls = [call for call in observation.modules if call.module in {*module}]
        if len(calls) == expected and sum(counts) == len(modules) and 0 not in counts:
            if len(observation.attention) > expected:
                raise NotUnderstood("a layer computes attention more than once")
            return name, module
        missing = counts.count(0)
        if len(module) == expected and missing:
            partial = f"{missing} of its {expected} layers have no attention of that kind (a recurrent state, say)"
        partial = partial or f"{name} has {len(module)} layers, and its config says {expected}"
    raise NotUnderstood(partial or "its layers are not in a list of modules")


def _layer_calls(layers: nn.ModuleList, observation: Observation) -> tuple[list[ModuleCall], list[ModuleCall]]:
    """The calls of all layers, in order, and those of their attention modules, which must take hidden states."""
    attending = {call.module for call in observation.attention}
    entered = [call for call in observation.modules if call.module in {*layers}]
    calls = [call for call in observation.modules if call.module in attending]
    for number, (layer, call) in enumerate(zip(entered, calls, strict=True), start=1):
        for name, hidden in (("takes in", layer.hidden), ("'s attention takes in", call.hidden),
                             ("gives out", layer.hidden_output)):  # fmt: skip
            if hidden is None or hidden.ndim != 3 or hidden.shape[1] != TOKENS:
                raise NotUnderstood(f"layer {number} {name} something else than hidden states".replace(" '", "'"))
    return entered, calls


@torch.no_grad()
def _check_only_attention_passes_on(
    backbone: PreTrainedModel, entered: list[ModuleCall], calls: list[ModuleCall]
) -> None:
    """In no layer anything but attention may pass on from token to token: without attention, the last token must not
    depend on the others."""
    for number, (layer, call) in enumerate(zip(entered, calls, strict=True), start=1):
        assert layer.hidden is not None
        other = layer.hidden.clone()
        other[:, :-1] = layer.hidden[:, :-1].flip(1)
        silenced = call.module.register_forward_hook(_without_attention)
        try:
            with eval_mode(backbone):
                one, two = (_last_position(layer, hidden) for hidden in (layer.hidden, other))
        finally:
            silenced.remove()
        if not is_close(two, one, _ROUNDING.get(one.dtype, 1e-5)):
            raise NotUnderstood(
                f"layer {number} passes something on from token to token beside attention (a recurrent state, say)"
            )


def _without_attention(attention: nn.Module, args: tuple, output: Any) -> Any:
    first, *rest = output if isinstance(output, tuple) else (output,)
    return (torch.zeros_like(first), *rest) if rest else torch.zeros_like(first)


def _last_position(layer: ModuleCall, hidden: Tensor) -> Tensor:
    """A layer's output at the last position, for other hidden states."""
    args, kwargs = (hidden, *layer.args[1:]), layer.kwargs
    if not layer.args:
        args, kwargs = (), {**kwargs, "hidden_states": hidden}
    output = layer.module(*args, **kwargs)
    return (output if isinstance(output, Tensor) else output[0])[:, -1]


def _gets(call: ModuleCall, context: HookContext) -> bool:
    return any(value is context for value in call.kwargs.values())


def _takes_keywords(call: ModuleCall) -> bool:
    parameters = inspect.signature(type(call.module).forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _reaches_layers(entered: list[ModuleCall], context: HookContext) -> bool:
    """Whether the model hands keyword arguments on to its layers, which must take them."""
    reached = [_gets(call, context) for call in entered]
    if not all(reached) and (any(reached) or not all(map(_takes_keywords, entered))):
        raise NotUnderstood(f"keyword arguments are not handed on to layer {reached.index(False) + 1}")
    return all(reached)


def _hands_down(calls: list[ModuleCall], context: HookContext) -> bool:
    """Whether layers hand keyword arguments on to their attention, which must take them."""
    if not all(map(_takes_keywords, calls)):
        raise NotUnderstood("its attention takes no further keyword arguments")
    return all(_gets(call, context) for call in calls)


def _same(entered: list[ModuleCall], calls: list[ModuleCall]) -> str:
    """The path from a layer to its attention, which must be the same in all layers."""
    paths = {next(name for name, part in layer.module.named_modules() if part is call.module)
             for layer, call in zip(entered, calls, strict=True)}  # fmt: skip
    if len(paths) > 1:
        raise NotUnderstood(f"attention is in different places of its layers: {', '.join(sorted(paths))}")
    return paths.pop()


def _norm(layers: list[ModuleCall], calls: list[ModuleCall], observation: Observation) -> str | None:
    """The path from a layer to the norm in front of attention: what gives out the hidden states that attention takes
    in. None if these are the layer's own input."""
    paths: set[str | None] = set()
    for entered, call in zip(layers, calls, strict=True):
        assert call.hidden is not None
        assert entered.hidden is not None
        if call.hidden is entered.hidden:
            paths.add(None)
            continue
        names = {module: name for name, module in entered.module.named_modules()}
        inside = [one for one in observation.modules if one.module in names and one.module is not entered.module]
        made = [one for one in inside if one.output is call.hidden] or [
            one for one in inside if isinstance(one.output, Tensor) and one.output.shape == call.hidden.shape
            and one is not call and torch.equal(one.output, call.hidden)
        ]  # fmt: skip
        if not made and not torch.equal(call.hidden, entered.hidden):
            raise NotUnderstood("no module of a layer gives out what its attention takes in")
        paths.add(names[made[-1].module] if made else None)
    if None in paths and len(paths) == 2:  # a norm that does nothing gives out what it took in
        (path,) = paths - {None}
        paths = {path} if any(_is_identity(call.module, path) for call in layers) else paths
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
    return is_close(given[:1], hidden)


@torch.no_grad()
def _is_plain_head(model: PreTrainedModel, ids: Tensor, hidden: Tensor) -> bool:
    """Whether logits are the output layer of the last hidden states, and nothing else is done to them."""
    head = model.get_output_embeddings()
    if head is None:
        return True
    with eval_mode(model):
        return is_close(head(hidden), call_backbone(model, ids).logits)
