# SPDX-License-Identifier: Apache-2.0
"""The recurrent models, one class per head, all ordinary `PreTrainedModel`s.

Each says what a window gives out and how that becomes the call's output: logits or hidden states for every token, a
loss computed inside the window, or one vector per window for a classifier of whole documents.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.loss.loss_utils import ForSequenceClassificationLoss
from transformers.utils import can_return_tuple

from . import bptt, checks, losses
from .generation import Generation
from .modeling import RecurrentPreTrainedModel
from .outputs import Given, RecurrentOutput, columns_of, columns_to_keep, spread, summarise
from .program import Emit
from .reading import Cell, Reading
from .state import State
from .window_cache import WindowCache, check_cache


class _TokenModel(RecurrentPreTrainedModel):
    """Models that give something for every token. A subclass says what the base model gives from a position on."""

    def _outputs(self, inputs: dict[str, Any], start: int, width: int) -> Tensor:
        raise NotImplementedError

    @property
    def _num_outputs(self) -> int:
        """How many numbers that is for each."""
        return self._num_classes

    def _given(self, inputs: dict[str, Any], start: int) -> tuple[Tensor, ...]:
        return (self._outputs(inputs, start, inputs["input_ids"].shape[1]),)

    def _nll_sum(self, inputs: dict[str, Any], targets: Tensor, start: int) -> Tensor:
        return losses.nll_sum(self._outputs(inputs, start, inputs["input_ids"].shape[1]), targets)

    def _run(
        self,
        reading: Reading,
        columns: Tensor | None,
        width: int,
        num_items_in_batch: Tensor | int | None = None,
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Read the documents; give back the outputs, [B, width, ...], if they are wanted, and the other fields.

        Args:
            columns, width: where outputs go, as `Reading.place` takes it.
        """
        given = Given(reading, columns, width)

        def start(cell: Cell) -> int:
            if self._small:
                return 0
            return reading.scored_from(cell) if reading.labels is not None else given.first[id(cell)]

        def emit(cell: Cell, scores: Tensor) -> bptt.Emission:
            begin = start(cell)
            outputs = given.of(cell, scores, begin)
            if reading.labels is None:
                return (outputs,)
            first = reading.scored_from(cell)
            return losses.nll_sum(scores[:, first - begin :], reading.targets(cell, first)), outputs

        # before the windows: afterwards their gradients take the room
        n_scored = None if reading.labels is None else reading.count_scored()
        emissions, carried = self._unroll(reading, Emit(emit, start) if reading.outputs else None)
        fields: dict[str, Any] = {"state": reading.state(*self._parts(carried))}
        if not reading.causal:
            fields["emitted"] = torch.tensor(reading.emitted())
        if n_scored is not None:
            nll_sum = sum((emitted[0] for emitted in emissions), torch.zeros((), device=carried.device))
            items = n_scored.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            fields |= {"loss": nll_sum / items, "nll_sum": nll_sum, "n_scored": n_scored}
        if not reading.outputs:
            return None, fields
        if not emissions:  # an encoder's piece that completes no window
            return carried.new_zeros(len(reading.read), width, self._num_outputs), fields
        values = torch.cat([emitted[-1] for emitted in emissions])
        return spread(values, reading.index(given.where), len(reading.read), width), fields


