# SPDX-License-Identifier: Apache-2.0
"""Settings of `carryforward memory-tasks`: what all tasks share, then those of each task."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from .base import at_least, data_setting, flag, optimisation_setting, run_setting, setting
from .commands import FAST_PATHS, MIXED_PRECISION, TEXT_FIELD
from .recurrence import BUNDLED, CORPUS, MEMORY, PYTHON_DOCS, RecurrentSettings

NEW = "new"  # a model: a small one from scratch
BACKBONES = ("llama", "gpt2")
_BY_TASK = "chosen by the task"


@dataclass(frozen=True)
class TaskSettings(RecurrentSettings):
    """Settings that all tasks share. An option of `RecurrentSettings` that a task does not have is a class variable."""

    task: ClassVar[str]
    recurrence: ClassVar[bool] = True  # type: ignore[misc]  # the controls have none

    memory: tuple[str, ...] | None = setting(None, MEMORY, shown="the preset's")
    steps: int = setting(10_000, "Training steps, at most; 0 only tests the model.")
    train_sizes: tuple[int, ...] | None = setting(None, "Sizes of the curriculum, in its order.", shown=_BY_TASK)
    test_sizes: tuple[int, ...] | None = setting(None, "Sizes to test.", shown=_BY_TASK)
    samples: int = setting(256, "Test documents of each size.")
    stage_steps: int | None = optimisation_setting(
        None, "Steps of each curriculum stage but the last, at most.", shown="--steps / number of stages"
    )
    stage_accuracy: float = optimisation_setting(0.95, "Validation accuracy at which a curriculum stage ends.")
    stop_accuracy: float = optimisation_setting(1.0, "Validation accuracy at which the last stage, and training, ends.")
    batch_size: int = setting(64, "Documents per batch.")
    learning_rate: float = setting(1e-3, "Learning rate.")
    recurrence_learning_rate: float | None = optimisation_setting(
        None, "Learning rate of the memory's own parameters.", shown="--learning-rate"
    )
    weight_decay: float = optimisation_setting(0.01, "Weight decay of AdamW.")
    warmup_steps: int = optimisation_setting(100, "Steps of linear warm-up. The learning rate is constant afterwards.")
    max_grad_norm: float = optimisation_setting(1.0, "Clip gradients to this norm.")
    validate_every: int = run_setting(100, "Validate every N steps.")
    validation_samples: int = run_setting(128, "Documents of a validation.")
    bf16: bool = setting(False, MIXED_PRECISION)
    fast_path: str = run_setting("auto", "CUDA graphs on a GPU: auto, compiled (compile at once) or off.")
    seed: int = run_setting(0, "Random seed, of the samples and of new weights.")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "train_sizes", "test_sizes", "samples", "stage_steps", "batch_size", "validate_every",
                 "validation_samples")  # fmt: skip
        at_least(0, self, "steps", "warmup_steps", "weight_decay")
        for name in ("learning_rate", "recurrence_learning_rate", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{flag(name)} {value}: it must be above 0.")
        for name in ("stage_accuracy", "stop_accuracy"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{flag(name)} {getattr(self, name)}: it must be above 0 and at most 1.")
        if self.fast_path not in FAST_PATHS:
            raise ValueError(f"--fast-path {self.fast_path}: it must be one of {', '.join(FAST_PATHS)}.")


_new_model = partial(setting, panel="Advanced: new model")


@dataclass(frozen=True)
class SymbolTaskSettings(TaskSettings):
    """Settings of tasks with symbols of their own, which small models learn from scratch."""

    data: ClassVar[str] = ""  # type: ignore[misc]
    overlap: ClassVar[None] = None  # type: ignore[misc]
    model: str = setting(NEW, "Folder of a model made for this task; new: a small one from scratch.")

    backbone: str = _new_model("llama", f"Architecture: {' or '.join(BACKBONES)}.")
    layers: int = _new_model(4, "Layers.")
    width: int = _new_model(128, "Hidden size.")
    heads: int = _new_model(4, "Attention heads.")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "layers", "width", "heads")
        if self.backbone not in BACKBONES:
            raise ValueError(f"--backbone {self.backbone}: it must be one of {', '.join(BACKBONES)}.")


@dataclass(frozen=True)
class RetrievalSettings(SymbolTaskSettings):
    """Settings of `carryforward memory-tasks retrieval`."""

    task: ClassVar[str] = "retrieval"

    mode: str = setting("rewrite", "rewrite (16 keys, the latest value counts) or remember (unique keys).")
    key_symbols: int | None = setting(None, "Symbols of a key.", shown="rewrite: 1, remember: 3")
    window: int | None = setting(None, "Tokens per window; each holds one pair.", shown="what a pair needs")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "key_symbols")
        if self.mode not in ("rewrite", "remember"):
            raise ValueError(f"--mode {self.mode}: it must be rewrite or remember.")


@dataclass(frozen=True)
class CopySettings(SymbolTaskSettings):
    """Settings of `carryforward memory-tasks copy`."""

    task: ClassVar[str] = "copy"
    window: ClassVar[None] = None  # type: ignore[misc]

    symbols: int = setting(24, "Symbols of the longest sequence.")
    windows: int = setting(4, "Windows that it takes, with its repetition.")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "symbols", "windows")


@dataclass(frozen=True)
class ReverseSettings(CopySettings):
    """Settings of `carryforward memory-tasks reverse`."""

    task: ClassVar[str] = "reverse"


@dataclass(frozen=True)
class TextTaskSettings(TaskSettings):
    """Settings of tasks in words, for pretrained models."""

    model: str = setting(BUNDLED, "Causal model, plain or recurrent: Hub name, folder, or bundled.")
    data: str = setting(PYTHON_DOCS, f"Text that hides the facts. {CORPUS}")
    text_field: str = data_setting("text", TEXT_FIELD)
    samples: int = setting(100, "Test documents of each size.")
    batch_size: int = setting(8, "Documents per batch.")
    learning_rate: float = setting(1e-4, "Learning rate of the base model.")
    recurrence_learning_rate: float | None = optimisation_setting(1e-3, "Learning rate of the memory's own parameters.")


@dataclass(frozen=True)
class PassKeySettings(TextTaskSettings):
    """Settings of `carryforward memory-tasks passkey`."""

    task: ClassVar[str] = "passkey"

    digits: int = setting(5, "Digits of the number.")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "digits")


@dataclass(frozen=True)
class FactsSettings(TextTaskSettings):
    """Settings of `carryforward memory-tasks facts`."""

    task: ClassVar[str] = "facts"

    about: str = setting("people", "Where people are (one fact is needed) or things (two or more).")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.about not in ("people", "things"):
            raise ValueError(f"--about {self.about}: it must be people or things.")
