# SPDX-License-Identifier: Apache-2.0
"""Train question-answering models with Hugging Face's `Trainer`; validation measures exact match and F1."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.trainer_utils import PredictionOutput

from ..data.samples import pad
from ..data.tokenization import tokens_in_span
from ..models.question_answering import ANSWER_KINDS, RecurrentForQuestionAnswering
from ..training.base_trainer import BaseTrainer, BaseTrainingArguments
from ..utils.peft import get_recurrent_model, is_frozen_by_peft
from ..windows import IGNORE
from .dataset import Question
from .metrics import mean_percent, score_all
from .predict import PredictedAnswer, TokenisedQuestion, answer_all, tokenise_questions


@dataclass
class QuestionTrainingArguments(BaseTrainingArguments):
    """`TrainingArguments` for question answering; the defaults are the paper's where it states them."""

    learning_rate: float = 2e-5
    num_train_epochs: float = 4.0
    warmup_steps: float = 0.1  # as a share of all steps
    eval_strategy: str = "epoch"
    save_strategy: str = "epoch"
    metric_for_best_model: str | None = "f1"
    greater_is_better: bool | None = True


class QuestionTrainer(BaseTrainer):
    """A `Trainer` whose data sets are lists of `Question`.

    Attributes:
        lost: ids of the questions that are left out of training because their answer is not in the document.
    """

    unit = "questions"

    def __init__(
        self,
        model: RecurrentForQuestionAnswering,
        args: QuestionTrainingArguments,
        train_dataset: Sequence[Question],
        eval_dataset: Sequence[Question] | None = None,
        *,
        tokenizer: Any,
        **kwargs: Any,
    ):
        inner = get_recurrent_model(model)
        if not isinstance(inner, RecurrentForQuestionAnswering):
            raise ValueError(
                f"model is a {type(model).__name__}: QuestionTrainer needs a question-answering model. Create one with "
                'add_recurrence(encoder, tokenizer=..., head="question-answering").'
            )
        frozen = [name for name, part in inner.heads() if is_frozen_by_peft(model, part)]
        if frozen:
            raise ValueError(
                "peft has frozen the question-answering head, and would not save it: set "
                f"modules_to_save={['memory', *frozen]} in the adapter's config."
            )
        for name, questions in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset or [])):
            if not isinstance(questions, Sequence) or not all(isinstance(one, Question) for one in questions):
                raise ValueError(f"{name}: give a list of Question, as read_questions returns.")
        self.tokenizer = tokenizer
        samples_or_none = [_sample(question) for question in tokenise_questions(inner, train_dataset, tokenizer)]
        samples = [sample for sample in samples_or_none if sample is not None]
        self.lost = [
            question.id for question, sample in zip(train_dataset, samples_or_none, strict=True) if sample is None
        ]
        if not samples:
            raise ValueError(f"train_dataset: none of {len(train_dataset)} questions has an answer in its document.")
        inner.init_kind_prior([sample["kind"] for sample in samples])
        super().__init__(
            model, args, data_collator=_collate, train_dataset=samples,  # type: ignore[arg-type]
            eval_dataset=None if eval_dataset is None  # type: ignore[arg-type]
            else tokenise_questions(inner, eval_dataset, tokenizer),
            processing_class=tokenizer, **kwargs,
        )  # fmt: skip

    def units_after(self, step: int) -> int:
        batch = self.args.train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps
        steps = -(-len(self.train_dataset) // batch)  # type: ignore[arg-type]
        epochs, rest = divmod(step, steps)
        return epochs * len(self.train_dataset) + min(rest * batch, len(self.train_dataset))  # type: ignore[arg-type]

    def describe_metrics(self, metrics: dict[str, float]) -> str:
        return f"validation exact match {metrics['eval_exact']:.2f}, F1 {metrics['eval_f1']:.2f}"

    def compute_loss(  # type: ignore[override]
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        out = model(**inputs, use_state=self.args.use_state)
        return (out.loss, out) if return_outputs else out.loss

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Measure exact match and F1 of the best answers. With several processes, each answers all questions."""
        questions: Any = self.eval_dataset if eval_dataset is None else self._tokenise(eval_dataset)
        if questions is None:
            raise ValueError("eval_dataset is missing: give questions, here or to QuestionTrainer.")
        return self._report_metrics(self._answer(questions, metric_key_prefix)[1])

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict the best answer to each question, as `answer` does, and measure exact match and F1."""
        answers, metrics = self._answer(self._tokenise(test_dataset), metric_key_prefix)
        return PredictionOutput(predictions=answers, label_ids=None, metrics=metrics)  # type: ignore[arg-type]

    def _tokenise(self, questions: Sequence[Question]) -> list[TokenisedQuestion]:
        return tokenise_questions(self.inner, questions, self.tokenizer)

    def _answer(
        self, tokenised: Sequence[TokenisedQuestion], prefix: str
    ) -> tuple[list[PredictedAnswer], dict[str, float]]:
        questions, tokens = [one.question for one in tokenised], sum(len(one.document_ids) for one in tokenised)
        with self.accelerator.autocast(), self.validation_progress(tokens) as progress:
            answers = answer_all(
                self.inner, tokenised, use_state=self.args.use_state, batch_size=self.args.per_device_eval_batch_size,
                allow_none=any(question.kind == "none" for question in questions), progress=progress,
            )  # fmt: skip
        best = [candidates[0] for candidates in answers]
        exact, f1 = mean_percent(score_all(questions, [answer.text for answer in best]))
        return best, {f"{prefix}_exact": exact, f"{prefix}_f1": f1}


def _sample(tokenised: TokenisedQuestion) -> dict[str, Any] | None:
    """A training sample; None if the document has no token of the answer."""
    question, start, end = tokenised.question, IGNORE, IGNORE
    if question.kind == "span":
        inside = tokens_in_span(tokenised.offsets, *(question.answer_span or (0, 0)))
        if not len(inside):
            return None
        start, end = int(inside[0]), int(inside[-1])
    return {
        "document": tokenised.document_ids,
        "question": tokenised.question_ids,
        "start": start,
        "end": end,
        "kind": ANSWER_KINDS.index(question.kind),
    }


def _collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pad documents and questions on the right, each on its own: the model puts the question before every window."""
    documents, questions = (
        pad([torch.from_numpy(sample[name]).long() for sample in samples]) for name in ("document", "question")
    )
    return {
        **documents,
        "question_ids": questions["input_ids"],
        "question_mask": questions["attention_mask"],
        "start_positions": torch.tensor([sample["start"] for sample in samples]),
        "end_positions": torch.tensor([sample["end"] for sample in samples]),
        "answer_kinds": torch.tensor([sample["kind"] for sample in samples]),
    }
