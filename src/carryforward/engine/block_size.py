# SPDX-License-Identifier: Apache-2.0
"""How many windows of each row run side by side, as a block.

Without gradients a block has a fixed number of tokens, so that results do not depend on how much memory is free. With
gradients `block_windows` decides. "auto" is resolved once for a model, before its first training step: as many windows
as memory allows, and no more tokens than speed gains from. A trainer stores the number with its checkpoints.
"""

import torch
from torch import Tensor

from ..memories.base import Dependency
from . import activation_budget
from .run_policy import is_sharded
from .window_model import WindowInputs, WindowModel

# Larger blocks are not faster: on a CPU a few thousand tokens use all cores, and more no longer fit its caches.
BLOCK_TOKENS = {"cuda": 1 << 15, "cpu": 1 << 13}
LOGIT_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}  # of a block, in float32, where windows give out logits


class BlockSize:
    """A model's block size.

    Attributes:
        resolved: windows of each row in training, once "auto" is resolved.
    """

    def __init__(self) -> None:
        self.resolved: int | None = None

    def windows(self, model: WindowModel, rows: int, *, use_state: bool, logits: bool) -> int:
        """Windows of each row that run side by side in a call of so many rows; 1: one after the other.

        Args:
            use_state: windows receive a state.
            logits: windows give out logits, which take far more memory than anything else.
        """
        recurrence = model.config.recurrence
        if use_state and recurrence.dependency > Dependency.SAME_LAYER_KV:
            return 1
        if not torch.is_grad_enabled():
            return max(_by_size(model, logits) // max(rows, 1), 1)
        if isinstance(recurrence.block_windows, int):
            return recurrence.block_windows
        windows = self.resolve(model, rows)
        return min(windows, max(_by_size(model, logits) // max(rows, 1), 1)) if logits else windows

    def resolve(self, model: WindowModel, rows: int) -> int:
        """The number of training. If "auto" is not resolved yet, it is now, for batches of so many rows."""
        block = model.config.recurrence.block_windows
        if isinstance(block, int):
            return block
        if self.resolved is None:
            fitting = _by_size(model, logits=False)
            if not is_sharded(model.modules()):  # a forward pass alone would confuse FSDP
                fitting = min(fitting, _by_memory(model))
            self.resolved = max(fitting // max(rows, 1), 1)
        return self.resolved


def _by_size(model: WindowModel, logits: bool) -> int:
    """Windows in a block, from a fixed number of tokens."""
    device, window = model.device.type, model.config.recurrence.window
    tokens = BLOCK_TOKENS.get(device, BLOCK_TOKENS["cpu"])
    if logits:
        tokens = min(tokens, LOGIT_BYTES.get(device, LOGIT_BYTES["cpu"]) // (4 * model.config.vocab_size))
    return tokens // window


def _by_memory(model: WindowModel) -> int:
    """Windows in a block, from the memory that their activations take and that is free."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    usable = activation_budget.usable_memory(parameters, model.device)
    # Half: a captured graph holds its activations while blocks of other shapes run.
    return int(usable / 2 // max(_activation_bytes(model), 1))


def _activation_bytes(model: WindowModel) -> int:
    """Activation memory that one more window of a batch takes. A model on no real device takes none."""
    ids = torch.zeros(2, model.config.recurrence.window, dtype=torch.long, device=model.device)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad():  # dropout must not draw from the run's generator
        one, two = (_saved_bytes(model, ids[:rows]) for rows in (1, 2))
    return two - one


def _saved_bytes(model: WindowModel, ids: Tensor) -> int:
    """Bytes that autograd saves of a training step's forward pass over windows without a state."""
    with activation_budget.saved_sizes(model.parameters()) as sizes:
        results = model.run_window(WindowInputs(ids, **model.probe_outputs(ids)))
    del results
    return sum(sizes.values())
