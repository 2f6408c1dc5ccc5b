# SPDX-License-Identifier: Apache-2.0
"""Steps that all training jobs share: check a model that is already recurrent, train until done or stopped, save."""

import dataclasses
import gc
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..config import RecurrentModelConfig
from ..memories.reach import memory_with_reach
from ..models.add_recurrence import recurrence_of
from ..models.base import RecurrentPreTrainedModel
from ..models.files.model_card import CARD, write_files
from ..settings.commands import QuestionSettings, TrainSettings
from ..settings.recurrence import RecurrentSettings
from ..utils import console
from ..utils.digests import digest_files
from ..utils.files import atomic_folder
from ..utils.provenance import provenance
from ..utils.signals import STOP_SIGNALS
from .base_trainer import BaseTrainer
from .callbacks import GracefulStopCallback
from .run_folder import RunFolder
from .sharding import gathered_weights


def uses_cpu(device: str | None) -> bool:
    """Whether training must stay on the CPU. `Trainer` chooses the device, so no other can be asked for by name."""
    present = torch.accelerator.current_accelerator()
    if device in (None, "cpu") or (present is not None and device == present.type):
        return device == "cpu"
    if present is None and device.partition(":")[0] in ("cuda", "mps", "xpu"):
        built = "" if torch.version.cuda else " (this PyTorch is built without CUDA)" * device.startswith("cuda")
        raise ValueError(f"--device {device}: PyTorch finds no such device here{built}. Leave it out to use the CPU.")
    raise ValueError(
        f"--device {device}: training uses the GPU if there is one, or cpu. Leave the option out, and choose GPUs "
        "with CUDA_VISIBLE_DEVICES."
    )


class Interrupted(KeyboardInterrupt):
    """Training was stopped from outside; everything up to here is saved."""


_TRAINING_FIELDS = ("bptt_windows", "block_windows", "keep_windows")  # how a recurrence is trained, not what it is


def check_same_recurrence(config: RecurrentModelConfig, settings: RecurrentSettings) -> None:
    """Refuse settings of a recurrence that differs from the model's own."""
    own, fields = config.recurrence, settings.recurrence_fields()
    if fields.pop("preset") != RecurrentSettings.preset:
        raise ValueError(f"{settings.model} is recurrent already. Leave --preset out.")
    if (reach := fields.pop("reach", None)) is not None:
        sized = memory_with_reach(reach, fields.get("memory", "kv"), config.base_config)
        fields["memory"] = [{"kind": "kv", "sinks": sized.sinks, "recent": sized.recent, "far": sized.far}]
    pairs = [(name, getattr(own, name), value) for name, value in fields.items() if name != "memory"]
    memories, kinds = fields.get("memory", ()), [memory.kind for memory in own.memories]
    others = settings.memory is not None and {*settings.memory} != {*kinds}
    if others or any(options["kind"] not in kinds for options in memories):
        raise ValueError(
            f"{settings.model} is recurrent already, with the memory {' '.join(kinds)}. Leave out --memory and options "
            "of other memories."
        )
    for options in memories:
        memory = own.find(options["kind"])
        pairs += [(name, getattr(memory, name), value) for name, value in options.items()]
    differing = [f"{name}={ours}" for name, ours, value in pairs if name not in _TRAINING_FIELDS and ours != value]
    if differing:
        raise ValueError(f"{settings.model} is recurrent already, with {', '.join(differing)}. Leave these out.")


def recurrence_arguments(
    settings: RecurrentSettings, base: PreTrainedConfig, *, question_answering: bool = False
) -> dict[str, Any]:
    """The arguments of `add_recurrence` that settings ask for. Without recurrence only the window matters: the model
    gets the paper's memory, which is neither read nor trained."""
    fields = settings.recurrence_fields()
    recurrence = recurrence_of(base, question_answering=question_answering, **fields)
    if not settings.recurrence:
        return {**fields, "preset": "paper", "window": recurrence.window}
    return {**fields, "window": recurrence.window}


def describe_memory(config: RecurrentModelConfig) -> None:
    """Tell the user what passes from a window to the next, and what to expect of it."""
    console.note(f"windows of {config.recurrence.window} tokens")
    for memory in config.recurrence.memories:
        console.note(f"memory: {memory.describe()}. {memory.usage_note()}")


def apply_training_fields(config: RecurrentModelConfig, settings: RecurrentSettings) -> None:
    """Set the fields of a recurrent model's config that decide how it is trained; refuse to change the others."""
    check_same_recurrence(config, settings)
    fields = {name: value for name, value in settings.recurrence_fields().items() if name in _TRAINING_FIELDS}
    config.recurrence = dataclasses.replace(config.recurrence, **fields)


def shared_training_arguments(
    settings: TrainSettings | QuestionSettings, out: Path, report_to: str, use_cpu: bool
) -> dict[str, Any]:
    """Arguments of Hugging Face's `TrainingArguments` that all training jobs set."""
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


def train_until_done(trainer: BaseTrainer, run: RunFolder) -> None:
    """Train until the end or a signal, from the newest intact checkpoint if there is one. All trainings of a run have
    the same `block_windows`."""
    stop = GracefulStopCallback()
    trainer.add_callback(stop)
    trainer.block_windows = run.record.get("block_windows")
    started = time.monotonic()
    try:
        with stop.listening(*STOP_SIGNALS):
            trainer.train(resume_from_checkpoint=True)
    finally:
        # the total, with learning-rate searches and earlier parts of the run
        run.record["seconds"] = run.record.get("seconds", 0.0) + time.monotonic() - started
        run.record["block_windows"] = trainer.block_windows
        run.write()
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)  # close the bar on errors
    if stop.stopped or stop.requested:
        step = trainer.state.global_step
        raise Interrupted(f"stopped at step {step} and saved in {run.folder}. To resume, run the same command again.")


def save_run(
    trainer: BaseTrainer, run: RunFolder, model: Any, tokenizer: Any, outcome: dict[str, Any]
) -> dict[str, Any]:
    """Save the model and finish the run's record, with `outcome` as the entries of this kind of job. Returns it."""
    files: dict[str, str] = {}
    steps = {"steps": trainer.state.global_step, "best_step": trainer.state.best_global_step}
    outcome = {**provenance(str(trainer.args.device)), **steps, **outcome}
    weights = gathered_weights(trainer, model)
    if run.writes:
        with atomic_folder(run.folder) as beside:
            model.save_pretrained(beside, state_dict=weights)
            if getattr(model, "tokenizer", None) is None:  # a recurrent model saves its own
                tokenizer.save_pretrained(beside)
            if isinstance(model, RecurrentPreTrainedModel):
                write_files(model, beside, run.folder, {**run.record, **outcome})
            # but not the card, which users edit
            files = digest_files(beside, sorted(p for p in beside.rglob("*") if p.is_file() and p.name != CARD))
    run.finish({**outcome, "files": files})
    trainer.accelerator.wait_for_everyone()
    return run.record


def release_memory() -> None:
    """Free what a model leaves behind: reference cycles, and compiled code, whose cache has a size limit."""
    gc.collect()
    if torch.cuda.is_available():
        torch.compiler.reset()
