# SPDX-License-Identifier: Apache-2.0
"""What every training here has in common: Hugging Face's `Trainer`, whose checkpoints are whole or not there, which
stops before a loss that is not a number spoils the weights, and which has a learning rate for what is new."""

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from ..utils import checkpoints
from ..utils.peft import frozen_by_peft, refuse_to_train, unwrapped

logger = logging.get_logger(__name__)


def unseen(total: int) -> contextlib.AbstractContextManager[Callable[[int], object]]:
    """Validation that shows nothing."""
    return contextlib.nullcontext(lambda count: None)


class NonFiniteLoss(ArithmeticError):
    """The loss is not a number. Raised before the weights are touched."""


@dataclass
class WholeTrainingArguments(TrainingArguments):
    """What every training here can be told beside `TrainingArguments`, and the defaults that all have."""

    recurrence_learning_rate: float | None = field(
        default=None, metadata={"help": "of the recurrence module; None is the learning rate of the base model"}
    )
    use_state: bool = field(default=True, metadata={"help": "False trains the plain model: every window stands alone"})

    logging_steps: float = 10
    save_total_limit: int | None = 2
    load_best_model_at_end: bool = True
    remove_unused_columns: bool = False
    ddp_find_unused_parameters: bool | None = False  # every trained parameter has a gradient in every step

    def __post_init__(self) -> None:
        if self.label_smoothing_factor:
            raise ValueError("label_smoothing_factor is not for recurrent models, which compute their own loss: use 0.")
        super().__post_init__()


