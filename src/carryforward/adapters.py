# SPDX-License-Identifier: Apache-2.0
"""Adapters of peft's: they are put into a recurrent model, and what would lose them is refused."""

from typing import Any

from torch import nn


def unwrapped(model: Any) -> Any:
    """The recurrent model inside one that peft has wrapped, its adapters in place; any other as it is."""
    if not hasattr(model, "get_base_model"):
        return model
    if model.active_peft_config.is_prompt_learning:
        raise ValueError("prompts that peft learns stand before a model's first window only. Use LoRA, or the like.")
    return model.get_base_model()


def refuse_adapters(model: Any) -> None:
    """Recurrence goes in first: what is saved of a recurrent model is its weights under the base model's names."""
    if hasattr(model, "get_base_model") or _loaded(model) or any(hasattr(part, "base_layer") for part in _parts(model)):
        raise ValueError(
            f"{type(model).__name__} has adapters, which could not be loaded again with recurrence around them. Merge "
            "them into it (peft's merge_and_unload), or add recurrence first and adapters to what that gives."
        )


def refuse_to_lose(model: Any) -> None:
    """Of a model with adapters of its own (`add_adapter`) transformers saves only these."""
    own = [*model.recurrence.parameters()]
    wrapped = hasattr(model.recurrence, "modules_to_save")
    if _loaded(model) and not wrapped and any(parameter.requires_grad for parameter in own):
        raise ValueError(
            "beside adapters the trained recurrence would not be saved. Give their config "
            'modules_to_save=["recurrence"].'
        )


def refuse_own(model: Any) -> None:
    """Of a model with adapters of its own `Trainer` cannot load checkpoints again."""
    if _loaded(model):
        raise ValueError("to train adapters, give peft's get_peft_model(model, ...) instead of model.add_adapter(...).")


def frozen_by_peft(model: Any) -> bool:
    """Whether peft has frozen the recurrence, as it does unless told."""
    trained = any(parameter.requires_grad for parameter in model.recurrence.parameters())
    return hasattr(model, "get_base_model") and not trained and any(True for _ in model.recurrence.parameters())


def _loaded(model: Any) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def _parts(model: Any) -> list[nn.Module]:
    return list(model.modules()) if isinstance(model, nn.Module) else []
