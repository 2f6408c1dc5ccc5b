# SPDX-License-Identifier: Apache-2.0
"""`carryforward qa train`: train an encoder on a file of questions to find answers."""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForQuestionAnswering, set_seed

from ..config import RecurrentModelConfig
from ..data.tokenization import tokenise_texts
from ..models.add_recurrence import add_recurrence
from ..models.loading import describe, load_question_answering
from ..models.model_files import load_model, load_tokenizer
from ..models.question_answering import RecurrentForQuestionAnswering
from ..settings.commands import QuestionSettings
from ..training.callbacks import ResumableEarlyStoppingCallback, use_progress_bar
from ..training.lifecycle import (
    apply_training_fields,
    describe_memory,
    recurrence_arguments,
    save_run,
    shared_training_arguments,
    train_until_done,
)
from ..training.run_folder import RunFolder
from ..utils import console
from .dataset import Question, read_questions
from .join_passages import join_passages
from .trainer import QuestionTrainer, QuestionTrainingArguments

_HELD_OUT = 20  # one of 20 documents is used for validation


def train(settings: QuestionSettings, out: Path, *, report_to: str = "none", use_cpu: bool = False) -> dict[str, Any]:
    """Train a model, or resume an interrupted run; returns the run's record, which is also in its `run.json`."""
    use_cpu = use_cpu or not torch.accelerator.is_available()
    arguments = QuestionTrainingArguments(
        **shared_training_arguments(settings, out, report_to, use_cpu),
        learning_rate=settings.learning_rate,
        recurrence_learning_rate=settings.recurrence_learning_rate,
    )
    with RunFolder(settings, out, arguments.should_save) as run:
        if run.finished:
            console.note(f"{out} is finished already. Use another --out to train again.")
            return run.record
        return _train(settings, run, arguments)


def _train(settings: QuestionSettings, run: RunFolder, arguments: QuestionTrainingArguments) -> dict[str, Any]:
    tokenizer = load_tokenizer(settings.model)
    training, validation = _questions(settings)
    set_seed(settings.seed)  # for the initial values of the new parameters
    model = _model(settings, tokenizer, training, arguments.device)
    trainer = QuestionTrainer(model, arguments, training, validation, tokenizer=tokenizer)
    use_progress_bar(trainer)
    if settings.patience is not None:
        trainer.add_callback(ResumableEarlyStoppingCallback(settings.patience))
    lost = f"; {len(trainer.lost):,} whose answer is not in the document are left out" * bool(trainer.lost)
    console.note(f"training: {len(training):,} questions{lost}; validation: {len(validation):,}")
    if settings.recurrence:
        describe_memory(model.config)
    digests = {"train": _digest(training), "validation": _digest(validation)}
    run.begin({"data": digests, "processes": arguments.world_size, "window": model.config.recurrence.window})
    train_until_done(trainer, run)
    history = [entry for entry in trainer.state.log_history if "eval_f1" in entry]
    outcome = {
        "questions": len(training) - len(trainer.lost),
        "lost": trainer.lost,
        "best_f1": trainer.state.best_metric,
        "history": history,
    }
    return save_run(trainer, run, trainer.accelerator.unwrap_model(trainer.model), tokenizer, outcome)


def _questions(settings: QuestionSettings) -> tuple[list[Question], list[Question]]:
    """Questions for training and for validation, which share no document. Passages are joined within each set."""
    training = read_questions(settings.data)
    if settings.validation_data is not None:
        validation = read_questions(settings.validation_data)
    else:
        validation = [question for question in training if _is_held_out(question.document)]
        training = [question for question in training if not _is_held_out(question.document)]
        if not validation or not training:
            raise ValueError(f"{settings.data} has too few documents to hold some out. Give --validation-data.")
    if settings.join_words is not None:
        training = join_passages(training, settings.join_words, seed=settings.seed)
        validation = join_passages(validation, settings.join_words, seed=settings.seed)
    return training[: settings.max_questions], validation[: settings.max_validation_questions]


def _is_held_out(document: str) -> bool:
    return blake2b(document.encode(), digest_size=4).digest()[0] % _HELD_OUT == 0


def _digest(questions: list[Question]) -> str:
    return blake2b(repr(questions).encode(), digest_size=16).hexdigest()


def _model(
    settings: QuestionSettings, tokenizer: Any, training: Sequence[Question], device: torch.device
) -> RecurrentForQuestionAnswering:
    config = describe(settings.model)
    if isinstance(config, RecurrentModelConfig):
        loaded: Any = load_question_answering(settings.model, device="cpu").model
        apply_training_fields(loaded.config, settings)
        loaded.config.use_state = settings.recurrence
        return loaded
    has_head = any("ForQuestionAnswering" in name for name in config.architectures or [])
    load = (AutoModelForQuestionAnswering if has_head else AutoModel).from_pretrained
    plain = load_model(load, settings.model, dtype=torch.float32)
    fields = recurrence_arguments(settings, config, question_answering=True)
    texts = tokenise_texts(tokenizer, [question.document for question in training[:256]], offsets=False)
    model = add_recurrence(
        plain.to(device), tokenizer=tokenizer, documents=[ids for ids, _ in texts],
        head=None if has_head else "question-answering", **fields,
    )  # fmt: skip
    assert isinstance(model, RecurrentForQuestionAnswering)
    model.config.use_state = settings.recurrence
    return model
