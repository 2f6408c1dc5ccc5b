# SPDX-License-Identifier: Apache-2.0
"""The supported model families, one row each: where layers, norms and attention are, and how positions work.

A new family is a row of `ARCHITECTURES`. Together with `hooks` and `attention` this is all the package knows of a base
model's inside.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .kv_layout import KVLayout
from .quantization import is_quantized_weight
from .rotations import LAYOUTS, rotate_keys

MASKED = torch.finfo(torch.float32).min  # what eager attention adds to the scores of masked keys


@dataclass(frozen=True)
class Architecture:
    """The structure of one family of base models.

    Attributes:
        causal: a token attends only to earlier tokens.
        layers: path from the model without its head to the list of layers.
        norm: the layer's norm in front of attention; None where the norm comes after it.
        attention: path from a layer to its self-attention module.
        backbone: path from the model with its head to the one without; empty where it is transformers' `base_model`.
        hands_down: layers hand keyword arguments on to their attention.
        core: path from the model without its head to the module that takes token ids and gives hidden states.
        reaches_layers: the model hands keyword arguments on to its layers.
        order: for each layer, which item of the list computes it, counted from 0; empty if each computes one, in order.
        own_attention: what attention modules call with queries and keys, if it is not transformers' attention
            interface: a name of `own_attention.CALLS`.
        rotary: positions are rotations of queries and keys, not learned vectors.
        rotary_by_type: layers of different attention types are rotated differently.
        rotation_table: the name of a table of sines and cosines in attention modules, if rotations are not made by a
            module `rotary_emb`.
        rotation_layout: how rotations are written down, a name of `rotations.LAYOUTS`.
        unrotated: the layers, counted from 1, in which keys have no position.
        offset_positions: position ids start after the padding id, so that fewer positions can be used.
        masks_by_type: layers of different attention types take their masks from a dictionary.
        kv_shapes: for each layer the number of key-value heads, the size of a key and that of a value, where the config
            does not say them.
        kv_repeats: so many times fewer heads are cached than reach the attention function.
        state_size: the size of a key in a state, if there are `kv_shapes`; see `kv_layout`.
        plain_head: a causal model's logits are a linear layer's output, and nothing else is done to them.
    """

    causal: bool
    layers: str
    norm: str | None
    attention: str
    hands_down: bool = True
    core: str = ""
    backbone: str = ""
    reaches_layers: bool = True
    order: tuple[int, ...] = ()
    own_attention: str = ""
    rotary: bool = False
    rotary_by_type: bool = False
    rotation_table: str = ""
    rotation_layout: str = "halves"
    unrotated: tuple[int, ...] = ()
    offset_positions: bool = False
    masks_by_type: bool = False
    plain_head: bool = True
    takes_embeddings: bool = True
    kv_shapes: tuple[tuple[int, int, int], ...] = ()
    state_size: int = 0
    kv_repeats: int = 1

    def max_positions(self, config: Any) -> int:
        """The number of positions the base model has, or was trained on if they are rotary."""
        return config.max_position_embeddings - self._skipped(config)

    @property
    def positions_end(self) -> bool:
        """Whether there are no positions beyond `max_positions`."""
        return not self.rotary or bool(self.rotation_table)

    @property
    def kind_of_positions(self) -> str:
        """What the positions are that end, for messages."""
        return "positions" if self.rotary else "learned positions"

    def position_ids(self, config: Any, positions: Tensor) -> Tensor:
        """Position ids of the base model for positions counted from 0."""
        return positions + self._skipped(config)

    def _skipped(self, config: Any) -> int:
        return config.pad_token_id + 1 if self.offset_positions else 0

    def embedding_width(self, config: Any) -> int:
        """Numbers of an embedding: of what enters the model, memory positions included."""
        return getattr(config, "embedding_size", None) or self.output_width(config)

    def output_width(self, config: Any) -> int:
        """Numbers of a last hidden state, which OPT-350m projects down."""
        return getattr(config, "word_embed_proj_dim", None) or config.hidden_size

    def kv_heads(self, config: Any) -> tuple[int, int]:
        """The number of key-value heads, and the size of a key, in a state."""
        if self.kv_shapes:
            return max(heads for heads, _, _ in self.kv_shapes), self.state_size
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
        rotations = {}
        types = backbone.config.layer_types if self.rotary_by_type else [None] * num_layers
        back = torch.full((1, 1), distance, device=like.device) if isinstance(distance, int) else distance
        back = back.to(like.device)
        # position 0, the new position, and the last one of a window, by which some models choose their frequencies
        positions = torch.cat([torch.zeros_like(back), -back, torch.full_like(back, window - 1)], dim=1)
        for layer_type in set(types):
            cos, sin = self._angles(backbone, like.float(), positions, layer_type)
            rotations[layer_type] = cos[:, 1] / cos[:, 0], sin[:, 1] / cos[:, 0]  # some models scale both
        widest = max(cos.shape[-1] for cos, _ in rotations.values())
        rotations = {
            one: (_widened(cos, widest, 1.0), _widened(sin, widest, 0.0)) for one, (cos, sin) in rotations.items()
        }
        by_layer = [rotations[one] for one in types]
        for layer in self.unrotated:
            cos, sin = by_layer[layer - 1]
            by_layer[layer - 1] = torch.ones_like(cos), torch.zeros_like(sin)
        cos, sin = (torch.stack([rotation[i] for rotation in by_layer], dim=1) for i in (0, 1))
        return cos, sin

    def _angles(self, backbone: Any, like: Tensor, positions: Tensor, layer_type: str | None) -> tuple[Tensor, Tensor]:
        """Cosine and sine of a model's rotations at positions [b, n], each [b, n, d']."""
        if self.rotation_table:
            table = self._table(backbone).to(like.dtype)
            sin, cos = table[positions.abs().to(table.device)].to(like.device).chunk(2, dim=-1)
            angles = cos, sin * positions.sign()[..., None]
        else:
            angles = backbone.rotary_emb(like, positions, *([layer_type] if self.rotary_by_type else []))
        return LAYOUTS[self.rotation_layout].in_halves(*angles)

    def _table(self, backbone: Any) -> Tensor:
        """Sines and cosines of all positions, [n, d']."""
        return getattr(self.layer_list(backbone)[0].get_submodule(self.attention), self.rotation_table)

    def rotated_sizes(self, backbone: Any) -> list[int]:
        """For each layer, how many numbers of its keys are rotated."""
        count = backbone.config.num_hidden_layers
        if not self.rotary:
            return [0] * count
        buffers = [self._table(backbone)] if self.rotation_table else backbone.rotary_emb.buffers()
        device = next((x.device for x in buffers), backbone.device)  # weights may be offloaded
        like, position = torch.empty(0, device=device), torch.zeros(1, 1, dtype=torch.long, device=device)
        types = backbone.config.layer_types if self.rotary_by_type else [None] * count
        sizes = {one: self._angles(backbone, like, position, one)[0].shape[-1] for one in set(types)}
        return [sizes[one] for one in types]

    def kv_layouts(self, backbone: Any) -> list[KVLayout]:
        """For each layer, how its keys and values stand in a state; empty if all stand there as they are."""
        heads, size = self.kv_heads(backbone.config)
        rotated = self.rotated_sizes(backbone)
        shapes = self.kv_shapes or ((heads, size, size),) * len(rotated)
        neighbours = self.rotary and LAYOUTS[self.rotation_layout].neighbours
        layouts = [
            KVLayout(*shape, own, heads, size, max(rotated), neighbours, self.kv_repeats)
            for shape, own in zip(shapes, rotated, strict=True)
        ]
        return [] if all(layout.is_plain for layout in layouts) else layouts

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
        visible_state: Tensor,
        last: int | None = None,
    ) -> list[Tensor | None]:
        """Each layer's attention mask for queries at `positions` [B, n] of a window over a cache, [B, 1, n, S + keys].

        transformers cannot make them: keys stay in place, and every row is at another position.

        Args:
            keys: places of the window that attention sees.
            state_columns: for each layer, how many places in front of them belong to the state (S).
            visible_state: the rows that see these, [B, 1]; or which of them each row sees, [B, S].
            last: one query a row, all at this position, sees all places: a layer needs a mask only if its sliding
                window is shorter. None if there are more queries, such as those of inserted vectors.
        """

        @cache  # layers of the same kind share a mask
        def mask(sliding: int | None, columns: int) -> Tensor | None:
            if last is not None and (sliding is None or last < sliding):
                return None
            distance = positions[:, None, :, None] - torch.arange(keys, device=positions.device)  # [B, 1, n, keys]
            near = distance >= 0 if sliding is None else (distance >= 0) & (distance < sliding)
            state = visible_state[:, None, None, :columns].expand(-1, 1, positions.shape[1], columns)
            visible = torch.cat([state, near], dim=-1)
            if config._attn_implementation.endswith("eager"):
                return torch.zeros_like(visible, dtype=torch.float).masked_fill(~visible, MASKED)
            return visible

        return [mask(*layer) for layer in zip(self.sliding_windows(config), state_columns, strict=True)]

    def replaced_mask(self, config: Any, device: torch.device) -> Any:
        """A mask for the base model, so that it makes none; `hooks` replace it by those of `cache_masks`."""
        return self.masks_of_all_types(config, torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device))

    def masks_of_all_types(self, config: Any, mask: Tensor) -> Any:
        """One mask for the layers of all types, as the base model takes it."""
        if not self.masks_by_type:
            return mask
        types = getattr(config, "layer_types", None) or ()
        return dict.fromkeys({"full_attention", "sliding_attention", *types}, mask)

    def backbone_of(self, model: Any) -> Any:
        """The model without its head."""
        return getattr(model, self.backbone, model) if self.backbone else model.base_model

    def layer_list(self, backbone: nn.Module) -> nn.ModuleList:
        return backbone.get_submodule(self.layers)  # type: ignore[return-value]

    def layers_in_order(self, backbone: nn.Module) -> list[nn.Module]:
        """For each layer the module that computes it, which may be that of another layer, too."""
        modules = [*self.layer_list(backbone)]
        return [modules[i] for i in self.order] if self.order else modules

    @staticmethod
    def runtime_options(config: Any) -> tuple[str, float | None]:
        """The config values that change how a forward pass runs: the attention function, and a cap on logits."""
        return config._attn_implementation, getattr(config, "final_logit_softcapping", None)

    def output_projection(self, model: Any) -> nn.Linear | None:
        """The linear layer that makes a causal model's logits; None if the model or a hook does more than that."""
        layer, (_, logit_cap) = model.get_output_embeddings(), self.runtime_options(model.config)
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        hooked = any(
            not getattr(hook, "func", hook).__module__.startswith(__package__)
            for module in (model, layer) for kind in hooks for hook in getattr(module, kind).values()
        )  # fmt: skip
        patched = any("forward" in vars(module) for module in (model, layer)) or hasattr(layer, "_hf_hook")
        is_transformers = type(model).forward.__module__.startswith("transformers.")
        is_linear = type(layer) is nn.Linear and not is_quantized_weight(layer.weight)
        is_plain = self.plain_head and is_linear and is_transformers and logit_cap is None
        return layer if is_plain and not hooked and not patched else None


