# SPDX-License-Identifier: Apache-2.0
"""Recurrent encoders with a head: masked language model, token and sequence classification."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForSequenceClassificationLoss
from transformers.utils import can_return_tuple

from ..backbones.heads import check_first_token, classify
from ..config import RecurrentModelConfig
from ..engine import bptt
from ..engine.window_batches import WindowBatch
from ..engine.window_program import OutputSpec
from ..state import State
from ..utils.checks import check_flag
from . import argument_checks
from .base import RecurrentPreTrainedModel
from .outputs import OutputLayout, RecurrentOutput, input_layout, max_over_windows
from .token_model import TokenOutputModel


class EncoderHead(RecurrentPreTrainedModel):
    """The call that all encoder heads share."""

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
        allow_other_model: bool = False,
        output_hidden_states: bool | None = None,
        work: Callable[[], tuple[Tensor, ...]] | None = None,
        **others: Any,
    ) -> RecurrentOutput | tuple[Tensor, ...]:
        """Read documents, or the next piece of them.

        Args:
            input_ids: the documents' tokens, [B, N]. Special tokens are added to every window; those that a tokenizer
                has put around a whole document are recognised, and have outputs too.
            attention_mask: 0 where a row is padded, left or right.
            labels: one for every token, [B, N], where -100 is not scored; for a sequence classifier one per document,
                and as for the base model the loss follows `config.problem_type`.
            state: an earlier call's `state`, to continue from.
            token_type_ids: accepted for convenience; must be all zero.
            overlap: read at another overlap than the model was made for.
            use_state: False removes the state: every window stands alone, as with the base model.
            final: the documents end here. Give False for every piece but the last when reading in pieces: a window is
                returned and scored once it is complete, so outputs then start where `emitted` says. A sequence
                classifier returns logits and loss with the last piece only.
            return_logits: return logits beside the loss; without labels they are always returned, and a classifier's
                also without gradients, since they are small and evaluation needs them.
            num_items_in_batch: divide the loss by this instead of the number of scored targets (token outputs only).
            allow_other_model: continue from a state that a model with other weights or settings has made.
            output_hidden_states: return the hidden states of the embeddings and of all L layers at every token: L + 1
                times the memory of the last ones.
            work: from `sharded_backward`: do this in place of reading documents, while FSDP has gathered the weights.
            **others: arguments of Hugging Face models that must not request anything here.
        """
        if work is not None:
            return work()
        argument_checks.refuse_unsupported({**others, "token_type_ids": token_type_ids})
        argument_checks.check_num_items(num_items_in_batch)
        check_flag("return_logits", return_logits, optional=True)
        returns_logits = self._returns_logits(labels) if return_logits is None else return_logits
        documents = {
            "input_ids": input_ids, "attention_mask": attention_mask, "state": state,
            "overlap": overlap, "use_state": use_state, "final": final, "allow_other_model": allow_other_model,
        }  # fmt: skip
        hidden_states = self._asks_for_hidden_states(output_hidden_states)
        return self._read(documents, labels, returns_logits, num_items_in_batch, hidden_states)

    def _returns_logits(self, labels: Tensor | None) -> bool:
        """Whether logits are returned if the call does not say."""
        return labels is None

    def _read(
        self,
        documents: dict[str, Any],
        labels: Tensor | None,
        returns_logits: bool,
        num_items: Tensor | int | None,
        hidden_states: bool,
    ) -> RecurrentOutput:
        """The output of a call; `documents` are the arguments of `_plan`."""
        raise NotImplementedError


class _TokenHead(TokenOutputModel, EncoderHead):
    """An encoder with logits and labels for every token."""

    def _token_outputs(self, inputs: dict[str, Any], start: int, width: int) -> tuple[Tensor, Any]:
        outputs = self.base(**inputs)
        return outputs.logits[:, start:], outputs

    def _read(
        self,
        documents: dict[str, Any],
        labels: Tensor | None,
        returns_logits: bool,
        num_items: Tensor | int | None,
        hidden_states: bool,
    ) -> RecurrentOutput:
        plan = self._plan(**documents, labels=labels, outputs=returns_logits or hidden_states)
        layout = input_layout(plan, documents["state"])
        logits, fields = self._read_documents(plan, *layout, num_items, hidden_states)
        return RecurrentOutput(logits=logits if returns_logits else None, **fields)


class RecurrentForMaskedLM(_TokenHead):
    """A masked language model that reads documents of any length."""

    auto_class = "AutoModelForMaskedLM"
    _capturable_outputs = False


class RecurrentForTokenClassification(_TokenHead):
    """A token classifier that reads documents of any length."""

    auto_class = "AutoModelForTokenClassification"

    def _returns_logits(self, labels: Tensor | None) -> bool:
        return labels is None or not torch.is_grad_enabled()

    @property
    def _num_classes(self) -> int:
        return len(self.config.id2label)  # type: ignore[arg-type]


class RecurrentForSequenceClassification(EncoderHead):
    """A classifier of whole documents: the first token's final state, max-pooled over windows (section 5.4)."""

    auto_class = "AutoModelForSequenceClassification"
    accepts_loss_kwargs = False  # one label a document: `Trainer` may average by itself

    def __init__(self, config: RecurrentModelConfig, base: PreTrainedModel | None = None):
        check_first_token(config.base_config)
        super().__init__(config, base)

    def _window_outputs(self, inputs: dict[str, Any], start: int) -> tuple[Tensor, ...]:
        outputs = self.backbone(**inputs)
        first_token = outputs.last_hidden_state[:, 0].clone()  # a view would keep the whole window alive
        return first_token, *self._hidden_states(inputs, outputs)

    def _returns_logits(self, labels: Tensor | None) -> bool:
        return True

    def _read(
        self,
        documents: dict[str, Any],
        labels: Tensor | None,
        returns_logits: bool,
        num_items: Tensor | int | None,
        hidden_states: bool,
    ) -> RecurrentOutput:
        if num_items is not None:
            raise ValueError("num_items_in_batch: a sequence classifier averages over documents. Leave it out.")
        final = documents["final"]
        plan = self._plan(**documents, labels=None, outputs=True, labelled=labels is not None)
        if labels is not None and final:
            size = len(self.config.id2label)  # type: ignore[arg-type]
            labels = argument_checks.check_targets(labels, len(plan.read), size, self.config.problem_type)
        layout = OutputLayout(plan, *input_layout(plan, documents["state"]))

        def make(batch: WindowBatch, first_token: Tensor, *hidden: Tensor) -> bptt.Outputs:
            return first_token, *(layout.select(batch, values) for values in hidden)

        results, flat = self._run(plan, OutputSpec(make, hidden_states=hidden_states))
        summary = max_over_windows(plan, [outputs[0] for outputs in results])
        logits = loss = None
        if final:
            assert summary is not None, "documents that end have had a window"
            logits = classify(self.base, summary)
            loss = None if labels is None else ForSequenceClassificationLoss(labels, logits, self.config)
        emitted = torch.tensor(plan.emitted())
        logits = logits if returns_logits else None
        hidden = layout.hidden_states([one[-1] for one in results], self.config, flat) if hidden_states else None
        state = self._state(plan, flat, summary)
        return RecurrentOutput(loss=loss, logits=logits, hidden_states=hidden, emitted=emitted, state=state)
