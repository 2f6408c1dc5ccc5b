# SPDX-License-Identifier: Apache-2.0
"""The job behind `carryforward train`: a model, a corpus and settings in; a folder with a trained model out.

Of several learning rates, each is tried on a few tokens and the best on validation is used.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from ..config import RecurrentModelConfig
from ..data.corpora import ALL, available_splits, has_own_splits
from ..data.documents import Documents, load_documents
from ..models.add_recurrence import add_recurrence, ensure_architecture, recurrence_of
from ..models.causal_lm import RecurrentForCausalLM
from ..models.loading import Loaded, describe_causal, load_causal
from ..models.model_files import load_tokenizer
from ..settings.commands import TrainSettings
from ..utils import checkpoints, console
from ..utils.files import delete_folder
from .base_trainer import NonFiniteLoss
from .callbacks import use_progress_bar
from .lifecycle import (
    apply_training_fields,
    check_same_recurrence,
    describe_memory,
    recurrence_arguments,
    release_memory,
    save_run,
    shared_training_arguments,
    train_until_done,
)
from .run_folder import RunFolder
from .sharding import load_weights_on_every_process
from .trainer import RecurrentTrainer, RecurrentTrainingArguments


def train(settings: TrainSettings, out: Path, *, report_to: str = "none", use_cpu: bool = False) -> dict[str, Any]:
    """Train, resume a run that was stopped, or continue a finished one for longer. Returns the run's record, as in its
    `run.json`."""
    load_weights_on_every_process()
    use_cpu = use_cpu or not torch.accelerator.is_available()  # else `Trainer` refuses bf16 on a CPU
    processes = RecurrentTrainingArguments(str(out), use_cpu=use_cpu, load_best_model_at_end=False)
    with RunFolder(settings, out, processes.should_save, length_settings=("epochs", "train_tokens")) as run:
        if run.finished:
            console.note(f"{out} is finished already. To train it further, give more --epochs or --train-tokens.")
            return run.record
        return _train(settings, run, processes, report_to, use_cpu)


def _train(
    settings: TrainSettings, run: RunFolder, processes: RecurrentTrainingArguments, report_to: str, use_cpu: bool
) -> dict[str, Any]:
    config = _check_recurrence(settings)
    tokenizer = load_tokenizer(settings.model, config)
    with processes.main_process_first(local=False):
        train_documents, validation = _documents(settings, tokenizer)
    console.note(_describe("training", train_documents) + (_describe("; validation", validation) if validation else ""))
    if settings.recurrence:
        describe_memory(config)
    data = {"train": train_documents.key, "validation": validation.key if validation else None}

    def make_trainer(chosen: TrainSettings, folder: Path) -> RecurrentTrainer:
        arguments = _arguments(chosen, folder, report_to, use_cpu)
        loaded = load_causal(settings.model)
        base = checkpoints.fingerprint(loaded.model)
        set_seed(chosen.seed)  # the recurrence is initialised at random
        model = _recurrent(loaded, chosen, train_documents, arguments.device)
        model.fast_path = settings.fast_path  # type: ignore[assignment]  # checked by the settings
        trainer = RecurrentTrainer(model, arguments, train_documents, validation, processing_class=tokenizer)
        use_progress_bar(trainer)
        # after all checks: a command that was refused leaves the folder free for a corrected one
        window = model.config.recurrence.window
        run.begin({"data": data, "processes": processes.world_size, "window": window, "base": base})
        return trainer

    trainer = make_trainer(_search(settings, run, make_trainer), run.folder)
    run.plan(trainer.planned_steps)
    train_until_done(trainer, run)
    model = trainer.accelerator.unwrap_model(trainer.model)
    return save_run(trainer, run, model if settings.recurrence else model.base, tokenizer, _outcome(trainer))


def _outcome(trainer: RecurrentTrainer) -> dict[str, Any]:
    history = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    for entry in history:
        entry["tokens"] = trainer.tokens_after(int(entry["step"]))
    return {
        "tokens": trainer.tokens_after(trainer.state.global_step),
        "best_word_perplexity": trainer.state.best_metric,
        "history": history,
    }


# --- data, model and arguments -------------------------------------------------------------------------------------


def _documents(settings: TrainSettings, tokenizer: Any) -> tuple[Documents, Documents | None]:
    checksums = Path(settings.checksums) if settings.checksums else None
    documents = load_documents(
        settings.data, "train", tokenizer, text_field=settings.text_field, checksums=checksums,
        max_tokens=settings.max_document_tokens,
    )  # fmt: skip
    if not settings.validation:
        return documents, None
    source = settings.validation_data or settings.data
    split = "validation" if settings.validation_data is None or has_own_splits(source) else ALL
    if split != ALL and split not in (splits := available_splits(source)):
        raise ValueError(
            f"{source} has no validation split (it has: {', '.join(splits)}). Give --validation-data, or "
            "--no-validation."
        )
    checksums = checksums if source.partition("=")[0] == "pg19" else None
    validation = load_documents(
        source, split, tokenizer, text_field=settings.text_field, checksums=checksums,
        max_tokens=settings.max_validation_tokens, require_targets=True,
    )  # fmt: skip
    return documents, validation


def _check_recurrence(settings: TrainSettings) -> RecurrentModelConfig:
    """Refuse a recurrence that the model does not support, before anything is tokenised. Returns the model's config."""
    config, _ = describe_causal(settings.model)
    if isinstance(config, RecurrentModelConfig):
        check_same_recurrence(config, settings)
        return config
    recurrence = recurrence_of(config, **recurrence_arguments(settings, config))
    return RecurrentModelConfig(base_config=config, recurrence=recurrence)


