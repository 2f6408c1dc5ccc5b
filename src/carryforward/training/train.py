# SPDX-License-Identifier: Apache-2.0
"""The job behind `carryforward train`: a model, a corpus and settings in; a folder with a trained model out.

Several learning rates are tried first, briefly, and the best by validation is used. `runs` keeps the run's folder.
"""

import dataclasses
import itertools
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from ..config import RecurrenceConfig, RecurrentModelConfig
from ..data.corpora import ALL, available_splits, has_own_splits, open_corpus
from ..data.documents import Documents, tokenise
from ..models.add_recurrence import add_recurrence
from ..models.causal_lm import RecurrentForCausalLM
from ..models.loading import Loaded, describe_causal, load_causal, load_tokenizer
from ..models.position_offsets import measure_position_offsets, needs_position_offsets
from ..settings import TrainSettings
from ..utils import checkpoints, console
from .base_trainer import NonFiniteLoss
from .callbacks import GracefulStopCallback, show
from .finishing import check_same, finish, free, shared_arguments, take_over, train_until_done
from .run_folder import Run
from .trainer import RecurrentTrainer, RecurrentTrainingArguments


def train(settings: TrainSettings, out: Path, *, report_to: str = "none", use_cpu: bool = False) -> dict[str, Any]:
    """Train, or go on with a run that was stopped. Gives back the run's record, as in its `run.json`."""
    use_cpu = use_cpu or not torch.accelerator.is_available()  # or `Trainer` refuses bf16 there
    begin = RecurrentTrainingArguments(str(out), use_cpu=use_cpu, load_best_model_at_end=False)  # knows the processes
    run = Run(settings, out, writes=begin.should_save)
    if run.finished:
        console.note(f"{out} is finished already. Use another --out to train again.")
        return run.record
    _check_recurrence(settings)
    tokenizer = load_tokenizer(settings.model)
    with begin.main_process_first(local=False):
        train_documents, validation = _documents(settings, tokenizer)
    console.note(_describe("training", train_documents) + (_describe("; validation", validation) if validation else ""))
    data = {"train": train_documents.key, "validation": validation.key if validation else None}

    def job(chosen: TrainSettings, folder: Path) -> RecurrentTrainer:
        arguments = _arguments(chosen, folder, report_to, use_cpu)
        loaded = load_causal(settings.model)
        base = checkpoints.fingerprint(loaded.model)
        set_seed(chosen.seed)  # the new parameters' first values
        model = _recurrent(loaded, chosen)
        model.fast_path = settings.fast_path  # type: ignore[assignment]  # `settings` has checked it
        trainer = RecurrentTrainer(model, arguments, train_documents, validation, processing_class=tokenizer)
        if settings.recurrence and needs_position_offsets(model):  # on the trainer's device
            measure_position_offsets(model, train_documents)
        show(trainer)
        # not before all is known to fit: a corrected command may use the folder
        told = {"data": data, "processes": begin.world_size, "window": model.config.recurrence.window}
        run.begin({**told, "base": base})
        return trainer

    stop = GracefulStopCallback()
    with stop.listening(signal.SIGINT, signal.SIGTERM):
        trainer = job(_search(settings, run, job, stop), out)
        train_until_done(trainer, run, stop)
    model = trainer.accelerator.unwrap_model(trainer.model)
    return finish(trainer, run, model if settings.recurrence else model.base, tokenizer, _outcome(trainer))


def _outcome(trainer: RecurrentTrainer) -> dict[str, Any]:
    history = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    for entry in history:
        entry["tokens"] = trainer.tokens_after(int(entry["step"]))
    return {
        "tokens": trainer.tokens_after(trainer.state.global_step),
        "best_word_perplexity": trainer.state.best_metric,
        "history": history,
    }


# --- what goes in --------------------------------------------------------------------------------------------------


def _documents(settings: TrainSettings, tokenizer: Any) -> tuple[Documents, Documents | None]:
    checksums = Path(settings.checksums) if settings.checksums else None
    corpus = open_corpus(settings.data, "train", text_field=settings.text_field, checksums=checksums)
    documents = tokenise(corpus, tokenizer, max_tokens=settings.max_document_tokens)
    if not settings.validation:
        return documents, None
    source = settings.validation_data or settings.data
    split = "validation" if settings.validation_data is None or has_own_splits(source) else ALL
    if split != ALL and split not in (splits := available_splits(source)):
        raise ValueError(
            f"{source} has no validation split (it has: {', '.join(splits)}). Give --validation-data, or "
            "--no-validation to train without."
        )
    checksums = checksums if source.partition("=")[0] == "pg19" else None
    held_out = open_corpus(source, split, text_field=settings.text_field, checksums=checksums)
    found = tokenise(held_out, tokenizer, max_tokens=settings.max_validation_tokens)
    if not (found.lengths > 1).any():
        raise ValueError(f"{source}, split {split!r}: no document has a second token to validate on. Give longer ones.")
    return documents, found