def _widened(x: Tensor, width: int, value: float) -> Tensor:
    """Cosines or sines [..., r] of a layer that rotates less than others, for the halves of [..., width]."""
    missing = (width - x.shape[-1]) // 2
    if not missing:
        return x
    return torch.cat([pad(half, (0, missing), value=value) for half in x.chunk(2, dim=-1)], dim=-1)


_llama = Architecture(True, "layers", "input_layernorm", "self_attn", rotary=True)
_qwen = Architecture(True, "layers", "input_layernorm", "self_attn", rotary=True, masks_by_type=True)
_bert = Architecture(False, "encoder.layer", None, "attention.self")
_roberta = replace(_bert, offset_positions=True)

ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(True, "h", "ln_1", "attn"),
    "gpt_neox": Architecture(True, "layers", "input_layernorm", "attention", rotary=True),
    "opt": Architecture(True, "decoder.layers", "self_attn_layer_norm", "self_attn", core="decoder"),
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
    "electra": _bert,
    "distilbert": Architecture(False, "transformer.layer", None, "attention"),
    "modernbert": Architecture(
        False, "layers", "attn_norm", "attn", rotary=True, rotary_by_type=True, masks_by_type=True
    ),
}

STORED_AS = "recurrence_architecture"  # the field of a base model's config that holds what was discovered

