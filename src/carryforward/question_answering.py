# SPDX-License-Identifier: Apache-2.0
"""Extractive question answering over documents longer than the model (section 5.4 of the paper).

Every window is the question, a separator and the next stretch of the document. Starts and ends are scored over the
document's tokens in all windows together; whether the answer is a stretch of it, yes, no, or not there at all is told
by the first token's final state, max-pooled over windows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput, can_return_tuple

from . import bptt
from .configuration import RecurrentModelConfig
from .heads import spread, summarise
from .modeling import RecurrentPreTrainedModel
from .reading import IGNORE, Cell

KINDS = ("span", "yes", "no", "none")  # of answers
_SPAN_AT_FIRST = 4.0  # a head that was trained on spans alone is to give spans


@dataclass
class AnswerOutput(ModelOutput):
    """What a question-answering model gives back.

    Attributes:
        loss: of the kinds of answers, and the mean of starts and ends; each a mean over the rows that have one.
        start_logits, end_logits: for every token of the documents, in the layout of the input; -inf at padding.
        kind_logits: [B, 4], in the order of `KINDS`.
    """

    loss: Tensor | None = None
    start_logits: Tensor | None = None
    end_logits: Tensor | None = None
    kind_logits: Tensor | None = None


class RecurrentForQuestionAnswering(RecurrentPreTrainedModel):
    """An encoder that finds answers in documents of any length."""

    auto_class = "AutoModelForQuestionAnswering"
    accepts_loss_kwargs = False  # one answer a document: `Trainer` may average by itself

    def __init__(self, config: RecurrentModelConfig, base: PreTrainedModel | None = None):
        super().__init__(config, base)
        self.kinds = nn.Linear(config.base_config.hidden_size, len(KINDS))
        nn.init.zeros_(self.kinds.weight)
        with torch.no_grad():
            self.kinds.bias.copy_(torch.tensor([_SPAN_AT_FIRST, 0.0, 0.0, 0.0]))
        self.kinds._is_hf_initialized = True  # type: ignore[assignment]

    def prefixes(self, question_ids: Tensor | Sequence[Sequence[int]], mask: Tensor | None = None) -> list[list[int]]:
        """What stands in front of every window: special tokens, the row's question, the separator."""
        recurrence = self.config.recurrence
        rows = question_ids.tolist() if isinstance(question_ids, Tensor) else [list(row) for row in question_ids]
        if mask is not None:
            rows = [[token for token, real in zip(*pair, strict=True) if real]
                    for pair in zip(rows, mask.tolist(), strict=True)]  # fmt: skip
        return [[*recurrence.prefix, *row, *recurrence.separator] for row in rows]

    @torch.compiler.disable  # planning is Python; `compile` compiles what a window runs
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        question_ids: Tensor | Sequence[Sequence[int]] | None = None,
        question_mask: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        answer_kinds: Tensor | None = None,
        *,
        overlap: int | None = None,
        use_state: bool = True,
    ) -> AnswerOutput:
        """Look for answers in whole documents.

        Args:
            input_ids: the documents' own tokens, [B, N]; question and special tokens are added to every window.
            attention_mask: 0 where a row is padded, left or right.
            question_ids: the questions' own tokens, [B, Q] or a list for each row.
            question_mask: 0 where a question is padded.
            start_positions, end_positions: the columns of each answer's first and last token, [B]; -100 where the
                answer is no stretch of the document.
            answer_kinds: the kind of each answer, [B], as in `KINDS`; without them all are spans.
            overlap: read at another overlap than the model was made for.
            use_state: False removes the state: every window stands alone (the paper's baseline).
        """
        if question_ids is None or len(question_ids) != len(input_ids):
            given = "missing" if question_ids is None else f"of {len(question_ids)} rows, input_ids of {len(input_ids)}"
            raise ValueError(f"question_ids is {given}: give one question for each document.")
        reading = self._plan(
            input_ids, attention_mask, None, None, overlap=overlap, use_state=use_state, outputs=True, final=True,
            prefixes=self.prefixes(question_ids, question_mask),
        )  # fmt: skip
        place = reading.place(torch.arange(reading.width))
        kept = {id(cell): reading.kept(cell, place, reading.width) for cell in reading.cells}

        def emit(cell: Cell, inputs: dict[str, Any]) -> bptt.Emission:
            rows, positions, _ = kept[id(cell)]
            hidden = self._body(**inputs).last_hidden_state
            scores = self.config.architecture.answer(self.base, hidden)  # type: ignore[misc]
            return scores[rows.to(scores.device), positions.to(scores.device)], hidden[:, 0]

        emissions, _ = self._unroll(reading, emit)
        scores = torch.cat([emitted[0] for emitted in emissions]).float()
        where = torch.cat([kept[id(cell)][2] for cell in reading.cells])
        start_logits, end_logits = spread(scores, where, len(input_ids), reading.width, -torch.inf).unbind(-1)
        summary = summarise(reading, [emitted[1] for emitted in emissions])
        assert summary is not None, "every document has a window"
        kind_logits = self.kinds(summary.to(self.kinds.weight.dtype)).float()
        loss = None
        if start_positions is not None or answer_kinds is not None:
            loss = _loss((start_logits, end_logits), (start_positions, end_positions), kind_logits, answer_kinds)
        return AnswerOutput(loss=loss, start_logits=start_logits, end_logits=end_logits, kind_logits=kind_logits)


def _loss(
    logits: tuple[Tensor, Tensor],
    positions: tuple[Tensor | None, Tensor | None],
    kind_logits: Tensor,
    kinds: Tensor | None,
) -> Tensor:
    device = kind_logits.device
    kinds = torch.zeros(len(kind_logits), dtype=torch.long) if kinds is None else kinds
    loss = F.cross_entropy(kind_logits, kinds.to(device))
    for name, scores, where in zip(("start", "end"), logits, positions, strict=True):
        if where is None:
            raise ValueError(f"{name}_positions is missing: give starts and ends, -100 where an answer has none.")
        where, rows = where.to(device), torch.arange(len(scores), device=device)
        has = where != IGNORE
        if not bool(has.any()):
            loss = loss + 0 * torch.where(scores.isfinite(), scores, 0).sum()  # so that every weight has a gradient
            continue
        inside = (where >= 0) & (where < scores.shape[1])
        inside &= scores[rows, where.clamp(0, scores.shape[1] - 1)].isfinite()
        if not bool((inside | ~has).all()):
            row = int((has & ~inside).nonzero()[0])
            raise ValueError(
                f"{name}_positions: row {row} has {int(where[row])}, which is no token of the document. Columns of "
                f"input_ids are expected, or {IGNORE} for an answer that is no stretch of it."
            )
        loss = loss + F.cross_entropy(scores[has], where[has]) / 2
    return loss
