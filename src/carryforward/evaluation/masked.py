# SPDX-License-Identifier: Apache-2.0
"""The loss of masked tokens in whole documents, overall and by distance to a border of the window that scores them.

A border is an end of a window's text behind which the document goes on: what lies there is not read with the window.
The ends of a document are no borders. So the distance of a token is that to the nearest end at which its window cuts
the document, 0 at the end itself, and a token in a window that cuts nothing has none. Where windows overlap, a token is
scored by the window in which it is farthest from an end, so no token is nearer to a border than half of the overlap.

Results hold sums, by distances 0, 1, 2–3, 4–7, 8–15 and so on. Ratios are computed last, so results can be added.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..backbones.modes import eval_mode
from ..data.masking import MaskedDocuments
from ..data.samples import batch_by_length, collate
from ..distributed.work_map import WorkMap
from ..engine import bptt, run_windows
from ..engine.window_batches import WindowBatch
from ..engine.window_program import OutputSpec
from ..models import argument_checks
from ..models.encoders import RecurrentForMaskedLM
from ..utils.checks import check_callable, check_count, check_flag
from ..utils.peft import get_recurrent_model
from ..windows import IGNORE

_NO_BORDER = 0  # the group of tokens whose window cuts nothing; group n has distances of n - 1 binary digits


class Sums(NamedTuple):
    """Sums over some targets: their number, negative log-likelihood in nats, and how many were predicted right."""

    targets: int = 0
    nats: float = 0.0
    correct: int = 0

    @property
    def loss(self) -> float | None:
        """Nats per target; None without one."""
        return self.nats / self.targets if self.targets else None

    @property
    def accuracy(self) -> float | None:
        """The share of targets to which the model gives the highest probability."""
        return self.correct / self.targets if self.targets else None


@dataclass(frozen=True)
class MaskedScore:
    """Sums over the masked tokens of a set of documents. Results can be added with +.

    Attributes:
        groups: the sums of each group: of targets without a border, then at distances 0, 1, 2–3, 4–7, ...
        documents: number of documents.
    """

    groups: tuple[Sums, ...] = ()
    documents: int = 0

    def __add__(self, other: "MaskedScore") -> "MaskedScore":
        pairs = zip_longest(self.groups, other.groups, fillvalue=Sums())
        return MaskedScore(tuple(_add(*pair) for pair in pairs), self.documents + other.documents)

    @property
    def total(self) -> Sums:
        """The sums over all targets."""
        return reduce(_add, self.groups, Sums())

    @property
    def loss(self) -> float | None:
        return self.total.loss

    @property
    def accuracy(self) -> float | None:
        return self.total.accuracy

    def by_distance(self) -> list[dict[str, Any]]:
        """The sums of each group that has targets, with its least and greatest distance; None without a border."""
        rows = []
        for group, sums in enumerate(self.groups):
            if sums.targets:
                least, most = (None, None) if group == _NO_BORDER else (2 ** (group - 1) // 2, 2 ** (group - 1) - 1)
                rows.append({"from": least, "to": most, **sums._asdict()})
        return rows


def _add(one: Sums, other: Sums) -> Sums:
    return Sums(one.targets + other.targets, one.nats + other.nats, one.correct + other.correct)


def masked_score(
    model: RecurrentForMaskedLM,
    documents: MaskedDocuments,
    *,
    overlap: int | None = None,
    use_state: bool = True,
    batch_size: int = 8,
    progress: Callable[[int], object] = lambda read: None,
    work_map: WorkMap | None = None,
) -> MaskedScore:
    """Score a masked language model on whole documents.

    Args:
        model: a recurrent masked language model. Of a plain one, `use_state=False` scores what `add_recurrence` makes.
        documents: from `mask_documents`: what is read, and what is to be predicted.
        overlap: tokens that consecutive windows share; by default that of the config.
        use_state: False removes the state: the control.
        batch_size: documents in a batch.
        progress: called with the number of tokens that windows have given out.
        work_map: divides the batches among processes, and keeps their results for a restart.
    """
    model = get_recurrent_model(model)
    if not isinstance(model, RecurrentForMaskedLM):
        raise ValueError(f"model: a recurrent masked language model is needed, not {type(model).__name__}.")
    if not isinstance(documents, MaskedDocuments):
        raise ValueError(f"documents is a {type(documents).__name__}: give what mask_documents returns.")
    overlap = argument_checks.check_overlap(model.config, overlap)
    check_count("batch_size", batch_size)
    check_flag("use_state", use_state)
    check_callable("progress", progress)
    lengths = [len(ids) for ids in documents.documents]
    batches = batch_by_length(lengths, batch_size)

    def work(i: int) -> _GroupSums:
        pairs = [map(torch.from_numpy, documents[row]) for row in batches[i]]
        batch = collate([{"input_ids": ids, "labels": labels} for ids, labels in pairs])
        sums = _GroupSums(model.device)
        _read(model, batch, overlap, use_state, sums, progress)
        return sums

    sizes = [sum(lengths[row] for row in rows) for rows in batches]
    with eval_mode(model), torch.inference_mode():
        parts = (work_map or WorkMap())(sizes, work, finish=_GroupSums.result, progress=progress)
    scores = [MaskedScore(tuple(Sums(*group) for group in groups)) for groups in parts]
    return reduce(MaskedScore.__add__, scores, MaskedScore(documents=len(documents)))


def _read(
    model: RecurrentForMaskedLM,
    batch: dict[str, Tensor],
    overlap: int,
    use_state: bool,
    sums: "_GroupSums",
    progress: Callable[[int], object],
) -> None:
    """Read a batch of documents and add the sums of its windows; no logits are kept."""
    plan = model._plan(
        batch["input_ids"], batch["attention_mask"], batch["labels"], None,
        overlap=overlap, use_state=use_state, outputs=False, final=True, logits=True,
    )  # fmt: skip

    def make(windows: WindowBatch, logits: Tensor) -> bptt.Outputs:
        start = windows.first_scored
        targets = windows.targets(start).to(logits.device)
        scored = targets != IGNORE
        sums.add(logits[scored].float(), targets[scored], _groups(windows, start, targets.shape[1])[scored.cpu()])
        progress(windows.num_scored)
        return ()

    run_windows.stream_outputs(model, plan, OutputSpec(make, lambda windows: windows.first_scored))


def _groups(batch: WindowBatch, start: int, width: int) -> Tensor:
    """The group of each position from `start` on, by its distance to a border, [b, width]."""
    plan, rows = batch.plan, []
    for row, window in zip(batch.rows, batch.windows, strict=True):
        token = np.arange(width) + start - len(plan.prefixes[row]) + window.start
        left = token - window.start if window.start > 0 else np.inf
        right = window.end - 1 - token if window.end < plan.lengths[row] else np.inf
        distance = np.minimum(left, right) + np.zeros(width)
        # of distance + 1/2, frexp gives the number of binary digits
        digits = np.frexp(np.clip(distance, 0, 2.0**60) + 0.5)[1]
        rows.append(np.where(np.isinf(distance), _NO_BORDER, digits + 1))
    return torch.from_numpy(np.stack(rows))


class _GroupSums:
    """Sums by group, on the device."""

    size = 40  # groups, more than a window has

    def __init__(self, device: torch.device):
        exact = torch.float32 if device.type == "mps" else torch.float64  # which Apple's GPUs do not have
        self.sums = torch.zeros(3, self.size, dtype=exact, device=device)

    def add(self, logits: Tensor, targets: Tensor, groups: Tensor) -> None:
        """Add n targets: their logits, [n, V], and groups."""
        nats = F.cross_entropy(logits, targets, reduction="none")
        values = [torch.ones_like(nats), nats, (logits.argmax(dim=-1) == targets).to(nats.dtype)]
        self.sums.index_add_(1, groups.to(logits.device), torch.stack(values).to(self.sums.dtype))

    def result(self) -> tuple[Sums, ...]:
        columns = self.sums.T.tolist()
        while columns and not columns[-1][0]:
            columns.pop()
        return tuple(Sums(round(targets), nats, round(correct)) for targets, nats, correct in columns)
