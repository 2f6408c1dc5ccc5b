# SPDX-License-Identifier: Apache-2.0
"""The job behind `carryforward memory-tasks`: train a model on a task, score it, and write what came out.

The output folder gets `result.json`, the figure `accuracy.png`, and the model in `model`. The result is plain JSON:

    {"kind": "memory task", "task": "retrieval", "commit": "...", ..., "settings": {...}, "about": {"mode": ...},
     "unit": "pairs", "chance": 0.0625, "model": {"memory": ..., "window": 3, "parameters": ...},
     "training": {"steps": 900, "validations": [...], ...}, "scores": [{"size": 1, "whole": 1.0, ...}, ...]}
"""

from pathlib import Path
from typing import Any

import torch

from ..models.add_recurrence import add_recurrence
from ..models.causal_lm import RecurrentForCausalLM
from ..models.loading import load_causal, need_state, usable_device
from ..models.model_files import load_config, load_model
from ..settings.memory_tasks import (
    NEW,
    CopySettings,
    FactsSettings,
    PassKeySettings,
    RetrievalSettings,
    ReverseSettings,
    TaskSettings,
    TextTaskSettings,
)
from ..training.lifecycle import Interrupted, apply_training_fields, describe_memory, recurrence_arguments
from ..utils import console
from ..utils.files import atomic_folder, is_vacant, write_json
from ..utils.locks import LOCK, lock_output
from ..utils.parsing import read_json_object
from ..utils.provenance import provenance
from ..utils.signals import STOP_SIGNALS, Interruptible
from . import report
from .base import Task
from .copying import Copy, Reverse
from .facts import Facts
from .filler import Filler
from .models import make_model
from .passkey import PassKey
from .retrieval import Retrieval
from .score import SizeScore, score_task
from .train import TaskTraining, TrainingCurve, train_task

SETTINGS, RESULT, FIGURE = "settings.json", "result.json", "accuracy.png"
MODEL, CHECKPOINT = "model", "checkpoint.pt"  # the latter until there is a result
_REMEDY = "Use another --out."


def memory_tasks(settings: TaskSettings, out: Path, *, device: str | None = None) -> dict[str, Any]:
    """Train and score a model on a task, or go on where an earlier call with the same settings was interrupted. Returns
    the result; that of an earlier call if the folder has it already."""
    _check_folder(settings, out)
    if (out / RESULT).is_file():
        console.note(f"{out} is finished already: this is its result.")
        return read_json_object(out / RESULT, _REMEDY)
    device = usable_device(device)
    task, model = prepare(settings)
    task.check_model(model)
    model.to(device)  # type: ignore[arg-type]
    model.fast_path = settings.fast_path  # type: ignore[assignment]  # checked by the settings
    describe_memory(model.config)
    if not settings.steps and model.untrained_memories:
        console.note(f"never trained: the memory {', '.join(model.untrained_memories)}")
    out.mkdir(parents=True, exist_ok=True)
    with lock_output(out / LOCK, out):
        write_json(out / SETTINGS, _identity(settings))
        try:
            curve = _train(model, task, settings, out) if settings.steps else None
            scores = _score(model, task, settings)
        except KeyboardInterrupt:
            kept = f"the training is saved in {out}" if (out / CHECKPOINT).exists() else "nothing is saved"
            raise Interrupted(f"interrupted: {kept}. To go on, run the same command again.") from None
        result = {
            "kind": "memory task", "task": task.name, **provenance(device), "seed": settings.seed,
            "settings": settings.as_json(), "about": task.settings(), "unit": task.unit, "chance": task.chance,
            "whole_answers": task.whole_answers, "model": _describe(model), "training": curve and curve.as_json(),
            "scores": [score.as_json() for score in scores],
        }  # fmt: skip
        report.draw(result, out / FIGURE)
        write_json(out / RESULT, result)
        (out / CHECKPOINT).unlink(missing_ok=True)
    return result


