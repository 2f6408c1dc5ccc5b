# SPDX-License-Identifier: Apache-2.0
"""The base of both trainers: Hugging Face's `Trainer` with atomic checkpoints, a stop before a non-finite loss reaches
the weights, and a separate learning rate for the recurrence."""

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
from ..utils.files import delete_folder, replace_folder
from ..utils.peft import check_trainable_adapters, get_recurrent_model, is_frozen_by_peft

logger = logging.get_logger(__name__)


def no_progress(total: int) -> contextlib.AbstractContextManager[Callable[[int], object]]:
    """Show no progress."""
    return contextlib.nullcontext(lambda count: None)


class NonFiniteLoss(ArithmeticError):
    """The loss or its gradient is NaN or infinite. Raised before the weights are updated."""


@dataclass
class BaseTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the fields and defaults that both trainers share."""

    recurrence_learning_rate: float | None = field(
        default=None, metadata={"help": "learning rate of the recurrence; None uses that of the base model"}
    )
    use_state: bool = field(
        default=True, metadata={"help": "False trains the base model alone, on independent windows"}
    )

    logging_steps: float = 10
    save_total_limit: int | None = 2
    load_best_model_at_end: bool = True
    remove_unused_columns: bool = False
    ddp_find_unused_parameters: bool | None = False  # every trained parameter gets a gradient in every step

    def __post_init__(self) -> None:
        if self.label_smoothing_factor:
            raise ValueError("label_smoothing_factor is not for recurrent models, which compute their own loss. Use 0.")
        rate = self.recurrence_learning_rate
        if rate is not None and (
            isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < math.inf
        ):
            raise ValueError(f"recurrence_learning_rate={rate!r} must be a number of at least 0, or None.")
        super().__post_init__()


class BaseTrainer(Trainer):
    """A `Trainer` for recurrent models. Without `eval_dataset` there is no validation.

    Attributes:
        unit: what progress is counted in: tokens, questions.
        validation_progress: called with the size of a validation; gives a context whose function takes each advance.
    """

    args: Any  # BaseTrainingArguments; `Trainer` declares TrainingArguments
    unit: str
    validation_progress: Callable[[int], contextlib.AbstractContextManager[Callable[[int], object]]]

    def __init__(self, model: Any, args: BaseTrainingArguments, *, eval_dataset: Any = None, **kwargs: Any):
        self._staging: Path | None = None
        self.validation_progress = no_progress
        if eval_dataset is None:
            args.eval_strategy, args.load_best_model_at_end = "no", False  # type: ignore[assignment]
        if kwargs.get("compute_loss_func") is not None:
            raise ValueError(
                "compute_loss_func would get no logits: recurrent models compute their own loss. Leave it out."
            )
        check_trainable_adapters(model)
        if args.use_state and is_frozen_by_peft(model, model.memory):
            logger.warning(
                "peft has frozen the recurrence and will not save it. To train it, set "
                'modules_to_save=["memory"] in the adapter config.'
            )
        if not args.use_state:
            model.memory.requires_grad_(False)
        super().__init__(model, args, eval_dataset=eval_dataset, **kwargs)

    @property
    def inner(self) -> Any:
        """The recurrent model, without the wrappers of accelerate and peft."""
        return get_recurrent_model(self.accelerator.unwrap_model(self.model))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is not None:
            return self.optimizer
        optimizer = super().create_optimizer(model)
        rate = self.args.recurrence_learning_rate
        added = set(self.accelerator.unwrap_model(self.model if model is None else model).memory.parameters())
        if rate is not None:
            for group in list(optimizer.param_groups):
                moved = [parameter for parameter in group["params"] if parameter in added]
                if moved:
                    group["params"] = [parameter for parameter in group["params"] if parameter not in added]
                    optimizer.add_param_group({**group, "params": moved, "lr": rate})
        return optimizer

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Check the gradient norm: `Trainer` computes it in each step before the update, equal on all processes."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if not math.isfinite(norm) and not self.args.fp16:  # with fp16, loss scaling skips such steps
            raise self._non_finite(f"The gradient's norm became {float(norm)}", self.state.global_step + 1)
        return norm

    def _non_finite(self, what: str, step: int) -> NonFiniteLoss:
        return NonFiniteLoss(
            f"{what} at step {step} ({self.units_after(self.state.global_step):,} {self.unit}). Use a smaller learning "
            "rate, and another output folder."
        )

    def units_after(self, step: int) -> int:
        """Number of tokens or questions (see `unit`) that the first `step` steps train on."""
        raise NotImplementedError

    def describe_metrics(self, metrics: dict[str, float]) -> str:
        """The results of a validation in words, for the progress bar."""
        raise NotImplementedError

    def _report_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Pass the results of `evaluate` to the log and the callbacks, and return them."""
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Skip the epoch if a run is resumed from its last checkpoint: `Trainer` would train one more step."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)

    # --- atomic checkpoints ----------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """As `Trainer.train`; `resume_from_checkpoint=True` resumes from the newest complete checkpoint, if any."""
        if resume_from_checkpoint is True:
            latest = checkpoints.latest_checkpoint(Path(self._get_output_dir(None)))
            resume_from_checkpoint = None if latest is None else str(latest)
        elif isinstance(resume_from_checkpoint, str) and not checkpoints.is_complete(Path(resume_from_checkpoint)):
            raise ValueError(
                f"resume_from_checkpoint={resume_from_checkpoint!r} does not exist or is incomplete. Use True for "
                "the newest complete checkpoint."
            )
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
        """If the best checkpoint was deleted or damaged since, start the comparison of checkpoints over."""
        best = self.state.best_model_checkpoint
        if best is not None and not checkpoints.is_complete(Path(best)):
            logger.warning("The best checkpoint, %s, is missing or incomplete: only later ones are compared.", best)
            self.state.best_model_checkpoint = self.state.best_metric = self.state.best_global_step = None

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raise an error for missing or unexpected weights, except for tied ones, which are saved once."""
        tied = set(self.inner.all_tied_weights_keys)
        misfits = sorted(set(load_result.missing_keys) - tied) + sorted(load_result.unexpected_keys)
        if misfits:
            raise ValueError(
                f"the checkpoint does not fit the model: {', '.join(misfits[:3])}. Use another output_dir."
            )

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging or super()._get_output_dir(trial))

    @contextlib.contextmanager
    def _staged(self, run: Path) -> Iterator[Path]:
        """A hidden folder that `Trainer` writes to as if it were the run's."""
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
                replace_folder(staging / name, run / name)
                self._rotate(run, best)
        self.accelerator.wait_for_everyone()

    def _rotate(self, run: Path, best: Path | None) -> None:
        """Keep the best checkpoint and the newest ones."""
        if self.args.save_total_limit:
            others = [path for path in checkpoints.list_checkpoints(run) if path != best]
            complete = [path for path in others if checkpoints.is_complete(path)]
            count = max(self.args.save_total_limit - (best is not None), 1)
            for path in others:
                if path not in complete[-count:]:
                    delete_folder(path)
