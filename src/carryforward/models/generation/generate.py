# SPDX-License-Identifier: Apache-2.0
"""`generate` without a length limit: transformers' own, with a cache that rolls over at the window's end.

Sampling, beam search, logits processors, stopping and streaming are transformers'; `window_cache` adds recurrence.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from ...state import State
from .. import argument_checks
from .window_cache import WindowCache

_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
# Arguments of transformers' `generate` that are refused, and why.
_REFUSED = {
    "inputs_embeds": "the overlap is read again as tokens; give input_ids",
    "cache_implementation": "a recurrent model has its own cache; leave it out",
    "prefill_chunk_size": "prompts are read window by window anyway; leave it out",
    "guidance_scale": "the unconditional text would need a state of its own; leave it out",
    "output_attentions": "they exist per window only; see `carryforward inspect`",
    "output_hidden_states": "they exist per window only; call the model itself",
    "position_ids": "positions are counted per window; leave it out",
}


class Generation(GenerationMixin):
    """Adds `generate` to a recurrent causal model."""

    def generate(  # type: ignore[override]
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        state: State | None = None,
        overlap: int | None = None,
        use_state: bool | None = None,
        allow_other_model: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Generate as every Hugging Face model does, with prompts and outputs of any length.

        Args:
            inputs: the prompts, [B, N], padded on the left. With a state they may be left out: its last tokens are
                then the prompts.
            state: continue from here: the prompts are what follows.
            overlap: generate at another overlap than the model was made for.
            use_state: False removes the state: every window stands alone. True by default.
            allow_other_model: continue from a state that a model with other weights or settings has made.
            *args, **kwargs: as for every Hugging Face model. With `return_dict_in_generate=True` the result's
                `past_key_values.state` is the state to continue from: each row but its last token, an eos included,
                has been read. There is none after beam search.
        """
        model: Any = self  # a `PreTrainedModel`: a mixin cannot say so
        if model.training and model.is_gradient_checkpointing:
            raise ValueError("generate needs a cache, which gradient checkpointing disables: call model.eval() first.")
        settings, _ = model._prepare_generation_config(generation_config, **kwargs)
        _check_settings(settings, kwargs)
        cache = kwargs.get("past_key_values")
        if cache is not None:
            check_cache(cache, state=state, overlap=overlap, use_state=use_state)
            cache.restart()
        prompts = inputs if inputs is not None else kwargs.pop("input_ids", None)
        if prompts is not None and not argument_checks.check_batch(prompts).shape[1]:
            prompts = None
            if state is None:
                raise ValueError("input_ids has no tokens: give a prompt, or a state to continue from.")
        if prompts is not None:
            argument_checks.check_mask(kwargs.get("attention_mask"), prompts)
        if state is not None and prompts is None:
            state, prompts = state.before_last()
            kwargs["attention_mask"] = torch.ones_like(prompts)  # or transformers infers padding from ids
        rows = 1 if prompts is None else len(prompts)
        if cache is None:
            overlap = argument_checks.check_overlap(model.config, overlap)
            start = model.fresh_state(rows, overlap) if state is None else state
            use_state = True if use_state is None else use_state
            cache = kwargs["past_key_values"] = WindowCache(start, overlap, use_state, allow_other_model)
        fresh = model.fresh_state(rows, cache.overlap)
        argument_checks.check_state(cache.state, rows, fresh, cache.allow_other_model)
        ends = settings.eos_token_id
        cache.ends = () if ends is None else tuple(torch.as_tensor(ends).flatten().tolist())
        return super().generate(prompts, generation_config, *args, **kwargs)  # type: ignore[misc]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, for `generate_batch` and others that begin here: it would run for half a minute and fail."""
        raise ValueError(
            "continuous batching (generate_batch) cannot be used with a recurrent model, which has its own cache: call "
            "generate with a batch padded on the left."
        )

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, past_key_values: WindowCache, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The columns the cache has not seen yet."""
        new = slice(past_key_values.columns, None)
        if not input_ids[:, new].numel():
            raise ValueError(
                f"past_key_values has read {past_key_values.columns} columns, and input_ids has {input_ids.shape[1]}: "
                "give the whole text so far and something new, or continue from past_key_values.state instead."
            )
        mask = None if attention_mask is None else attention_mask[:, new]
        return {"input_ids": input_ids[:, new], "attention_mask": mask, "past_key_values": past_key_values}


def _check_settings(settings: GenerationConfig, arguments: dict[str, Any]) -> None:
    mode = str(settings.get_generation_mode(arguments.get("assistant_model")).value)
    if mode not in _MODES:
        raise ValueError(
            f"generate cannot do {mode.replace('_', ' ')} with a recurrent model: a state cannot be rolled back. Use "
            "greedy search, sampling or beams (no assistant_model, prompt_lookup_num_tokens, penalty_alpha, "
            "dola_layers, num_beam_groups or constraints)."
        )
    for name, reason in _REFUSED.items():
        value = arguments.get(name, getattr(settings, name, None))
        neutral = value is None or value is False or (name == "guidance_scale" and value == 1)
        if not neutral:
            raise ValueError(f"{name} cannot be used to generate with a recurrent model: {reason}.")


def check_cache(cache: Any, **others: Any) -> None:
    """Refuse another kind of cache, and arguments that a cache already fixes."""
    if not isinstance(cache, WindowCache):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}: a recurrent model continues from the WindowCache that "
            "generate returned, or from a state."
        )
    for name, value in others.items():
        if value is not None:
            raise ValueError(
                f"{name} cannot be given together with past_key_values, which continues as it began and returns the "
                "logits of the last token."
            )
