# SPDX-License-Identifier: Apache-2.0
"""Extractive question answering over documents longer than the model (section 5.4 of the paper).

Every window is the question, a separator and the next stretch of the document. Starts and ends are scored over the
document's tokens in all windows together; whether the answer is a stretch of it, yes, no, or not there at all is told
by the first token's final state, max-pooled over windows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput, can_return_tuple

from ..config import RecurrentModelConfig
from ..engine import chunked_loss
from ..engine.window_batches import Cell
from ..engine.window_program import Emit
from ..windows import IGNORE
from . import argument_checks
from .base import RecurrentPreTrainedModel
from .outputs import Given, spread, summarise

KINDS = ("span", "yes", "no", "none")  # of answers
_LEAST = 0.02  # what a kind is likely at first, however rare, so that it can be learned later


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
        self._begin_with([KINDS.index("span")])
        self.kinds._is_hf_initialized = True  # type: ignore[assignment]

    def _given(self, inputs: dict[str, Any], start: int) -> tuple[Tensor, ...]:
        """Scores for starts and ends [b, n, 2], and the first token's vector [b, k]."""
        hidden = self.backbone(**inputs).last_hidden_state
        scores = self.config.architecture.answer(self.base, hidden)  # type: ignore[misc]
        return scores, hidden[:, 0].clone()  # a view would keep every window's states until the last is read

    def heads(self) -> list[tuple[str, nn.Module]]:
        """What is above the encoder, by name: the base model's head, and what tells kinds of answers apart."""
        own = [(name, part) for name, part in self.base.named_children() if part is not self.backbone]
        return [("kinds", self.kinds), *((name, part) for name, part in own if any(True for _ in part.parameters()))]

    @property
    def tells_kinds(self) -> bool:
        """Whether it was ever trained to: or it only knows stretches of the document."""
        return bool(self.kinds.weight.any())

    def expect(self, kinds: Sequence[int]) -> None:
        """Begin training with kinds of answers as likely as they are among these, in the order of `KINDS`; without it
        spans are. A model that was trained before, on spans alone too, stays as it is."""
        if not self.tells_kinds:
            self._begin_with(kinds)

    @torch.no_grad()
    def _begin_with(self, kinds: Sequence[int]) -> None:
        shares = [kinds.count(kind) / len(kinds) for kind in range(len(KINDS))]
        self.kinds.bias.copy_(torch.tensor([max(share, _LEAST) for share in shares]).log())

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
        use_state: bool | None = None,
        progress: Callable[[int], object] = lambda tokens: None,
        **others: Any,
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
            use_state: False removes the state: every window stands alone (the paper's baseline). By default as the
                model was trained.
            progress: called, window by window, with how many of the documents' tokens were just read.
            **others: what Hugging Face's models may be given beside, and must not ask for anything here.
        """
        argument_checks.neutral(others)
        if question_ids is None or len(question_ids) != len(input_ids):
            found = "missing" if question_ids is None else f"of {len(question_ids)} rows, input_ids of {len(input_ids)}"
            raise ValueError(f"question_ids is {found}: give one question for each document.")
        use_state = self.config.use_state if use_state is None else use_state
        prefixes = self.prefixes(question_ids, question_mask)
        tokens = torch.tensor([token for prefix in prefixes for token in prefix])
        argument_checks.vocabulary(tokens, None, self.config.base_config.vocab_size, "question_ids")
        argument_checks.one_each(answer_kinds, len(input_ids), "answer_kinds")
        argument_checks.classes(answer_kinds, None, len(KINDS), "answer_kinds")
        reading = self._plan(
            input_ids, attention_mask, None, None, overlap=overlap, use_state=use_state, outputs=True, final=True,
            prefixes=prefixes,
        )  # fmt: skip
        given = Given(reading, torch.arange(reading.width), reading.width)
        wanted = None
        if start_positions is not None or answer_kinds is not None:
            real = torch.zeros(len(input_ids) * reading.width, dtype=torch.bool)
            real[given.where] = True
            wanted = _wanted(start_positions, end_positions, real.view(len(input_ids), -1))

        def emit(cell: Cell, scores: Tensor, first: Tensor) -> tuple[Tensor, ...]:
            progress(sum(window.score_to - window.score_from for window in cell.windows))
            return given.of(cell, scores), first

        emissions, _ = self._unroll(reading, Emit(emit))
        scores = chunked_loss.exact(torch.cat([emitted[0] for emitted in emissions]))
        logits = spread(scores, reading.index(given.where), len(input_ids), reading.width, -torch.inf)
        summary = summarise(reading, [emitted[1] for emitted in emissions])
        assert summary is not None, "every document has a window"
        kind_logits = chunked_loss.exact(self.kinds(summary.to(self.kinds.weight.dtype)))
        loss = None if wanted is None else _loss(logits, wanted, kind_logits, answer_kinds)
        start_logits, end_logits = logits.unbind(-1)
        return AnswerOutput(loss=loss, start_logits=start_logits, end_logits=end_logits, kind_logits=kind_logits)


def _checked(name: str, given: Tensor | None, real: Tensor) -> Tensor:
    """Columns of answers, on the host; those that are no token, by what is `real` of each row, are refused."""
    if given is None:
        raise ValueError(f"{name} is missing: give starts and ends, {IGNORE} where an answer has none.")
    given = given.view(-1) if given.ndim == 2 and given.shape[1] == 1 else given  # as some data sets have them
    argument_checks.one_each(given, len(real), name)
    for row, column in enumerate(columns := given.tolist()):
        if column != IGNORE and not (0 <= column < real.shape[1] and real[row, column]):
            raise ValueError(
                f"{name}: row {row} has {column}, which is no token of the document. Columns of input_ids are "
                f"expected, or {IGNORE} for an answer that is no stretch of it."
            )
    return torch.tensor(columns)


def _wanted(starts: Tensor | None, ends: Tensor | None, real: Tensor) -> tuple[Tensor, Tensor]:
    """Where answers begin and end, on the host; refuses what is no stretch of its document."""
    starts, ends = _checked("start_positions", starts, real), _checked("end_positions", ends, real)
    wrong = ((starts == IGNORE) != (ends == IGNORE)) | (ends < starts)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise ValueError(f"row {row}: an answer cannot start at {int(starts[row])} and end at {int(ends[row])}.")
    return starts, ends


def _loss(logits: Tensor, wanted: Sequence[Tensor], kind_logits: Tensor, kinds: Tensor | None) -> Tensor:
    """Of the kinds, and of starts and ends over all windows together, [B, N, 2]."""
    device = kind_logits.device
    kinds = torch.zeros(len(kind_logits), dtype=torch.long) if kinds is None else kinds
    none = 0 * kind_logits.sum()  # so that every weight has a gradient
    loss = none if (kinds == IGNORE).all() else F.cross_entropy(kind_logits, kinds.to(device), ignore_index=IGNORE)
    for scores, where in zip(logits.unbind(-1), wanted, strict=True):
        if (where == IGNORE).all():
            loss = loss + 0 * torch.where(scores.isfinite(), scores, 0).sum()  # likewise
        else:
            loss = loss + F.cross_entropy(scores, where.to(device), ignore_index=IGNORE) / 2
    return loss
