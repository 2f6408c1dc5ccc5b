# SPDX-License-Identifier: Apache-2.0
"""Training to find answers, on Hugging Face's `Trainer`: questions in, exact match and F1 as validation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.trainer_utils import PredictionOutput

from ..data.samples import pad
from ..data.tokenization import tokens_within
from ..models.question_answering import KINDS, RecurrentForQuestionAnswering
from ..training.base_trainer import BaseTrainer, WholeTrainingArguments
from ..utils.peft import frozen_by_peft, unwrapped
from ..windows import IGNORE
from .dataset import Question
from .metrics import percent, score_all
from .predict import Asked, Found, answer_all, ask


@dataclass
class QuestionTrainingArguments(WholeTrainingArguments):
    """`TrainingArguments` with what question answering needs; the defaults are the paper's where it says something."""

    learning_rate: float = 2e-5
    num_train_epochs: float = 4.0
    warmup_steps: float = 0.1  # of all
    eval_strategy: str = "epoch"
    save_strategy: str = "epoch"
    metric_for_best_model: str | None = "f1"
    greater_is_better: bool | None = True


class QuestionTrainer(BaseTrainer):
    """A `Trainer` whose data sets are questions (`data.questions`). Those whose answer is not in the document cannot be
    trained on: `lost` says which."""

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
        inner = unwrapped(model)
        if not isinstance(inner, RecurrentForQuestionAnswering):
            raise ValueError(f"QuestionTrainer trains models that find answers, not {type(model).__name__}: make one "
                             'with add_recurrence(encoder, tokenizer=..., head="question-answering").')  # fmt: skip
        frozen = [name for name, part in inner.heads() if frozen_by_peft(model, part)]
        if frozen:
            raise ValueError(f"peft has frozen what finds answers, and would not save it: give the adapters' config "
                             f"modules_to_save={['recurrence', *frozen]}.")  # fmt: skip
        self.tokenizer = tokenizer
        found = [_sample(asked) for asked in ask(inner, train_dataset, tokenizer)]
        self.lost = [question.id for question, sample in zip(train_dataset, found, strict=True) if sample is None]
        if len(self.lost) == len(found):
            raise ValueError(f"none of {len(train_dataset)} questions has an answer in its document.")
        samples = [sample for sample in found if sample is not None]
        inner.expect([sample["kind"] for sample in samples])
        super().__init__(
            model, args, data_collator=_collate, train_dataset=samples,  # type: ignore[arg-type]
            eval_dataset=None if eval_dataset is None else ask(inner, eval_dataset, tokenizer),  # type: ignore[arg-type]
            processing_class=tokenizer, **kwargs,
        )  # fmt: skip

    def done_after(self, step: int) -> int:
        batch = self.args.train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps
        steps = -(-len(self.train_dataset) // batch)  # type: ignore[arg-type]
        epochs, rest = divmod(step, steps)
        return epochs * len(self.train_dataset) + min(rest * batch, len(self.train_dataset))  # type: ignore[arg-type]

    def told(self, metrics: dict[str, float]) -> str:
        return f"validation exact match {metrics['eval_exact']:.2f}, F1 {metrics['eval_f1']:.2f}"

    def compute_loss(  # type: ignore[override]
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        out = model(**inputs, use_state=self.args.use_state)
        return (out.loss, out) if return_outputs else out.loss

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Exact match and F1 of the best answers. With several processes, each answers all questions."""
        asked: Any = self.eval_dataset if eval_dataset is None else self._ask(eval_dataset)
        if asked is None:
            raise ValueError("evaluate needs questions: give eval_dataset, here or to QuestionTrainer.")
        return self._tell(self._answer(asked, metric_key_prefix)[1])

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """The best answers, as `answer` gives them, and how good they are."""
        found, metrics = self._answer(self._ask(test_dataset), metric_key_prefix)
        return PredictionOutput(predictions=found, label_ids=None, metrics=metrics)  # type: ignore[arg-type]

    def _ask(self, questions: Sequence[Question]) -> list[Asked]:
        return ask(self.inner, questions, self.tokenizer)

    def _answer(self, asked: Sequence[Asked], prefix: str) -> tuple[list[Found], dict[str, float]]:
        questions = [one.question for one in asked]
        with self.accelerator.autocast(), self.validating(sum(len(one.ids) for one in asked)) as progress:
            found = answer_all(
                self.inner, asked, use_state=self.args.use_state, batch_size=self.args.per_device_eval_batch_size,
                allow_none=any(question.kind == "none" for question in questions), progress=progress,
            )  # fmt: skip
        first = [answers[0] for answers in found]
        exact, f1 = percent(score_all(questions, [one.text for one in first]))
        return first, {f"{prefix}_exact": exact, f"{prefix}_f1": f1}


def _sample(asked: Asked) -> dict[str, Any] | None:
    """What is trained on; None for an answer that no token of the document stands for."""
    question, start, end = asked.question, IGNORE, IGNORE
    if question.kind == "span":
        begin, stop = question.place or (0, 0)
        inside = tokens_within(asked.offsets, begin, stop)
        if not len(inside):
            return None
        start, end = int(inside[0]), int(inside[-1])
    return {"ids": asked.ids, "asked": asked.own, "start": start, "end": end, "kind": KINDS.index(question.kind)}


def _collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Documents padded on the right; questions are put in front of every window, and stay as they are."""
    ids, asked = (pad([torch.from_numpy(sample[name]).long() for sample in samples]) for name in ("ids", "asked"))
    return {
        **ids,
        "question_ids": asked["input_ids"],
        "question_mask": asked["attention_mask"],
        "start_positions": torch.tensor([sample["start"] for sample in samples]),
        "end_positions": torch.tensor([sample["end"] for sample in samples]),
        "answer_kinds": torch.tensor([sample["kind"] for sample in samples]),
    }
