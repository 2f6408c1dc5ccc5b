# SPDX-License-Identifier: Apache-2.0
"""How the state enters a base model and how its layers' outputs are read: the only file that knows a model's inside.

The state becomes one more key and value of a layer's self-attention (figure 2 of the paper) without a line of model
code: a hook puts the state, passed through the layer's own norm, in front of the attention module's input, and a
second one takes its positions off the output. The module's own projections make its keys and values; its queries
give results nobody reads. That costs a slot the attention's projections, and no feed-forward network.

Keys and values of earlier positions enter where they are used, and those of the window are noted there (`doors`).

What belongs to one call travels with the call, as the keyword `carry`, which transformers hands down to every layer:
under gradient checkpointing a layer runs again during the backward pass and must meet its own window's state. The
hooks themselves hold no reference to any model, so copies and pickles of a model are independent of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

HIDDEN = torch.finfo(torch.float32).min  # what eager attention adds where nothing is to be seen


@dataclass(frozen=True)
class Architecture:
    """Where things are in one family of base models.

    Attributes:
        causal: a token sees only what is before it.
        layers: path from the model without its head to the list of layers.
        norm: the layer's norm in front of attention; None where the norm comes after it.
        attention: path from a layer to the module that makes keys and values.
        rotary: positions are rotations of queries and keys, not learned vectors.
        rotary_by_type: layers of different attention types are rotated differently.
        offset_positions: learned positions start after the padding id, so that fewer can be used.
        masks_by_type: layers of different attention types take their masks from a dictionary.
        classify: the classification head applied to first-token vectors [B, k]; None where there is no such head.
        answer: the question-answering head applied to hidden states [B, T, k]: [B, T, 2], for starts and ends.
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

    def positions(self, config: Any) -> int:
        """How many positions the base model can use, or was trained on where they are rotary."""
        return config.max_position_embeddings - self._skipped(config)

    def position_ids(self, config: Any, positions: Tensor) -> Tensor:
        """Positions from 0 as the base model counts them."""
        return positions + self._skipped(config)

    def _skipped(self, config: Any) -> int:
        return config.pad_token_id + 1 if self.offset_positions else 0

    def heads(self, config: Any) -> tuple[int, int]:
        """How many heads have keys of their own, and the size of a key."""
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return getattr(config, "num_key_value_heads", None) or config.num_attention_heads, size

    def reaches(self, config: Any) -> list[int | None]:
        """How far each layer looks; None where it sees everything."""
        sliding = getattr(config, "sliding_window", None) or None
        types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        return [sliding if kind == "sliding_attention" else None for kind in types]

    def types_tokens(self, config: Any) -> bool:
        """Whether the base model can be told which tokens are the question's and which the document's."""
        return getattr(config, "type_vocab_size", 0) > 1

    def turned(self, body: Any, keys: Tensor, by: int | Tensor, window: int) -> Tensor:
        """Rotary keys [B, L, heads, n, d] of all layers, `by` positions further back, or each row so many, [B, 1]."""
        config, found = body.config, {}
        kinds = config.layer_types if self.rotary_by_type else [None] * keys.shape[1]
        # none; so many back; and as far as a window reaches, since some models rotate longer texts otherwise
        back = torch.full((1, 1), by, device=keys.device) if isinstance(by, int) else by.to(keys.device)
        positions = torch.cat([torch.zeros_like(back), -back, torch.full_like(back, window - 1)], dim=1)
        for kind in set(kinds):
            cos, sin = body.rotary_emb(keys.float(), positions, *([kind] if self.rotary_by_type else []))
            found[kind] = cos[:, 1] / cos[:, 0], sin[:, 1] / cos[:, 0]  # some models scale them
        cos, sin = (torch.stack([found[kind][i] for kind in kinds], dim=1)[:, :, None, None] for i in (0, 1))
        turned, rest = keys[..., : cos.shape[-1]], keys[..., cos.shape[-1] :]
        half = turned.shape[-1] // 2
        swapped = torch.cat([-turned[..., half:], turned[..., :half]], dim=-1)
        return torch.cat([(turned * cos + swapped * sin).to(keys.dtype), rest], dim=-1)

    def masks(self, config: Any, positions: Tensor, keys: int) -> Any:
        """Attention masks for queries at `positions` [B, n] of a window, over keys at the window's first `keys` ones.

        Made here where keys are kept in place and rows stand at different positions, which transformers cannot know.
        """
        distance = positions[:, None, :, None] - torch.arange(keys, device=positions.device)  # [B, 1, n, keys]
        full = distance >= 0
        sliding = getattr(config, "sliding_window", None)
        near = full if sliding is None else full & (distance < sliding)
        if config._attn_implementation.endswith("eager"):
            full, near = (torch.zeros_like(m, dtype=torch.float).masked_fill(~m, HIDDEN) for m in (full, near))
        return {"full_attention": full, "sliding_attention": near} if self.masks_by_type else near

    def layer_list(self, body: nn.Module) -> nn.ModuleList:
        return body.get_submodule(self.layers)  # type: ignore[return-value]

    @staticmethod
    def decisions(config: Any) -> tuple[str, float | None]:
        """What of a config decides in Python how a window is run: how attention is computed, and a cap on logits."""
        return config._attn_implementation, getattr(config, "final_logit_softcapping", None)

    def projection(self, model: Any) -> nn.Linear | None:
        """The layer whose outputs are a causal model's logits, or None where more is done, by the model or a hook."""
        layer, (_, cap) = model.get_output_embeddings(), self.decisions(model.config)
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        hooked = any(getattr(module, kind) for module in (model, layer) for kind in kinds)
        changed = any("forward" in vars(module) for module in (model, layer)) or hasattr(layer, "_hf_hook")
        own = type(model).forward.__module__.startswith("transformers.")
        if type(layer) is not nn.Linear or not own or hooked or changed or cap is not None:
            return None
        return layer


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


# Settings under which a supported type computes something else than this file assumes.
_REFUSED_SETTINGS: dict[str, tuple[Any, str]] = {
    "is_decoder": (False, "it turns an encoder into a decoder"),
    "add_cross_attention": (False, "the state would enter cross-attention"),
    "is_encoder_decoder": (False, "only decoders and encoders are supported"),
    "layerdrop": (0.0, "a dropped layer would neither receive the state nor be pooled; set it to 0.0"),
    "use_bidirectional_attention": (False, "a causal model is expected"),
    "classifier_pooling": ("cls", "windows are joined by their first token; set it to 'cls'"),
}


def architecture_of(config: Any) -> Architecture:
    """What is known of a base model, or a refusal that names the model and what is supported."""
    refusal = _refusal(config)
    if refusal is not None:
        raise ValueError(refusal)
    return ARCHITECTURES[config.model_type]


def is_supported(config: Any) -> bool:
    """Whether the inside of a base model is known."""
    return _refusal(config) is None


def positions_of(config: Any) -> int | None:
    """How many positions a base model has, known or not; None where it does not say."""
    return getattr(config, "max_position_embeddings", None)


def _refusal(config: Any) -> str | None:
    if config.model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        return f"Recurrence cannot be added to a model of type {config.model_type!r}. Supported types: {known}."
    for name, (expected, reason) in _REFUSED_SETTINGS.items():
        value = getattr(config, name, None)
        if value not in (None, expected):
            return f"Recurrence cannot be added to {config.model_type!r} with {name}={value!r}: {reason}."
    return None
