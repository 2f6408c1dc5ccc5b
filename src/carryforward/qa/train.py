# SPDX-License-Identifier: Apache-2.0
"""The job behind `carryforward qa train`: an encoder and a file of questions in, a model that finds answers out."""

import signal
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForQuestionAnswering, set_seed

from ..backbones.architectures import architecture_of
from ..config import RecurrenceConfig, RecurrentModelConfig
from ..data.tokenization import tokens_of
from ..models.add_recurrence import add_recurrence
from ..models.loading import load_config, load_finder, load_model, load_tokenizer
from ..models.position_offsets import measure_position_offsets, needs_position_offsets
from ..models.question_answering import RecurrentForQuestionAnswering
from ..settings import QuestionSettings
from ..training.callbacks import GracefulStopCallback, Patience, show
from ..training.finishing import finish, shared_arguments, take_over, train_until_done
from ..training.run_folder import Run
from ..utils import console
from .dataset import Question, read_questions
from .join_passages import join_passages
from .trainer import QuestionTrainer, QuestionTrainingArguments

_HELD_OUT = 20  # one document of so many is for validation


def train_answers(
    settings: QuestionSettings, out: Path, *, report_to: str = "none", use_cpu: bool = False
) -> dict[str, Any]:
    """Train, or go on with a run that was stopped. Gives back the run's record, as in its `run.json`."""
    use_cpu = use_cpu or not torch.accelerator.is_available()
    arguments = QuestionTrainingArguments(
        **shared_arguments(settings, out, report_to, use_cpu),
        learning_rate=settings.learning_rate,
        recurrence_learning_rate=settings.recurrence_learning_rate,
    )
    run = Run(settings, out, writes=arguments.should_save)
    if run.finished:
        console.note(f"{out} is finished already. Use another --out to train again.")
        return run.record
    tokenizer = load_tokenizer(settings.model)
    train, held_out = _questions(settings)
    set_seed(settings.seed)  # the new parameters' first values
    model = _model(settings, tokenizer)
    trainer = QuestionTrainer(model, arguments, train, held_out, tokenizer=tokenizer)
    show(trainer)
    if settings.patience is not None:
        trainer.add_callback(Patience(settings.patience))
    lost = f"; {len(trainer.lost):,} whose answer is not in the document are left out" * bool(trainer.lost)
    console.note(f"training: {len(train):,} questions{lost}; validation: {len(held_out):,}")
    if settings.recurrence and needs_position_offsets(model):
        texts = tokens_of(tokenizer, [question.document for question in train[:256]], offsets=False)
        measure_position_offsets(model, [ids for ids, _ in texts])
    told = {"train": _digest(train), "validation": _digest(held_out)}
    run.begin({"data": told, "processes": arguments.world_size, "window": model.config.recurrence.window})
    stop = GracefulStopCallback()
    with stop.listening(signal.SIGINT, signal.SIGTERM):
        train_until_done(trainer, run, stop)
    history = [entry for entry in trainer.state.log_history if "eval_f1" in entry]
    outcome = {
        "questions": len(train) - len(trainer.lost),
        "lost": trainer.lost,
        "best_f1": trainer.state.best_metric,
        "history": history,
    }
    return finish(trainer, run, trainer.accelerator.unwrap_model(trainer.model), tokenizer, outcome)


def _questions(settings: QuestionSettings) -> tuple[list[Question], list[Question]]:
    """For training and for validation: no document is in both, and passages are joined on each side alone."""
    given = read_questions(settings.data)
    if settings.validation_data is not None:
        train, held_out = given, read_questions(settings.validation_data)
    else:
        held_out = [question for question in given if _is_held_out(question.document)]
        train = [question for question in given if not _is_held_out(question.document)]
        if not held_out or not train:
            raise ValueError(f"{settings.data} has too few documents to validate on some. Give --validation-data.")
    if settings.join_words is not None:
        train, held_out = (join_passages(some, settings.join_words, seed=settings.seed) for some in (train, held_out))
    return train[: settings.max_questions], held_out[: settings.max_validation_questions]


def _is_held_out(document: str) -> bool:
    return blake2b(document.encode(), digest_size=4).digest()[0] % _HELD_OUT == 0


def _digest(questions: list[Question]) -> str:
    return blake2b(repr(questions).encode(), digest_size=16).hexdigest()


def _model(settings: QuestionSettings, tokenizer: Any) -> RecurrentForQuestionAnswering:
    config, fields = load_config(settings.model), settings.recurrence_fields()
    if isinstance(config, RecurrentModelConfig):
        loaded: Any = load_finder(settings.model, device="cpu").model
        take_over(loaded.config, settings)
        loaded.config.use_state = settings.recurrence
        return loaded
    has_head = any("ForQuestionAnswering" in one for one in config.architectures or [])
    load = (AutoModelForQuestionAnswering if has_head else AutoModel).from_pretrained
    plain = load_model(load, settings.model, dtype=torch.float32)
    chosen = None  # the preset "paper" is section 5.4, which `add_recurrence` knows
    if settings.preset == "kept":
        positions = architecture_of(config).positions(config)
        # half a window is kept: together they fill the model's positions
        chosen = RecurrenceConfig.preset("kept", **{"window": min(512, (2 * positions + 1) // 3), **fields})
    made = add_recurrence(
        plain, chosen, tokenizer=tokenizer, head=None if has_head else "question-answering",
        **(fields if chosen is None else {}),
    )  # fmt: skip
    assert isinstance(made, RecurrentForQuestionAnswering)
    made.config.use_state = settings.recurrence
    return made
