# SPDX-License-Identifier: Apache-2.0
"""Training on Hugging Face's `Trainer`: documents in, the paper's protocol as defaults (section 4.2).

`Trainer` keeps doing what it does: accumulation, mixed precision, clipping, logging, several processes. Added are
samples of whole windows, intervals counted in scored tokens, perplexity of whole documents as validation, a learning
rate for the new parameters, and checkpoints that are whole or not there (`whole_trainer`), so that a resumed run is
exact.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ..data.samples import Order, Samples, StatefulBatchSampler, check_documents, collate
from ..evaluation.perplexity import Perplexity, perplexity
from ..models.causal_lm import RecurrentForCausalLM
from ..state import State
from ..utils.peft import frozen_by_peft, unwrapped
from ..windows import IGNORE
from .base_trainer import BaseTrainer, WholeTrainingArguments

NEVER = 10**12  # steps: intervals are counted in tokens


@dataclass
class RecurrentTrainingArguments(WholeTrainingArguments):
    """`TrainingArguments` with the paper's protocol as defaults: Adam, 100 steps of warm-up and then constant, two
    epochs, validation every 2 million tokens with the best kept, the base model trained too. Tokens are scored ones."""

    windows_per_sample: int = field(default=20, metadata={"help": "windows backpropagated through in one sample"})
    train_tokens: int | None = field(default=None, metadata={"help": "stop after so many tokens instead of epochs"})
    eval_tokens: int = field(default=2_000_000, metadata={"help": "validate and save every so many tokens"})
    save_tokens: int | None = field(default=None, metadata={"help": "save every so many tokens as well"})
    freeze_base: bool = field(default=False, metadata={"help": "train the recurrence module alone"})
    carry_state: bool = field(
        default=False, metadata={"help": "start a sample with the state of the one before, without its gradient"}
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
    metric_for_best_model: str | None = "word_perplexity"
    greater_is_better: bool | None = False

    def __post_init__(self) -> None:
        for name in ("windows_per_sample", "eval_tokens", "train_tokens", "save_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        if self.carry_state and not self.use_state:
            raise ValueError("carry_state=True carries what use_state=False removes: choose one.")
        if self.freeze_base and not self.use_state:
            raise ValueError("freeze_base trains the recurrence alone and use_state=False the base alone: choose one.")
        unsaid = self.accelerator_config is None
        super().__post_init__()
        if unsaid and self.dataloader_pin_memory:  # the next batch travels while this one is worked on
            self.accelerator_config.non_blocking = True  # type: ignore[union-attr]


class RecurrentTrainer(BaseTrainer):
    """A `Trainer` whose data sets are documents: sequences of token ids, usually `Documents`."""

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
        inner = unwrapped(model)
        if not isinstance(inner, RecurrentForCausalLM):
            raise ValueError(f"RecurrentTrainer trains causal recurrent models, not {type(model).__name__}: make one "
                             "with add_recurrence(AutoModelForCausalLM.from_pretrained(...)).")  # fmt: skip
        nothing = not any(True for _ in inner.recurrence.parameters()) or frozen_by_peft(model, inner.recurrence)
        if args.freeze_base and nothing:
            raise ValueError("freeze_base trains the recurrence alone, and this one has nothing to be trained.")
        recurrence = inner.config.recurrence
        self.samples = Samples(
            train_dataset, recurrence.window, recurrence.overlap, args.windows_per_sample, in_pieces=args.carry_state
        )
        if args.freeze_base:
            model.base.requires_grad_(False)
        if isinstance(eval_dataset, dict):
            raise ValueError("eval_dataset is a dictionary: give documents, and evaluate others with evaluate(...).")
        if eval_dataset is not None:
            check_documents(eval_dataset)
            if not any(len(document) > 1 for document in eval_dataset):
                raise ValueError("eval_dataset: no document has a second token to predict.")
        self.global_batch = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
        rows, seed = args.train_batch_size * args.world_size, args.seed if args.data_seed is None else args.data_seed
        self.order = (
            StatefulBatchSampler(self.samples, rows, seed) if args.carry_state else Order(len(self.samples), rows, seed)
        )
        self.carried: State | None = None
        self.epoch_steps = math.ceil(len(self.order) / self.global_batch)
        self._targets: tuple[int, np.ndarray] = (-1, np.empty(0))
        if args.train_tokens is not None:
            args.max_steps = self._steps_for(args.train_tokens)
        super().__init__(
            model, args, data_collator=collate, train_dataset=self.samples, eval_dataset=eval_dataset,
            callbacks=[_TokenFlow(self), *callbacks], **kwargs,
        )  # fmt: skip
        # a first label counts too: a state precedes it, or it is -100
        self._loss_shifts_labels = False

    # --- samples and tokens ----------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> Order:
        return self.order

    def tokens_after(self, step: int) -> int:
        """How many tokens are scored by the first so many steps: known without having run them."""
        epoch, rest = divmod(step, self.epoch_steps)
        if not rest:
            return epoch * int(self.samples.targets.sum())
        if self._targets[0] != epoch:
            of_sample = np.append(self.samples.targets, 0)  # the last is the empty sample's
            self._targets = epoch, np.cumsum(of_sample[self.order.indices(epoch)])
        scored = self._targets[1]
        return epoch * int(self.samples.targets.sum()) + int(scored[min(rest * self.global_batch, len(scored)) - 1])

    def _steps_for(self, tokens: int) -> int:
        step = tokens // int(self.samples.targets.sum()) * self.epoch_steps
        while self.tokens_after(step) < tokens:
            step += 1
        return step

    done_after = tokens_after

    def told(self, metrics: dict[str, float]) -> str:
        return f"validation word perplexity {metrics['eval_word_perplexity']:,.2f}"

    def compute_loss(  # type: ignore[override]
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        inputs = {**inputs, "use_state": self.args.use_state}
        if self.args.carry_state:
            inputs["state"] = self._state_for(inputs["labels"])
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        if self.args.carry_state:
            self.carried = outputs.state.detach()
        return (loss, outputs) if return_outputs else loss

    def _state_for(self, labels: Tensor) -> State:
        """A batch goes on from the state of the last one, in the rows whose first token has a label: others begin."""
        fresh = self.inner.fresh_state(len(labels))
        if self.carried is None:
            return fresh
        goes_on = (labels[:, 0] != IGNORE).tolist()
        return State.cat([(self.carried if on else fresh)[[row]] for row, on in enumerate(goes_on)])

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.carried is not None:
            self.carried.save(Path(output_dir) / f"state-{self.args.process_index}.safetensors")

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        state = Path(checkpoint or "") / f"state-{self.args.process_index}.safetensors"
        self.carried = State.load(state, self.args.device) if checkpoint and state.exists() else None

    # --- validation ------------------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Perplexity of whole documents at the overlap of training."""
        documents = self.eval_dataset if eval_dataset is None else eval_dataset
        if documents is None:
            raise ValueError("evaluate needs documents: give eval_dataset, here or to RecurrentTrainer.")
        score = self._perplexity(documents)
        if not math.isfinite(score.nats):  # before such weights are saved
            raise self._not_finite(f"The validation loss became {score.nats}", self.state.global_step)
        metrics = {
            f"{metric_key_prefix}_loss": score.nats / max(score.tokens, 1),
            f"{metric_key_prefix}_word_perplexity": score.word_perplexity if score.words else score.token_perplexity,
            f"{metric_key_prefix}_token_perplexity": score.token_perplexity,
            f"{metric_key_prefix}_tokens": score.tokens,
        }
        if score.bytes:
            metrics[f"{metric_key_prefix}_bits_per_byte"] = score.bits_per_byte
        return self._tell(metrics)

    def _perplexity(self, documents: Any) -> Perplexity:
        """Over all processes: each reads its share of the documents, and the sums add up."""
        world, rank = self.args.world_size, self.args.process_index
        shared = world > 1 and not self.is_fsdp_enabled  # sharded weights need every process in every call
        mine = documents[rank::world] if shared else documents
        targets = sum(max(len(ids) - 1, 0) for ids in mine)
        with self.accelerator.autocast(), self.validating(targets) as progress:
            score = perplexity(
                self.inner,
                mine,
                use_state=self.args.use_state,
                batch_size=self.args.per_device_eval_batch_size,
                progress=progress,
            )
        if not shared:
            return score
        sums = torch.tensor([*vars(score).values()], dtype=torch.float64, device=self.args.device)
        total = self.accelerator.reduce(sums, reduction="sum").tolist()
        return Perplexity(total[0], *map(int, total[1:]))


class _TokenFlow(TrainerCallback):
    """Validation and saving at intervals counted in tokens; the order of each epoch."""

    def __init__(self, trainer: RecurrentTrainer):
        self.trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.order.set_epoch(state.global_step // self.trainer.epoch_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        before, now = self.trainer.tokens_after(state.global_step - 1), self.trainer.tokens_after(state.global_step)
        if now // args.eval_tokens > before // args.eval_tokens:
            control.should_evaluate |= args.eval_strategy != "no"
            control.should_save |= args.save_strategy != "no"
        if args.save_tokens and now // args.save_tokens > before // args.save_tokens:
            control.should_save |= args.save_strategy != "no"
