# SPDX-License-Identifier: Apache-2.0
"""Train language models on documents with Hugging Face's `Trainer`. Defaults: the paper's protocol (section 4.2).

`Trainer` does accumulation, mixed precision, clipping, logging and several processes. Added are samples of whole
windows, intervals counted in scored tokens and perplexity of whole documents as validation; `base_trainer` adds a
learning rate for the recurrence and atomic checkpoints. A resumed run is exact.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState

from ..data.samples import EpochSampler, Samples, StatefulBatchSampler, check_documents, collate
from ..evaluation.perplexity import Perplexity, perplexity
from ..models.causal_lm import RecurrentForCausalLM
from ..state import State
from ..utils.checks import check_count, check_flag
from ..utils.peft import get_recurrent_model, is_frozen_by_peft
from ..windows import IGNORE
from .base_trainer import BaseTrainer, BaseTrainingArguments
from .sharded_step import sharded_backward

_OF_WORDS = "word_perplexity"  # a metric that needs the counts of words
NEVER = 10**12  # steps; intervals are counted in tokens instead


@dataclass
class RecurrentTrainingArguments(BaseTrainingArguments):
    """`TrainingArguments` with the paper's protocol as defaults.

    Adam, 100 steps of warm-up, then a constant learning rate; two epochs; validation every 2 million tokens, and the
    best checkpoint is kept; the base model is trained too. Tokens are scored tokens.
    """

    windows_per_sample: int = field(
        default=20, metadata={"help": "windows per sample; the loss is backpropagated through all"}
    )
    train_tokens: int | None = field(
        default=None, metadata={"help": "tokens to train on, in place of num_train_epochs"}
    )
    eval_tokens: int = field(default=2_000_000, metadata={"help": "tokens between validations, each with a checkpoint"})
    save_tokens: int | None = field(default=None, metadata={"help": "tokens between additional checkpoints"})
    freeze_base: bool = field(default=False, metadata={"help": "train only the recurrence"})
    carry_state: bool = field(
        default=False, metadata={"help": "start a sample with the final state of the previous one, detached"}
    )

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
    metric_for_best_model: str | None = _OF_WORDS  # of token lists, whose words are not known: token_perplexity
    greater_is_better: bool | None = False

    def __post_init__(self) -> None:
        for name in ("windows_per_sample", "eval_tokens", "train_tokens", "save_tokens"):
            value = getattr(self, name)
            check_count(name, value, optional=name in ("train_tokens", "save_tokens"))
        for name in ("freeze_base", "carry_state", "use_state"):
            check_flag(name, getattr(self, name))
        if self.carry_state and not self.use_state:
            raise ValueError("carry_state=True carries the state, which use_state=False removes: choose one.")
        if self.freeze_base and not self.use_state:
            raise ValueError("freeze_base trains only the recurrence, and use_state=False only the base: choose one.")
        default_config = self.accelerator_config is None
        super().__post_init__()
        if default_config and self.dataloader_pin_memory:  # copy the next batch to the device during a step
            self.accelerator_config.non_blocking = True  # type: ignore[union-attr]


class RecurrentTrainer(BaseTrainer):
    """A `Trainer` whose datasets are documents: sequences of token ids, usually `Documents`."""

    args: RecurrentTrainingArguments
    unit = "tokens"

    def __init__(
        self,
        model: RecurrentForCausalLM,
        args: RecurrentTrainingArguments,
        train_dataset: Sequence[Any],
        eval_dataset: Sequence[Any] | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        **kwargs: Any,
    ):
        inner = get_recurrent_model(model)
        if not isinstance(inner, RecurrentForCausalLM):
            raise ValueError(f"RecurrentTrainer trains causal recurrent models, not {type(model).__name__}. Make one "
                             "with add_recurrence(AutoModelForCausalLM.from_pretrained(...)).")  # fmt: skip
        if not isinstance(args, RecurrentTrainingArguments):
            raise ValueError(f"args is a {type(args).__name__}: give RecurrentTrainingArguments(...).")
        check_documents(train_dataset, "train_dataset")
        has_parameters = any(True for _ in inner.memory.parameters())
        if args.freeze_base and (not has_parameters or is_frozen_by_peft(model, inner.memory)):
            raise ValueError("freeze_base trains only the recurrence, and this one has no parameters to train.")
        recurrence = inner.config.recurrence
        self.samples = Samples(
            train_dataset, recurrence.window, recurrence.overlap, args.windows_per_sample, carry_state=args.carry_state
        )
        if args.freeze_base:
            model.base.requires_grad_(False)
        if isinstance(eval_dataset, dict):
            raise ValueError("eval_dataset is a dictionary. Give documents, and pass other datasets to evaluate(...).")
        if eval_dataset is not None:
            check_documents(eval_dataset, "eval_dataset")
            if not any(len(document) > 1 for document in eval_dataset):
                raise ValueError("eval_dataset: no document has a second token to predict.")
            if not np.any(getattr(eval_dataset, "words", 0)) and (args.metric_for_best_model or "").endswith(_OF_WORDS):
                args.metric_for_best_model = "token_perplexity"  # token lists have no words: it ranks models the same
        self.global_batch = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
        rows, seed = args.train_batch_size * args.world_size, args.seed if args.data_seed is None else args.data_seed
        self.order = (
            StatefulBatchSampler(self.samples, rows, seed)
            if args.carry_state
            else EpochSampler(len(self.samples), rows, seed)
        )
        self.carried: State | None = None
        self.epoch_steps = math.ceil(len(self.order) / self.global_batch)
        self._targets: tuple[int, np.ndarray] = (-1, np.empty(0))
        if args.train_tokens is not None:
            args.max_steps = self._steps_for(args.train_tokens)
        super().__init__(
            model, args, data_collator=collate, train_dataset=self.samples, eval_dataset=eval_dataset,
            callbacks=[_TokenIntervalCallback(self), *callbacks], **kwargs,
        )  # fmt: skip
        # the first label counts too: a state precedes it, or it is -100
        self._loss_shifts_labels = False

    # --- samples and tokens ----------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        return self.order

    def tokens_after(self, step: int) -> int:
        """Number of tokens that the first `step` steps score. Known before they run."""
        epoch, rest = divmod(step, self.epoch_steps)
        if not rest:
            return epoch * int(self.samples.targets.sum())
        if self._targets[0] != epoch:
            of_sample = np.append(self.samples.targets, 0)  # the last one is the empty sample
            self._targets = epoch, np.cumsum(of_sample[self.order.indices(epoch)])
        scored = self._targets[1]
        return epoch * int(self.samples.targets.sum()) + int(scored[min(rest * self.global_batch, len(scored)) - 1])

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

    def describe_metrics(self, metrics: dict[str, float]) -> str:
        unit = "word" if "eval_word_perplexity" in metrics else "token"
        return f"validation {unit} perplexity {metrics[f'eval_{unit}_perplexity']:,.2f}"

    def compute_loss(  # type: ignore[override]
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        loss, outputs = super().compute_loss(model, self._with_state(inputs), return_outputs=True, **kwargs)
        if self.args.carry_state:
            self.carried = outputs.state.detach()
        return (loss, outputs) if return_outputs else loss

    def training_step(  # type: ignore[override]
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """As in `Trainer`; where FSDP shards the weights, the gradients are computed block by block."""
        if not self.is_fsdp_enabled:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        # the share of this batch in the loss of the step, as `Trainer` computes it
        share = 1.0 if num_items_in_batch is not None else 1 / self.current_gradient_accumulation_steps
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            share *= self.accelerator.num_processes  # FSDP averages gradients over processes
        scaler = self.accelerator.scaler
        factor = share if scaler is None else scaler.scale(torch.tensor(share, device=self.args.device))
        inputs = self._with_state(self._prepare_inputs(inputs))
        outputs = sharded_backward(model, **inputs, num_items_in_batch=num_items_in_batch, factor=factor)
        if self.args.carry_state:
            self.carried = outputs.state
        assert outputs.loss is not None
        return outputs.loss * share

    def _with_state(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """A batch with the state that it starts from."""
        inputs = {**inputs, "use_state": self.args.use_state}
        return {**inputs, "state": self._state_for(inputs["labels"])} if self.args.carry_state else inputs

    def _state_for(self, labels: Tensor) -> State:
        """The initial state of a batch: the carried one in rows that continue a document (their first token has a
        label), a fresh one in the others."""
        fresh = self.inner.fresh_state(len(labels))
        if self.carried is None:
            return fresh
        continues = (labels[:, 0] != IGNORE).tolist()
        return State.cat([(self.carried if carry else fresh)[[row]] for row, carry in enumerate(continues)])

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.carried is not None:
            self.carried.save(Path(output_dir) / f"state-{self.args.process_index}.safetensors")

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        state = Path(checkpoint or "") / f"state-{self.args.process_index}.safetensors"
        self.carried = State.load(state, self.args.device) if checkpoint and state.exists() else None

    # --- longer runs -----------------------------------------------------------------------------------------------
    # The last step is validated even if no interval ends there. A run that is continued past its end forgets that
    # validation, and so equals one that was planned longer from the start.

    def reaches(self, step: int, interval: int) -> bool:
        """Whether an interval, in tokens, ends with a step."""
        return self.tokens_after(step) // interval > self.tokens_after(step - 1) // interval

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
        scheduled = self.args.eval_strategy == "epoch" or by_steps or self.reaches(end, self.args.eval_tokens)
        return [
            entry for entry in self.state.log_history
            if "eval_loss" in entry and (scheduled or entry["step"] != end)
        ]  # fmt: skip

    def _best_of(self, validations: list[dict[str, Any]]) -> tuple[float | None, int | None]:
        """The best metric of some validations, and its step; of equal ones, the first."""
        name = f"eval_{(self.args.metric_for_best_model or 'loss').removeprefix('eval_')}"
        sign = -1 if self.args.greater_is_better else 1
        scored = [(sign * entry[name], entry["step"]) for entry in validations if name in entry]
        return (sign * min(scored)[0], min(scored)[1]) if scored else (None, None)

    # --- validation ------------------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Measure the perplexity of whole documents at the overlap of training: of tokens, and of words and bytes where
        they were counted."""
        documents = self.eval_dataset if eval_dataset is None else eval_dataset
        if documents is None:
            raise ValueError("evaluate needs documents: give eval_dataset, here or to RecurrentTrainer.")
        score = self._perplexity(documents)
        if not math.isfinite(score.nats):  # before these weights are saved
            raise self._non_finite(f"The validation loss became {score.nats}", self.state.global_step)
        metrics = {
            f"{metric_key_prefix}_loss": score.nats / max(score.tokens, 1),
            f"{metric_key_prefix}_word_perplexity": score.word_perplexity,
            f"{metric_key_prefix}_token_perplexity": score.token_perplexity,
            f"{metric_key_prefix}_tokens": score.tokens,
            f"{metric_key_prefix}_bits_per_byte": score.bits_per_byte,
        }
        return self._report_metrics({name: value for name, value in metrics.items() if value is not None})

    def _perplexity(self, documents: Any) -> Perplexity:
        """Perplexity over all processes: each one scores its share of the documents, and the sums are reduced."""
        world, rank = self.args.world_size, self.args.process_index
        distributed = world > 1 and not self.is_fsdp_enabled  # sharded weights need every process in every call
        share = documents[rank::world] if distributed else documents
        targets = sum(max(len(ids) - 1, 0) for ids in share)
        with self.accelerator.autocast(), self.validation_progress(targets) as progress:
            score = perplexity(
                self.inner,
                share,
                use_state=self.args.use_state,
                batch_size=self.args.per_device_eval_batch_size,
                progress=progress,
            )
        if not distributed:
            return score
        sums = torch.tensor([*vars(score).values()], dtype=torch.float64, device=self.args.device)
        total = self.accelerator.reduce(sums, reduction="sum").tolist()
        return Perplexity(total[0], *map(int, total[1:]))


class _TokenIntervalCallback(TrainerCallback):
    """Validates and saves at intervals counted in tokens, and sets the order of each epoch."""

    def __init__(self, trainer: RecurrentTrainer):
        self.trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.order.set_epoch(state.global_step // self.trainer.epoch_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.reaches(state.global_step, args.eval_tokens):
            control.should_evaluate |= args.eval_strategy != "no"
            control.should_save |= args.save_strategy != "no"
        if args.save_tokens and self.trainer.reaches(state.global_step, args.save_tokens):
            control.should_save |= args.save_strategy != "no"
