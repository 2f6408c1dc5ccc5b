# SPDX-License-Identifier: Apache-2.0
"""Recurrence for pretrained transformers: documents of any length, in the memory of one window.

The public names are imported when first used, so that `import carryforward` is instant; transformers' Auto classes and
pipelines know recurrent models all the same (see `registration`).
"""

import importlib
from typing import TYPE_CHECKING, Any

from .registration import register_when_needed

if TYPE_CHECKING:
    from .config import RecurrenceConfig as RecurrenceConfig
    from .config import RecurrentModelConfig as RecurrentModelConfig
    from .data.corpora import open_corpus as open_corpus
    from .data.documents import Documents as Documents
    from .data.documents import tokenise as tokenise
    from .data.labelled import LabelledDocuments as LabelledDocuments
    from .data.labelled import load_labelled as load_labelled
    from .data.masking import MaskedDocuments as MaskedDocuments
    from .data.masking import mask_documents as mask_documents
    from .embeddings.chunks import ChunkVectors as ChunkVectors
    from .embeddings.encode import TokenVectors as TokenVectors
    from .embeddings.encode import encode as encode
    from .embeddings.sentence_transformers import RecurrentTransformer as RecurrentTransformer
    from .evaluation.classification import ClassificationScore as ClassificationScore
    from .evaluation.classification import classification_score as classification_score
    from .evaluation.flops import flops_per_token as flops_per_token
    from .evaluation.masked import MaskedScore as MaskedScore
    from .evaluation.masked import masked_score as masked_score
    from .evaluation.perplexity import Perplexity as Perplexity
    from .evaluation.perplexity import perplexity as perplexity
    from .memories.associative import AssociativeMemoryConfig as AssociativeMemoryConfig
    from .memories.kv import KVMemoryConfig as KVMemoryConfig
    from .memories.tokens import TokenMemoryConfig as TokenMemoryConfig
    from .memories.vector import VectorMemoryConfig as VectorMemoryConfig
    from .models.add_recurrence import add_recurrence as add_recurrence
    from .models.causal_lm import RecurrentForCausalLM as RecurrentForCausalLM
    from .models.encoders import RecurrentForMaskedLM as RecurrentForMaskedLM
    from .models.encoders import RecurrentForSequenceClassification as RecurrentForSequenceClassification
    from .models.encoders import RecurrentForTokenClassification as RecurrentForTokenClassification
    from .models.headless import RecurrentModel as RecurrentModel
    from .models.loading import load_bundled as load_bundled
    from .models.position_offsets import measure_position_offsets as measure_position_offsets
    from .models.question_answering import RecurrentForQuestionAnswering as RecurrentForQuestionAnswering
    from .qa.dataset import read_questions as read_questions
    from .qa.predict import answer as answer
    from .qa.trainer import QuestionTrainer as QuestionTrainer
    from .qa.trainer import QuestionTrainingArguments as QuestionTrainingArguments
    from .state import State as State
    from .training.encoder_trainer import ClassificationTrainer as ClassificationTrainer
    from .training.encoder_trainer import ClassificationTrainingArguments as ClassificationTrainingArguments
    from .training.encoder_trainer import MaskedTrainer as MaskedTrainer
    from .training.encoder_trainer import MaskedTrainingArguments as MaskedTrainingArguments
    from .training.encoder_trainer import TokenClassificationTrainer as TokenClassificationTrainer
    from .training.sharded_step import sharded_backward as sharded_backward
    from .training.trainer import RecurrentTrainer as RecurrentTrainer
    from .training.trainer import RecurrentTrainingArguments as RecurrentTrainingArguments

__version__ = "0.1.0"

_HOME = {
    "add_recurrence": "models.add_recurrence",
    "answer": "qa.predict",
    "RecurrenceConfig": "config",
    "RecurrentModelConfig": "config",
    "open_corpus": "data.corpora",
    "read_questions": "qa.dataset",
    "Documents": "data.documents",
    "tokenise": "data.documents",
    "ChunkVectors": "embeddings.chunks",
    "LabelledDocuments": "data.labelled",
    "load_labelled": "data.labelled",
    "MaskedDocuments": "data.masking",
    "mask_documents": "data.masking",
    "TokenVectors": "embeddings.encode",
    "encode": "embeddings.encode",
    "Perplexity": "evaluation.perplexity",
    "perplexity": "evaluation.perplexity",
    "ClassificationScore": "evaluation.classification",
    "classification_score": "evaluation.classification",
    "MaskedScore": "evaluation.masked",
    "masked_score": "evaluation.masked",
    "flops_per_token": "evaluation.flops",
    "RecurrentForCausalLM": "models.causal_lm",
    "RecurrentForMaskedLM": "models.encoders",
    "RecurrentForSequenceClassification": "models.encoders",
    "RecurrentForTokenClassification": "models.encoders",
    "RecurrentModel": "models.headless",
    "AssociativeMemoryConfig": "memories.associative",
    "KVMemoryConfig": "memories.kv",
    "TokenMemoryConfig": "memories.tokens",
    "VectorMemoryConfig": "memories.vector",
    "load_bundled": "models.loading",
    "measure_position_offsets": "models.position_offsets",
    "RecurrentForQuestionAnswering": "models.question_answering",
    "QuestionTrainer": "qa.trainer",
    "QuestionTrainingArguments": "qa.trainer",
    "RecurrentTransformer": "embeddings.sentence_transformers",
    "State": "state",
    "ClassificationTrainer": "training.encoder_trainer",
    "ClassificationTrainingArguments": "training.encoder_trainer",
    "MaskedTrainer": "training.encoder_trainer",
    "MaskedTrainingArguments": "training.encoder_trainer",
    "TokenClassificationTrainer": "training.encoder_trainer",
    "sharded_backward": "training.sharded_step",
    "RecurrentTrainer": "training.trainer",
    "RecurrentTrainingArguments": "training.trainer",
}
__all__ = [*_HOME, "windows"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        try:
            return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "sentence_transformers":
                raise
            from .utils.install import install_hint

            raise ImportError(f"{name} needs sentence-transformers: {install_hint('sentences')}") from error
    if name == "windows":
        return importlib.import_module(".windows", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


register_when_needed()