# Config values under which a supported type computes something else than this file assumes.
_REFUSED_SETTINGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "is_decoder": ((False,), "it turns an encoder into a decoder"),
    "add_cross_attention": ((False,), "the state would be inserted into cross-attention"),
    "is_encoder_decoder": ((False,), "only decoders and encoders are supported"),
    "layerdrop": ((0.0,), "a dropped layer neither receives the state nor is pooled; set it to 0.0"),
    "alibi": ((False,), "its masks hold a bias for distances (ALiBi), which what is carried would not get"),
    "use_bidirectional_attention": ((False, "vision"), "a causal model is expected"),
}


def architecture_of(config: Any) -> Architecture:
    """The architecture of a base model: a row of the table, or what was discovered of it (`store_architecture`). A
    ValueError names the supported types otherwise."""
    if not is_known(config):
        raise ValueError(unsupported_type(config.model_type))
    check_settings(config)
    stored = getattr(config, STORED_AS, None)
    return ARCHITECTURES[config.model_type] if stored is None else _from_dict(stored)


def store_architecture(config: Any, architecture: Architecture) -> None:
    """Write a discovered architecture into a base model's config, with which it is saved."""
    setattr(config, STORED_AS, dataclasses.asdict(architecture))


def _from_dict(stored: Any) -> Architecture:
    try:
        lists = {name: tuple(stored[name]) for name in ("unrotated", "order") if name in stored}
        shapes = tuple(tuple(shape) for shape in stored["kv_shapes"])
        return Architecture(**{**stored, **lists, "kv_shapes": shapes})
    except (TypeError, KeyError) as error:
        raise ValueError(f"config.json: {STORED_AS} is not the architecture of a base model ({error}).") from error


