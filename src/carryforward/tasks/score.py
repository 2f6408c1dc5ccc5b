# SPDX-License-Identifier: Apache-2.0
"""How many answers a model finds, with its memory and without it.

An answer is right if greedy decoding writes it: if at each of its tokens, the token with the highest logit among all of
the vocabulary is the right one. (Each is predicted from the right ones before it, which finds the same answers.)

Two controls read only the windows that predict answers, and so know nothing of the windows before them. In one, the
memory is reset at every window: each is a document's first one. In the other there is no memory, and no memory
positions: each window is read by the base model alone.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..backbones.modes import eval_mode
from ..models.causal_lm import RecurrentForCausalLM
from ..state import State
from ..utils.checks import check_count
from ..utils.progress import ProgressBar
from ..windows import IGNORE, schedule
from .base import TEST, Samples, Task, sample_seed

_Z = 1.959964  # of a 95 % interval
_DEPTHS = 5  # into so many equal parts a document is divided
_WINDOWS_PER_CALL = 64  # affects only how often progress is reported
MEMORY_RESET, NO_MEMORY = CONTROLS = "memory reset", "no memory"


@dataclass(frozen=True)
class Accuracy:
    """Counts of right answers. Counts of other samples can be added with +.

    Attributes:
        samples: answers.
        right: answers of which every token is right.
        tokens: tokens of the answers.
        tokens_right: those that are right.
    """

    samples: int = 0
    right: int = 0
    tokens: int = 0
    tokens_right: int = 0

    def __add__(self, other: "Accuracy") -> "Accuracy":
        return Accuracy(
            self.samples + other.samples, self.right + other.right, self.tokens + other.tokens,
            self.tokens_right + other.tokens_right,
        )  # fmt: skip

    @property
    def whole(self) -> float:
        """The share of answers that are right as a whole."""
        return self.right / max(self.samples, 1)

    @property
    def by_token(self) -> float:
        """The share of tokens that are right."""
        return self.tokens_right / max(self.tokens, 1)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of `whole` (Wilson's, of a binomial distribution)."""
        return binomial_interval(self.right, self.samples)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "whole": self.whole, "by_token": self.by_token, "interval": list(self.interval)}


@dataclass(frozen=True)
class SizeScore:
    """What a model scores on documents of one size.

    Attributes:
        length: tokens of a document.
        windows: in which it is read.
        accuracy: of the model.
        controls: of the controls, by name.
        by_depth: of the model, by how deep the fact stands in the document: fifths, from its start; empty if the task
            has no depths.
    """

    size: int
    length: int
    windows: int
    accuracy: Accuracy
    controls: dict[str, Accuracy]
    by_depth: tuple[Accuracy, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "size": self.size, "length": self.length, "windows": self.windows, **self.accuracy.as_json(),
            "controls": {name: accuracy.as_json() for name, accuracy in self.controls.items()},
            "by_depth": [accuracy.as_json() for accuracy in self.by_depth],
        }  # fmt: skip


