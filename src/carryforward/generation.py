# SPDX-License-Identifier: Apache-2.0
"""`generate` without a length limit: Hugging Face's machinery, with a cache that rolls over at the window's end.

Sampling, beams, processors, stopping and streaming are transformers' own; `window_cache` holds what recurrence adds.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import GenerationMixin

from .state import State
from .window_cache import WindowCache


class Generation(GenerationMixin):
    """Adds `generate` to a recurrent causal model."""

    fresh_state: Callable[..., State]

    def generate(  # type: ignore[override]
        self,
        inputs: Tensor | None = None,
        *args: Any,
        state: State | None = None,
        overlap: int | None = None,
        use_state: bool = True,
        **kwargs: Any,
    ) -> Any:
        """As `transformers`' `generate`, for prompts and outputs of any length.

        Args:
            inputs: the prompts, [B, N], padded on the left.
            state: go on from here: the prompts are what follows.
            overlap: write at another overlap than the model was made for.
            use_state: False removes the state: every window stands alone.
            *args, **kwargs: as for every Hugging Face model. With `return_dict_in_generate=True` the result's
                `past_key_values.state` is where the documents stand, all but the last token read.
        """
        prompts = inputs if inputs is not None else kwargs.get("input_ids")
        rows = len(state) if state is not None else 1 if prompts is None else len(prompts)
        overlap = self.config.recurrence.overlap if overlap is None else overlap
        begin = self.fresh_state(rows, overlap) if state is None else state
        if kwargs.get("past_key_values") is None:
            kwargs["past_key_values"] = WindowCache(begin, overlap, use_state)
        return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, past_key_values: WindowCache, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The columns the cache has not seen yet."""
        new = slice(past_key_values.columns, None)
        mask = None if attention_mask is None else attention_mask[:, new]
        return {"input_ids": input_ids[:, new], "attention_mask": mask, "past_key_values": past_key_values}
