# SPDX-License-Identifier: Apache-2.0
"""Callbacks of a training run: progress bar, early stopping that survives a restart, and a stop that loses nothing."""

import math
from functools import partial
from typing import Any

import torch
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from ..utils import console
from ..utils.progress import ProgressBar
from ..utils.signals import Interruptible
from .base_trainer import BaseTrainer, no_progress


class GracefulStopCallback(Interruptible, TrainerCallback):
    """Finishes the step and saves at the first Ctrl-C; a second one stops at once."""

    def __init__(self) -> None:
        super().__init__("finishing this step, then saving; press again to stop at once")
        self.stopped = False  # in any process; `requested` is of this process

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._any_process_requested(args):
            control.should_save = control.should_training_stop = True
            self.stopped = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Undo the validation that `Trainer` requests when it stops: a run that never stopped has none at this step."""
        if self.stopped and state.epoch % 1:
            control.should_evaluate = control.should_save = False  # it was saved after the step

    def _any_process_requested(self, args: Any) -> bool:
        """All processes stop together, whichever received the signal."""
        if args.world_size == 1:
            return self.requested
        requests = torch.tensor(float(self.requested), device=args.device)
        torch.distributed.all_reduce(requests)
        return bool(requests > 0)


class ResumableEarlyStoppingCallback(EarlyStoppingCallback):
    """Early stopping whose count a resumed run restores from its log."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        name = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
        best, sign = -math.inf, 1 if args.greater_is_better else -1
        for value in (sign * entry[name] for entry in state.log_history if name in entry):
            self.early_stopping_patience_counter = 0 if value > best else self.early_stopping_patience_counter + 1
            best = max(best, value)


class ProgressBarCallback(TrainerCallback):
    """Shows tokens or questions, rate, loss, validation results and time left."""

    def __init__(self, trainer: BaseTrainer):
        self.trainer = trainer
        self.bar: ProgressBar | None = None
        self.loss = self.validation = ""  # shown beside the bar

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            warmup = args.get_warmup_steps(state.max_steps)
            if warmup >= state.max_steps > 0:
                console.note(
                    f"{state.max_steps:,} steps in all, and {warmup:,} of warm-up: the learning rate stays small. Use "
                    "fewer warm-up steps, or train longer."
                )
            if state.global_step:
                console.note(f"resuming from step {state.global_step:,}")
            total, done = (self.trainer.units_after(step) for step in (state.max_steps, state.global_step))
            self.bar = ProgressBar("training", total, self.trainer.unit, done=done)
            self.bar.__enter__()
            self.trainer.validation_progress = partial(self.bar.subtask, "validating")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update(self.trainer.units_after(state.global_step), remark=self._remark())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.loss = f"loss {logs['loss']:.3f}"

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.validation = self.trainer.describe_metrics(metrics)
        if self.bar is not None:
            done = self.trainer.units_after(state.global_step)
            self.bar.update(done, remark=self._remark())
            console.note(f"step {state.global_step:,}, {done:,} {self.trainer.unit}: {self._remark()}")

    def _remark(self) -> str:
        return ", ".join(filter(None, (self.loss, self.validation)))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.__exit__()
            self.bar = None
            self.trainer.validation_progress = no_progress


def use_progress_bar(trainer: BaseTrainer) -> None:
    """Replace Hugging Face's progress bar by `ProgressBarCallback`."""
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(ProgressBarCallback(trainer))
