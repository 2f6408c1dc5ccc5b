# SPDX-License-Identifier: Apache-2.0
"""Adapters of peft's: they are put into a recurrent model, and what would lose them is refused."""

from typing import Any

from torch import nn

_DEFAULT = ["default"]  # what peft calls an adapter that was given no name


def unwrapped(model: Any) -> Any:
    """The recurrent model inside one that peft has wrapped, its adapters in place; any other as it is."""
    if type(model).__name__ == "PeftMixedModel":
        raise ValueError("adapters of several kinds at once (PeftMixedModel) cannot be used: use one kind.")
    if not _wrapped(model):
        return model
    if model.active_peft_config.is_prompt_learning:
        raise ValueError("prompts that peft learns stand before a model's first window only. Use LoRA.")
    return model.get_base_model()


def refuse_adapters(model: Any) -> None:
    """Recurrence goes in first: what is saved of a recurrent model is its weights under the base model's names."""
    inside = isinstance(model, nn.Module) and any(hasattr(part, "base_layer") for part in model.modules())
    if _wrapped(model) or _loaded(model) or inside:
        raise ValueError(
            f"{type(model).__name__} has adapters, which could not be loaded again with recurrence around them. Merge "
            "them into it (peft's merge_and_unload), or add recurrence first and adapters to what that gives."
        )


def refuse_to_lose(model: Any) -> None:
    """Of a model with adapters of its own (`add_adapter`) transformers saves only these."""
    trained = any(parameter.requires_grad for parameter in model.recurrence.parameters())
    if _loaded(model) and trained and not hasattr(model.recurrence, "modules_to_save"):
        raise ValueError(
            "beside adapters the trained recurrence would not be saved: give their config "
            'modules_to_save=["recurrence"].'
        )


def refuse_to_train(model: Any) -> None:
    """Adapters that `Trainer` saves and does not find again: it would end with others than the best."""
    if _loaded(model):
        raise ValueError("to train adapters, give peft's get_peft_model(model, ...) instead of model.add_adapter(...).")
    if _wrapped(model) and (model.active_adapters != _DEFAULT or [*model.peft_config] != _DEFAULT):
        raise ValueError(
            f"adapters {', '.join(model.peft_config)}: `Trainer` finds the best again of a single one that has no name "
            "of its own. Leave adapter_name out, and train one at a time."
        )


def frozen_by_peft(model: Any, part: nn.Module) -> bool:
    """Whether peft has frozen a part of a model that it was not told of: it would not be saved either."""
    parameters = [*part.parameters()]
    return _wrapped(model) and bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def _wrapped(model: Any) -> bool:
    return hasattr(model, "get_base_model")


def _loaded(model: Any) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False))
