# SPDX-License-Identifier: Apache-2.0
"""FSDP through accelerate: how trainers wrap a model, and how its weights are gathered again."""

import os
from typing import Any

from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env
from torch import Tensor
from transformers import PreTrainedModel


def load_weights_on_every_process() -> None:
    """Load pretrained weights on every process. By default only the first has them until FSDP shards the model, and
    the others cannot check them, or measure position offsets."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


# how `accelerate launch` asks for what is not supported
_UNTESTED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config (tensor, context or sequence parallelism)",
}


def refuse_untested(deepspeed: Any) -> None:
    """Refuse ways to train in several processes that were never tested with recurrent models, before anything starts.

    Args:
        deepspeed: the training argument of this name.
    """
    asked = [name for variable, name in _UNTESTED.items() if parse_flag_from_env(variable)]
    asked += ["DeepSpeed"] if deepspeed else []
    if asked:
        raise ValueError(
            f"{asked[0]} is not supported: recurrent models were never tested with it. Use plain data parallelism, or "
            "FSDP (--use_fsdp --fsdp_version 2)."
        )


def prepare_sharding(accelerator: Accelerator, model: Any, fsdp: Any) -> None:
    """Choose the units that FSDP shards: the transformer layers, and all the rest together.

    Args:
        model: the recurrent model.
        fsdp: the training argument of this name.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        if fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP"):
            raise ValueError(
                "FSDP was asked for, but accelerate shards weights only in several processes with a GPU each. Leave "
                "--use_fsdp out."
            )
        return
    if plugin.fsdp_version == 1:
        raise ValueError("FSDP version 1 cannot validate a recurrent model. Use --fsdp_version 2.")
    if plugin.transformer_cls_names_to_wrap is None:  # accelerate would wrap the memory too, which must stay outside
        layers = model.config.architecture.layer_list(model.backbone)
        plugin.transformer_cls_names_to_wrap = sorted({type(layer).__name__ for layer in layers})


def gathered_weights(trainer: Any, part: PreTrainedModel) -> dict[str, Tensor] | None:
    """All weights of a part of the trained model, on the first process; None if FSDP does not shard them. Every process
    must call it."""
    if not trainer.is_fsdp_enabled:
        return None
    prefix = next(f"{name}." if name else "" for name, module in trainer.model.named_modules() if module is part)
    weights = trainer.accelerator.get_state_dict(trainer.model)
    named = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
    return {name: x for name, x in named.items() if name not in part.all_tied_weights_keys}  # saved once