def is_known(config: Any) -> bool:
    """Whether a base model's architecture is in the table, or was discovered."""
    return config.model_type in ARCHITECTURES or is_discovered(config)


def is_discovered(config: Any) -> bool:
    """Whether a base model's architecture was discovered."""
    return getattr(config, STORED_AS, None) is not None


def is_supported(config: Any) -> bool:
    """Whether recurrence can be added to a base model."""
    return is_known(config) and _refused_setting(config) is None


def positions_of(config: Any) -> int | None:
    """The number of positions of any base model; None if its config does not say."""
    return getattr(config, "max_position_embeddings", None)


def unsupported_type(model_type: str) -> str:
    """The refusal of a base model whose structure is not known."""
    return (
        f"Recurrence cannot be added to a model of type {model_type!r}: it is not one of the known types "
        f"({', '.join(ARCHITECTURES)}), and its structure was not found in the model itself, or not saved with it."
    )


def check_settings(config: Any) -> None:
    """Refuse settings under which a base model computes something else than this file assumes."""
    refusal = _refused_setting(config)
    if refusal is not None:
        raise ValueError(refusal)


def _refused_setting(config: Any) -> str | None:
    for name, (accepted, reason) in _REFUSED_SETTINGS.items():
        value = getattr(config, name, None)
        if value is not None and value not in accepted:
            return (
                f"Recurrence cannot be added to a model of type {config.model_type!r} with {name}={value!r}: {reason}."
            )
    return None
