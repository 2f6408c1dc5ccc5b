# SPDX-License-Identifier: Apache-2.0
"""The supported model families, one row each: where layers, norms, attention and heads are, and how positions work.

A new family is a row of `ARCHITECTURES`. Together with `hooks` and `attention` this is all the package knows of a base
model's inside.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

MASKED = torch.finfo(torch.float32).min  # what eager attention adds to the scores of masked keys


@dataclass(frozen=True)
class Architecture:
    """The structure of one family of base models.

    Attributes:
        causal: a token attends only to earlier tokens.
        layers: path from the model without its head to the list of layers.
        norm: the layer's norm in front of attention; None where the norm comes after it.
        attention: path from a layer to its self-attention module.
        rotary: positions are rotations of queries and keys, not learned vectors.
        rotary_by_type: layers of different attention types are rotated differently.
        offset_positions: position ids start after the padding id, so that fewer positions can be used.
        masks_by_type: layers of different attention types take their masks from a dictionary.
        classify: applies the classification head to first-token vectors [B, k]; None without such a head.
        answer: applies the question-answering head to hidden states [B, T, k]; gives [B, T, 2], starts and ends.
    """

    causal: bool
    layers: str
    norm: str | None
    attention: str
    rotary: bool = False
    rotary_by_type: bool = False
    offset_positions: bool = False
    masks_by_type: bool = False
    classify: Callable[[Any, Tensor], Tensor] | None = None
    answer: Callable[[Any, Tensor], Tensor] | None = None

    def max_positions(self, config: Any) -> int:
        """The number of positions the base model has, or was trained on if they are rotary."""
        return config.max_position_embeddings - self._skipped(config)

    def position_ids(self, config: Any, positions: Tensor) -> Tensor:
        """Position ids of the base model for positions counted from 0."""
        return positions + self._skipped(config)

    def _skipped(self, config: Any) -> int:
        return config.pad_token_id + 1 if self.offset_positions else 0

    def kv_heads(self, config: Any) -> tuple[int, int]:
        """The number of key-value heads, and the size of a key."""
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return getattr(config, "num_key_value_heads", None) or config.num_attention_heads, size

    def sliding_windows(self, config: Any) -> list[int | None]:
        """The attention window of each layer; None for full attention."""
        sliding = getattr(config, "sliding_window", None) or None
        types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        return [sliding if kind == "sliding_attention" else None for kind in types]

    def has_token_types(self, config: Any) -> bool:
        """Whether the base model has token types, to tell a question's tokens from the document's."""
        return getattr(config, "type_vocab_size", 0) > 1

    def rotation(
        self, backbone: Any, distance: int | Tensor, window: int, like: Tensor, num_layers: int
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine by which RoPE keys of each layer are moved `distance` positions back, each [1 or B, L, d].

        Args:
            distance: one for all rows, or one a row, [B, 1].
            window: tokens of a window: some models rotate long texts differently.
            like: a tensor on the device of the keys.
        """
        config, rotations = backbone.config, {}
        types = config.layer_types if self.rotary_by_type else [None] * num_layers
        back = torch.full((1, 1), distance, device=like.device) if isinstance(distance, int) else distance
        back = back.to(like.device)
        # position 0, the new position, and the last one of a window, by which some models choose their frequencies
        positions = torch.cat([torch.zeros_like(back), -back, torch.full_like(back, window - 1)], dim=1)
        for layer_type in set(types):
            cos, sin = backbone.rotary_emb(like.float(), positions, *([layer_type] if self.rotary_by_type else []))
            rotations[layer_type] = cos[:, 1] / cos[:, 0], sin[:, 1] / cos[:, 0]  # some models scale both
        cos, sin = (torch.stack([rotations[one][i] for one in types], dim=1) for i in (0, 1))
        return cos, sin

    def rerotate(self, backbone: Any, kv: Tensor, distance: int | Tensor, window: int) -> Tensor:
        """Re-rotate the RoPE keys of all layers, as if they stood `distance` positions further back.

        Args:
            kv: keys and values, [B, L, 2, heads, n, d]. Values are returned as they are: rotated by zero, since two
                branches for keys and values make a kernel that torch's compiler gets wrong (see benchmarks/NOTES.md).
            distance, window: as in `rotation`.
        """
        cos, sin = self.rotation(backbone, distance, window, kv, kv.shape[1])
        cos, sin = torch.stack([cos, torch.ones_like(cos)], dim=2), torch.stack([sin, torch.zeros_like(sin)], dim=2)
        return rotate_keys(kv, cos[:, :, :, None, None], sin[:, :, :, None, None])

    def cache_masks(
        self,
        config: Any,
        positions: Tensor,
        keys: int,
        state_columns: Sequence[int],
        with_state: Tensor,
        last: int | None = None,
    ) -> list[Tensor | None]:
        """Each layer's attention mask for queries at `positions` [B, n] of a window over a cache, [B, 1, n, S + keys].

        transformers cannot make them: keys stay in place, and every row is at another position.

        Args:
            keys: places of the window that attention sees.
            state_columns: for each layer, how many places in front of them belong to the state (S).
            with_state: the rows that see these, [B].
            last: one query a row, all at this position, sees all places: a layer needs a mask only if its sliding
                window is shorter. None if there are more queries, such as those of inserted vectors.
        """

        @cache  # layers of the same kind share a mask
        def mask(sliding: int | None, columns: int) -> Tensor | None:
            if last is not None and (sliding is None or last < sliding):
                return None
            distance = positions[:, None, :, None] - torch.arange(keys, device=positions.device)  # [B, 1, n, keys]
            near = distance >= 0 if sliding is None else (distance >= 0) & (distance < sliding)
            state = with_state[:, None, None, None].expand(-1, 1, positions.shape[1], columns)
            visible = torch.cat([state, near], dim=-1)
            if config._attn_implementation.endswith("eager"):
                return torch.zeros_like(visible, dtype=torch.float).masked_fill(~visible, MASKED)
            return visible

        return [mask(*layer) for layer in zip(self.sliding_windows(config), state_columns, strict=True)]

    def replaced_mask(self, device: torch.device) -> Any:
        """A mask for the base model, so that it makes none; `hooks` replace it by those of `cache_masks`."""
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        return {"full_attention": mask, "sliding_attention": mask} if self.masks_by_type else mask

    def layer_list(self, backbone: nn.Module) -> nn.ModuleList:
        return backbone.get_submodule(self.layers)  # type: ignore[return-value]

    @staticmethod
    def runtime_options(config: Any) -> tuple[str, float | None]:
        """The config values that change how a forward pass runs: the attention function, and a cap on logits."""
        return config._attn_implementation, getattr(config, "final_logit_softcapping", None)

    def output_projection(self, model: Any) -> nn.Linear | None:
        """The linear layer that makes a causal model's logits; None if the model or a hook does more than that."""
        layer, (_, logit_cap) = model.get_output_embeddings(), self.runtime_options(model.config)
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        hooked = any(getattr(module, kind) for module in (model, layer) for kind in hooks)
        patched = any("forward" in vars(module) for module in (model, layer)) or hasattr(layer, "_hf_hook")
        is_transformers = type(model).forward.__module__.startswith("transformers.")
        if type(layer) is not nn.Linear or not is_transformers or hooked or patched or logit_cap is not None:
            return None
        return layer


