# SPDX-License-Identifier: Apache-2.0
"""The recurrent causal language model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils import can_return_tuple

from ..config import RecurrentModelConfig
from ..engine.loss import projected_nll_sum
from ..engine.window_model import WindowInputs
from ..state import State
from ..utils.checks import check_flag
from . import argument_checks
from .generation.generate import Generation, check_cache
from .generation.window_cache import WindowCache
from .headless import without_head
from .outputs import RecurrentOutput, columns_to_keep
from .token_model import TokenOutputModel


class RecurrentForCausalLM(TokenOutputModel, Generation, GenerationMixin):  # transformers looks for the last by name
    """A causal language model that reads documents of any length, window by window, carrying a state."""

    auto_class = "AutoModelForCausalLM"
    _capturable_outputs = False

    _made = False

    def __init__(self, config: RecurrentModelConfig, base: PreTrainedModel | None = None):
        super().__init__(config, base)
        self._made = True

    @property
    def base_model(self) -> PreTrainedModel:
        """This model without its head, for those who compute a loss from hidden states, as TRL does.

        Transformers asks for it while the model is made and before its weights are loaded: then it is the model itself.
        """
        if not self._made or self.device.type == "meta":
            return self
        reader = without_head(self)
        reader.training = self.training
        return reader

    def _token_outputs(self, inputs: dict[str, Any], start: int, width: int) -> tuple[Tensor, Any]:
        outputs = self.base(**inputs, logits_to_keep=width - start)
        return outputs.logits, outputs

    @property
    def _chunks_loss(self) -> bool:
        return self.config.architecture.output_projection(self.base) is not None

    def _window_loss(self, inputs: dict[str, Any], window: WindowInputs) -> Tensor:
        projection = self.config.architecture.output_projection(self.base)
        if projection is None:
            return super()._window_loss(inputs, window)
        assert window.targets is not None
        hidden = self.backbone(**inputs).last_hidden_state[:, window.start :]
        return projected_nll_sum(hidden, projection, window.targets)

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
        allow_other_model: bool = False,
        output_hidden_states: bool | None = None,
        work: Callable[[], tuple[Tensor, ...]] | None = None,
        **others: Any,
    ) -> RecurrentOutput | tuple[Tensor, ...]:
        """Read documents, or the next piece of them.

        With labels and gradients enabled, the gradients are already computed here: evaluate under `torch.no_grad()`.

        Args:
            input_ids: the documents' tokens, [B, N], of any length.
            attention_mask: 0 where a row is padded, left or right.
            labels: as in Hugging Face: shifted inside, -100 is not scored; usually `input_ids` itself.
            state: an earlier call's `state`, to continue from; the first new token is then scored too.
            overlap: read at another overlap than the model was made for.
            use_state: False removes the state: every window stands alone, as with the base model. True by default.
            logits_to_keep: compute logits for the last so many columns only, or for the columns listed, or for those of
                a boolean mask [N]; 0 is all.
            return_logits: return logits beside the loss; without labels they are always returned.
            num_items_in_batch: divide the loss by this instead of the number of scored targets.
            past_key_values: from `generate`: read the next tokens, and return the logits of the last one only.
            allow_other_model: continue from a state that a model with other weights or settings has made.
            output_hidden_states: return the hidden states of the embeddings and of all layers at every token, whatever
                `logits_to_keep` says: (L + 1) · k numbers a token, and the call computes all logits.
            work: from `sharded_backward`: do this in place of reading documents, while FSDP has gathered the weights.
            **others: arguments of Hugging Face models that must not request anything here.
        """
        if work is not None:
            return work()
        argument_checks.refuse_unsupported(others)
        argument_checks.check_num_items(num_items_in_batch)
        if past_key_values is not None:
            check_cache(
                past_key_values, labels=labels, state=state, overlap=overlap, use_state=use_state,
                logits_to_keep=None if isinstance(logits_to_keep, int) and logits_to_keep in (0, 1) else logits_to_keep,
                return_logits=None if return_logits else return_logits,
                num_items_in_batch=num_items_in_batch, output_hidden_states=output_hidden_states or None,
            )  # fmt: skip
            next_logits = past_key_values.read(self, input_ids, attention_mask)
            return RecurrentOutput(logits=next_logits, past_key_values=past_key_values)
        outputs = labels is None if return_logits is None else return_logits
        use_state = True if use_state is None else use_state
        hidden = self._asks_for_hidden_states(output_hidden_states)
        check_flag("return_logits", outputs)
        plan = self._plan(
            input_ids, attention_mask, labels, state, overlap=overlap, use_state=use_state, outputs=outputs or hidden,
            final=False, allow_other_model=allow_other_model,
        )  # fmt: skip
        columns, width, order = columns_to_keep(logits_to_keep, plan.width) if outputs else (None, 0, None)
        kept = columns
        if hidden:  # of all columns: logits are selected afterwards
            columns, width = torch.arange(plan.width), plan.width
        logits, fields = self._read_documents(plan, columns, width, num_items_in_batch, hidden)
        if not outputs or logits is None:
            return RecurrentOutput(**fields)
        if hidden and kept is not None:
            logits = logits[:, (kept >= 0).to(logits.device)]
        if order is not None:
            logits = logits[:, order.to(logits.device)]
        return RecurrentOutput(logits=logits, **fields)
