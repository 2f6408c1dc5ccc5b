# SPDX-License-Identifier: Apache-2.0
"""The package recurrent-memory-transformer-pytorch (Phil Wang, MIT), trained and scored like our models.

    pip install --no-deps --target FOLDER recurrent-memory-transformer-pytorch==0.7.0 hyper-connections einops
    PYTHONPATH=FOLDER:... python run.py peer

It is used as it comes, with rotary positions in place of a table of them, and without the keys and values of
Transformer-XL (`use_xl_memories`), which its wrapper does not hand on either.
"""

from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch
from arms import Arm
from torch import Tensor, nn
from torch.nn import functional

from carryforward.models.causal_lm import RecurrentForCausalLM
from carryforward.tasks.base import Task
from carryforward.windows import IGNORE

PACKAGE = "recurrent-memory-transformer-pytorch"


class Peer(nn.Module):
    """Its model with what training and scoring ask of ours. A state holds the tokens so far, which are read again."""

    def __init__(self, model: nn.Module, window: int, memory_tokens: int, width: int):
        super().__init__()
        self.model = model
        self.memory = nn.ParameterList([model.transformer.read_memory_emb, model.transformer.memory_tokens])
        recurrence = SimpleNamespace(
            window=window, overlap=0, state_numbers=memory_tokens * width,
            describe=f"{memory_tokens} memory tokens, {PACKAGE} {metadata.version(PACKAGE)}",
        )  # fmt: skip
        self.config = SimpleNamespace(recurrence=recurrence)

    @property
    def device(self) -> torch.device:
        return self.memory[0].device

    def advance_state(self, input_ids: Tensor, state: Tensor | None = None, use_state: bool = True) -> Tensor:
        return input_ids if state is None else torch.cat([state, input_ids], dim=1)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, *, state: Tensor | None = None, use_state: bool = True,
        logits_to_keep: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Without its state, the model starts anew at every window: it cannot do without memory tokens."""
        input_ids = input_ids.to(self.device)
        text = self.advance_state(input_ids, state)
        logits, _ = self.model(text)
        logits = logits[:, text.shape[1] - input_ids.shape[1] :]
        if labels is not None:
            targets = labels.to(self.device)[:, 1:]
            loss = functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE
            )
            return SimpleNamespace(loss=loss, logits=logits)
        return SimpleNamespace(logits=logits if logits_to_keep is None else logits[:, logits_to_keep])


def make_peer(arm: Arm, task: Task, device: str) -> tuple[Peer, Task]:
    """The package's model with the sizes of an arm, and its task."""
    from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer, RecurrentMemoryTransformerWrapper

    torch.manual_seed(arm.seed)
    sizes, count = arm.model, arm.recurrence["memory"]["memory_tokens"]
    assert task.vocabulary is not None
    assert task.window is not None
    transformer = RecurrentMemoryTransformer(
        sizes["width"], num_tokens=len(task.vocabulary), depth=sizes["layers"], num_memory_tokens=count,
        seq_len=task.window, dim_head=sizes["width"] // sizes["heads"], heads=sizes["heads"], abs_pos_emb=False,
        rotary_pos_emb=True, use_xl_memories=False,
    )  # fmt: skip
    model = Peer(RecurrentMemoryTransformerWrapper(transformer), task.window, count, sizes["width"])
    task.check_model = _accept  # type: ignore[method-assign]  # it asks for a model of ours
    return model.to(device), task


def _accept(model: RecurrentForCausalLM) -> None:
    """Training and scoring use of a model only what `Peer` has."""