def _describe(what: str, documents: Documents) -> str:
    number = f"{len(documents):,} document{'s' * (len(documents) != 1)}"
    return f"{what}: {documents.name}, {number}, {int(documents.lengths.sum()):,} tokens"


def _recurrent(
    loaded: Loaded, settings: TrainSettings, documents: Documents, device: torch.device
) -> RecurrentForCausalLM:
    if isinstance(loaded.model, RecurrentForCausalLM):
        apply_training_fields(loaded.model.config, settings)
        return loaded.model
    rotary = ensure_architecture(loaded.model).rotary
    fields = recurrence_arguments(settings, loaded.model.config)
    if not rotary:  # position offsets are measured: on the device of the training
        loaded.model.to(device)  # type: ignore[arg-type]
    model = add_recurrence(loaded.model, documents=documents, tokenizer=loaded.tokenizer, **fields)
    assert isinstance(model, RecurrentForCausalLM)
    return model


def _arguments(settings: TrainSettings, out: Path, report_to: str, use_cpu: bool) -> RecurrentTrainingArguments:
    return RecurrentTrainingArguments(
        **shared_training_arguments(settings, out, report_to, use_cpu),
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


# --- learning-rate search ------------------------------------------------------------------------------------------


def _search(settings: TrainSettings, run: RunFolder, make_trainer: Any) -> TrainSettings:
    """Train briefly with each pair of learning rates and choose the best on validation. A single pair is kept."""
    rates = settings.recurrence_learning_rate if settings.recurrence else settings.recurrence_learning_rate[:1]
    pairs = list(itertools.product(settings.learning_rate, rates))
    if len(pairs) == 1:
        return settings
    if not settings.validation:
        raise ValueError(
            "Several learning rates are compared on validation text: leave out --no-validation, or give one rate."
        )
    # A folder for each trial, deleted after its result was recorded: one that is found is of a trial without a result.
    folder = run.folder / "search"
    tried = {tuple(trial["rates"]): trial["word_perplexity"] for trial in run.record["search"]}
    for number, (base, new) in enumerate(pairs, 1):
        if (base, new) in tried:
            continue
        console.note(f"trying learning rate {base:g}, recurrence {new:g}")
        trial = dataclasses.replace(
            settings, learning_rate=(base,), recurrence_learning_rate=(new,), train_tokens=settings.search_tokens
        )
        tried[base, new] = _try(make_trainer(trial, folder / f"trial-{number}"), run)
        run.record["search"].append({"rates": [base, new], "word_perplexity": tried[base, new]})
        run.write()
        if run.writes:
            delete_folder(folder / f"trial-{number}")
    if run.writes and folder.exists():
        delete_folder(folder)
    finite = {pair: perplexity for pair, perplexity in tried.items() if perplexity is not None}
    if not finite:
        raise NonFiniteLoss("No learning rate gave a finite loss. Use smaller ones, and another --out.")
    base, new = min(finite, key=lambda pair: finite[pair])
    console.note(f"best on validation: learning rate {base:g}, recurrence {new:g}")
    run.record["chosen"] = {"learning_rate": base, "recurrence_learning_rate": new}
    return dataclasses.replace(settings, learning_rate=(base,), recurrence_learning_rate=(new,))


def _try(trainer: RecurrentTrainer, run: RunFolder) -> float | None:
    """The best word perplexity of a trial; None if its loss became non-finite."""
    try:
        train_until_done(trainer, run)
    except NonFiniteLoss as error:
        console.note(str(error))
        return None
    finally:
        release_memory()
    # from the log: the checkpoint of the best validation may be lost, its result is not
    return min(entry["eval_word_perplexity"] for entry in trainer.state.log_history if "eval_loss" in entry)
