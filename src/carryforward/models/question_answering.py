# SPDX-License-Identifier: Apache-2.0
"""Extractive question answering over documents longer than the model (section 5.4 of the paper).

Every window is the question, a separator and the next stretch of the document. Starts and ends are scored over the
document's tokens in all windows together. The kind of the answer (a span of the document, yes, no, or none) is
predicted from the first token's final state, max-pooled over windows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput, can_return_tuple

from ..backbones.heads import answer_scores
from ..config import RecurrentModelConfig
from ..engine.loss import to_float32
from ..engine.window_batches import WindowBatch
from ..engine.window_program import OutputSpec
from ..utils.checks import check_callable
from ..windows import IGNORE
from . import argument_checks
from .base import RecurrentPreTrainedModel
from .outputs import OutputLayout, max_over_windows, scatter_outputs

ANSWER_KINDS = ("span", "yes", "no", "none")  # of answers
_MIN_SHARE = 0.02  # a kind's initial probability, however rare it is, so that it can be learned later


@dataclass
class AnswerOutput(ModelOutput):
    """The output of a question-answering model.

    Attributes:
        loss: of the kinds, plus the mean of starts and ends; each a mean over the rows that have one.
        start_logits, end_logits: for every token of the documents, in the layout of the input; -inf at padding.
        kind_logits: [B, 4], in the order of `ANSWER_KINDS`.
        null_logits: start and end score of the first token, a special one, in the window where they are lowest, [B, 2]:
            by these, models that predict no kinds say that there is no answer. None without such a token.
        hidden_states: if asked for, those of the embeddings and of each layer, at every token of the documents.
    """

    loss: Tensor | None = None
    start_logits: Tensor | None = None
    end_logits: Tensor | None = None
    kind_logits: Tensor | None = None
    null_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class RecurrentForQuestionAnswering(RecurrentPreTrainedModel):
    """An encoder that finds answers in documents of any length."""

    auto_class = "AutoModelForQuestionAnswering"
    accepts_loss_kwargs = False  # one answer a document: `Trainer` may average by itself

    def __init__(self, config: RecurrentModelConfig, base: PreTrainedModel | None = None):
        super().__init__(config, base)
        self.kinds = nn.Linear(config.base_config.hidden_size, len(ANSWER_KINDS))
        nn.init.zeros_(self.kinds.weight)
        self._set_prior([ANSWER_KINDS.index("span")])
        self.kinds._is_hf_initialized = True  # type: ignore[assignment]

    def _window_outputs(self, inputs: dict[str, Any], start: int) -> tuple[Tensor, ...]:
        """Scores for starts and ends [b, n, 2], and the first token's vector [b, k]."""
        outputs = self.backbone(**inputs)
        hidden = outputs.last_hidden_state
        scores = torch.stack(answer_scores(self.base, hidden), dim=-1)
        first_token = hidden[:, 0].clone()  # a view would keep every window alive
        return scores, first_token, *self._hidden_states(inputs, outputs)

    def heads(self) -> list[tuple[str, nn.Module]]:
        """The heads by name: the base model's, and the one that predicts kinds of answers."""
        own = [(name, part) for name, part in self.base.named_children() if part is not self.backbone]
        return [("kinds", self.kinds), *((name, part) for name, part in own if any(True for _ in part.parameters()))]

    @property
    def predicts_kinds(self) -> bool:
        """Whether it was trained to predict kinds of answers; otherwise it only knows spans."""
        return bool(self.kinds.weight.any())

    def init_kind_prior(self, kinds: Sequence[int]) -> None:
        """Start training with kinds of answers as probable as they are among these, indices of `ANSWER_KINDS`. A model
        that was trained to predict kinds before stays as it is."""
        if not self.predicts_kinds:
            self._set_prior(kinds)

    @torch.no_grad()
    def _set_prior(self, kinds: Sequence[int]) -> None:
        shares = [kinds.count(kind) / len(kinds) for kind in range(len(ANSWER_KINDS))]
        self.kinds.bias.copy_(torch.tensor([max(share, _MIN_SHARE) for share in shares]).log())

    def prefixes(self, question_ids: Tensor | Sequence[Sequence[int]], mask: Tensor | None = None) -> list[list[int]]:
        """The tokens in front of every window: special tokens, the row's question, the separator."""
        recurrence = self.config.recurrence
        rows = argument_checks.token_lists("question_ids", question_ids)
        if mask is not None:
            if not isinstance(question_ids, Tensor):
                raise ValueError("question_mask is given, and question_ids is a list: leave it out, or give tensors.")
            argument_checks.check_mask(mask, question_ids, "question_mask")
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
        output_hidden_states: bool | None = None,
        progress: Callable[[int], object] = lambda tokens: None,
        **others: Any,
    ) -> AnswerOutput:
        """Find answers in whole documents.

        Args:
            input_ids: the documents' own tokens, [B, N]; question and special tokens are added to every window.
            attention_mask: 0 where a row is padded, left or right.
            question_ids: the questions' own tokens, [B, Q] or a list for each row.
            question_mask: 0 where a question is padded.
            start_positions, end_positions: the columns of each answer's first and last token, [B]; -100 where the
                answer is not a span of the document.
            answer_kinds: the kind of each answer, [B], an index of `ANSWER_KINDS`; by default all are spans.
            overlap: read at another overlap than the model was made for.
            use_state: False removes the state: every window stands alone (the paper's baseline). By default as in
                training.
            output_hidden_states: return the hidden states of the embeddings and of all layers at the document's tokens.
            progress: called after each window batch with the number of document tokens just read.
            **others: arguments of Hugging Face models that must not request anything here.
        """
        argument_checks.refuse_unsupported(others)
        check_callable("progress", progress)
        input_ids = argument_checks.check_batch(input_ids)
        if question_ids is None:
            raise ValueError("question_ids: missing. Give one question for each document.")
        prefixes = self.prefixes(question_ids, question_mask)
        if len(prefixes) != len(input_ids):
            raise ValueError(
                f"question_ids: {len(prefixes)} rows, input_ids {len(input_ids)}. Give one question for each document."
            )
        use_state = self.config.use_state if use_state is None else use_state
        tokens = torch.tensor([token for prefix in prefixes for token in prefix])
        argument_checks.check_vocabulary(tokens, None, self.config.base_config.vocab_size, "question_ids")
        answer_kinds = argument_checks.check_one_each(answer_kinds, len(input_ids), "answer_kinds")
        argument_checks.check_classes(answer_kinds, None, len(ANSWER_KINDS), "answer_kinds")
        plan = self._plan(
            input_ids, attention_mask, None, None, overlap=overlap, use_state=use_state, outputs=True, final=True,
            prefixes=prefixes,
        )  # fmt: skip
        layout = OutputLayout(plan, torch.arange(plan.width), plan.width)
        answers = None
        if any(labels is not None for labels in (start_positions, end_positions, answer_kinds)):
            real = torch.zeros(len(input_ids) * plan.width, dtype=torch.bool)
            real[layout.targets] = True
            answers = _answer_spans(start_positions, end_positions, real.view(len(input_ids), -1))

        def make(batch: WindowBatch, scores: Tensor, first_token: Tensor, *hidden: Tensor) -> tuple[Tensor, ...]:
            progress(batch.num_scored)
            selected = (layout.select(batch, values) for values in hidden)
            return layout.select(batch, scores), first_token, scores[:, 0].clone(), *selected

        asks_hidden = self._asks_for_hidden_states(output_hidden_states)
        results, flat = self._run(plan, OutputSpec(make, hidden_states=asks_hidden))
        scores = to_float32(torch.cat([one[0] for one in results]))
        logits = scatter_outputs(scores, plan.index(layout.targets), len(input_ids), plan.width, -torch.inf)
        summary = max_over_windows(plan, [one[1] for one in results])
        assert summary is not None, "every document has a window"
        kind_logits = to_float32(self.kinds(summary.to(self.kinds.weight.dtype)))
        loss = None if answers is None else _loss(logits, answers, kind_logits, answer_kinds)
        start_logits, end_logits = logits.unbind(-1)
        null_logits = None
        if self.config.recurrence.prefix:
            highest = max_over_windows(plan, [-to_float32(one[2]) for one in results])
            null_logits = None if highest is None else -highest
        states = layout.hidden_states([one[-1] for one in results], self.config, flat) if asks_hidden else None
        return AnswerOutput(
            loss=loss, start_logits=start_logits, end_logits=end_logits, kind_logits=kind_logits,
            null_logits=null_logits, hidden_states=states,
        )  # fmt: skip