class BaseTrainer(Trainer):
    """A `Trainer` of recurrent models. Without `eval_dataset` nothing is validated.

    Attributes:
        unit: what it counts: tokens, questions.
        validating: shows how far validation is: from all that is to be read to what is told of every part.
    """

    args: Any  # WholeTrainingArguments, which `Trainer` does not know
    unit: str
    validating: Callable[[int], contextlib.AbstractContextManager[Callable[[int], object]]]

    def __init__(self, model: Any, args: WholeTrainingArguments, *, eval_dataset: Any = None, **kwargs: Any):
        self._staging: Path | None = None
        self.validating = unseen
        if eval_dataset is None:
            args.eval_strategy, args.load_best_model_at_end = "no", False  # type: ignore[assignment]
        if kwargs.get("compute_loss_func") is not None:
            raise ValueError("compute_loss_func would be given no logits: recurrent models compute their own loss.")
        refuse_to_train(model)
        if args.use_state and frozen_by_peft(model, model.recurrence):
            logger.warning(
                "peft has frozen the recurrence, and saves nothing of it. To train it, give the adapters' config "
                'modules_to_save=["recurrence"].'
            )
        if not args.use_state:
            model.recurrence.requires_grad_(False)
        super().__init__(model, args, eval_dataset=eval_dataset, **kwargs)

    @property
    def inner(self) -> Any:
        """The recurrent model itself, out of what accelerate and peft have put around it."""
        return unwrapped(self.accelerator.unwrap_model(self.model))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is not None:
            return self.optimizer
        optimizer = super().create_optimizer(model)
        rate = self.args.recurrence_learning_rate
        new = set(self.accelerator.unwrap_model(self.model if model is None else model).recurrence.parameters())
        if rate is not None:
            for group in list(optimizer.param_groups):
                mine = [parameter for parameter in group["params"] if parameter in new]
                if mine:
                    group["params"] = [parameter for parameter in group["params"] if parameter not in new]
                    optimizer.add_param_group({**group, "params": mine, "lr": rate})
        return optimizer

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """`Trainer` asks for the norm before it touches the weights, once a step, the same on all processes."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if not math.isfinite(norm) and not self.args.fp16:  # there, loss scaling passes over such steps
            raise self._not_finite(f"The gradient's norm became {float(norm)}", self.state.global_step + 1)
        return norm

    def _not_finite(self, what: str, step: int) -> NonFiniteLoss:
        return NonFiniteLoss(
            f"{what} at step {step} ({self.done_after(self.state.global_step):,} {self.unit}). Use a smaller learning "
            "rate, in another output folder."
        )

    def done_after(self, step: int) -> int:
        """How much was trained on after so many steps."""
        raise NotImplementedError

    def told(self, metrics: dict[str, float]) -> str:
        """What validation found, in words."""
        raise NotImplementedError

    def _tell(self, metrics: dict[str, float]) -> dict[str, float]:
        """The end of `evaluate`: what it found goes to the log and the callbacks."""
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Resumed from its last checkpoint, a run is at its end: `Trainer` would train one step more."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)

    # --- checkpoints that are whole or not there -------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """As `Trainer.train`; `resume_from_checkpoint=True` goes on from the newest complete checkpoint, if any."""
        if resume_from_checkpoint is True:
            found = checkpoints.latest(Path(self._get_output_dir(None)))
            resume_from_checkpoint = None if found is None else str(found)
        elif isinstance(resume_from_checkpoint, str) and not checkpoints.is_complete(Path(resume_from_checkpoint)):
            raise ValueError(f"resume_from_checkpoint={resume_from_checkpoint!r} is not there or was cut short.")
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        start = super()._init_training_state(*args, **kwargs)
        self._forget_lost_best()
        return start

    def _load_best_model(self) -> None:
        self._forget_lost_best()
        if self.state.best_model_checkpoint is not None:
            super()._load_best_model()

    def _forget_lost_best(self) -> None:
        """The best checkpoint may have been deleted or damaged since; then the search for the best begins anew."""
        best = self.state.best_model_checkpoint
        if best is not None and not checkpoints.is_complete(Path(best)):
            logger.warning("The best checkpoint, %s, is lost or incomplete: what follows is compared anew.", best)
            self.state.best_model_checkpoint = self.state.best_metric = self.state.best_global_step = None

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Weights tied to others are saved once; anything else that is missing is an error, not a warning."""
        tied = set(self.inner.all_tied_weights_keys)
        wrong = sorted(set(load_result.missing_keys) - tied) + sorted(load_result.unexpected_keys)
        if wrong:
            raise ValueError(f"the checkpoint does not fit the model: {', '.join(wrong[:3])}. Use another output_dir.")

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging or super()._get_output_dir(trial))

    @contextlib.contextmanager
    def _staged(self, run: Path) -> Iterator[Path]:
        """A hidden folder in which `Trainer` writes what it believes to be the run."""
        self._staging = run / ".saving"
        try:
            yield self._staging
        finally:
            if self.args.should_save:
                shutil.rmtree(self._staging, ignore_errors=True)
            self._staging = None

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run = Path(super()._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(run / ".saving", ignore_errors=True)
        self.accelerator.wait_for_everyone()
        best = run / f"checkpoint-{self.state.best_global_step}" if self.state.best_global_step else None
        if best is not None and best.name != name and not checkpoints.is_complete(best):
            best = None
        with self._staged(run) as staging:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()  # every process has written its part
            self.state.best_model_checkpoint = None if best is None else str(best)
            if self.args.should_save:
                self.state.save_to_json(str(staging / name / "trainer_state.json"))
                checkpoints.seal(staging / name)
                if (run / name).exists():
                    checkpoints.discard(run / name)
                (staging / name).rename(run / name)
                self._rotate(run, best)
        self.accelerator.wait_for_everyone()

    def _rotate(self, run: Path, best: Path | None) -> None:
        """Keep the best checkpoint and the newest ones."""
        if self.args.save_total_limit:
            others = [path for path in checkpoints.of_run(run) if path != best]
            whole = [path for path in others if checkpoints.is_complete(path)]
            keep = max(self.args.save_total_limit - (best is not None), 1)
            for path in others:
                if path not in whole[-keep:]:
                    checkpoints.discard(path)
