# SPDX-License-Identifier: Apache-2.0
"""The recurrent models, one class per head, all ordinary `PreTrainedModel`s.

Each says what a window gives out and how that becomes the call's output: logits or hidden states for every token, a
loss computed inside the window, or one vector per window for a classifier of whole documents.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.loss.loss_utils import ForSequenceClassificationLoss
from transformers.utils import can_return_tuple

from ..engine.window_program import Emit
from ..state import State
from . import argument_checks
from .base import RecurrentPreTrainedModel
from .outputs import RecurrentOutput, columns_of, summarise
from .token_outputs import TokenOutputModel


class _LabelledEncoder(TokenOutputModel):
    """Encoders with logits and labels for every token."""

    def _gives_logits(self, labels: Tensor | None) -> bool:
        """Whether logits are given when the call does not say."""
        return labels is None

    def _outputs(self, inputs: dict[str, Any], start: int, width: int) -> Tensor:
        return self.base(**inputs).logits[:, start:]

    @torch.compiler.disable  # planning is Python; `compile` compiles what a window runs
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        state: State | None = None,
        *,
        token_type_ids: Tensor | None = None,
        overlap: int | None = None,
        use_state: bool = True,
        final: bool = True,
        return_logits: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **others: Any,
    ) -> RecurrentOutput:
        """Read documents, or the next piece of them.

        Args:
            input_ids: the documents' own tokens, [B, N]; special tokens are added to every window.
            attention_mask: 0 where a row is padded, left or right.
            labels: one for every token, [B, N]; -100 is not scored.
            state: an earlier call's `state`, to go on from there.
            token_type_ids: accepted for convenience; must be all zero.
            overlap: read at another overlap than the model was made for.
            use_state: False removes the state: every window stands alone, as with the base model.
            final: the documents end here. Give False for every piece but the last when reading in pieces: a window is
                given out and scored once it is complete, so outputs then start where `emitted` says.
            return_logits: give logits beside the loss; without labels they are always given, and a classifier's also
                where no gradients are computed, since they are small and evaluation wants them.
            num_items_in_batch: divide the loss by this instead of the number of scored targets.
            **others: what Hugging Face's models may be given beside, and must not ask for anything here.
        """
        argument_checks.token_types(token_type_ids)
        argument_checks.neutral(others)
        outputs = self._gives_logits(labels) if return_logits is None else return_logits
        reading = self._plan(
            input_ids, attention_mask, labels, state, overlap=overlap, use_state=use_state, outputs=outputs, final=final
        )
        logits, fields = self._run(reading, *columns_of(reading, state), num_items_in_batch)
        return RecurrentOutput(logits=logits, **fields)


class RecurrentForMaskedLM(_LabelledEncoder):
    """A masked language model that reads documents of any length."""

    auto_class = "AutoModelForMaskedLM"
    _small = False


class RecurrentForTokenClassification(_LabelledEncoder):
    """A token classifier that reads documents of any length."""

    auto_class = "AutoModelForTokenClassification"

    def _gives_logits(self, labels: Tensor | None) -> bool:
        return labels is None or not torch.is_grad_enabled()

    @property
    def _num_classes(self) -> int:
        return len(self.config.id2label)  # type: ignore[arg-type]


class RecurrentForSequenceClassification(RecurrentPreTrainedModel):
    """A classifier of whole documents: the first token's final state, max-pooled over windows (section 5.4)."""

    auto_class = "AutoModelForSequenceClassification"
    accepts_loss_kwargs = False  # one label a document: `Trainer` may average by itself

    def _given(self, inputs: dict[str, Any], start: int) -> tuple[Tensor, ...]:
        return (self.backbone(**inputs).last_hidden_state[:, 0].clone(),)  # a view would keep the whole window's

    def _check_labels(self, labels: Tensor, rows: int) -> None:
        """Where a document is of one class; what else labels can be is the loss's to judge."""
        number = len(self.config.id2label)  # type: ignore[arg-type]
        single = self.config.problem_type in (None, "single_label_classification") and number > 1
        if single and not labels.is_floating_point():
            argument_checks.one_each(labels.view(-1), rows, "labels")
            argument_checks.classes(labels, None, number)

    @torch.compiler.disable  # planning is Python; `compile` compiles what a window runs
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        state: State | None = None,
        *,
        token_type_ids: Tensor | None = None,
        overlap: int | None = None,
        use_state: bool = True,
        final: bool = True,
        **others: Any,
    ) -> RecurrentOutput:
        """Read documents, or the next piece of them.

        Args:
            input_ids: the documents' own tokens, [B, N]; special tokens are added to every window.
            attention_mask: 0 where a row is padded, left or right.
            labels: one per document; as for the base model, the loss follows `config.problem_type`.
            state: an earlier call's `state`, to go on from there.
            token_type_ids: accepted for convenience; must be all zero.
            overlap: read at another overlap than the model was made for.
            use_state: False removes the state: every window stands alone.
            final: the documents end here. With False nothing is classified yet, and labels are not used.
            **others: what Hugging Face's models may be given beside, and must not ask for anything here.
        """
        argument_checks.token_types(token_type_ids)
        argument_checks.neutral(others)
        reading = self._plan(
            input_ids, attention_mask, None, state, overlap=overlap, use_state=use_state, outputs=True, final=final
        )

        if labels is not None and final:
            self._check_labels(labels, len(reading.read))
        emissions, carried = self._unroll(reading, Emit(lambda cell, first: (first,)))
        summary = summarise(reading, [first for (first,) in emissions])
        logits = loss = None
        if final:
            assert summary is not None, "documents that end have had a window"
            logits = self.config.architecture.classify(self.base, summary)  # type: ignore[misc]
            loss = None if labels is None else ForSequenceClassificationLoss(labels, logits, self.config)
        state, emitted = reading.state(*self._parts(carried), summary), torch.tensor(reading.emitted())
        return RecurrentOutput(loss=loss, logits=logits, emitted=emitted, state=state)