def _checked_positions(name: str, positions: Tensor | None, real: Tensor) -> Tensor:
    """Start or end positions of answers, on the host; each must be a real token, [B, N], or -100."""
    positions = argument_checks.check_one_each(positions, len(real), name)
    if positions is None:
        raise ValueError(f"{name} is missing: give starts and ends, {IGNORE} where an answer has none.")
    for row, column in enumerate(columns := positions.tolist()):
        if column != IGNORE and not (0 <= column < real.shape[1] and real[row, column]):
            raise ValueError(
                f"{name}: row {row} has {column}, which is not a token of the document. Give a column of input_ids, or "
                f"{IGNORE} for an answer that is not a span."
            )
    return torch.tensor(columns)


def _answer_spans(starts: Tensor | None, ends: Tensor | None, real: Tensor) -> tuple[Tensor, Tensor]:
    """Starts and ends of the answers, on the host, checked to be spans of their documents."""
    starts = _checked_positions("start_positions", starts, real)
    ends = _checked_positions("end_positions", ends, real)
    wrong = ((starts == IGNORE) != (ends == IGNORE)) | (ends < starts)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise ValueError(f"row {row}: an answer cannot start at {int(starts[row])} and end at {int(ends[row])}.")
    return starts, ends


def _loss(logits: Tensor, answers: Sequence[Tensor], kind_logits: Tensor, kinds: Tensor | None) -> Tensor:
    """The loss of the kinds, and of starts and ends over all windows together, [B, N, 2]."""
    device = kind_logits.device
    kinds = torch.zeros(len(kind_logits), dtype=torch.long) if kinds is None else kinds
    zero = 0 * kind_logits.sum()  # so that every weight has a gradient
    loss = zero if (kinds == IGNORE).all() else F.cross_entropy(kind_logits, kinds.to(device), ignore_index=IGNORE)
    for scores, positions in zip(logits.unbind(-1), answers, strict=True):
        if (positions == IGNORE).all():
            loss = loss + 0 * torch.where(scores.isfinite(), scores, 0).sum()
        else:
            loss = loss + F.cross_entropy(scores, positions.to(device), ignore_index=IGNORE) / 2
    return loss
