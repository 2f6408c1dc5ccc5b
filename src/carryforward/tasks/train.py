# SPDX-License-Identifier: Apache-2.0
"""Train a model on a task, from short documents to long ones.

This is a plain loop, since `Trainer` draws epochs from a data set, and here every step makes new documents, whose size
follows from how well the model does.

A stage of the curriculum adds a size. Half of its steps have this size, the others an earlier one. It ends once enough
of the answers to validation samples are found, or after its share of the steps.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..models.causal_lm import RecurrentForCausalLM
from ..training.base_trainer import NonFiniteLoss
from ..utils.checks import check_count
from ..utils.files import atomic_write
from ..utils.progress import ProgressBar
from .base import TRAIN, VALIDATION, Task, generator, sample_seed
from .score import validate


@dataclass(frozen=True)
class TaskTraining:
    """How a model is trained on a task.

    Attributes:
        steps: at most, in all.
        sizes: of the curriculum's stages; None: the task's `train_sizes`.
        stage_steps: at most, of every stage but the last; None: `steps` divided by the number of stages.
        stage_accuracy: a stage ends once this share of the validation answers is right.
        stop_accuracy: the same for the last stage, which ends training.
        batch_size: documents of a step.
        learning_rate: of AdamW, constant after `warmup_steps` of linear warm-up.
        decay_steps: further ones, after the last stage, in which the rate falls to zero.
        recurrence_learning_rate: of the memory's own parameters; None: `learning_rate`.
        max_grad_norm: gradients are clipped to this norm.
        validate_every: steps between validations.
        validation_samples: documents of a validation, of the stage's size.
        bf16: bfloat16 autocast.
        seed: of the samples.
    """

    steps: int = 10_000
    sizes: tuple[int, ...] | None = None
    stage_steps: int | None = None
    stage_accuracy: float = 0.95
    stop_accuracy: float = 1.0
    batch_size: int = 64
    learning_rate: float = 1e-3
    recurrence_learning_rate: float | None = None
    weight_decay: float = 0.01
    warmup_steps: int = 100
    decay_steps: int = 0
    max_grad_norm: float = 1.0
    validate_every: int = 100
    validation_samples: int = 128
    bf16: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "validate_every", "validation_samples"):
            check_count(name, getattr(self, name))
        check_count("stage_steps", self.stage_steps, optional=True)
        for name in ("warmup_steps", "decay_steps"):
            check_count(name, getattr(self, name), 0)
        if self.sizes is not None and not self.sizes:
            raise ValueError("sizes=(): give at least one size, or None for the task's.")
        for name in ("stage_accuracy", "stop_accuracy"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be above 0 and at most 1.")
        for name in ("learning_rate", "recurrence_learning_rate", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value}: it must be above 0.")


@dataclass
class TrainingCurve:
    """What happened in training.

    Attributes:
        steps: that were done.
        tokens: that were read.
        decay_from: the step after which the rate fell; None if it did not.
        stages: each stage's size, its last step, and whether it was learnt: {"size": 5, "step": 400, "learnt": true}.
        validations: {"step", "size", "loss": mean over the steps since the last one, "accuracy"}.
        stopped: why training ended: "learnt", "steps" or "interrupted".
        seconds: it took.
    """

    steps: int = 0
    tokens: int = 0
    decay_from: int | None = None
    stages: list[dict[str, Any]] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    stopped: str = "steps"
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def train_task(
    model: RecurrentForCausalLM,
    task: Task,
    training: TaskTraining | None = None,
    *,
    interrupted: Callable[[], bool] = lambda: False,
    library: bool = True,
    checkpoint: Path | None = None,
) -> TrainingCurve:
    """Train a model on a task, where it is: on a GPU if it has been moved there. The model is left in training mode.

    Args:
        interrupted: asked after every step; if it is true, training ends there.
        library: as of `ProgressBar`; False is for commands.
        checkpoint: file to which training is written when it ends, for whatever reason. If it is there, training goes
            on from it, exactly as if it had not been interrupted.
    """
    training = TaskTraining() if training is None else training
    task.check_model(model)
    run = _Run(model, task, training, interrupted)
    if checkpoint is not None and checkpoint.exists():
        run.load(checkpoint)
    curve = run.run(library)
    if checkpoint is not None:
        run.save(checkpoint)
    return curve


_STATEFUL = ("model", "optimizer", "schedule")  # of a training, beside its curve


class _Run:
    """A training."""

    def __init__(
        self, model: RecurrentForCausalLM, task: Task, training: TaskTraining, interrupted: Callable[[], bool]
    ):
        self.model, self.task, self.training, self.interrupted = model, task, training, interrupted
        self.sizes = task.train_sizes if training.sizes is None else training.sizes
        self.stage_steps = training.stage_steps or max(training.steps // len(self.sizes), 1)
        self.optimizer = _make_optimizer(model, training)
        self.curve = TrainingCurve()
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._share_of_rate)
        self.losses: list[torch.Tensor] = []  # since the last validation

    def run(self, library: bool) -> TrainingCurve:
        started = time.monotonic()
        self.model.train()
        name, steps, done = f"training on {self.task.name}", self.training.steps, self.curve.steps
        with ProgressBar(name, steps + self.training.decay_steps, "steps", done=done, library=library) as self.bar:
            for stage in range(len(self.curve.stages), len(self.sizes)):
                if self.curve.steps >= steps or not self._run_stage(stage):
                    break
            if self.training.decay_steps and self.curve.stopped != "interrupted":
                self._decay()
        self.curve.seconds += time.monotonic() - started
        return self.curve

    def save(self, path: Path) -> None:
        """Write what training continues from."""
        parts = {name: getattr(self, name).state_dict() for name in _STATEFUL}
        progress = {"training": asdict(self.training), "curve": self.curve.as_json(), "losses": self.losses}
        with atomic_write(path) as temporary:
            torch.save(parts | progress, temporary)

    def load(self, path: Path) -> None:
        """Continue from what `save` wrote."""
        saved = torch.load(path, map_location=self.model.device, weights_only=True)
        if saved["training"] != asdict(self.training):
            raise ValueError(f"checkpoint={path} is of a training with other settings. Use the same, or another file.")
        for name in _STATEFUL:
            getattr(self, name).load_state_dict(saved[name])
        self.curve, self.losses = TrainingCurve(**saved["curve"]), saved["losses"]
        if self.curve.stopped == "interrupted":
            self.curve.stopped = self._outcome()

    def _outcome(self) -> str:
        """Why the stages ended, or "steps" if they have not."""
        stages = self.curve.stages
        return "learnt" if len(stages) == len(self.sizes) and stages[-1]["learnt"] else "steps"

    def _share_of_rate(self, step: int) -> float:
        """The learning rate of a step, as a share of the highest."""
        training, begin = self.training, self.curve.decay_from
        if begin is not None:
            return 1 - (step - begin) / training.decay_steps
        return min((step + 1) / (training.warmup_steps + 1), 1.0)

    def _run_stage(self, stage: int) -> bool:
        """Train on a stage; returns whether there is a next one."""
        curve, training = self.curve, self.training
        last = stage == len(self.sizes) - 1
        begin = curve.stages[-1]["step"] if curve.stages else 0
        end = training.steps if last else min(begin + self.stage_steps, training.steps)
        needed, learnt = training.stop_accuracy if last else training.stage_accuracy, False
        while curve.steps < end and not learnt and curve.stopped != "interrupted":
            accuracy = self._advance(stage, end)
            learnt = accuracy is not None and accuracy >= needed
        if curve.steps < end and not learnt:
            return False
        curve.stages.append({"size": self.sizes[stage], "step": curve.steps, "learnt": learnt})
        if last:
            curve.stopped = self._outcome()
        return curve.steps < training.steps and curve.stopped == "steps"

    def _decay(self) -> None:
        """Train on the last stage's sizes while the rate falls."""
        curve = self.curve
        if curve.decay_from is None:
            curve.decay_from = curve.steps
        end = curve.decay_from + self.training.decay_steps
        while curve.steps < end and curve.stopped != "interrupted":
            self._advance(len(curve.stages) - 1, end)

    def _advance(self, stage: int, end: int) -> float | None:
        """Train one step of a stage that ends at a step; returns the accuracy if it was time to validate."""
        curve, accuracy = self.curve, None
        self._step(self._draw_size(stage))
        if curve.steps % self.training.validate_every == 0 or curve.steps == end:
            accuracy = self._validate(self.sizes[stage])
        if self.interrupted():
            curve.stopped = "interrupted"
        return accuracy

    def _draw_size(self, stage: int) -> int:
        """The size of the next step's documents."""
        rng = generator(sample_seed(TRAIN, self.training.seed, self.curve.steps, 1))
        return self.sizes[int(rng.integers(stage)) if stage and rng.random() < 0.5 else stage]

    def _step(self, size: int) -> None:
        """Train on one batch."""
        training, step = self.training, self.curve.steps
        samples = self.task.samples(size, training.batch_size, sample_seed(TRAIN, training.seed, step, 0))
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=training.bf16):
            loss = self.model(input_ids=samples.input_ids, labels=samples.labels).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), training.max_grad_norm)
        if not math.isfinite(norm):
            raise NonFiniteLoss(f"the gradient's norm became {float(norm)} at step {step + 1}: use a smaller rate.")
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())
        self.curve.steps += 1
        self.curve.tokens += samples.input_ids.numel()
        self.bar.advance(1)

    def _validate(self, size: int) -> float:
        """The accuracy on new documents of a size, which is added to the curve."""
        training, curve = self.training, self.curve
        samples = self.task.samples(size, training.validation_samples, sample_seed(VALIDATION, training.seed, size))
        found = validate(self.model, samples, batch_size=training.batch_size, bf16=training.bf16)
        accuracy = found.whole if self.task.whole_answers else found.by_token
        loss = float(torch.stack(self.losses).mean())
        self.losses.clear()
        curve.validations.append({"step": curve.steps, "size": size, "loss": loss, "accuracy": accuracy})
        self.bar.update(curve.steps, remark=f"{size} {self.task.unit}: loss {loss:.3f}, accuracy {accuracy:.1%}")
        return accuracy


def _make_optimizer(model: RecurrentForCausalLM, training: TaskTraining) -> torch.optim.Optimizer:
    memory = {*model.memory.parameters()}
    rate = training.learning_rate if training.recurrence_learning_rate is None else training.recurrence_learning_rate
    trained = [one for one in model.parameters() if one.requires_grad]
    base, added = ([one for one in trained if (one in memory) == mine] for mine in (False, True))
    groups: list[dict[str, Any]] = [{"params": base}, {"params": added, "lr": rate}]
    return torch.optim.AdamW(groups, lr=training.learning_rate, weight_decay=training.weight_decay)