def prepare(settings: TaskSettings) -> tuple[Task, RecurrentForCausalLM]:
    """The task and the model that settings ask for."""
    if isinstance(settings, TextTaskSettings):
        return _prepare_text_task(settings)
    if isinstance(settings, RetrievalSettings):
        task: Task = Retrieval(settings.mode, key_symbols=settings.key_symbols, window=settings.window)
    elif isinstance(settings, CopySettings):
        task = (Reverse if isinstance(settings, ReverseSettings) else Copy)(settings.symbols, settings.windows)
    else:
        raise ValueError(f"settings: there is no task for {type(settings).__name__}.")
    if settings.model == NEW:
        fields = {name: value for name, value in settings.recurrence_fields().items() if name != "window"}
        sizes = {name: getattr(settings, name) for name in ("backbone", "layers", "width", "heads", "seed")}
        return task, make_model(task, **sizes, **fields)
    need_state(settings.model)
    config: Any = load_config(settings.model)
    apply_training_fields(config, settings)
    return task, load_model(RecurrentForCausalLM.from_pretrained, settings.model, config=config)


def _prepare_text_task(settings: TextTaskSettings) -> tuple[Task, RecurrentForCausalLM]:
    """A task in words, and a pretrained model, which is made recurrent if it is plain."""
    loaded = load_causal(settings.model)
    model: Any = loaded.model
    if loaded.recurrent:
        apply_training_fields(model.config, settings)
    else:
        torch.manual_seed(settings.seed)  # memories are initialised at random
        model = add_recurrence(model, tokenizer=loaded.tokenizer, **recurrence_arguments(settings, model.config))
    filler = Filler(loaded.tokenizer, settings.data, text_field=settings.text_field)
    if isinstance(settings, FactsSettings):
        return Facts(loaded.tokenizer, filler, about=settings.about), model
    if isinstance(settings, PassKeySettings):
        return PassKey(loaded.tokenizer, filler, digits=settings.digits), model
    raise ValueError(f"settings: there is no task for {type(settings).__name__}.")


def _train(model: RecurrentForCausalLM, task: Task, settings: TaskSettings, out: Path) -> TrainingCurve:
    """Train, and save the model. A first Ctrl-C ends training after the step."""
    names = (  # the same in both
        "steps", "stage_steps", "stage_accuracy", "stop_accuracy", "batch_size", "learning_rate",
        "recurrence_learning_rate", "weight_decay", "warmup_steps", "max_grad_norm", "validate_every",
        "validation_samples", "bf16", "seed",
    )  # fmt: skip
    training = TaskTraining(sizes=settings.train_sizes, **{name: getattr(settings, name) for name in names})
    stop = Interruptible("finishing this step, then saving; press again to stop at once")
    with stop.listening(*STOP_SIGNALS):
        curve = train_task(
            model, task, training, interrupted=lambda: stop.requested, library=False, checkpoint=out / CHECKPOINT
        )
    if stop.requested:
        raise KeyboardInterrupt
    with atomic_folder(out / MODEL) as folder:
        model.save_pretrained(folder)
    return curve


def _score(model: RecurrentForCausalLM, task: Task, settings: TaskSettings) -> list[SizeScore]:
    names = ("samples", "seed", "batch_size", "bf16")
    chosen = {name: getattr(settings, name) for name in names}
    return score_task(model, task, settings.test_sizes, library=False, **chosen)


def _describe(model: RecurrentForCausalLM) -> dict[str, Any]:
    """The model's type, size and recurrence."""
    base = model.config.base_config
    return {
        "type": base.model_type, "layers": base.num_hidden_layers, "width": base.hidden_size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_bytes": model.memory.state_bytes, "recurrence": model.config.recurrence.to_dict(),
        "carries": model.config.recurrence.describe(),
    }  # fmt: skip


def _identity(settings: TaskSettings) -> dict[str, Any]:
    return {"task": settings.task, **settings.as_json()}


def _check_folder(settings: TaskSettings, out: Path) -> None:
    """Refuse a folder that holds anything but what this command has written, with the same settings."""
    path = out / SETTINGS
    if path.is_file():
        now, before = _identity(settings), read_json_object(path, _REMEDY)
        changes = [f"{name}: {before.get(name)} there, {now[name]} here" for name in now
                   if now[name] != before.get(name)]  # fmt: skip
        if changes:
            raise ValueError(f"{out} is of other settings ({', '.join(changes)}). {_REMEDY}")
    elif out.exists() and not (out.is_dir() and is_vacant(out)):
        raise ValueError(f"--out {out} exists and is not of `carryforward memory-tasks`. {_REMEDY}")