def binomial_interval(right: int, samples: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share.

    >>> binomial_interval(10, 10)[0] > 0.7
    True
    """
    if not samples:
        return 0.0, 1.0
    share, spread = right / samples, _Z**2 / samples
    middle = (share + spread / 2) / (1 + spread)
    half = _Z / (1 + spread) * math.sqrt(share * (1 - share) / samples + spread / (4 * samples))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def score_task(
    model: RecurrentForCausalLM,
    task: Task,
    sizes: Sequence[int] | None = None,
    *,
    samples: int = 256,
    seed: int = 0,
    batch_size: int = 32,
    controls: Sequence[str] = CONTROLS,
    bf16: bool = False,
    library: bool = True,
) -> list[SizeScore]:
    """Score a model on a task's test samples.

    Args:
        sizes: by default the task's `test_sizes`.
        samples: documents of each size.
        batch_size: documents that are read at once.
        controls: of "memory reset" and "no memory".
        bf16: bfloat16 autocast.
        library: as of `ProgressBar`; False is for commands.
    """
    task.check_model(model)
    sizes = task.test_sizes if sizes is None else sizes
    for name, value in {"samples": samples, "batch_size": batch_size}.items():
        check_count(name, value)
    unknown = [name for name in controls if name not in CONTROLS]
    if unknown:
        raise ValueError(f"controls: {unknown[0]!r} must be one of {', '.join(map(repr, CONTROLS))}.")
    total = samples * sum(task.length(size) for size in sizes)
    with ProgressBar(f"testing {task.name}", total, "tokens", library=library) as bar, _inference(model, bf16):
        return [_score_size(model, task, size, samples, seed, batch_size, controls, bar.advance) for size in sizes]


def validate(model: RecurrentForCausalLM, samples: Samples, *, batch_size: int, bf16: bool = False) -> Accuracy:
    """The accuracy of a model on some samples, without controls."""
    with _inference(model, bf16):
        parts = [_count(batch, _read(model, batch)) for batch in samples.batches(batch_size)]
    return sum(parts, Accuracy())


@contextmanager
def _inference(model: RecurrentForCausalLM, bf16: bool) -> Iterator[None]:
    """Evaluation mode without gradients, in bfloat16 if asked for."""
    with (
        eval_mode(model),
        torch.inference_mode(),
        torch.autocast(model.device.type, torch.bfloat16, enabled=bf16),
    ):
        yield


def _score_size(
    model: RecurrentForCausalLM,
    task: Task,
    size: int,
    samples: int,
    seed: int,
    batch_size: int,
    controls: Sequence[str],
    progress: Callable[[int], object],
) -> SizeScore:
    """Score a model on documents of one size."""
    accuracy, of_controls = Accuracy(), dict.fromkeys(controls, Accuracy())
    by_depth = [Accuracy()] * _DEPTHS
    has_depths = False
    for batch in task.samples(size, samples, sample_seed(TEST, seed, size)).batches(batch_size):
        hits = _read(model, batch, progress=progress)
        accuracy += _count(batch, hits)
        for name in controls:
            of_controls[name] += _count(batch, _read_windows_alone(model, batch, name == MEMORY_RESET))
        if batch.depths is not None:
            has_depths = True
            parts = (batch.depths * _DEPTHS).long().clamp(max=_DEPTHS - 1)
            by_depth = [total + _count(batch, hits, parts == part) for part, total in enumerate(by_depth)]
    length, recurrence = task.length(size), model.config.recurrence
    windows = sum(1 for _ in schedule(length, recurrence.window, recurrence.overlap))
    return SizeScore(size, length, windows, accuracy, of_controls, tuple(by_depth) if has_depths else ())


def _count(samples: Samples, hits: Tensor, rows: Tensor | None = None) -> Accuracy:
    """Count the right answers, of all rows or of those in a mask [B].

    Args:
        hits: whether a token was predicted, [B, N].
    """
    answers = samples.labels != IGNORE
    if rows is not None:
        hits, answers = hits[rows], answers[rows]
    right = (hits | ~answers).all(dim=1)
    return Accuracy(len(hits), int(right.sum()), int(answers.sum()), int((hits & answers).sum()))


def _read(
    model: RecurrentForCausalLM,
    samples: Samples,
    use_state: bool = True,
    progress: Callable[[int], object] = lambda tokens: None,
) -> Tensor:
    """Read documents; returns whether each token of an answer is the most likely one, [B, N]. Elsewhere it is False."""
    ids, answers = samples.input_ids, samples.labels != IGNORE
    columns = answers.any(dim=0).nonzero()[:, 0] - 1  # a token is predicted at the one before it
    first, recurrence = int(columns[0]), model.config.recurrence
    step = _WINDOWS_PER_CALL * (recurrence.window - recurrence.overlap)
    state: State | None = None
    for start in range(0, first, step):  # what stands before the answers is read for the state alone
        piece = ids[:, start : min(start + step, first)].to(model.device)
        state = model.advance_state(piece, state=state, use_state=use_state)
        progress(piece.numel())
    rest = ids[:, first:-1].to(model.device)
    logits = model(rest, state=state, use_state=use_state, logits_to_keep=columns - first).logits
    progress(rest.numel() + len(ids))
    hits = torch.zeros_like(answers)
    hits[:, columns + 1] = logits.argmax(dim=-1).cpu() == ids[:, columns + 1]
    return hits & answers


def _read_windows_alone(model: RecurrentForCausalLM, samples: Samples, use_state: bool) -> Tensor:
    """As `_read`, but each window is a document of its own."""
    hits = torch.zeros_like(samples.labels, dtype=torch.bool)
    recurrence, length = model.config.recurrence, samples.input_ids.shape[1]
    for window in schedule(length, recurrence.window, recurrence.overlap):
        scored, read = slice(window.score_from, window.score_to), slice(window.start, window.score_to)
        if bool((samples.labels[:, scored] != IGNORE).any()):
            labels = samples.labels[:, read].clone()
            labels[:, : window.score_from - window.start] = IGNORE
            alone = _read(model, Samples(samples.input_ids[:, read], labels), use_state)
            hits[:, scored] = alone[:, window.score_from - window.start :]
    return hits
