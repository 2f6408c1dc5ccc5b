# SPDX-License-Identifier: Apache-2.0
"""The base of both trainers: Hugging Face's `Trainer` with atomic checkpoints, a stop before a non-finite loss reaches
the weights, and a separate learning rate for the recurrence."""

import contextlib
import itertools
import json
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

from ..backbones.quantization import is_quantized
from ..engine.block_size import given_block_windows, measure_block_windows
from ..utils import checkpoints
from ..utils.files import SAVING, clear_leftovers, delete_folder, replace_folder
from ..utils.locks import LOCK, lock_output
from ..utils.peft import check_trainable_adapters, get_recurrent_model, is_frozen_by_peft
from .sharding import prepare_sharding, refuse_untested

logger = logging.get_logger(__name__)

_BLOCKS = "block_windows.json"  # in a checkpoint: windows of each row that run side by side


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
        refuse_untested(self.deepspeed)
        if self.label_smoothing_factor:
            raise ValueError("label_smoothing_factor is not for recurrent models, which compute their own loss. Use 0.")
        rate = self.recurrence_learning_rate
        if rate is not None and (
            isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < math.inf
        ):
            raise ValueError(f"recurrence_learning_rate={rate!r} must be a number of at least 0, or None.")
        super().__post_init__()


def _stored_block_windows(checkpoint: str | None) -> int | None:
    """How many windows ran side by side in the run of a checkpoint; None if there is no checkpoint, or it is older."""
    path = Path(checkpoint or "") / _BLOCKS
    return json.loads(path.read_text())["block_windows"] if checkpoint and path.exists() else None


