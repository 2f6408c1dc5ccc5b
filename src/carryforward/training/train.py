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

from ..models.model_files import load_tokenizer
from ..settings.commands import TrainSettings
from ..utils import checkpoints, console
from ..utils.files import delete_folder
from .base_trainer import NonFiniteLoss
from .callbacks import use_progress_bar
from .document_trainer import DocumentTrainer, DocumentTrainingArguments
from .lifecycle import describe_memory, release_memory, save_run, shared_training_arguments, train_until_done
from .run_folder import RunFolder
from .sharding import load_weights_on_every_process
from .task_setup import TaskSetup, set_up_task


def train(settings: TrainSettings, out: Path, *, report_to: str = "none", use_cpu: bool = False) -> dict[str, Any]:
    """Train, resume a run that was stopped, or continue a finished one for longer. Returns the run's record, as in its
    `run.json`."""
    load_weights_on_every_process()
    use_cpu = use_cpu or not torch.accelerator.is_available()  # else `Trainer` refuses bf16 on a CPU
    processes = DocumentTrainingArguments(str(out), use_cpu=use_cpu, load_best_model_at_end=False)
    with RunFolder(settings, out, processes.should_save, length_settings=("epochs", "train_tokens")) as run:
        if run.finished:
            console.note(f"{out} is finished already. To train it further, give more --epochs or --train-tokens.")
            return run.record
        return _train(settings, run, processes, report_to, use_cpu)


def _train(
    settings: TrainSettings, run: RunFolder, processes: DocumentTrainingArguments, report_to: str, use_cpu: bool
) -> dict[str, Any]:
    setup = set_up_task(settings)
    config = setup.describe()
    tokenizer = load_tokenizer(settings.model, config)
    planned = setup.check_recurrence(config, tokenizer)
    with processes.main_process_first(local=False):
        documents, validation = setup.load_documents(tokenizer)
    console.note(_describe("training", documents) + (_describe("; validation", validation) if validation else ""))
    if settings.recurrence:
        describe_memory(planned)
    data = {"train": documents.key, "validation": validation.key if validation else None}

    def make_trainer(chosen: TrainSettings, folder: Path) -> DocumentTrainer:
        arguments = _arguments(setup, chosen, folder, report_to, use_cpu)
        set_seed(chosen.seed)  # a head may be new
        loaded = setup.load(documents)
        base = checkpoints.fingerprint(loaded.model)
        set_seed(chosen.seed)  # the recurrence is initialised at random
        model = setup.make_recurrent(loaded, documents, arguments.device)
        model.fast_path = settings.fast_path  # type: ignore[assignment]  # checked by the settings
        trainer = setup.make_trainer(model, arguments, documents, validation, tokenizer)
        use_progress_bar(trainer)
        # after all checks: a command that was refused leaves the folder free for a corrected one
        window = model.config.recurrence.window
        run.begin({"data": data, "processes": processes.world_size, "window": window, "base": base})
        return trainer

    trainer = make_trainer(_search(setup, run, make_trainer), run.folder)
    run.plan(trainer.planned_steps)
    train_until_done(trainer, run)
    model = trainer.accelerator.unwrap_model(trainer.model)
    outcome = {"task": setup.task, **_outcome(trainer)}
    return save_run(trainer, run, model if settings.recurrence else model.base, tokenizer, outcome)


def _outcome(trainer: DocumentTrainer) -> dict[str, Any]:
    for entry in trainer.validations:
        entry["tokens"] = trainer.tokens_after(int(entry["step"]))
    return {
        "tokens": trainer.tokens_after(trainer.state.global_step),
        f"best_{trainer.metric}": trainer.state.best_metric,
        "history": trainer.validations,
    }


_METRICS = {"word_perplexity": "word perplexity {:,.2f}", "loss": "loss {:.3f}", "macro_f1": "macro-F1 {:.3f}"}


def summary(record: dict[str, Any]) -> str:
    """A finished run in a line: its tokens, and the best validation if there was one."""
    best = [text.format(record[f"best_{name}"]) for name, text in _METRICS.items() if record.get(f"best_{name}")]
    return f"{record['tokens']:,} tokens" + "".join(f", validation {text}" for text in best)


def _describe(what: str, documents: Any) -> str:
    number = f"{len(documents):,} document{'s' * (len(documents) != 1)}"
    text = f"{what}: {documents.name}, {number}, {int(documents.lengths.sum()):,} tokens"
    if lost := getattr(documents, "words_without_token", 0):
        text += f" ({lost:,} words have no token and are not scored)"
    return text


def _arguments(
    setup: TaskSetup, settings: TrainSettings, out: Path, report_to: str, use_cpu: bool
) -> DocumentTrainingArguments:
    shared = {
        **shared_training_arguments(settings, out, report_to, use_cpu),
        "windows_per_sample": settings.windows_per_sample,
        "learning_rate": settings.learning_rate[0],
        "recurrence_learning_rate": settings.recurrence_learning_rate[0],
        "freeze_base": settings.freeze_base,
        "train_tokens": settings.train_tokens,
        "eval_tokens": settings.eval_tokens,
        "save_tokens": settings.save_tokens,
        "warmup_steps": settings.warmup_steps,
    }
    return setup.make_arguments(shared)


# --- learning-rate search ------------------------------------------------------------------------------------------


def _search(setup: TaskSetup, run: RunFolder, make_trainer: Any) -> TrainSettings:
    """Train briefly with each pair of learning rates and choose the best on validation. A single pair is kept."""
    settings = setup.settings
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
    tried = {tuple(trial["rates"]): trial[setup.metric] for trial in run.record["search"]}
    for number, (base, new) in enumerate(pairs, 1):
        if (base, new) in tried:
            continue
        console.note(f"trying learning rate {base:g}, recurrence {new:g}")
        trial = dataclasses.replace(
            settings, learning_rate=(base,), recurrence_learning_rate=(new,), train_tokens=settings.search_tokens
        )
        tried[base, new] = _try(make_trainer(trial, folder / f"trial-{number}"), run)
        run.record["search"].append({"rates": [base, new], setup.metric: tried[base, new]})
        run.write()
        if run.writes:
            delete_folder(folder / f"trial-{number}")
    if run.writes and folder.exists():
        delete_folder(folder)
    finite = {pair: result for pair, result in tried.items() if result is not None}
    if not finite:
        raise NonFiniteLoss("No learning rate gave a finite loss. Use smaller ones, and another --out.")
    sign = -1 if setup.arguments.greater_is_better else 1
    base, new = min(finite, key=lambda pair: sign * finite[pair])
    console.note(f"best on validation: learning rate {base:g}, recurrence {new:g}")
    run.record["chosen"] = {"learning_rate": base, "recurrence_learning_rate": new}
    return dataclasses.replace(settings, learning_rate=(base,), recurrence_learning_rate=(new,))


def _try(trainer: DocumentTrainer, run: RunFolder) -> float | None:
    """The best validation of a trial; None if its loss became non-finite."""
    try:
        train_until_done(trainer, run)
    except NonFiniteLoss as error:
        console.note(str(error))
        return None
    finally:
        release_memory()
    return trainer.best_validation()
