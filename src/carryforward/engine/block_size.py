# SPDX-License-Identifier: Apache-2.0
"""How many windows of each row run side by side, as a block.

Without gradients a block has a fixed number of tokens, so that results do not depend on how much memory is free. With
gradients `block_windows` decides. "auto" is resolved once for a model, before its first training step: as many windows
as memory allows, and no more tokens than speed gains from. A trainer stores the number with its checkpoints.
"""

import torch
from torch import Tensor

from ..config import RecurrenceConfig
from ..memories.base import Dependency
from . import activation_budget
from .run_policy import is_sharded
from .window_model import WindowInputs, WindowModel

# Larger blocks are not faster: on a CPU a few thousand tokens use all cores, and more no longer fit its caches.
BLOCK_TOKENS = {"cuda": 1 << 15, "cpu": 1 << 13}
WIDTH = 768  # of wider models blocks are shorter, since their activations take more memory
LOGIT_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}  # of a block, in float32, where windows give out logits


class BlockSize:
    """A model's block size.

    Attributes:
        resolved: what "auto" stands for in training: windows of each row. None until it is known.
        rows: the rows of the batches that `resolved` was chosen for. Larger batches get fewer windows of each row, so
            that no block is larger than theirs.
    """

    def __init__(self) -> None:
        self.resolved: int | None = None
        self.rows = 1

    def windows(self, model: WindowModel, rows: int, *, use_state: bool, logits: bool) -> int:
        """Windows of each row that run side by side in a call of so many rows; 1: one after the other.

        Args:
            use_state: windows receive a state.
            logits: windows give out logits, which take far more memory than anything else.
        """
        recurrence = model.config.recurrence
        if use_state and _must_wait(recurrence):
            return 1
        if not torch.is_grad_enabled():
            return _of_each_row(_by_size(model, logits), rows)
        if recurrence.block_windows != "auto":
            return recurrence.block_windows
        if self.resolved is None:
            self.resolve(measure_block_windows(model, rows), rows)
        windows = self._for(rows)
        return min(windows, _of_each_row(_by_size(model, logits), rows)) if logits else windows

    def resolve(self, windows: int, rows: int) -> None:
        """Set what "auto" stands for: so many windows of each row, in batches of up to so many rows."""
        self.resolved, self.rows = windows, max(rows, 1)

    def _for(self, rows: int) -> int:
        assert self.resolved is not None
        return self.resolved if rows <= self.rows else _of_each_row(self.resolved * self.rows, rows)


def given_block_windows(recurrence: RecurrenceConfig, *, use_state: bool) -> int | None:
    """Windows of each row that run side by side in training, where the settings say it; None for "auto"."""
    if use_state and _must_wait(recurrence):
        return 1
    return None if recurrence.block_windows == "auto" else recurrence.block_windows


def measure_block_windows(model: WindowModel, rows: int) -> int:
    """What "auto" is best resolved to now, for training with batches of so many rows."""
    windows = _by_size(model, logits=False)
    if not is_sharded(model.modules()):  # a forward pass alone would confuse FSDP
        windows = min(windows, _by_memory(model))
    return _of_each_row(windows, rows)


def block_tokens(model: WindowModel, *, logits: bool = False) -> int:
    """Tokens in a block without gradients, where windows need not wait for each other."""
    device = model.device.type
    tokens = BLOCK_TOKENS.get(device, BLOCK_TOKENS["cpu"]) * WIDTH // max(model.config.base_config.hidden_size, WIDTH)
    if logits:
        tokens = min(tokens, LOGIT_BYTES.get(device, LOGIT_BYTES["cpu"]) // (4 * model.config.vocab_size))
    return tokens


def _must_wait(recurrence: RecurrenceConfig) -> bool:
    """Whether a window with a state can only run after the one before it."""
    return recurrence.dependency > Dependency.SAME_LAYER_KV


def _of_each_row(windows: int, rows: int) -> int:
    return max(windows // max(rows, 1), 1)


def _by_size(model: WindowModel, logits: bool) -> int:
    """Windows in a block, from a fixed number of tokens. What windows see counts as well: fully on a CPU, whose caches
    must hold it, and half on a GPU, where layers take as much memory again for a window's own tokens alone."""
    share = max(_seen_share(model) / (1 if model.device.type == "cpu" else 2), 1.0)
    return int(block_tokens(model, logits=logits) / (model.config.recurrence.window * share))


def _seen_share(model: WindowModel) -> float:
    """How much more a window sees than itself, if a memory reaches further than one window: its keys and values are
    gathered for each window, and training keeps them as it keeps the window's own."""
    recurrence = model.config.recurrence
    return 1 + recurrence.extra_positions / recurrence.window if recurrence.needs_history else 1.0


def _by_memory(model: WindowModel) -> int:
    """Windows in a block, from the memory that their activations take and that is free; 0 where that is unknown."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    usable = activation_budget.usable_memory(parameters, model.device)
    if usable <= 0:  # on the meta device, too: weights that are offloaded are not there to run a window
        return 0
    # Half: a captured graph holds its activations while blocks of other shapes run.
    return int(usable / 2 // max(_activation_bytes(model), 1))


def _activation_bytes(model: WindowModel) -> int:
    """Activation memory that one more window of a batch takes."""
    ids = torch.zeros(2, model.config.recurrence.window, dtype=torch.long, device=model.device)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad():  # dropout must not draw from the run's generator
        one, two = (_saved_bytes(model, ids[:rows]) for rows in (1, 2))
    return int((two - one) * _seen_share(model))


def _saved_bytes(model: WindowModel, ids: Tensor) -> int:
    """Bytes that autograd saves of a training step's forward pass over windows without a state."""
    with activation_budget.saved_sizes(model.parameters()) as sizes:
        results = model.run_window(WindowInputs(ids, **model.probe_outputs(ids)))
    del results
    return sum(sizes.values())
