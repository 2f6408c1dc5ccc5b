# SPDX-License-Identifier: Apache-2.0
"""What `carryforward evaluate` does differently for each task: how a model and documents are loaded, and scored."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from transformers import PreTrainedConfig

from ..data.documents import Documents, load_documents
from ..data.labelled import TOKEN_CLASSIFICATION, LabelledDocuments, load_labelled
from ..data.masking import MaskedDocuments, Masking
from ..models.loading import Loaded, describe_causal, describe_encoder, load_causal, load_encoder, task_of
from ..presets import TASKS
from ..settings.base import flag
from ..settings.commands import EvaluateSettings
from .classification import class_names, classification_score
from .masked import masked_score
from .perplexity import Perplexity, perplexity

Description = tuple[PreTrainedConfig, dict[str, Any] | None]  # a model's config, and the record of its run


@dataclasses.dataclass
class Measure:
    """A task with the settings of an evaluation.

    Attributes:
        unused: settings that have no effect on the task, and are refused.
        special_tokens: windows have the tokenizer's special tokens around them.
    """

    settings: EvaluateSettings
    task: str
    unused: ClassVar[tuple[str, ...]] = ()
    special_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in self.unused:
            if getattr(self.settings, name) not in (None, False):
                raise ValueError(f"{flag(name)} has no effect on the task {self.task}. Leave it out.")

    def describe(self, name: str) -> Description:
        """What would be loaded, without its weights."""
        raise NotImplementedError

    def load(self, name: str) -> Loaded:
        raise NotImplementedError

    def load_documents(self, split: str, loaded: Loaded) -> Any:
        """The documents to score, which can tell `about` themselves."""
        raise NotImplementedError

    def count(self, documents: Any) -> int:
        """The tokens of which a score tells the progress."""
        return int(documents.lengths.sum())

    def score(self, model: Any, documents: Any, *, window: int, **options: Any) -> tuple[dict[str, Any], list[str]]:
        """The fields of a result's row, and the lines of a file of predictions, if there are any.

        Args:
            window: tokens that a plain model reads at once.
            **options: those of the functions that score: `overlap`, `use_state`, `batch_size`, `work_map`, ...
        """
        raise NotImplementedError

    def identity(self, documents: Any) -> list[Any]:
        """What tells these documents from others, to continue an evaluation that was stopped."""
        return [documents.key]

    def about(self, documents: Any) -> dict[str, Any]:
        """What a result says of the data."""
        return documents.about()

    def _load_texts(self, split: str, loaded: Loaded, require_targets: bool) -> Documents:
        settings = self.settings
        return load_documents(
            settings.data, split, loaded.tokenizer, text_field=settings.text_field, require_targets=require_targets,
            bos=settings.bos,
            checksums=None if settings.checksums is None else Path(settings.checksums),
            max_tokens=settings.max_document_tokens,
        )  # fmt: skip


class _Causal(Measure):
    unused = ("mask_probability",)
    special_tokens = False

    def describe(self, name: str) -> Description:
        return describe_causal(name)

    def load(self, name: str) -> Loaded:
        return load_causal(name)

    def load_documents(self, split: str, loaded: Loaded) -> Documents:
        return self._load_texts(split, loaded, require_targets=True)

    def count(self, documents: Documents) -> int:
        return int((documents.lengths - 1).clip(min=0).sum())

    def score(
        self, model: Any, documents: Documents, *, window: int, **options: Any
    ) -> tuple[dict[str, Any], list[str]]:
        score = perplexity(model, documents, window=window, reset_every=self.settings.reset_every, **options)
        return {**dataclasses.asdict(score), **_ratios(score)}, []


class _Encoder(Measure):
    unused: ClassVar[tuple[str, ...]] = ("reset_every", "bos")

    def describe(self, name: str) -> Description:
        return describe_encoder(name)

    def load(self, name: str) -> Loaded:
        return load_encoder(name, self.task)


class _Masked(_Encoder):
    def load_documents(self, split: str, loaded: Loaded) -> MaskedDocuments:
        embeddings: Any = loaded.model.get_input_embeddings()
        masking = Masking.of(loaded.tokenizer, embeddings.weight.shape[0], self.settings.mask_probability)
        documents = self._load_texts(split, loaded, require_targets=False)
        return MaskedDocuments(documents, masking, self.settings.mask_seed)

    def count(self, documents: MaskedDocuments) -> int:
        return sum(map(len, documents.documents))

    def score(
        self, model: Any, documents: MaskedDocuments, *, window: int, **options: Any
    ) -> tuple[dict[str, Any], list[str]]:
        score = masked_score(model, documents, **options)
        if not score.total.targets:
            raise ValueError(
                f"{self.settings.data}: no token was chosen to be predicted. Use more text, or a larger "
                "--mask-probability."
            )
        return {
            **score.total._asdict(),
            "loss": score.loss,
            "accuracy": score.accuracy,
            "documents": score.documents,
            "by_distance": score.by_distance(),
        }, []

    def identity(self, documents: MaskedDocuments) -> list[Any]:
        plain: Any = documents.documents
        return [plain.key, documents.masking.probability, documents.seed]

    def about(self, documents: MaskedDocuments) -> dict[str, Any]:
        masking = {"probability": documents.masking.probability, "seed": documents.seed}
        plain: Any = documents.documents
        return {**plain.about(), "masking": masking}


class _Classification(_Encoder):
    unused = ("reset_every", "bos", "mask_probability", "checksums")

    def load_documents(self, split: str, loaded: Loaded) -> LabelledDocuments:
        settings = self.settings
        return load_labelled(
            settings.data, split, loaded.tokenizer, classes=class_names(loaded.model.config), task=self.task,
            text_field=settings.text_field, max_tokens=settings.max_document_tokens,
        )  # fmt: skip

    def score(
        self, model: Any, documents: LabelledDocuments, *, window: int, **options: Any
    ) -> tuple[dict[str, Any], list[str]]:
        predictions: list[np.ndarray] = []
        score = classification_score(model, documents, predictions=predictions, **options)
        ratios = {name: getattr(score, name) for name in ("scored", "nats", "loss", "accuracy", "macro_f1")}
        lines = [json.dumps(_prediction(documents, i, one), ensure_ascii=False) for i, one in enumerate(predictions)]
        return {**ratios, "confusion": score.confusion.tolist()}, lines


def _prediction(documents: LabelledDocuments, index: int, classes: np.ndarray) -> dict[str, Any]:
    """The predicted label of a document, or of each of its words; null for words without a token."""
    name = documents.names[index]
    if documents.task != TOKEN_CLASSIFICATION:
        return {"name": name, "label": documents.classes[int(classes[0])]}
    assert documents.first_tokens is not None
    first = documents.first_tokens[index].tolist()
    return {"name": name, "labels": [None if i < 0 else documents.classes[int(classes[i])] for i in first]}


def _ratios(score: Perplexity) -> dict[str, float | None]:
    """Perplexities and bits per byte; None (null) where text was not counted, and for infinity, which JSON has not."""
    values = {name: getattr(score, name) for name in ("word_perplexity", "token_perplexity", "bits_per_byte")}
    return {name: value if value is not None and math.isfinite(value) else None for name, value in values.items()}


_MEASURES: dict[str, Callable[[EvaluateSettings, str], Measure]] = dict(
    zip(TASKS, (_Causal, _Masked, _Classification, _Classification), strict=True)
)


def measure_of(name: str, settings: EvaluateSettings) -> Measure:
    """How a model is evaluated, by its head."""
    task = task_of(name)
    if task is None:
        raise ValueError(
            f"{name} is an encoder without a head for {', '.join(TASKS[1:])}. Train it with `carryforward train`."
        )
    return _MEASURES[task](settings, task)
