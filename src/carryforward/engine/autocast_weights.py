# SPDX-License-Identifier: Apache-2.0
"""Weights in the precision of autocast, for captured graphs to read: cast once per call of the model."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


class AutocastWeights:
    """A cache of linear layers' weights in the precision of autocast, cast once per call instead of in every window.

    Only weights that nothing else reads: an embedding that shares one, or an adapter around a layer, needs the
    original.
    """

    def __init__(self, layers: Iterable[nn.Module] = (), modules: Sequence[nn.Module] = ()):
        """
        Args:
            layers: the base model's layers, whose weights are cast.
            modules: all modules of the model.
        """
        adapted = {inner for module in modules if hasattr(module, "base_layer") for inner in module.modules()}
        inside = {module: None for layer in layers for module in layer.modules()}
        linear = [module for module in inside if type(module) in (nn.Linear, Conv1D) and module not in adapted]
        others = {weight for module in {*modules} - {*linear} for weight in module.parameters(recurse=False)}
        own = {weight: None for module in linear for weight in module.parameters(recurse=False)}
        self._weights = [weight for weight in own if weight not in others and weight.dtype == torch.float32]
        self._cast: dict[torch.dtype, list[Tensor]] = {}

    def current(self, device: torch.device) -> dict[nn.Parameter, Tensor]:
        """The cast weights, by weight, in autocast's current precision. Always the same tensors."""
        if not self._weights or not torch.is_autocast_enabled(device.type):
            return {}
        dtype = torch.get_autocast_dtype(device.type)
        if dtype not in self._cast:
            self._cast[dtype] = [weight.detach().to(dtype) for weight in self._weights]
        return dict(zip(self._weights, self._cast[dtype], strict=True))

    def refresh(self) -> None:
        """Cast again: weights may have changed since the last call."""
        with torch.inference_mode(False), torch.no_grad():
            for cast in self._cast.values():
                torch._foreach_copy_(cast, [*self._weights])
