# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every model type that can carry a state, built without downloads, with the same weights every time.

Defaults hide failures (a multiplier of 1, a norm whose weights are 1, layers that are all alike), so configs differ
from them wherever a type has a setting that matters, and no parameter is what it is initialised with.
"""

import copy
import dataclasses
from typing import Any

import torch
import transformers as hf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import carryforward as cf

from . import tiny
from .tiny import HEADS, LAYERS, VOCABULARY, WIDTH

# --- what is set wherever a type's config has a field of that name ---------------------------------------------------

_BY_VALUE: list[tuple[Any, str]] = [
    (VOCABULARY, "vocab_size vocab_size_per_layer_input"),
    (WIDTH, "hidden_size d_model n_embd dim word_embed_proj_dim prediction_head_size"),
    (12, "embedding_size"),
    (LAYERS, "num_hidden_layers n_layer n_layers"),
    (HEADS, "num_attention_heads n_head n_heads"),
    (1, "num_key_value_heads"),
    (8, "head_dim v_head_dim qk_nope_head_dim q_lora_rank kv_lora_rank kv_channels hidden_size_per_layer_input"),
    (8, "shape_embed_dim pronunciation_embed_dim"),
    (4, "qk_rope_head_dim"),
    (24, "intermediate_size ffn_dim hidden_dim dff n_inner moe_intermediate_size shared_expert_intermediate_size"),
    (24, "shared_intermediate_size prefix_dense_intermediate_size"),
    (40, "max_position_embeddings n_positions max_seq_len original_max_position_embeddings"),
    (1, "pad_token_id"),
    (2, "bos_token_id cls_token_id"),
    (3, "eos_token_id sep_token_id"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok moe_k moe_topk top_k_experts"),
    (1, "n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts"),
    (1, "first_k_dense_replace num_dense_layers"),
    (5, "sliding_window"),  # smaller than the windows that tests read
    (4, "local_attention"),
    (20, "shape_vocab_size pronunciation_vocab_size max_2d_position_embeddings"),
    (True, "attention_bias attention_out_bias mlp_bias norm_bias use_bias use_qkv_bias lm_head_bias classifier_bias"),
    (True, "qk_layernorm use_qk_norm norm_topk_prob mup_enabled"),
    (1e-3, "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon"),
    (1.7, "routed_scaling_factor router_scaling_factor route_scale moe_routed_scaling_factor"),
    (2.0, "logits_scaling final_logit_softcapping"),
    (3.0, "embedding_multiplier scale_emb"),
    (3, "query_pre_attn_scalar"),
    (0.4, "attention_multiplier logit_scale attention_value_scale"),
    (0.5, "residual_multiplier clip_qkv"),
]
_COMMON = {name: value for value, names in _BY_VALUE for name in names.split()}

_mixed = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_full_first = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
_rope = {"rope_type": "default", "rope_theta": 10000.0}
_rope_by_type = {"rope_parameters": {"sliding_attention": _rope, "full_attention": {**_rope, "rope_theta": 100000.0}}}
_partial = {"rope_parameters": {**_rope, "partial_rotary_factor": 0.5}}
_latent = {"num_key_value_heads": 2}  # multi-head latent attention
_yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 20}
_gemma4 = {
    "num_kv_shared_layers": 0,
    "global_head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}

# --- one row a type: what it needs beyond that -----------------------------------------------------------------------

CAUSAL: dict[str, dict[str, Any]] = {
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "gpt-sw3": {},
    "gpt_neox": _partial,
    "opt": {},
    "llama": {},
    "mistral": {},
    "qwen2": {**_mixed, "use_sliding_window": True},
    "qwen3": {**_mixed, "use_sliding_window": True},
    "gemma3_text": {**_mixed, **_rope_by_type},
    "phi": _partial,
    "apertus": {},
    "arcee": {},
    "biogpt": {},
    "bitnet": {},
    "cohere_compass_text": {**_mixed, **_rope_by_type},
    "cwm": _full_first,
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 1, "clip_qkv": 0.5},
        "ffn_config": {"hidden_size": WIDTH, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma": {},
    "gemma2": _mixed,
    "gpt_bigcode": {},
    "jais2": {},
    "ministral": _mixed,
    "olmo": {},
    "olmo2": {},
    "olmo3": {**_mixed, **_rope_by_type},
    "persimmon": _partial,
    "phi3": _partial,
    "seed_oss": {},
    "starcoder2": {},
    "vaultgemma": _mixed,
    "aria_text": {},
    "dots1": _mixed,
    "flex_olmo": {},
    "glm4_moe": _partial,
    "hy_v3": {},
    "mellum": {**_mixed, **_rope_by_type},
    "minimax_m2": {},
    "mixtral": {},
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {**_mixed, "use_sliding_window": True, "mlp_only_layers": [1]},
    "qwen3_moe": {"mlp_only_layers": [1]},
    "solar_open": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "glm": _partial,
    "glm4": _partial,
    "helium": {},
    "nanochat": {},
    "gpt_oss": _mixed,
    "flint": _full_first,
    "exaone4": _mixed,
    "exaone_moe": _mixed,
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "kolibri1": _mixed,
    "afmoe": _mixed,
    "granite": {},
    "granite_swa": _full_first,
    "granitemoe": {},
    "granitemoe_swa": _full_first,
    "granitemoeshared": {},
    "hyperclovax": {},
    "modernbert-decoder": {**_full_first, **_rope_by_type},
    "cohere": {},
    "cohere2": _mixed,
    "cohere2_moe": _mixed,
    "jetmoe": {},
    "laguna": _mixed,
    "mimo_v2_flash": _full_first,
    "gemma4_text": _gemma4,
    "gemma4_unified_text": _gemma4,
    "nemotron": _partial,
    "stablelm": {**_partial, "use_parallel_residual": True},
    "ministral3": {"rope_parameters": {**_yarn, "llama_4_scaling_beta": 0.5, "beta_fast": 32.0, "beta_slow": 1.0,
                                       "mscale": 1.0, "mscale_all_dim": 1.0}},
    "ctrl": {},
    "axk1": _latent,
    "deepseek_v3": _latent,
    "glm4_moe_lite": _latent,
    "minicpm3": _latent,
    "youtu": _latent,
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "gptj": {"rotary_dim": 4},
    "falcon": {"num_kv_heads": 1, "bias": True, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 2},
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "xlm-roberta": {},
    "camembert": {},
    "electra": {},
    "distilbert": {},
    "modernbert": {**_full_first, **_rope_by_type},
    "data2vec-text": {},
    "ernie": {},
    "esm": {"position_embedding_type": "absolute", "emb_layer_norm_before": True},
    "gte": {},
    "jina_embeddings_v3": {},
    "layoutlm": {},
    "nomic_bert": {},
    "roberta-prelayernorm": {},
    "roc_bert": {},
    "ultrabert": {**_mixed, **_rope_by_type},
    "xlm-roberta-xl": {},
    "xmod": {"default_language": "en_XX"},
    "esmc": _latent,
    "eurobert": {"classifier_pooling": "mean"},
    "albert": {"num_hidden_groups": 2},
}
ALL = {**CAUSAL, **ENCODERS}
INSTALLED = [name for name in ALL if name in CONFIG_MAPPING]
NOT_INSTALLED = [name for name in ALL if name not in CONFIG_MAPPING]
REPRESENTATIVE = [
    "granite", "cohere", "glm4", "olmo2", "gemma2", "mixtral", "gpt_oss", "stablelm", "nanochat", "smollm3",
    "cohere_compass_text", "gpt_bigcode", "esm", "eurobert", "nomic_bert", "layoutlm",
    "gptj", "falcon", "albert", "jetmoe",
]  # fmt: skip
# Given embeddings instead of token ids, they leave out positions or norms, or fail.
NO_MEMORY_POSITIONS = ["esm", "esmc", "gemma4_text"]


def is_causal(name: str) -> bool:
    return name in CAUSAL


def config(name: str, **settings: Any) -> hf.PreTrainedConfig:
    """The config of a tiny model; `settings` replace its own where the type has them."""
    cls = CONFIG_MAPPING[name]
    fields = {field.name for field in dataclasses.fields(cls)}
    values = {**_COMMON, **settings}
    return cls(**{key: value for key, value in values.items() if key in fields} | copy.deepcopy(ALL[name]))


def base(name: str, head: str | None = None, seed: int = 0, **settings: Any) -> hf.PreTrainedModel:
    """A tiny base model in evaluation mode, all of whose parameters matter."""
    torch.manual_seed(seed)
    classes = tiny.HEADS_OF[head or ("causal" if is_causal(name) else "masked")]
    model = classes.from_config(config(name, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
            else:
                parameter += 0.2 * torch.randn_like(parameter)
    return model.eval()


def precise_base(name: str, head: str | None = None, **settings: Any) -> hf.PreTrainedModel:
    """The same in double precision, if the model can compute in it."""
    model = compute_in_double(base(name, head, **settings))
    try:
        with torch.no_grad():
            model(input_ids=tiny.documents(1, 4))
    except RuntimeError:  # it casts to single precision itself
        model = model.float()
    return model


def compute_in_double(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    """Double precision; grouped products of experts, which exist in single precision only, become batched ones."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")
    return model.double()


def recurrent(
    name: str, head: str | None = None, settings: dict[str, Any] | None = None, precise: bool = True, **fields: Any
) -> Any:
    """A tiny recurrent model with a state large enough to matter, in double precision if it is to be `precise`. Fields
    are those of `RecurrenceConfig`."""
    special = {"window": 8} if is_causal(name) else {"window": 11, "prefix": (2,), "suffix": (3, 3)}
    fields = {"overlap": 2, "verify": False, **special, **fields}
    text = [list(range(5, VOCABULARY)) * 4]  # to measure position offsets on
    build = precise_base if precise else base
    model = cf.add_recurrence(build(name, head, **(settings or {})), documents=text, **fields)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.memory.parameters():
            parameter.normal_(std=0.6)
    return model.eval()
