# SPDX-License-Identifier: Apache-2.0
"""Adapters of the library peft: unwrapping models that have them, and refusing uses that would lose them."""

from typing import Any

from torch import nn

_DEFAULT = ["default"]  # the name that peft gives to an adapter by default


def get_recurrent_model(model: Any) -> Any:
    """Return the recurrent model inside a `PeftModel`, with its adapters in place; other models are returned as is."""
    if type(model).__name__ == "PeftMixedModel":
        raise ValueError("PeftMixedModel (adapters of several types at once) is not supported: use one type.")
    if not _is_peft_model(model):
        return model
    if model.active_peft_config.is_prompt_learning:
        raise ValueError("peft's prompt learning reaches only the first window of a document. Use LoRA.")
    return model.get_base_model()


def check_no_adapters(model: Any) -> None:
    """Refuse to add recurrence to a model with adapters: its weights are saved under the base model's names."""
    has_layers = isinstance(model, nn.Module) and any(hasattr(part, "base_layer") for part in model.modules())
    if _is_peft_model(model) or has_own_adapters(model) or has_layers:
        raise ValueError(
            f"{type(model).__name__} has adapters, which could not be loaded again once recurrence is added. Merge "
            "them first (peft's merge_and_unload), or add recurrence first and adapters to the recurrent model."
        )


def check_memory_saved(model: Any) -> None:
    """Refuse to save a model whose trained memory would be lost: after `add_adapter`, only adapters are saved."""
    trained = any(parameter.requires_grad for parameter in model.memory.parameters())
    if has_own_adapters(model) and trained and not hasattr(model.memory, "modules_to_save"):
        raise ValueError(
            'the trained memory would not be saved with the adapters: set modules_to_save=["memory"] in their config.'
        )


def check_trainable_adapters(model: Any) -> None:
    """Refuse adapters that `Trainer` saves but cannot load again, so that the best checkpoint would be lost."""
    if has_own_adapters(model):
        raise ValueError("to train adapters, use peft's get_peft_model(model, ...) instead of model.add_adapter(...).")
    if _is_peft_model(model) and (model.active_adapters != _DEFAULT or [*model.peft_config] != _DEFAULT):
        raise ValueError(
            f"adapters {', '.join(model.peft_config)}: `Trainer` loads the best checkpoint only of a single adapter "
            "with the default name. Leave adapter_name out, and train one at a time."
        )


def is_frozen_by_peft(model: Any, part: nn.Module) -> bool:
    """Whether peft has frozen a part of a model, which it then does not save either."""
    parameters = [*part.parameters()]
    return _is_peft_model(model) and bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def _is_peft_model(model: Any) -> bool:
    return hasattr(model, "get_base_model")


def has_own_adapters(model: Any) -> bool:
    """Whether adapters were added with transformers' `add_adapter`."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))
