# SPDX-License-Identifier: Apache-2.0
"""Recurrence for pretrained transformers: documents of any length, in the memory of one window.

The public names are imported when first used, so that `import carryforward` is instant; transformers' Auto classes
know recurrent models all the same (see `registration`).
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import registration

if TYPE_CHECKING:
    from .adding import add_recurrence as add_recurrence
    from .answering import answer as answer
    from .configuration import RecurrenceConfig as RecurrenceConfig
    from .configuration import RecurrentModelConfig as RecurrentModelConfig
    from .data.corpora import open_corpus as open_corpus
    from .data.documents import Documents as Documents
    from .data.documents import tokenise as tokenise
    from .data.questions import read_questions as read_questions
    from .embedding import TokenVectors as TokenVectors
    from .embedding import encode as encode
    from .evaluation import Perplexity as Perplexity
    from .evaluation import perplexity as perplexity
    from .flops import flops_per_token as flops_per_token
    from .heads import RecurrentForCausalLM as RecurrentForCausalLM
    from .heads import RecurrentForMaskedLM as RecurrentForMaskedLM
    from .heads import RecurrentForSequenceClassification as RecurrentForSequenceClassification
    from .heads import RecurrentForTokenClassification as RecurrentForTokenClassification
    from .heads import RecurrentModel as RecurrentModel
    from .loading import load_bundled as load_bundled
    from .places import measure_places as measure_places
    from .question_answering import RecurrentForQuestionAnswering as RecurrentForQuestionAnswering
    from .question_trainer import QuestionTrainer as QuestionTrainer
    from .question_trainer import QuestionTrainingArguments as QuestionTrainingArguments
    from .sentences import RecurrentTransformer as RecurrentTransformer
    from .state import State as State
    from .trainer import RecurrentTrainer as RecurrentTrainer
    from .trainer import RecurrentTrainingArguments as RecurrentTrainingArguments

__version__ = "0.1.0"

_HOME = {
    "add_recurrence": "adding",
    "answer": "answering",
    "RecurrenceConfig": "configuration",
    "RecurrentModelConfig": "configuration",
    "open_corpus": "data.corpora",
    "read_questions": "data.questions",
    "Documents": "data.documents",
    "tokenise": "data.documents",
    "TokenVectors": "embedding",
    "encode": "embedding",
    "Perplexity": "evaluation",
    "perplexity": "evaluation",
    "flops_per_token": "flops",
    "RecurrentForCausalLM": "heads",
    "RecurrentForMaskedLM": "heads",
    "RecurrentForSequenceClassification": "heads",
    "RecurrentForTokenClassification": "heads",
    "RecurrentModel": "heads",
    "load_bundled": "loading",
    "measure_places": "places",
    "RecurrentForQuestionAnswering": "question_answering",
    "QuestionTrainer": "question_trainer",
    "QuestionTrainingArguments": "question_trainer",
    "RecurrentTransformer": "sentences",
    "State": "state",
    "RecurrentTrainer": "trainer",
    "RecurrentTrainingArguments": "trainer",
}
__all__ = [*_HOME, "windows"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    if name == "windows":
        return importlib.import_module(".windows", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


registration.register_when_needed()
