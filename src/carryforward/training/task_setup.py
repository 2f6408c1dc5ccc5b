# SPDX-License-Identifier: Apache-2.0
"""What `carryforward train` does differently for each task: the model and its head, the documents, and the trainer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig

from ..config import RecurrentModelConfig
from ..data.corpora import ALL, available_splits, has_own_splits
from ..data.documents import Documents, load_documents
from ..data.labelled import LabelledDocuments, labelled_task, load_labelled
from ..evaluation.classification import class_names
from ..models.add_recurrence import add_recurrence, ensure_architecture, recurrence_of, special_tokens
from ..models.base import RecurrentPreTrainedModel
from ..models.loading import Loaded, describe_causal, describe_encoder, load_causal, load_encoder, task_of
from ..presets import MASK_PROBABILITY
from ..settings.commands import TrainSettings
from .document_trainer import DocumentTrainer, DocumentTrainingArguments
from .encoder_trainer import (
    ClassificationTrainer,
    ClassificationTrainingArguments,
    MaskedTrainer,
    MaskedTrainingArguments,
    TokenClassificationTrainer,
)
from .lifecycle import apply_training_fields, check_same_recurrence, recurrence_arguments
from .trainer import RecurrentTrainer, RecurrentTrainingArguments

_CAUSAL, _MASKED = "causal-lm", "masked-lm"


@dataclass
class TaskSetup:
    """A task with the settings of a run.

    Attributes:
        unused: settings that have no effect on the task, and are refused.
    """

    settings: TrainSettings
    task: str

    arguments: ClassVar[type[DocumentTrainingArguments]]
    trainer: ClassVar[type[DocumentTrainer]]
    unused: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name in self.unused:
            if getattr(self.settings, name) not in (None, False):
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} has no effect on the task {self.task}. Leave it out.")

    @property
    def metric(self) -> str:
        """The name of the metric that validations are compared by."""
        assert self.arguments.metric_for_best_model is not None
        return self.arguments.metric_for_best_model

    def describe(self) -> PreTrainedConfig:
        """The model's config."""
        raise NotImplementedError

    def check_recurrence(self, config: PreTrainedConfig, tokenizer: Any) -> RecurrentModelConfig:
        """Refuse a recurrence that the model does not support, before anything is tokenised. Returns the config that
        the recurrent model will have."""
        if isinstance(config, RecurrentModelConfig):
            check_same_recurrence(config, self.settings)
            return config
        fields = recurrence_arguments(self.settings, config) | self._special_fields(tokenizer)
        return RecurrentModelConfig(base_config=config, recurrence=recurrence_of(config, **fields))

    def _special_fields(self, tokenizer: Any) -> dict[str, Any]:
        """The fields of `RecurrenceConfig` for the tokenizer's special tokens."""
        return {}

    def load_documents(self, tokenizer: Any) -> tuple[Any, Any | None]:
        """The documents for training and for validation, if there is one."""
        raise NotImplementedError

    def load(self, documents: Any) -> Loaded:
        """The model, with a head for the task."""
        raise NotImplementedError

    def make_recurrent(self, loaded: Loaded, documents: Any, device: torch.device) -> RecurrentPreTrainedModel:
        """A loaded model with the recurrence that the settings ask for."""
        if isinstance(loaded.model, RecurrentPreTrainedModel):
            apply_training_fields(loaded.model.config, self.settings)
            return loaded.model
        rotary = ensure_architecture(loaded.model).rotary
        fields = recurrence_arguments(self.settings, loaded.model.config)
        if not rotary:  # position offsets are measured: on the device of the training
            loaded.model.to(device)  # type: ignore[arg-type]
        return add_recurrence(loaded.model, documents=documents, tokenizer=loaded.tokenizer, **fields)

    def make_arguments(self, shared: dict[str, Any]) -> DocumentTrainingArguments:
        """The training arguments; `shared` are those that do not depend on the task."""
        return self.arguments(**shared)

    def make_trainer(self, model: Any, args: Any, documents: Any, validation: Any, tokenizer: Any) -> DocumentTrainer:
        return self.trainer(model, args, documents, validation, processing_class=tokenizer)


def _load_splits(settings: TrainSettings, load: Callable) -> tuple[Any, Any | None]:
    """The documents for training, and those for validation: a split of the same data, or other data.

    Args:
        load: of a source, a split, a limit of tokens a document, and the training documents if these are not they.
    """
    documents = load(settings.data, "train", settings.max_document_tokens, None)
    if not settings.validation:
        return documents, None
    source = settings.validation_data or settings.data
    split = "validation" if settings.validation_data is None or has_own_splits(source) else ALL
    if split != ALL and split not in (splits := available_splits(source)):
        raise ValueError(
            f"{source} has no validation split (it has: {', '.join(splits)}). Give --validation-data, or "
            "--no-validation."
        )
    return documents, load(source, split, settings.max_validation_tokens, documents)


