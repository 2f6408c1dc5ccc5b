# SPDX-License-Identifier: Apache-2.0
"""The base of trainers whose data are documents: samples of whole windows, and intervals counted in tokens.

`Trainer` does accumulation, mixed precision, clipping, logging and several processes; `base_trainer` adds a learning
rate for the recurrence and atomic checkpoints. A resumed run is exact. Defaults are the paper's protocol (section 4.2).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerState

from ..data.samples import DocumentSamples, EpochSampler, collate
from ..utils.checks import check_count, check_flag
from ..utils.peft import get_recurrent_model, is_frozen_by_peft
from .base_trainer import BaseTrainer, BaseTrainingArguments

NEVER = 10**12  # steps; intervals are counted in tokens instead


@dataclass
class DocumentTrainingArguments(BaseTrainingArguments):
    """`TrainingArguments` with the paper's protocol as defaults.

    Adam, 100 steps of warm-up, then a constant learning rate; two epochs; validation every 2 million tokens, and the
    best checkpoint is kept; the base model is trained too.
    """

    windows_per_sample: int = field(
        default=20, metadata={"help": "windows per sample; the loss is backpropagated through all"}
    )
    train_tokens: int | None = field(
        default=None, metadata={"help": "tokens to train on, in place of num_train_epochs"}
    )
    eval_tokens: int = field(default=2_000_000, metadata={"help": "tokens between validations, each with a checkpoint"})
    eval_epochs: bool = field(default=False, metadata={"help": "validate after each epoch too"})
    save_tokens: int | None = field(default=None, metadata={"help": "tokens between additional checkpoints"})
    freeze_base: bool = field(default=False, metadata={"help": "train only the recurrence"})

    recurrence_learning_rate: float | None = 1e-3
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    num_train_epochs: float = 2
    lr_scheduler_type: str = "constant_with_warmup"
    warmup_steps: float = 100
    eval_strategy: str = "steps"
    eval_steps: float | None = NEVER
    save_strategy: str = "steps"
    save_steps: float = NEVER
    metric_for_best_model: str | None = "loss"
    greater_is_better: bool | None = False

    def __post_init__(self) -> None:
        for name in ("windows_per_sample", "eval_tokens", "train_tokens", "save_tokens"):
            value = getattr(self, name)
            check_count(name, value, optional=name in ("train_tokens", "save_tokens"))
        for name in ("freeze_base", "use_state", "eval_epochs"):
            check_flag(name, getattr(self, name))
        if self.freeze_base and not self.use_state:
            raise ValueError("freeze_base trains only the recurrence, and use_state=False only the base: choose one.")
        default_config = self.accelerator_config is None
        super().__post_init__()
        if default_config and self.dataloader_pin_memory:  # copy the next batch to the device during a step
            self.accelerator_config.non_blocking = True  # type: ignore[union-attr]


class DocumentTrainer(BaseTrainer):
    """A `Trainer` for samples of documents. A subclass makes the samples, and says how a validation is measured.

    Attributes:
        samples: the parts of documents that are trained on.
        order: their order in each epoch.
    """

    args: DocumentTrainingArguments
    unit = "tokens"

    def __init__(
        self,
        model: Any,
        args: DocumentTrainingArguments,
        samples: DocumentSamples,
        eval_dataset: Sequence[Any] | None,
        *,
        data_collator: Callable = collate,
        callbacks: Sequence[TrainerCallback] = (),
        **kwargs: Any,
    ):
        memory = get_recurrent_model(model).memory
        if args.freeze_base:
            if not any(True for _ in memory.parameters()) or is_frozen_by_peft(model, memory):
                raise ValueError("freeze_base trains only the recurrence, and this one has no parameters to train.")
            model.base.requires_grad_(False)
        self.samples = samples
        rows, seed = args.train_batch_size * args.world_size, args.seed if args.data_seed is None else args.data_seed
        self.global_batch = rows * args.gradient_accumulation_steps
        self.order = self._make_order(args, rows, seed)
        self.epoch_steps = math.ceil(len(self.order) / self.global_batch)
        self._targets: tuple[int, np.ndarray] = (-1, np.empty(0))
        if args.train_tokens is not None:
            args.max_steps = self._steps_for(args.train_tokens)
        super().__init__(
            model, args, data_collator=data_collator, train_dataset=samples, eval_dataset=eval_dataset,
            callbacks=[_TokenIntervalCallback(self), *callbacks], **kwargs,
        )  # fmt: skip
        # the first label counts too: a state precedes it, or it is -100
        self._loss_shifts_labels = False

    def _make_order(self, args: Any, rows: int, seed: int) -> EpochSampler:
        """The order of the samples, in batches of so many rows over all processes."""
        return EpochSampler(len(self.samples), rows, seed)

    # --- samples and tokens ----------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        return self.order

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor | int | None:
        """At least one: the samples of a step may have no target at all."""
        items: Any = super()._get_num_items_in_batch(batch_samples, device)
        return items.clamp(min=1) if isinstance(items, Tensor) else items

    def tokens_after(self, step: int) -> int:
        """Number of tokens that the first `step` steps train on. Known before they run."""
        epoch, rest = divmod(step, self.epoch_steps)
        total = int(self.samples.targets.sum())
        if not rest:
            return epoch * total
        if self._targets[0] != epoch:
            of_sample = np.append(self.samples.targets, 0)  # the last one is the empty sample
            self._targets = epoch, np.cumsum(of_sample[self.order.indices(epoch)])
        scored = self._targets[1]
        return epoch * total + int(scored[min(rest * self.global_batch, len(scored)) - 1])

    def _steps_for(self, tokens: int) -> int:
        step = tokens // int(self.samples.targets.sum()) * self.epoch_steps
        while self.tokens_after(step) < tokens:
            step += 1
        return step

    units_after = tokens_after

    @property
    def planned_steps(self) -> int:
        """The number of steps of the whole training."""
        steps = self.args.max_steps
        return steps if steps > 0 else math.ceil(self.args.num_train_epochs * self.epoch_steps)

    # --- longer runs -----------------------------------------------------------------------------------------------
    # The last step is validated even if no interval ends there. A run that is continued past its end forgets that
    # validation, and so equals one that was planned longer from the start.

    def reaches(self, step: int, interval: int) -> bool:
        """Whether an interval, in tokens, ends with a step."""
        return self.tokens_after(step) // interval > self.tokens_after(step - 1) // interval

    def validates_after(self, step: int) -> bool:
        """Whether a validation is due after a step, also if training goes on."""
        ends_epoch = self.args.eval_epochs and step % self.epoch_steps == 0
        return ends_epoch or self.reaches(step, self.args.eval_tokens)

    def _adjust_resumed_state(self, checkpoint: str) -> None:
        if self.state.global_step < self.state.max_steps and self._was_the_end(checkpoint):
            validations = self._validations_before_end(self.state.global_step)
            others = [entry for entry in self.state.log_history if "eval_loss" not in entry]
            self.state.log_history = sorted([*others, *validations], key=lambda entry: entry["step"])
            self.state.best_metric, self.state.best_global_step = self._best_of(validations)
            self._set_best(self.state.best_global_step)

    def _was_the_end(self, checkpoint: str) -> bool:
        """Whether training was to end with a checkpoint."""
        before = TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))
        return before.max_steps == before.global_step

    def _best_step_if_continued(self) -> int | None:
        return self._best_of(self._validations_before_end(self.state.max_steps))[1]

    def _validations_before_end(self, end: int) -> list[dict[str, Any]]:
        """The log's validations, without that of the last step if only the end of training asked for it."""
        by_steps = bool(self.state.eval_steps) and end % self.state.eval_steps == 0
        scheduled = by_steps or self.args.eval_strategy == "epoch" or self.validates_after(end)
        return [entry for entry in self.validations if scheduled or entry["step"] != end]

    @property
    def validations(self) -> list[dict[str, Any]]:
        """The results of all validations so far, from the log."""
        return [entry for entry in self.state.log_history if "eval_loss" in entry]

    @property
    def metric(self) -> str:
        """The name of the metric that checkpoints are compared by."""
        return (self.args.metric_for_best_model or "loss").removeprefix("eval_")

    def best_validation(self) -> float | None:
        """The best result, also if the checkpoint that had it is lost."""
        return self._best_of(self.validations)[0]

    def _best_of(self, validations: list[dict[str, Any]]) -> tuple[float | None, int | None]:
        """The best metric of some validations, and its step; of equal ones, the first."""
        name, sign = f"eval_{self.metric}", -1 if self.args.greater_is_better else 1
        scored = [(sign * entry[name], entry["step"]) for entry in validations if name in entry]
        return (sign * min(scored)[0], min(scored)[1]) if scored else (None, None)

    # --- validation ------------------------------------------------------------------------------------------------

    def _measure(self, data: Any) -> dict[str, float | None]:
        """Measure a validation over all processes: metrics by name, "loss" among them."""
        raise NotImplementedError

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Measure on whole documents, at the overlap of training."""
        documents = self.eval_dataset if eval_dataset is None else eval_dataset
        if documents is None:
            raise ValueError(f"evaluate needs documents: give eval_dataset, here or to {type(self).__name__}.")
        metrics = self._measure(documents)
        if not math.isfinite(metrics["loss"] or 0.0):  # before these weights are saved
            raise self._non_finite(f"The validation loss became {metrics['loss']}", self.state.global_step)
        return self._report_metrics(
            {f"{metric_key_prefix}_{name}": value for name, value in metrics.items() if value is not None}
        )

    @property
    def _shares_validation(self) -> bool:
        """Whether each process measures a part; sharded weights need every process in every call."""
        return self.args.world_size > 1 and not self.is_fsdp_enabled

    def _share(self, documents: Any) -> Any:
        """The documents that this process measures."""
        return documents[self.args.process_index :: self.args.world_size] if self._shares_validation else documents

    def _sum_over_processes(self, sums: Sequence[float]) -> list[float]:
        """Numbers of this process, added to those of the others."""
        if not self._shares_validation:
            return list(sums)
        numbers = torch.tensor(sums, dtype=torch.float64, device=self.args.device)
        return self.accelerator.reduce(numbers, reduction="sum").tolist()  # type: ignore[union-attr]


class _TokenIntervalCallback(TrainerCallback):
    """Validates and saves at intervals counted in tokens, and sets the order of each epoch."""

    def __init__(self, trainer: DocumentTrainer):
        self.trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.order.set_epoch(state.global_step // self.trainer.epoch_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.validates_after(state.global_step):
            control.should_evaluate |= args.eval_strategy != "no"
            control.should_save |= args.save_strategy != "no"
        if args.save_tokens and self.trainer.reaches(state.global_step, args.save_tokens):
            control.should_save |= args.save_strategy != "no"