def rotate_keys(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate keys [..., d] by angles whose cosine and sine [..., d'] are given; d' < d: only the first d' numbers."""
    rotary, rest = keys[..., : cos.shape[-1]], keys[..., cos.shape[-1] :]  # some models rotate a part only
    half = rotary.shape[-1] // 2
    swapped = torch.cat([-rotary[..., half:], rotary[..., :half]], dim=-1)
    return torch.cat([(rotary * cos + swapped * sin).to(keys.dtype), rest], dim=-1)


def _first_token_head(model: Any, first: Tensor) -> Tensor:
    return model.classifier(first[:, None])  # the head itself picks position 0


def _bert_head(model: Any, first: Tensor) -> Tensor:
    return model.classifier(model.dropout(model.bert.pooler(first[:, None])))


def _distilbert_head(model: Any, first: Tensor) -> Tensor:
    return model.classifier(model.dropout(torch.relu(model.pre_classifier(first))))


def _modernbert_head(model: Any, first: Tensor) -> Tensor:
    return model.classifier(model.drop(model.head(first)))


def _answers(model: Any, hidden: Tensor) -> Tensor:
    return model.qa_outputs(hidden)


def _distilbert_answers(model: Any, hidden: Tensor) -> Tensor:
    return model.qa_outputs(model.dropout(hidden))


def _modernbert_answers(model: Any, hidden: Tensor) -> Tensor:
    return model.classifier(model.drop(model.head(hidden)))


_llama = Architecture(True, "layers", "input_layernorm", "self_attn", rotary=True)
_qwen = Architecture(True, "layers", "input_layernorm", "self_attn", rotary=True, masks_by_type=True)
_bert = Architecture(False, "encoder.layer", None, "attention.self", classify=_bert_head, answer=_answers)
_roberta = replace(_bert, offset_positions=True, classify=_first_token_head)

ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(True, "h", "ln_1", "attn"),
    "gpt_neox": Architecture(True, "layers", "input_layernorm", "attention", rotary=True),
    "opt": Architecture(True, "decoder.layers", "self_attn_layer_norm", "self_attn"),
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "gemma3_text": replace(_qwen, rotary_by_type=True),
    "phi": _llama,
    "bert": _bert,
    "roberta": _roberta,
    "xlm-roberta": _roberta,
    "camembert": _roberta,
    "electra": replace(_bert, classify=_first_token_head),
    "distilbert": Architecture(
        False, "transformer.layer", None, "attention", classify=_distilbert_head, answer=_distilbert_answers
    ),
    "modernbert": Architecture(
        False,
        "layers",
        "attn_norm",
        "attn",
        rotary=True,
        rotary_by_type=True,
        classify=_modernbert_head,
        answer=_modernbert_answers,
    ),
}

# Config values under which a supported type computes something else than this file assumes.
_REFUSED_SETTINGS: dict[str, tuple[Any, str]] = {
    "is_decoder": (False, "it turns an encoder into a decoder"),
    "add_cross_attention": (False, "the state would be inserted into cross-attention"),
    "is_encoder_decoder": (False, "only decoders and encoders are supported"),
    "layerdrop": (0.0, "a dropped layer neither receives the state nor is pooled; set it to 0.0"),
    "use_bidirectional_attention": (False, "a causal model is expected"),
    "classifier_pooling": ("cls", "windows are joined by their first token; set it to 'cls'"),
}


def architecture_of(config: Any) -> Architecture:
    """The architecture of a base model; a ValueError names the supported types otherwise."""
    refusal = _refusal(config)
    if refusal is not None:
        raise ValueError(refusal)
    return ARCHITECTURES[config.model_type]


def is_supported(config: Any) -> bool:
    """Whether recurrence can be added to a base model."""
    return _refusal(config) is None


def positions_of(config: Any) -> int | None:
    """The number of positions of any base model; None if its config does not say."""
    return getattr(config, "max_position_embeddings", None)


def unsupported_type(model_type: str) -> str:
    """The refusal of a base model of another type."""
    return f"Recurrence cannot be added to a model of type {model_type!r}. Supported types: {', '.join(ARCHITECTURES)}."


def _refusal(config: Any) -> str | None:
    if config.model_type not in ARCHITECTURES:
        return unsupported_type(config.model_type)
    for name, (expected, reason) in _REFUSED_SETTINGS.items():
        value = getattr(config, name, None)
        if value not in (None, expected):
            return f"Recurrence cannot be added to {config.model_type!r} with {name}={value!r}: {reason}."
    return None
