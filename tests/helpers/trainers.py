# SPDX-License-Identifier: Apache-2.0
"""A small `RecurrentTrainer`, its documents, and what tests compare."""

import numpy as np
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from carryforward.data.documents import Documents
from carryforward.engine import activation_budget, block_size
from carryforward.training.trainer import RecurrentTrainer, RecurrentTrainingArguments

from . import tiny

RNG = np.random.default_rng(0)
LENGTHS = (5, 1, 40, 77, 100, 12, 63, 2)
TRAIN = Documents.of([RNG.integers(5, 30, size=n) for n in LENGTHS], words=[3] * len(LENGTHS))
HELD_OUT = Documents.of([RNG.integers(5, 30, size=n) for n in (30, 50, 1)], words=[20, 30, 1], bytes=[90, 150, 2])
NO_DROPOUT, DROPOUT = (dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), p) for p in (0.0, 0.1))
# Adam makes a step of full size out of a gradient that is rounding error, as a key's bias has it
SGD = {"optim": "sgd", "learning_rate": 0.1, "recurrence_learning_rate": 0.1}
TARGETS = sum(n - 1 for n in LENGTHS)


def trainer(out, *, callbacks=(), held_out=HELD_OUT, settings=None, fields=None, **arguments):
    torch.manual_seed(0)
    model = tiny.recurrent("gpt2", settings=settings or NO_DROPOUT, **(fields or {}))
    defaults = {
        "windows_per_sample": 3, "eval_tokens": 150, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
        "warmup_steps": 2, "logging_steps": 1, "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    args = RecurrentTrainingArguments(str(out), **{**defaults, **arguments})
    return RecurrentTrainer(model, args, TRAIN, held_out, callbacks=list(callbacks))


def train_with_hugging_face(model, folder):
    """A few steps of transformers' own trainer. Returns the loss before and after them."""
    rows = [{"input_ids": row, "labels": row} for row in tiny.documents(8, 30)]
    arguments = TrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    job = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    before = job.evaluate()["eval_loss"]
    job.train()
    return before, job.evaluate()["eval_loss"]


def leave_free(job, fitting):
    """Leave as much memory free as blocks with so many windows of each row take."""
    rows, share = job.args.per_device_train_batch_size, activation_budget.MEMORY_SHARE["cpu"]
    weights = activation_budget.RESERVED_BYTES * job.inner.num_parameters(only_trainable=True)
    free = weights + 2 * (fitting + 0.5) * rows * block_size._activation_bytes(job.inner.train()) / share
    activation_budget.available_memory = lambda device: free


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_identical(first, second):
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different


class Watch(TrainerCallback):
    """Calls a function at the end of every step."""

    def __init__(self, function):
        self.function = function

    def on_step_end(self, args, state, control, **kwargs):
        self.function(state, control)
