# SPDX-License-Identifier: Apache-2.0
"""The "question-answering" pipeline, which transformers removed in 5.3, for recurrent models and for plain ones.

Importing this module enters it in transformers' registry, and `import carryforward` has the module imported as soon as
transformers' pipelines are. Arguments and results are those of the earlier pipeline.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForQuestionAnswering, Pipeline, pipelines
from transformers.models.auto.modeling_auto import MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES

from ..models.question_answering import RecurrentForQuestionAnswering
from ..utils.checks import check_count, check_flag
from ..utils.peft import get_recurrent_model
from .dataset import Question
from .plain_reader import PlainReader
from .predict import TokenisedQuestion, best_answers, tokenise_pairs, tokenise_questions
from .span_search import best_spans, trim_offsets

TASK = "question-answering"
_DEFAULT_MODEL = "distilbert/distilbert-base-cased-distilled-squad", "564e9b5"  # and revision, as it was
_TENSORS = ("input_ids", "attention_mask", "question_ids", "question_mask")


def _register() -> None:
    """Enter the pipeline in transformers' registry, and take it off the list of removed ones."""
    getattr(pipelines, "REMOVED_TASKS", {}).pop(TASK, None)
    # not by `register_pipeline`: the pipeline would be saved with a copy of this file
    pipelines.PIPELINE_REGISTRY.supported_tasks[TASK] = {
        "impl": QuestionAnsweringPipeline, "pt": (AutoModelForQuestionAnswering,), "type": "text",
        "default": {"model": _DEFAULT_MODEL},
    }  # fmt: skip