def _check_recurrence(settings: TrainSettings) -> None:
    """Refuse what the model cannot do before anything is tokenised."""
    config, _ = describe_causal(settings.model)
    if isinstance(config, RecurrentModelConfig):
        check_same(config, settings)
    else:
        RecurrentModelConfig(base_config=config, recurrence=_recurrence(settings))


def _recurrence(settings: TrainSettings) -> RecurrenceConfig:
    return RecurrenceConfig.preset(settings.preset or "paper", **settings.recurrence_fields())


def _describe(what: str, documents: Documents) -> str:
    number = f"{len(documents):,} document{'s' * (len(documents) != 1)}"
    return f"{what}: {documents.name}, {number}, {int(documents.lengths.sum()):,} tokens"


def _recurrent(loaded: Loaded, settings: TrainSettings) -> RecurrentForCausalLM:
    if isinstance(loaded.model, RecurrentForCausalLM):
        take_over(loaded.model.config, settings)
        return loaded.model
    model = add_recurrence(loaded.model, _recurrence(settings))
    assert isinstance(model, RecurrentForCausalLM)
    return model


def _arguments(settings: TrainSettings, out: Path, report_to: str, use_cpu: bool) -> RecurrentTrainingArguments:
    return RecurrentTrainingArguments(
        **shared_arguments(settings, out, report_to, use_cpu),
        windows_per_sample=settings.windows_per_sample,
        learning_rate=settings.learning_rate[0],
        recurrence_learning_rate=settings.recurrence_learning_rate[0],
        freeze_base=settings.freeze_base,
        carry_state=settings.carry_state,
        train_tokens=settings.train_tokens,
        eval_tokens=settings.eval_tokens,
        save_tokens=settings.save_tokens,
        warmup_steps=settings.warmup_steps,
    )


# --- running -------------------------------------------------------------------------------------------------------


def _search(settings: TrainSettings, run: Run, job: Any, stop: GracefulStopCallback) -> TrainSettings:
    """Try each pair of learning rates briefly and choose the best by validation; nothing to do for a single pair."""
    rates = settings.recurrence_learning_rate if settings.recurrence else settings.recurrence_learning_rate[:1]
    pairs = list(itertools.product(settings.learning_rate, rates))
    if len(pairs) == 1:
        return settings
    if not settings.validation:
        raise ValueError("several learning rates are compared by validation: leave out --no-validation, or give one.")
    tried = {tuple(trial["rates"]): trial["word_perplexity"] for trial in run.record["search"]}
    folder = run.folder / "search"
    for base, new in pairs:
        if (base, new) in tried:
            continue
        console.note(f"trying learning rate {base:g}, of the recurrence {new:g}")
        trial = dataclasses.replace(
            settings, learning_rate=(base,), recurrence_learning_rate=(new,), train_tokens=settings.search_tokens
        )
        tried[base, new] = _try(job(trial, folder), run, stop)
        run.record["search"].append({"rates": [base, new], "word_perplexity": tried[base, new]})
        if run.writes:
            shutil.rmtree(folder, ignore_errors=True)
        run.write()
    found = {pair: perplexity for pair, perplexity in tried.items() if perplexity is not None}
    if not found:
        raise NonFiniteLoss("No learning rate gave a finite loss: try smaller ones, with another --out.")
    base, new = min(found, key=lambda pair: found[pair])
    console.note(f"best by validation: learning rate {base:g}, of the recurrence {new:g}")
    run.record["chosen"] = {"learning_rate": base, "recurrence_learning_rate": new}
    return dataclasses.replace(settings, learning_rate=(base,), recurrence_learning_rate=(new,))


def _try(trainer: RecurrentTrainer, run: Run, stop: GracefulStopCallback) -> float | None:
    """The best word perplexity of a trial, or None if it came to nothing."""
    try:
        train_until_done(trainer, run, stop)
    except NonFiniteLoss as error:
        console.note(str(error))
        return None
    finally:
        free()
    return trainer.state.best_metric
