# SPDX-License-Identifier: Apache-2.0
"""Weights in the precision that autocast gives them, for recordings to read: cast once in a call of the model."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


class AutocastWeights:
    """The weights of linear layers in the precision that autocast gives them, cast once in a call of the model instead
    of in every window, there and back. Only weights that nothing else looks at: what else owns one, as an embedding
    does, or reads it, as adapters around a layer do, may want it as it is."""

    def __init__(self, layers: Sequence[nn.Module] = (), modules: Sequence[nn.Module] = ()):
        """
        Args:
            layers: those of the base model, whose weights are cast.
            modules: all of the model's.
        """
        adapted = {inner for module in modules if hasattr(module, "base_layer") for inner in module.modules()}
        inside = {module: None for layer in layers for module in layer.modules()}
        linear = [module for module in inside if type(module) in (nn.Linear, Conv1D) and module not in adapted]
        others = {weight for module in {*modules} - {*linear} for weight in module.parameters(recurse=False)}
        own = {weight: None for module in linear for weight in module.parameters(recurse=False)}
        self._weights = [weight for weight in own if weight not in others and weight.dtype == torch.float32]
        self._made: dict[torch.dtype, list[Tensor]] = {}

    def now(self, device: torch.device) -> dict[nn.Parameter, Tensor]:
        """What to use for which weight, in the precision of this moment. Always the same tensors."""
        if not self._weights or not torch.is_autocast_enabled(device.type):
            return {}
        dtype = torch.get_autocast_dtype(device.type)
        if dtype not in self._made:
            self._made[dtype] = [weight.detach().to(dtype) for weight in self._weights]
        return dict(zip(self._weights, self._made[dtype], strict=True))

    def renew(self) -> None:
        """Weights may have changed since the last call."""
        with torch.inference_mode(False), torch.no_grad():
            for made in self._made.values():
                torch._foreach_copy_(made, [*self._weights])