class QuestionAnsweringPipeline(Pipeline):
    """Answers questions about texts of any length.

    Args:
        model: a recurrent question-answering model, or any of transformers' encoders with such a head.
        tokenizer: its fast tokenizer.

    The other arguments can be given here, or in a call:

        top_k: number of answers, 1 by default.
        doc_stride: tokens that consecutive windows share. By default a recurrent model's own overlap; for plain models
            128, or less if windows are small.
        max_seq_len: tokens of a window of a plain model, question and special tokens included, by default 384. A
            recurrent model has windows of its own.
        max_answer_len: length of the longest answer, in tokens, 15 by default.
        max_question_len: a question that is longer is refused; by default all that leave room for the text are taken.
        handle_impossible_answer: whether "no answer", an empty one, can be the result.
        align_to_words: extend answers to whole words, as the tokenizer splits them. The default.
        batch_size: questions that are read at once.

    **Scores.** A recurrent model that was trained to predict kinds of answers gives the probabilities of
    `carryforward.answer`. Other models give the probability of the first token as a start, times that of the last one
    as an end: each is a softmax over the tokens of the whole text, and the first special token in the window where it
    scores lowest, which stands for "no answer". If the text fits into one window, these are the scores of the earlier
    pipeline; otherwise it compared probabilities of different windows, each of which had a sum of its own.
    """

    _load_processor = False  # type: ignore[assignment]
    _load_image_processor = False  # type: ignore[assignment]
    _load_feature_extractor = False  # type: ignore[assignment]
    _load_tokenizer = True  # type: ignore[assignment]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.check_model_type(MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES)
        finder = get_recurrent_model(self.model)
        self.recurrent = finder if isinstance(finder, RecurrentForQuestionAnswering) else None
        self.plain = PlainReader(self.model, self.tokenizer) if self.recurrent is None else None

    def _sanitize_parameters(  # type: ignore[override]
        self,
        top_k: int | None = None,
        doc_stride: int | None = None,
        max_seq_len: int | None = None,
        max_answer_len: int | None = None,
        max_question_len: int | None = None,
        handle_impossible_answer: bool | None = None,
        align_to_words: bool | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        counts = {"top_k": top_k, "max_seq_len": max_seq_len, "max_answer_len": max_answer_len,
                  "max_question_len": max_question_len}  # fmt: skip
        flags = {"handle_impossible_answer": handle_impossible_answer, "align_to_words": align_to_words}
        for name, value in counts.items():
            if value is not None:
                check_count(name, value)
        for name, flag in flags.items():
            check_flag(name, flag, optional=True)
        values: dict[str, Any] = {**counts, **flags, "doc_stride": doc_stride}
        given = {name: value for name, value in values.items() if value is not None}
        windows: dict[str, Any] = {name: given.pop(name) for name in ("doc_stride", "max_seq_len") if name in given}
        questions = {name: given.pop(name) for name in ("max_question_len",) if name in given}
        return windows | questions, windows, given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Answer questions about texts.

        Args:
            question, context: a text each; or lists of texts; or several questions about one text.
            *args: instead, a dictionary with these two keys, a list of such dictionaries, or a dataset or generator
                that gives them.
            **kwargs: see the class.

        Returns:
            for one question a dictionary with `score`, the characters `start` and `end` of the context, and `answer`,
            or with `top_k` a list of these; for several questions a list of such results. Answers that are no spans
            ("yes", "no", and "" for no answer) have start and end 0.
        """
        examples = _examples(*args, question=kwargs.pop("question", None), context=kwargs.pop("context", None))
        single = isinstance(examples, list) and len(examples) == 1
        return super().__call__(examples[0] if single else examples, **kwargs)

    def preprocess(  # type: ignore[override]
        self,
        example: dict[str, str],
        doc_stride: int | None = None,
        max_seq_len: int | None = None,
        max_question_len: int | None = None,
    ) -> dict[str, Any]:
        question = Question("", *_checked(example), (), "span", "squad")
        if self.recurrent is not None:
            self._check_window(max_seq_len)
            (tokenised,) = tokenise_questions(self.recurrent, [question], self.tokenizer, overlap=doc_stride)
        else:
            assert self.plain is not None
            (tokenised,) = tokenise_pairs([question], self.tokenizer)
            self.plain.window_of(len(tokenised.question_ids), max_seq_len, doc_stride)
        length = len(tokenised.question_ids)
        if max_question_len is not None and length > max_question_len:
            raise ValueError(f"max_question_len={max_question_len}: the question has {length} tokens. Shorten it.")
        ids = {"input_ids": tokenised.document_ids, "question_ids": tokenised.question_ids}
        tensors = {name: torch.from_numpy(values)[None].long() for name, values in ids.items()}
        masks = {"attention_mask": "input_ids", "question_mask": "question_ids"}
        tensors |= {name: torch.ones_like(tensors[of]) for name, of in masks.items()}
        return {**tensors, "tokenised": tokenised}

    def _check_window(self, max_seq_len: int | None) -> None:
        assert self.recurrent is not None
        window = self.recurrent.config.recurrence.window
        if max_seq_len not in (None, window):
            raise ValueError(f"max_seq_len={max_seq_len}: the model reads {window} tokens at once. Leave it out.")

    def _forward(  # type: ignore[override]
        self, inputs: dict[str, Any], doc_stride: int | None = None, max_seq_len: int | None = None
    ) -> dict[str, Any]:
        tensors = {name: inputs[name] for name in _TENSORS}
        if self.recurrent is not None:
            out = self.recurrent(**tensors, overlap=doc_stride)
        else:
            assert self.plain is not None
            out = self.plain(**tensors, max_seq_len=max_seq_len, doc_stride=doc_stride)
        kinds = out.kind_logits if self.recurrent is not None and self.recurrent.predicts_kinds else None
        return {
            "tokenised": inputs["tokenised"], "real": inputs["attention_mask"].bool(),
            "starts": out.start_logits, "ends": out.end_logits, "kinds": kinds, "nulls": out.null_logits,
        }  # fmt: skip

    def postprocess(  # type: ignore[override]
        self,
        outputs: dict[str, Any],
        top_k: int = 1,
        max_answer_len: int = 15,
        handle_impossible_answer: bool = False,
        align_to_words: bool = True,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        tokenised: TokenisedQuestion = outputs["tokenised"]
        starts, ends = (outputs[name][0][outputs["real"][0]].float() for name in ("starts", "ends"))
        context = tokenised.question.document
        answers: list[dict[str, Any]]
        if outputs["kinds"] is None:
            log_probabilities = _log_probabilities(starts, ends, outputs["nulls"])
            answers = _span_answers(tokenised, log_probabilities, top_k, max_answer_len)
        else:
            found = best_answers(
                (starts, ends, outputs["kinds"][0].float()), context, tokenised.offsets, top_k=top_k,
                max_answer_tokens=max_answer_len, allow_none=handle_impossible_answer,
            )  # fmt: skip
            answers = [{"score": one.probability, "start": one.start or 0, "end": one.end or 0, "answer": one.text}
                       for one in found]  # fmt: skip
        if align_to_words:
            self._extend_to_words(answers, context)
        answers = _merged(answers)
        if outputs["kinds"] is None:
            if handle_impossible_answer and outputs["nulls"] is not None:
                score = log_probabilities[:, 0].sum().exp().item()
                answers.append({"score": score, "start": 0, "end": 0, "answer": ""})
            answers = sorted(answers, key=lambda one: -one["score"])[:top_k]
        return answers[0] if len(answers) == 1 else answers

    def _extend_to_words(self, answers: list[dict[str, Any]], context: str) -> None:
        """Extend spans to the words that the tokenizer finds in the context."""
        encoded: Any = self.tokenizer(  # type: ignore[misc]
            context, add_special_tokens=False, truncation=False, verbose=False
        )
        for answer in answers:
            if answer["end"] <= answer["start"]:
                continue
            words = [encoded.char_to_word(answer["start"]), encoded.char_to_word(answer["end"] - 1)]
            if None in words:  # some tokenizers have no words
                continue
            start, end = encoded.word_to_chars(words[0])[0], encoded.word_to_chars(words[1])[1]
            answer["answer"] = context[start:end].strip()  # some words begin with a space
            answer["start"] = start + len(context[start:end]) - len(context[start:end].lstrip())
            answer["end"] = answer["start"] + len(answer["answer"])


def _examples(*args: Any, question: Any, context: Any) -> Any:
    """The examples of a call: a list of dictionaries, or a dataset or generator of them."""
    if args:
        if len(args) > 1 or question is not None or context is not None:
            raise ValueError("give question= and context=, or one dictionary, list or dataset of questions.")
        return [args[0]] if isinstance(args[0], dict) else args[0]
    if isinstance(question, str) and isinstance(context, str):
        return [{"question": question, "context": context}]
    if isinstance(question, str) or not isinstance(question, Sequence) or not isinstance(context, str | Sequence):
        raise ValueError(
            f"question is of type {type(question).__name__} and context of type {type(context).__name__}: give a text "
            "each, two lists, or a list of questions and one text."
        )
    contexts: Iterable[Any] = [context] * len(question) if isinstance(context, str) else context
    if not isinstance(context, str) and len(question) != len(context):
        raise ValueError(f"question has {len(question)} texts, and context {len(context)}: give as many of each.")
    return [{"question": one, "context": about} for one, about in zip(question, contexts, strict=True)]


def _checked(example: Any) -> tuple[str, str]:
    if not isinstance(example, dict) or not {"question", "context"} <= example.keys():
        raise ValueError(f"a question is {type(example).__name__}: give a dictionary with keys question and context.")
    return example["question"], example["context"]


def _log_probabilities(starts: Tensor, ends: Tensor, nulls: Tensor | None) -> Tensor:
    """Log-probabilities of starts and ends of an answer, [2, 1 + N]. The first are that there is none."""
    none = torch.full((2, 1), -torch.inf) if nulls is None else nulls[0][:, None].float()
    return torch.cat([none, torch.stack([starts, ends])], dim=1).log_softmax(-1)


def _span_answers(
    tokenised: TokenisedQuestion, log_probabilities: Tensor, top_k: int, max_tokens: int
) -> list[dict[str, Any]]:
    """The most probable spans of a model that predicts no kinds of answers."""
    context, trimmed = tokenised.question.document, trim_offsets(tokenised.question.document, tokenised.offsets)
    starts, ends = log_probabilities[:, 1:]
    answers = []
    for first, last, probability in best_spans(starts, ends, trimmed, top_k, max_tokens, normalise=False):
        start, end = int(trimmed[0][first]), int(trimmed[1][last])
        answers.append({"score": probability, "start": start, "end": end, "answer": context[start:end]})
    return answers


def _merged(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers of which none has the text of another: their scores are added."""
    merged: dict[str, dict[str, Any]] = {}
    for answer in answers:
        first = merged.setdefault(answer["answer"].lower(), answer)
        if first is not answer:
            first["score"] += answer["score"]
    return [*merged.values()]


_register()
