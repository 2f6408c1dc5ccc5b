# SPDX-License-Identifier: Apache-2.0
"""Layers that are told of their calls: which layer they are, and the context of the model's call.

Hooks know a layer by its module, and get the context of a call from its keyword arguments. Some models compute several
layers by one module (ALBERT), and some hand no keyword arguments down to their layers (GPT-J, Falcon). Then the list
that holds the layers does it: while the model runs, whoever takes a layer from it gets a call of that layer, to which
the context and the layer's number are bound. So both belong to the call also where gradient checkpointing repeats it.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from .architectures import Architecture

_CALL = "_call_of_the_model"


class LayerCalls(nn.ModuleList):
    """A list of layers. During a call of the model its items are calls of the layers, counted in the order in which
    they are taken."""

    def __iter__(self) -> Iterator[Any]:
        call = self.__dict__.get(_CALL)
        return super().__iter__() if call is None else map(call.of_layer, super().__iter__())

    def __getitem__(self, index: Any) -> Any:
        call, layer = self.__dict__.get(_CALL), super().__getitem__(index)
        return layer if call is None or isinstance(index, slice) else call.of_layer(layer)


class _ModelCall:
    """One call of a model.

    Attributes:
        began_in: the module that was called: the model with its head, or the one without.
        context: the hook context.
        count: how many layers were taken.
    """

    def __init__(self, began_in: nn.Module, context: Any):
        self.began_in = began_in
        self.context = context
        self.count = 0

    def of_layer(self, layer: nn.Module) -> Any:
        self.count += 1
        return partial(layer, hook_context=self.context, layer_number=self.count)


def install(model: nn.Module, architecture: Architecture) -> None:
    """Tell the layers of a model, with or without its head, of their calls, if they do not know by themselves."""
    if architecture.reaches_layers and not architecture.order:
        return
    backbone = architecture.backbone_of(model)
    architecture.layer_list(backbone).__class__ = LayerCalls
    for module in {model, backbone}:
        if not getattr(module, "_tells_layers", False):
            module._tells_layers = True  # type: ignore[assignment]
            module.register_forward_pre_hook(partial(_begin, architecture), with_kwargs=True)
            module.register_forward_hook(partial(_end, architecture), always_call=True)


def _begin(architecture: Architecture, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Begin a call. The model without its head gets the context also if the head keeps it."""
    layers = architecture.layer_list(architecture.backbone_of(module))
    call = layers.__dict__.get(_CALL)
    if call is not None:
        return args, {**kwargs, "hook_context": call.context}
    if kwargs.get("hook_context") is not None:
        layers.__dict__[_CALL] = _ModelCall(module, kwargs["hook_context"])
    return None


def _end(architecture: Architecture, module: nn.Module, args: tuple, output: Any) -> None:
    layers = architecture.layer_list(architecture.backbone_of(module))
    call = layers.__dict__.get(_CALL)
    if call is not None and call.began_in is module:
        del layers.__dict__[_CALL]
