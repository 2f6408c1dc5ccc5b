# SPDX-License-Identifier: Apache-2.0
"""What both training jobs do alike: check a model that is recurrent already, train to the end or to Ctrl-C, save."""

import dataclasses
import gc
import time
from pathlib import Path
from typing import Any

import torch

from ..config import RecurrentModelConfig
from ..settings import QuestionSettings, RecurrentSettings, TrainSettings
from ..utils import checkpoints, console
from ..utils.provenance import provenance
from .base_trainer import BaseTrainer
from .callbacks import GracefulStopCallback
from .run_folder import Run


class Interrupted(KeyboardInterrupt):
    """Training was stopped from outside; everything up to here is saved."""


_OF_TRAINING = ("bptt_windows", "keep_windows")  # not what a recurrence is, but how it is trained


def check_same(config: RecurrentModelConfig, settings: RecurrentSettings) -> None:
    """Refuse settings that ask for another recurrence than a model has."""
    own, wanted = config.recurrence, settings.recurrence_fields()
    if settings.preset is not None:
        raise ValueError(f"{settings.model} is recurrent already. Leave --preset out.")
    differing = [f"{name}={getattr(own, name)}" for name, value in wanted.items()
                 if name not in _OF_TRAINING and getattr(own, name) != value]  # fmt: skip
    if differing:
        raise ValueError(f"{settings.model} is recurrent already, with {', '.join(differing)}. Leave these out.")


def take_over(config: RecurrentModelConfig, settings: RecurrentSettings) -> None:
    """Let a model that is recurrent already be trained as the settings say."""
    check_same(config, settings)
    wanted = settings.recurrence_fields()
    taken = {name: wanted[name] for name in _OF_TRAINING if name in wanted}
    config.recurrence = dataclasses.replace(config.recurrence, **taken)


def shared_arguments(
    settings: TrainSettings | QuestionSettings, out: Path, report_to: str, use_cpu: bool
) -> dict[str, Any]:
    """What every training tells Hugging Face's `Trainer`."""
    return {
        "output_dir": str(out),
        "use_state": settings.recurrence,
        "num_train_epochs": settings.epochs,
        "per_device_train_batch_size": settings.batch_size,
        "per_device_eval_batch_size": settings.batch_size,
        "gradient_accumulation_steps": settings.accumulate,
        "max_grad_norm": settings.max_grad_norm,
        "bf16": settings.bf16,
        "seed": settings.seed,
        "report_to": report_to,
        "use_cpu": use_cpu,
    }


def train_until_done(trainer: BaseTrainer, run: Run, stop: GracefulStopCallback) -> None:
    """Train from the newest checkpoint, if there is one, until the end or a signal."""
    trainer.add_callback(stop)
    whole = [one for one in checkpoints.of_run(Path(trainer.args.output_dir)) if checkpoints.is_complete(one)]
    if whole and run.writes:
        console.note(f"going on from {whole[-1]}")
    started = time.monotonic()
    try:
        trainer.train(resume_from_checkpoint=True)
    finally:
        # of all that was done, searches and what was stopped included
        run.record["seconds"] = run.record.get("seconds", 0.0) + time.monotonic() - started
        run.write()
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)  # the bar, if it failed
    if stop.stopped or stop.requested:
        step = trainer.state.global_step
        raise Interrupted(f"stopped at step {step} and saved in {run.folder}. To go on, give the same command again.")


def finish(trainer: BaseTrainer, run: Run, model: Any, tokenizer: Any, outcome: dict[str, Any]) -> dict[str, Any]:
    """Save the model and the run's record, which is given back; `outcome` is what it says beside what all runs say."""
    if run.writes:
        with checkpoints.atomic_folder(run.folder) as beside:
            model.save_pretrained(beside)
            tokenizer.save_pretrained(beside)
    state = trainer.state
    told = {"steps": state.global_step, "best_step": state.best_global_step, **outcome}
    run.finish({**provenance(str(trainer.args.device)), **told})
    trainer.accelerator.wait_for_everyone()
    return run.record


def free() -> None:
    """Give back what a model that is done with still holds: itself, in cycles, and what was compiled for it, of which
    there can only be so much."""
    gc.collect()
    if torch.cuda.is_available():
        torch.compiler.reset()
