# SPDX-License-Identifier: Apache-2.0
"""Train causal language models on documents with Hugging Face's `Trainer`: the paper's protocol (section 4.2).

Validation is the perplexity of whole documents. Samples, intervals and resuming are those of `document_trainer`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ..data.samples import EpochSampler, Samples, StatefulBatchSampler, check_documents
from ..evaluation.perplexity import Perplexity, perplexity
from ..models.causal_lm import RecurrentForCausalLM
from ..state import State
from ..utils.checks import check_flag
from ..utils.peft import get_recurrent_model
from ..windows import IGNORE
from .document_trainer import DocumentTrainer, DocumentTrainingArguments
from .sharded_step import sharded_backward

_OF_WORDS = "word_perplexity"  # a metric that needs the counts of words


@dataclass
class RecurrentTrainingArguments(DocumentTrainingArguments):
    """`TrainingArguments` of causal language models: the paper's protocol by default. Tokens are scored tokens."""

    carry_state: bool = field(
        default=False, metadata={"help": "start a sample with the final state of the previous one, detached"}
    )

    metric_for_best_model: str | None = _OF_WORDS  # of token lists, whose words are not known: token_perplexity

    def __post_init__(self) -> None:
        check_flag("carry_state", self.carry_state)
        if self.carry_state and not self.use_state:
            raise ValueError("carry_state=True carries the state, which use_state=False removes: choose one.")
        super().__post_init__()


class RecurrentTrainer(DocumentTrainer):
    """A `Trainer` whose datasets are documents: sequences of token ids, usually `Documents`."""

    args: RecurrentTrainingArguments
    samples: Samples

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
        recurrence = inner.config.recurrence
        samples = Samples(
            train_dataset, recurrence.window, recurrence.overlap, args.windows_per_sample, carry_state=args.carry_state
        )
        if isinstance(eval_dataset, dict):
            raise ValueError("eval_dataset is a dictionary. Give documents, and pass other datasets to evaluate(...).")
        if eval_dataset is not None:
            check_documents(eval_dataset, "eval_dataset")
            if not any(len(document) > 1 for document in eval_dataset):
                raise ValueError("eval_dataset: no document has a second token to predict.")
            if not np.any(getattr(eval_dataset, "words", 0)) and (args.metric_for_best_model or "").endswith(_OF_WORDS):
                args.metric_for_best_model = "token_perplexity"  # token lists have no words: it ranks models the same
        self.carried: State | None = None
        super().__init__(model, args, samples, eval_dataset, callbacks=callbacks, **kwargs)

    def _make_order(self, args: Any, rows: int, seed: int) -> EpochSampler:
        return (
            StatefulBatchSampler(self.samples, rows, seed)
            if args.carry_state
            else super()._make_order(args, rows, seed)
        )

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

    # --- validation ------------------------------------------------------------------------------------------------

    def describe_metrics(self, metrics: dict[str, float]) -> str:
        unit = "word" if "eval_word_perplexity" in metrics else "token"
        return f"validation {unit} perplexity {metrics[f'eval_{unit}_perplexity']:,.2f}"

    def _measure(self, data: Any) -> dict[str, float | None]:
        """Perplexity of tokens, and of words and bytes where they were counted."""
        score = self._perplexity(data)
        return {
            "loss": score.nats / max(score.tokens, 1),
            "word_perplexity": score.word_perplexity,
            "token_perplexity": score.token_perplexity,
            "tokens": score.tokens,
            "bits_per_byte": score.bits_per_byte,
        }

    def _perplexity(self, documents: Any) -> Perplexity:
        """Perplexity over all processes: each one scores its share of the documents, and the sums are reduced."""
        share = self._share(documents)
        targets = sum(max(len(ids) - 1, 0) for ids in share)
        with self.accelerator.autocast(), self.validation_progress(targets) as progress:
            score = perplexity(
                self.inner,
                share,
                use_state=self.args.use_state,
                batch_size=self.args.per_device_eval_batch_size,
                progress=progress,
            )
        nats, *counts = self._sum_over_processes([*vars(score).values()])
        return Perplexity(nats, *map(int, counts))
