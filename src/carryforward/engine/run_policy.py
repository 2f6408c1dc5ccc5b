# SPDX-License-Identifier: Apache-2.0
"""How the windows of one call run: decided once, before the first window."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers.utils import logging

from . import bptt
from .window_model import WindowModel

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class RunPolicy:
    """How the windows of one call run.

    Attributes:
        modules, weights: all of the model's.
        sharded: FSDP gathers weights window by window. Gradients must then reach it through the plain graph, and all
            ranks must run as many windows.
        keep_graph: autograd keeps the graph of all windows; nothing is recomputed.
        capture: windows may run as captured CUDA graphs.
        training: a module is in training mode: windows may draw random numbers.
    """

    modules: list[nn.Module]
    weights: list[nn.Parameter]
    sharded: bool
    keep_graph: bool
    capture: bool
    training: bool

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [weight for weight in self.weights if weight.requires_grad]


def decide(model: WindowModel, *, capturable: bool) -> RunPolicy:
    """The policy of a call.

    Args:
        capturable: what windows give out can be captured: a loss, or outputs of a fixed shape.
    """
    modules = list(model.modules())
    weights = _unique_weights(modules)
    recurrence = model.config.recurrence
    selects = any(memory.selects for memory in recurrence.memories)
    grad, keep_graph = torch.is_grad_enabled(), recurrence.keep_graph
    sharded = is_sharded(modules)
    _check_placement(weights, sharded)
    if sharded and grad and not keep_graph:
        logger.warning_once(
            "The weights are sharded (FSDP): the graph of all windows is kept instead of recomputing them, and memory "
            "grows with their number. carryforward.sharded_backward(module, input_ids, labels=...) does not need that."
        )
    trainable = [weight for weight in weights if weight.requires_grad]
    keep_graph = grad and (keep_graph or sharded or bptt.has_gradient_hooks(trainable))
    # saved_tensors_hooks cannot see inside a CUDA graph: do not capture while one is active.
    hooked = grad and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return RunPolicy(
        modules=modules,
        weights=weights,
        sharded=sharded,
        keep_graph=keep_graph,
        capture=capturable and not sharded and not keep_graph and not hooked and not selects,
        training=any(module.training for module in modules),
    )


def _unique_weights(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    weights = {weight: None for module in modules for weight in module._parameters.values() if weight is not None}
    return list(weights)


def _check_placement(weights: Iterable[nn.Parameter], sharded: bool) -> None:
    """Refuse weights that stand on several devices, or that tensor parallelism has split."""
    devices = sorted({str(weight.device) for weight in weights if weight.device.type != "meta"})  # meta: offloaded
    if len(devices) > 1:
        raise ValueError(
            f"the model's layers are on {' and '.join(devices)}: pipelines over several devices are not supported. "
            "Load the model on one device, or shard it with FSDP."
        )
    if not sharded and is_split(weights):
        raise ValueError(f"the weights are split among processes: {NO_MODEL_PARALLEL}")


NO_MODEL_PARALLEL = (
    "tensor, pipeline and expert parallelism (tp_plan, distributed_config) are not supported. Load the model without "
    "them, and shard it with FSDP."
)


def is_split(weights: Iterable[nn.Parameter]) -> bool:
    """Whether weights are distributed tensors: parts of them are in other processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(weight, DTensor) for weight in weights)


def is_sharded(modules: Iterable[nn.Module]) -> bool:
    """Whether FSDP shards the weights of some of these modules."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in modules)