class RecurrentForCausalLM(_TokenModel, Generation, GenerationMixin):  # transformers looks for the last by name
    """A causal language model that reads documents of any length, window by window, carrying a state."""

    auto_class = "AutoModelForCausalLM"
    _small = False

    def _outputs(self, inputs: dict[str, Any], start: int, width: int) -> Tensor:
        return self.base(**inputs, logits_to_keep=width - start).logits

    def _nll_sum(self, inputs: dict[str, Any], targets: Tensor, start: int) -> Tensor:
        projection = None if self._sharded else self.config.architecture.projection(self.base)
        if projection is None:  # FSDP gathers weights when the model that owns them is called
            return super()._nll_sum(inputs, targets, start)
        return losses.projected_nll_sum(self._body(**inputs).last_hidden_state[:, start:], projection, targets)

    @torch.compiler.disable  # planning is Python; `compile` compiles what a window runs
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        state: State | None = None,
        *,
        overlap: int | None = None,
        use_state: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        past_key_values: WindowCache | None = None,
        **others: Any,
    ) -> RecurrentOutput:
        """Read documents, or the next piece of them.

        With labels and gradients enabled, the gradients are computed already here: evaluate under `torch.no_grad()`.

        Args:
            input_ids: the documents' tokens, [B, N], of any length.
            attention_mask: 0 where a row is padded, left or right.
            labels: as in Hugging Face: shifted inside, -100 is not scored; usually `input_ids` itself.
            state: an earlier call's `state`, to go on from there; the first new token is then scored too.
            overlap: read at another overlap than the model was made for.
            use_state: False removes the state: every window stands alone, as with the base model. True by default.
            logits_to_keep: compute logits for the last so many columns only, or for the columns listed; 0 is all.
            return_logits: give logits beside the loss; without labels they are always given.
            num_items_in_batch: divide the loss by this instead of the number of scored targets.
            past_key_values: `generate`'s: read the next tokens, and give the logits of the last one only.
            **others: what Hugging Face's models may be given beside, and must not ask for anything here.
        """
        checks.neutral(others)
        if past_key_values is not None:
            check_cache(
                past_key_values, labels=labels, state=state, overlap=overlap, use_state=use_state,
                logits_to_keep=None if isinstance(logits_to_keep, int) and logits_to_keep in (0, 1) else logits_to_keep,
                return_logits=None if return_logits else return_logits,
                num_items_in_batch=num_items_in_batch,
            )  # fmt: skip
            next_logits = past_key_values.read(self, input_ids, attention_mask)
            return RecurrentOutput(logits=next_logits, past_key_values=past_key_values)
        outputs = labels is None if return_logits is None else return_logits
        use_state = True if use_state is None else use_state
        reading = self._plan(
            input_ids, attention_mask, labels, state, overlap=overlap, use_state=use_state, outputs=outputs, final=False
        )
        columns, width, order = columns_to_keep(logits_to_keep, reading.width) if outputs else (None, 0, None)
        logits, fields = self._run(reading, columns, width, num_items_in_batch)
        if logits is not None and order is not None:
            logits = logits[:, order.to(logits.device)]
        return RecurrentOutput(logits=logits, **fields)


class RecurrentModel(_TokenModel):
    """A model without a head: the hidden states of whole documents."""

    auto_class = "AutoModel"

    def _outputs(self, inputs: dict[str, Any], start: int, width: int) -> Tensor:
        return self.base(**inputs).last_hidden_state[:, start:]

    @property
    def _num_outputs(self) -> int:
        return self.config.base_config.hidden_size

    @torch.compiler.disable  # planning is Python; `compile` compiles what a window runs
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
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
            input_ids: the documents' own tokens, [B, N]; an encoder's special tokens are added to every window.
            attention_mask: 0 where a row is padded, left or right.
            state: an earlier call's `state`, to go on from there.
            token_type_ids: accepted for convenience; must be all zero.
            overlap: read at another overlap than the model was made for.
            use_state: False removes the state: every window stands alone, as with the base model.
            final: the documents end here. Give False for every piece but the last when an encoder reads in pieces:
                it gives out a window once it is complete, so outputs then start where `emitted` says.
            **others: what Hugging Face's models may be given beside, and must not ask for anything here.
        """
        checks.token_types(token_type_ids)
        checks.neutral(others)
        reading = self._plan(
            input_ids, attention_mask, None, state, overlap=overlap, use_state=use_state, outputs=True, final=final
        )
        hidden, fields = self._run(reading, *columns_of(reading, state))
        return RecurrentOutput(last_hidden_state=hidden, **fields)


class _LabelledEncoder(_TokenModel):
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
        checks.token_types(token_type_ids)
        checks.neutral(others)
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
        return (self._body(**inputs).last_hidden_state[:, 0].clone(),)  # a view would keep the whole window's

    def _check_labels(self, labels: Tensor, rows: int) -> None:
        """Where a document is of one class; what else labels can be is the loss's to judge."""
        number = len(self.config.id2label)  # type: ignore[arg-type]
        single = self.config.problem_type in (None, "single_label_classification") and number > 1
        if single and not labels.is_floating_point():
            checks.one_each(labels.view(-1), rows, "labels")
            checks.classes(labels, None, number)

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
        checks.token_types(token_type_ids)
        checks.neutral(others)
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
