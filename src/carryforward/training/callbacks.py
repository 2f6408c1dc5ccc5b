# SPDX-License-Identifier: Apache-2.0
"""What a training run in a terminal needs: a progress bar, and an end on request that loses nothing."""

import math
from functools import partial
from typing import Any

import torch
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from ..utils import console
from ..utils.signals import Interruptible
from .base_trainer import BaseTrainer, unseen


class GracefulStopCallback(Interruptible, TrainerCallback):
    """A first Ctrl-C ends the step and saves; a second one ends at once."""

    def __init__(self) -> None:
        super().__init__("finishing this step, then saving; once more to stop at once")
        self.stopped = False  # `requested` is for this process, this for all

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._anyone(args):
            control.should_save = control.should_training_stop = True
            self.stopped = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """`Trainer` takes a stop for an epoch's end; validated now, the run would not be one that never stopped."""
        if self.stopped and state.epoch % 1:
            control.should_evaluate = control.should_save = False  # it was saved after the step

    def _anyone(self, args: Any) -> bool:
        """All processes stop together, whichever heard the signal."""
        if args.world_size == 1:
            return self.requested
        heard = torch.tensor(float(self.requested), device=args.device)
        torch.distributed.all_reduce(heard)
        return bool(heard > 0)


class Patience(EarlyStoppingCallback):
    """Early stopping that counts on where a stopped run was: by what it has logged."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        name = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
        best, sign = -math.inf, 1 if args.greater_is_better else -1
        for value in (sign * entry[name] for entry in state.log_history if name in entry):
            self.early_stopping_patience_counter = 0 if value > best else self.early_stopping_patience_counter + 1
            best = max(best, value)


class Show(TrainerCallback):
    """The progress bar: tokens or questions, rate, loss, validation, time left."""

    def __init__(self, trainer: BaseTrainer):
        self.trainer = trainer
        self.bar: console.Bar | None = None
        self.loss = self.validation = ""  # what the remark says

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            warmup = args.get_warmup_steps(state.max_steps)
            if warmup >= state.max_steps > 0:
                told = f"{state.max_steps:,} steps in all, and {warmup:,} of warm-up"
                console.note(f"{told}: the learning rate stays small. Warm up for less, or train longer.")
            total, done = (self.trainer.done_after(step) for step in (state.max_steps, state.global_step))
            self.bar = console.Bar("training", total, self.trainer.unit, done=done)
            self.bar.__enter__()
            self.trainer.validating = partial(self.bar.aside, "validating")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.set(self.trainer.done_after(state.global_step), self._remark())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.loss = f"loss {logs['loss']:.3f}"

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.validation = self.trainer.told(metrics)
        if self.bar is not None:
            done = self.trainer.done_after(state.global_step)
            self.bar.set(done, self._remark())
            console.note(f"step {state.global_step:,}, {done:,} {self.trainer.unit}: {self._remark()}")

    def _remark(self) -> str:
        return ", ".join(filter(None, (self.loss, self.validation)))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.__exit__()
            self.bar = None
            self.trainer.validating = unseen


def show(trainer: BaseTrainer) -> None:
    """Our progress bar in place of Hugging Face's."""
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Show(trainer))