class BaseTrainer(Trainer):
    """A `Trainer` for recurrent models. Without `eval_dataset` there is no validation.

    Attributes:
        unit: what progress is counted in: tokens, questions.
        block_windows: windows of each row that run side by side in training, the same in all of a run. With "auto" it
            is measured before the first step, unless it was set before, as for several runs that are compared.
        validation_progress: called with the size of a validation; gives a context whose function takes each advance.
    """

    args: Any  # BaseTrainingArguments; `Trainer` declares TrainingArguments
    unit: str
    validation_progress: Callable[[int], contextlib.AbstractContextManager[Callable[[int], object]]]

    def __init__(self, model: Any, args: BaseTrainingArguments, *, eval_dataset: Any = None, **kwargs: Any):
        self._staging: Path | None = None
        self.block_windows: int | None = None
        self.validation_progress = no_progress
        if eval_dataset is None:
            args.eval_strategy, args.load_best_model_at_end = "no", False  # type: ignore[assignment]
        if kwargs.get("compute_loss_func") is not None:
            raise ValueError(
                "compute_loss_func would get no logits: recurrent models compute their own loss. Leave it out."
            )
        check_trainable_adapters(model)
        if is_quantized(model) and get_recurrent_model(model) is model:
            raise ValueError(
                "the base model's weights are quantised, and checkpoints of them cannot be loaded again in training. "
                "Train adapters, whose checkpoints hold nothing else (peft's get_peft_model, with "
                'modules_to_save=["memory"]), or train the model before it is quantised.'
            )
        if args.use_state and is_frozen_by_peft(model, model.memory):
            logger.warning(
                "peft has frozen the recurrence and will not save it. To train it, set "
                'modules_to_save=["memory"] in the adapter config.'
            )
        if not args.use_state:
            model.memory.requires_grad_(False)
        super().__init__(model, args, eval_dataset=eval_dataset, **kwargs)
        prepare_sharding(self.accelerator, self.inner, args.fsdp)

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

    # --- windows side by side -------------------------------------------------------------------------------------
    # Random numbers are drawn block by block, and sums are rounded by block: a run keeps its number of windows.

    def _prepare_for_training(self, max_steps: int, dataloader: Any, checkpoint: str | None) -> tuple[Any, Any]:
        prepared = super()._prepare_for_training(max_steps, dataloader, checkpoint)
        self.block_windows = self._resolve_block_windows(checkpoint)
        return prepared

    def _resolve_block_windows(self, checkpoint: str | None) -> int:
        """How many windows run side by side, the same on all processes: as given, as the run began, or measured now."""
        inner, rows = self.inner, self.args.per_device_train_batch_size
        given = given_block_windows(inner.config.recurrence, use_state=self.args.use_state)
        stored = _stored_block_windows(checkpoint)
        if None not in (given, stored) and given != stored:
            raise ValueError(
                f"block_windows: {checkpoint} was trained with {stored} windows of each row side by side, and this run "
                f'has {given}. Dropout would draw other numbers. Set block_windows to {stored} or "auto", or use '
                "another output_dir."
            )
        windows = given or stored or self.block_windows
        if windows is None:
            inner.train()  # as in every step: dropout takes memory
            with self.accelerator.autocast():
                windows = measure_block_windows(inner, rows)
        windows = int(self.accelerator.gather(torch.tensor([windows], device=self.args.device)).min())
        if given is None:
            inner.block_size.resolve(windows, rows)
        return windows

    # --- atomic checkpoints ----------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """As `Trainer.train`; `resume_from_checkpoint=True` resumes from the newest intact checkpoint, if any.

        The output folder is locked: a second process that trains into it is refused.
        """
        run = Path(self._get_output_dir(None))
        with self._locked(run):
            if resume_from_checkpoint is True:
                latest = checkpoints.latest_checkpoint(run)
                self._delete_damaged(run, latest)
                resume_from_checkpoint = None if latest is None else str(latest)
            elif isinstance(resume_from_checkpoint, str) and (
                damage := checkpoints.find_damage(Path(resume_from_checkpoint))
            ):
                raise ValueError(
                    f"resume_from_checkpoint={resume_from_checkpoint!r} does not exist or is {damage}. Use True for "
                    "the newest intact checkpoint."
                )
            return super().train(resume_from_checkpoint, *args, **kwargs)

    @contextlib.contextmanager
    def _locked(self, run: Path) -> Iterator[None]:
        """Hold the lock on the output folder, in the process that saves, and clear what killed processes left there."""
        if not self.args.should_save:
            yield
            return
        run.mkdir(parents=True, exist_ok=True)
        with lock_output(run / LOCK, run):
            clear_leftovers(run)
            shutil.rmtree(run / SAVING, ignore_errors=True)
            yield

    def _delete_damaged(self, run: Path, latest: Path | None) -> None:
        """Delete the checkpoints after the newest intact one, which are trained again."""
        newest_first = reversed(checkpoints.list_checkpoints(run))
        for path in itertools.takewhile(lambda path: path != latest, newest_first):
            if self.args.should_save:
                delete_folder(path)

    def _init_training_state(  # type: ignore[override]
        self, max_steps: int, steps: int, epochs: int, checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        start = super()._init_training_state(max_steps, steps, epochs, checkpoint, trial)
        self._set_best(self.state.best_global_step)
        if checkpoint is not None:
            self._adjust_resumed_state(checkpoint)
            self._rotate(Path(self._get_output_dir(trial)))  # it may have been killed before it had done so
        return start

    def _adjust_resumed_state(self, checkpoint: str) -> None:
        """Change the state that was read from a checkpoint, before training continues; see `RecurrentTrainer`."""

    # `Trainer` begins the average of the loss that it logs anew when it resumes.

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        average = {"loss": float(self._tr_loss), "last_logged": self._globalstep_last_logged}
        (Path(output_dir) / f"loss-{self.args.process_index}.json").write_text(json.dumps(average))
        if self.args.should_save:
            (Path(output_dir) / _BLOCKS).write_text(json.dumps({"block_windows": self.block_windows}))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        path = Path(checkpoint or "") / f"loss-{self.args.process_index}.json"
        if checkpoint and path.exists():
            average = json.loads(path.read_text())
            self._tr_loss.fill_(average["loss"])
            self._globalstep_last_logged = average["last_logged"]

    def _load_best_model(self) -> None:
        self._set_best(self.state.best_global_step)
        if self.state.best_model_checkpoint is not None:
            super()._load_best_model()

    def _set_best(self, step: int | None) -> None:
        """Make the checkpoint of a step the best one. If it was deleted or damaged, start the comparison over."""
        self.state.best_model_checkpoint = None
        if step is None:
            return
        best = Path(self._get_output_dir(None)) / f"checkpoint-{step}"
        damage = checkpoints.find_damage(best)
        if damage is None:
            self.state.best_model_checkpoint = str(best)
        elif self.args.load_best_model_at_end:
            logger.warning("The best checkpoint, %s, is missing or %s: only later ones are compared.", best, damage)
            self.state.best_global_step = self.state.best_metric = None

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
        self._staging = run / SAVING
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
            shutil.rmtree(run / SAVING, ignore_errors=True)
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
                self._rotate(run)
        self.accelerator.wait_for_everyone()

    def _best_step_if_continued(self) -> int | None:
        """The step of the best checkpoint, should training be continued past its end; see `RecurrentTrainer`."""
        return self.state.best_global_step

    def _rotate(self, run: Path) -> None:
        """Delete old checkpoints: keep the best one and the newest ones."""
        if self.args.save_total_limit and self.args.should_save:
            steps = {self.state.best_global_step, self._best_step_if_continued()} - {None}
            best = {run / f"checkpoint-{step}" for step in steps}
            others = [path for path in checkpoints.list_checkpoints(run) if path not in best]
            complete = [path for path in others if checkpoints.is_complete(path)]
            count = max(self.args.save_total_limit - len(best), 1)
            for path in others:
                if path not in complete[-count:]:
                    delete_folder(path)