def _load_texts(
    settings: TrainSettings, tokenizer: Any, second_token: bool, source: str, split: str, max_tokens: int | None,
    training: Documents | None,
) -> Documents:  # fmt: skip
    """Tokenised texts.

    Args:
        second_token: a validation needs a document with a second token, the first one to predict.
    """
    is_books = training is None or source.partition("=")[0] == "pg19"
    checksums = Path(settings.checksums) if settings.checksums and is_books else None
    return load_documents(
        source, split, tokenizer, text_field=settings.text_field, checksums=checksums, max_tokens=max_tokens,
        require_targets=second_token and training is not None,
    )  # fmt: skip


class _Causal(TaskSetup):
    arguments, trainer = RecurrentTrainingArguments, RecurrentTrainer
    unused = ("mask_probability",)

    def describe(self) -> PreTrainedConfig:
        return describe_causal(self.settings.model)[0]

    def load_documents(self, tokenizer: Any) -> tuple[Documents, Documents | None]:
        return _load_splits(self.settings, partial(_load_texts, self.settings, tokenizer, True))

    def load(self, documents: Any) -> Loaded:
        return load_causal(self.settings.model)

    def make_arguments(self, shared: dict[str, Any]) -> DocumentTrainingArguments:
        return RecurrentTrainingArguments(**shared, carry_state=self.settings.carry_state)


class _Encoder(TaskSetup):
    def describe(self) -> PreTrainedConfig:
        return describe_encoder(self.settings.model)[0]

    def _special_fields(self, tokenizer: Any) -> dict[str, Any]:
        prefix, suffix = special_tokens(tokenizer)
        return {"prefix": prefix, "suffix": suffix}

    def load(self, documents: Any) -> Loaded:
        return load_encoder(self.settings.model, self.task)


class _Masked(_Encoder):
    arguments, trainer = MaskedTrainingArguments, MaskedTrainer
    unused = ("carry_state",)

    def load_documents(self, tokenizer: Any) -> tuple[Documents, Documents | None]:
        return _load_splits(self.settings, partial(_load_texts, self.settings, tokenizer, False))

    def make_arguments(self, shared: dict[str, Any]) -> DocumentTrainingArguments:
        share = self.settings.mask_probability
        return MaskedTrainingArguments(**shared, mask_probability=MASK_PROBABILITY if share is None else share)

    def make_trainer(self, model: Any, args: Any, documents: Any, validation: Any, tokenizer: Any) -> DocumentTrainer:
        return MaskedTrainer(model, args, documents, validation, tokenizer=tokenizer)


class _Classification(_Encoder):
    arguments = ClassificationTrainingArguments
    trainer: ClassVar[type[DocumentTrainer]] = ClassificationTrainer
    unused = ("carry_state", "mask_probability", "checksums", "freeze_base")  # a head that is new must be trained

    def load_documents(self, tokenizer: Any) -> tuple[LabelledDocuments, LabelledDocuments | None]:
        own = class_names(self.describe()) if task_of(self.settings.model) == self.task else None

        def load(source: str, split: str, max_tokens: int | None, training: LabelledDocuments | None) -> Any:
            labelled = load_labelled(
                source, split, tokenizer, task=self.task, text_field=self.settings.text_field, max_tokens=max_tokens,
                classes=None if training is None else training.classes,
            )  # fmt: skip
            return labelled if training is not None else labelled.renumbered(_choose_classes(own, labelled.classes))

        return _load_splits(self.settings, load)

    def load(self, documents: LabelledDocuments) -> Loaded:
        return load_encoder(self.settings.model, self.task, documents.classes)


class _TokenClassification(_Classification):
    trainer = TokenClassificationTrainer


_SETUPS: dict[str, type[TaskSetup]] = {
    _CAUSAL: _Causal,
    _MASKED: _Masked,
    "classification": _Classification,
    "token-classification": _TokenClassification,
}


def set_up_task(settings: TrainSettings) -> TaskSetup:
    """The task that the settings ask for, or that the model's head and the data leave no doubt of."""
    task = _resolve_task(settings)
    return _SETUPS[task](settings, task)


def _resolve_task(settings: TrainSettings) -> str:
    head, asked = task_of(settings.model), settings.task
    if head == _CAUSAL or asked == _CAUSAL:
        if asked in (None, head):
            return _CAUSAL
        kind = "a causal language model" if head == _CAUSAL else "an encoder"
        raise ValueError(f"--task {asked}: {settings.model} is {kind}. Use another model, or leave --task out.")
    if asked is not None:
        return asked
    labelled = labelled_task(settings.data)
    data = labelled or _MASKED
    if head not in (None, data):
        rows = f"rows for {labelled}" if labelled else "texts without labels"
        raise ValueError(
            f"{settings.model} has a head for {head}, and {settings.data} holds {rows}. Say what to train with --task "
            f"{head} or --task {data}."
        )
    return data


def _choose_classes(own: Sequence[str] | None, labels: Sequence[str]) -> tuple[str, ...]:
    """The classes to train: the model's, if it was trained for these labels, or else the data's."""
    if own is None or (len(own) == len(labels) and all(one == f"LABEL_{i}" for i, one in enumerate(own))):
        return tuple(labels)
    unknown = sorted({*labels} - {*own})
    if unknown:
        raise ValueError(
            f"the model's head has the classes {', '.join(own)}, and the data the label {unknown[0]!r}. Use the "
            "encoder that it was made from, which gets a new head, or correct the labels."
        )
    return tuple(own)
