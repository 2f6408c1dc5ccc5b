# SPDX-License-Identifier: Apache-2.0
"""Base models whose weights are quantised to 8 or 4 bits. transformers loads, runs and saves them, by libraries such as
bitsandbytes and torchao; here is what else a recurrent model on top of one needs.

What is added to the base model keeps the precision of its other weights.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..utils.checkpoints import is_shard

# The field of a quantisation config that names the modules to leave alone, by library.
_LEFT_ALONE = {"bitsandbytes": "llm_int8_skip_modules", "torchao": "modules_to_not_convert"}
# What transformers and peft ask a quantised model for. Not `is_quantized`, by which `Trainer` refuses to train: a
# memory can be trained on weights that cannot.
_MARKS = ("hf_quantizer", "quantization_method", "is_loaded_in_8bit", "is_loaded_in_4bit")


def is_quantized(module: nn.Module) -> bool:
    """Whether any weight is quantised. (One that was read from a quantised GGUF file is an ordinary one.)"""
    return any(is_quantized_weight(weight) for weight in module.parameters())


def is_quantized_weight(weight: Tensor) -> bool:
    """Whether a weight is stored as integers, or as a tensor class of its own that is no shard."""
    return not weight.is_floating_point() or (type(weight) not in (nn.Parameter, Tensor) and not is_shard(weight))


def prepare(model: nn.Module) -> None:
    """Let a quantised base model compute the same with and without gradients, and when it is saved.

    On some CPUs bitsandbytes reorders the weights of 4 bits at their first use without gradients. Gradients do not flow
    through reordered weights, and saving puts them back inexactly.
    """
    for name, module in model.named_modules():
        if not hasattr(module, "support_avx512bf16_for_cpu"):
            continue
        if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
            raise ValueError(
                f"model has been called on this CPU, for which bitsandbytes has reordered its weights ({name}): saved "
                "or trained it would compute something else. Load it again, and add recurrence before it is called."
            )
        module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def check_gradients(base: nn.Module) -> None:
    """Refuse to train a memory or adapters on a base model through whose weights no gradient flows: those before a
    layer would silently get none."""
    layers = {
        (type(module), type(module.weight)): (name, module)
        for name, module in base.named_modules()
        if isinstance(module, nn.Linear) and is_quantized_weight(module.weight)
    }
    dtype = next((weight.dtype for weight in base.parameters() if not is_quantized_weight(weight)), None)
    for name, layer in layers.values():
        with torch.enable_grad():
            x = torch.ones(2, layer.in_features, dtype=dtype, device=layer.weight.device, requires_grad=True)
            y = layer(x).sum()
            (gradient,) = torch.autograd.grad(y, x, allow_unused=True) if y.requires_grad else (None,)
        if gradient is not None and bool(gradient.any()):
            continue
        raise ValueError(
            f"no gradient flows through quantised weights such as {name} ({type(layer.weight).__name__}), so that "
            "neither the memory nor adapters can be trained on them. Use another quantisation, such as one of weights "
            "alone, or evaluate under torch.no_grad()."
        )


def adopt(model: PreTrainedModel, base: PreTrainedModel) -> None:
    """Let a model that was built on a quantised one be saved, moved and adapted as such."""
    for name in _MARKS:
        if hasattr(base, name):
            setattr(model, name, getattr(base, name))


def after_loading(model: PreTrainedModel, base: PreTrainedModel) -> None:
    """Let a recurrent model that was loaded with a quantised base model be trained and saved again."""
    prepare(model)
    adopt(base, model)
    vars(model).pop("is_quantized", None)
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is not None and is_quantized(base):  # weights are saved as they are stored
        model._weight_conversions = [one for one in conversions if _can_be_reversed(one)]  # type: ignore[assignment]


def _can_be_reversed(conversion: Any) -> bool:
    try:
        conversion.reverse_transform()
    except NotImplementedError:
        return False
    return True


def leave_memory_alone(base: PreTrainedModel) -> None:
    """Write into the config of a quantised base model which modules are not quantised: those that are not now, and the
    memory. What transformers leaves alone by itself depends on the model, and a recurrent one is another."""
    quantization = copy.deepcopy(getattr(base.config, "quantization_config", None))
    field = _LEFT_ALONE.get(_method(base))
    if field is None or quantization is None:
        return
    names = {name for name, module in base.named_modules() if _is_plain_matrix(module)}
    setattr(quantization, field, sorted({"memory", *names}))
    base.config.quantization_config = quantization


def check_savable(model: PreTrainedModel) -> None:
    """Refuse to save a recurrent model whose quantised weights could not be loaded again."""
    method = _method(model)
    if method and method not in _LEFT_ALONE:
        raise ValueError(
            f"the base model's weights are quantised by {method}, and with recurrence only those by "
            f"{' and '.join(_LEFT_ALONE)} can be loaded again. Save the base model (model.base), and add recurrence to "
            "it after loading."
        )


def _method(model: PreTrainedModel) -> str:
    """The library that has quantised a model's weights; empty if none has."""
    method: Any = getattr(model, "quantization_method", None)
    return "" if method is None else str(getattr(method, "value", method))


def _is_plain_matrix(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 2 and not is_quantized_weight(weight)
