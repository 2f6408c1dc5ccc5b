# SPDX-License-Identifier: Apache-2.0
"""Train encoders on documents: masked language models, classifiers of documents, and classifiers of tokens.

Samples of masked language models and token classifiers are consecutive windows of a document, each with an empty state;
those of document classifiers are whole documents. Validation reads whole documents. Tokens are tokens of text: of a
masked language model's, a share is scored.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch.nn.functional as F
from torch import nn
from transformers import TrainerCallback

from ..config import RecurrenceConfig
from ..data.encoder_samples import Cut, LabelSamples, MaskedSampler, MaskedSamples, TokenLabelSamples, collate_labels
from ..data.labelled import LabelledDocuments
from ..data.masking import MaskedDocuments, Masking, check_probability
from ..data.samples import DocumentSamples, EpochSampler, check_documents, collate, encoder_sample_spans
from ..evaluation.classification import ClassificationScore, check_classifier, classification_score
from ..evaluation.masked import MaskedScore, Sums, masked_score
from ..models.encoders import (
    EncoderHead,
    RecurrentForMaskedLM,
    RecurrentForSequenceClassification,
    RecurrentForTokenClassification,
)
from ..presets import MASK_PROBABILITY
from ..utils.peft import get_recurrent_model
from ..windows import IGNORE, encoder_schedule, grouped_schedule
from .document_trainer import DocumentTrainer, DocumentTrainingArguments


@dataclass
class MaskedTrainingArguments(DocumentTrainingArguments):
    """`TrainingArguments` of masked language models, with the protocol of `DocumentTrainingArguments`."""

    mask_probability: float = field(
        default=MASK_PROBABILITY, metadata={"help": "share of tokens that are to be predicted"}
    )

    def __post_init__(self) -> None:
        check_probability("mask_probability", self.mask_probability)
        super().__post_init__()


@dataclass
class ClassificationTrainingArguments(DocumentTrainingArguments):
    """`TrainingArguments` of classifiers: they validate after each epoch too, and keep the best macro-F1."""

    eval_epochs: bool = True
    metric_for_best_model: str | None = "macro_f1"
    greater_is_better: bool | None = True


class EncoderTrainer(DocumentTrainer):
    """What the trainers of encoders share."""

    head: ClassVar[type[EncoderHead]]
    arguments: ClassVar[type[DocumentTrainingArguments]]

    def _check(self, model: Any, args: Any) -> Any:
        """The recurrent model inside `model`; refuses what this trainer does not train."""
        inner = get_recurrent_model(model)
        if not isinstance(inner, self.head):
            raise ValueError(
                f"{type(self).__name__} trains a {self.head.__name__}, not {type(model).__name__}. Make one with "
                f"add_recurrence({self.head.auto_class}.from_pretrained(...), tokenizer=...)."
            )
        if not isinstance(args, self.arguments):
            raise ValueError(f"args is a {type(args).__name__}: give {self.arguments.__name__}(...).")
        return inner

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.is_fsdp_enabled:
            raise ValueError("FSDP: encoders are trained with whole weights on every process. Leave --use_fsdp out.")

    def compute_loss(  # type: ignore[override]
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        inputs = {**inputs, "use_state": self.args.use_state}
        return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)


class MaskedTrainer(EncoderTrainer):
    """A `Trainer` of masked language models, whose datasets are documents: sequences of token ids.

    Each epoch corrupts the documents anew, and a validation always in the same way (`data.masking`).
    """

    args: MaskedTrainingArguments
    head, arguments = RecurrentForMaskedLM, MaskedTrainingArguments

    def __init__(
        self,
        model: RecurrentForMaskedLM,
        args: MaskedTrainingArguments,
        train_dataset: Sequence[Any],
        eval_dataset: Sequence[Any] | None = None,
        *,
        tokenizer: Any,
        callbacks: Sequence[TrainerCallback] = (),
        **kwargs: Any,
    ):
        """
        Args:
            tokenizer: the model's tokenizer, which knows the mask token and the special ones.
        """
        inner = self._check(model, args)
        self.masking = Masking.of(tokenizer, inner._vocabulary, args.mask_probability)
        seed = args.seed if args.data_seed is None else args.data_seed
        samples = MaskedSamples(train_dataset, _cut(inner.config.recurrence, args), self.masking, seed)
        if eval_dataset is not None:
            check_documents(eval_dataset, "eval_dataset")
            masked = MaskedDocuments(eval_dataset, self.masking)
            if not any((labels != IGNORE).any() for _, labels in masked):
                raise ValueError("eval_dataset: no token was chosen to be predicted. Validate on more text.")
        super().__init__(model, args, samples, eval_dataset, callbacks=callbacks, processing_class=tokenizer, **kwargs)

    def _make_order(self, args: Any, rows: int, seed: int) -> EpochSampler:
        return MaskedSampler(len(self.samples), rows, seed)

    def describe_metrics(self, metrics: dict[str, float]) -> str:
        return f"validation loss {metrics['eval_loss']:.3f}, accuracy {metrics['eval_accuracy']:.1%}"

    def _measure(self, data: Any) -> dict[str, float | None]:
        """The loss of masked tokens and the share that is predicted right."""
        documents = data if isinstance(data, MaskedDocuments) else MaskedDocuments(data, self.masking)
        share = self._share(documents)
        tokens = sum(map(len, share.documents))
        with self.accelerator.autocast(), self.validation_progress(tokens) as progress:
            score: MaskedScore = masked_score(
                self.inner, share, use_state=self.args.use_state, progress=progress,
                batch_size=self.args.per_device_eval_batch_size,
            )  # fmt: skip
        total = Sums(*self._sum_over_processes(score.total))  # type: ignore[arg-type]
        return {"loss": total.loss, "accuracy": total.accuracy, "targets": total.targets}


class _ClassificationBase(EncoderTrainer):
    """What both trainers of classifiers share: labelled documents, accuracy and macro-F1."""

    args: ClassificationTrainingArguments
    arguments = ClassificationTrainingArguments

    def __init__(
        self,
        model: Any,
        args: ClassificationTrainingArguments,
        train_dataset: LabelledDocuments,
        eval_dataset: LabelledDocuments | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        **kwargs: Any,
    ):
        inner = self._check(model, args)
        for name, documents in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
            if documents is not None:
                check_classifier(inner, documents, name)
        super().__init__(
            model, args, self._samples(inner, args, train_dataset), eval_dataset, callbacks=callbacks, **kwargs
        )

    def _samples(self, inner: Any, args: Any, documents: LabelledDocuments) -> DocumentSamples:
        raise NotImplementedError

    def describe_metrics(self, metrics: dict[str, float]) -> str:
        return f"validation accuracy {metrics['eval_accuracy']:.1%}, macro-F1 {metrics['eval_macro_f1']:.3f}"

    def _measure(self, data: LabelledDocuments) -> dict[str, float | None]:
        share = self._share(data)
        with self.accelerator.autocast(), self.validation_progress(int(share.lengths.sum())) as progress:
            own = classification_score(
                self.inner, share, use_state=self.args.use_state, progress=progress,
                batch_size=self.args.per_device_eval_batch_size,
            )  # fmt: skip
        nats, *counts = self._sum_over_processes([own.nats, *own.confusion.flatten().tolist()])
        score = ClassificationScore(np.array(counts).round().reshape(own.confusion.shape).astype(np.int64), nats)
        return {name: getattr(score, name) for name in ("loss", "accuracy", "macro_f1", "scored")}


class ClassificationTrainer(_ClassificationBase):
    """A `Trainer` of classifiers of whole documents, whose datasets `load_labelled` returns."""

    head = RecurrentForSequenceClassification

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, data_collator=collate_labels, **kwargs)
        self.model_accepts_loss_kwargs = True  # the loss is a sum over the labels of a step, divided by their number

    def _samples(self, inner: Any, args: Any, documents: LabelledDocuments) -> DocumentSamples:
        return LabelSamples(documents)

    def compute_loss(  # type: ignore[override]
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """The mean over all documents of a step: batches and processes may have empty samples."""
        documents = {name: value for name, value in inputs.items() if name != "labels"}
        out = model(**documents, use_state=self.args.use_state)
        nats = F.cross_entropy(out.logits.float(), inputs["labels"], ignore_index=IGNORE, reduction="sum")
        loss = nats / kwargs["num_items_in_batch"]
        if self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over processes
        return (loss, out) if return_outputs else loss


class TokenClassificationTrainer(_ClassificationBase):
    """A `Trainer` of token classifiers, whose datasets `load_labelled` returns."""

    head = RecurrentForTokenClassification

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, data_collator=collate, **kwargs)

    def _samples(self, inner: Any, args: Any, documents: LabelledDocuments) -> DocumentSamples:
        return TokenLabelSamples(documents, _cut(inner.config.recurrence, args))


def _cut(recurrence: RecurrenceConfig, args: DocumentTrainingArguments) -> Cut:
    """Where a document is cut into samples: between windows of its own schedule, or between groups of windows."""
    window, group = recurrence.window, recurrence.window_group
    special: dict[str, Any] = {"prefix": len(recurrence.prefix), "suffix": len(recurrence.suffix)}

    def cut(length: int) -> Iterator[tuple[int, ...]]:
        if group:
            schedule = grouped_schedule(length, window, group.size, **special)
        else:
            schedule = encoder_schedule(length, window, recurrence.overlap, **special)
        return encoder_sample_spans(schedule, args.windows_per_sample)

    return cut
