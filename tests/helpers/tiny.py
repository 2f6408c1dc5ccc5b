# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every supported architecture, built without downloads, with the same weights every time."""

import dataclasses
import math

import torch
import transformers as hf

import carryforward as cf
from carryforward.backbones.architectures import ARCHITECTURES

VOCABULARY = 67
WIDTH, LAYERS, HEADS = 16, 3, 2

_common = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
_grouped = {**_common, "num_key_value_heads": 1}
_rope = {"rope_theta": 10000.0, "rope_type": "default"}

CONFIGS = {
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=40,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        bos_token_id=2,
        eos_token_id=3,
    ),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**_common),
    "opt": lambda: hf.OPTConfig(**{**_common, "ffn_dim": 24, "word_embed_proj_dim": WIDTH}),
    "llama": lambda: hf.LlamaConfig(**_grouped),
    "mistral": lambda: hf.MistralConfig(**_grouped, sliding_window=5),  # smaller than the window: an explicit mask
    "qwen2": lambda: hf.Qwen2Config(**_grouped),
    "qwen3": lambda: hf.Qwen3Config(**_grouped, head_dim=8),
    "gemma3_text": lambda: hf.Gemma3TextConfig(
        **_grouped,
        head_dim=8,
        sliding_window=5,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "phi": lambda: hf.PhiConfig(**_common),
    "bert": lambda: hf.BertConfig(**_common),
    "roberta": lambda: hf.RobertaConfig(**_common),
    "xlm-roberta": lambda: hf.XLMRobertaConfig(**_common),
    "camembert": lambda: hf.CamembertConfig(**_common),
    "electra": lambda: hf.ElectraConfig(**_common, embedding_size=12),
    "distilbert": lambda: hf.DistilBertConfig(
        vocab_size=VOCABULARY, dim=WIDTH, n_layers=LAYERS, n_heads=HEADS, hidden_dim=24, max_position_embeddings=40
    ),
    "modernbert": lambda: hf.ModernBertConfig(
        **_common, cls_token_id=2, sep_token_id=3, local_attention=4, global_attn_every_n_layers=2
    ),
}
CAUSAL = ["gpt2", "gpt_neox", "opt", "llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi"]
ENCODERS = [name for name in CONFIGS if name not in CAUSAL]
LEARNED = [name for name in CONFIGS if not ARCHITECTURES[name].rotary]  # learned positions
WIDE = {"sliding_window": 64}  # carried keys and values are visible to every query, whatever the sliding window

VECTOR_FIELDS = dataclasses.fields(cf.VectorMemoryConfig)
KV_FIELDS = dataclasses.fields(cf.KVMemoryConfig)
TOKENS = {"memory": cf.TokenMemoryConfig(memory_tokens=3)}
ASSOCIATIVE = {"memory": cf.AssociativeMemoryConfig(memory_tokens=3, key_size=5)}
ASSOCIATIVE_AND_KV = {
    "memory": [cf.AssociativeMemoryConfig(memory_tokens=2, key_size=5), cf.KVMemoryConfig(recent=3, sinks=1)]
}
TEXT = [list(range(5, VOCABULARY)) * 11]  # enough to measure position offsets on

QUESTIONS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
FRAME = {"prefix": (2,), "separator": (3, 3), "suffix": (3,)}  # special tokens around a question and a document

HEADS_OF = {
    "causal": hf.AutoModelForCausalLM,
    "masked": hf.AutoModelForMaskedLM,
    "token": hf.AutoModelForTokenClassification,
    "sequence": hf.AutoModelForSequenceClassification,
    "none": hf.AutoModel,
}


def base(name: str, head: str | None = None, seed: int = 0, **settings) -> hf.PreTrainedModel:
    """A tiny base model in evaluation mode, with weights large enough that every part of it matters."""
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    for key, value in settings.items():
        setattr(config, key, value)
    if head in ("token", "sequence"):
        config.num_labels = 3
    model = HEADS_OF[head or ("causal" if name in CAUSAL else "masked")].from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    return model.eval()


def recurrent(name: str, head: str | None = None, seed: int = 0, settings: dict | None = None, **fields):
    """A tiny recurrent model with a state large enough to matter: the paper initialises it near zero.

    Fields are those of `RecurrenceConfig` and of the memory configs: see `with_memory`.
    """
    defaults = {"window": 8, "overlap": 2}
    if name in ENCODERS:
        defaults |= {"window": 11, "prefix": (2,), "suffix": (3, 3)}
    fields = with_memory(**{**defaults, "hidden_sizes": (12, 12), **fields})
    model = cf.add_recurrence(base(name, head, seed, **(settings or {})), documents=TEXT, **fields)
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.memory.parameters():
            parameter.normal_(std=0.6)
    return model


def without_zeros(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    """The same model with weights in which nothing is zero and the state is large."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.base.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
        for parameter in model.memory.parameters():
            parameter.normal_(std=0.5 if parameter.ndim == 1 else 1.5 / math.sqrt(parameter.shape[-1]))
    return model


def precise(name: str, head: str | None = None, **fields):
    """A tiny recurrent model; if a memory is given, in double precision, since random matrices and memory tokens make
    rounding errors larger."""
    model = recurrent(name, head, **fields)
    return model.double() if "memory" in fields else model


def with_memory(**fields):
    """Fields of `RecurrenceConfig` from its own fields and those of the memory configs.

    There is a vector memory unless slots=0, and a kv memory if `recent` is given.
    """
    if "memory" in fields:
        return {name: value for name, value in fields.items() if name not in ("hidden_sizes", "pooled_layers")}
    vector = {field.name: fields.pop(field.name) for field in VECTOR_FIELDS if field.name in fields}
    kv = {"sinks": 0, **{field.name: fields.pop(field.name) for field in KV_FIELDS if field.name in fields}}
    memory = [cf.VectorMemoryConfig(**vector)] if vector.get("slots", 1) else []
    return {**fields, "memory": [*memory, *([cf.KVMemoryConfig(**kv)] if kv.get("recent") else [])]}


def untrained(name: str, **fields):
    """A tiny causal model that carries keys and values, with position offsets of zero."""
    settings = WIDE if name in ("mistral", "gemma3_text") else {}
    fields = with_memory(window=8, slots=0, **fields)
    return unmeasured(cf.add_recurrence(base(name, **settings), documents=TEXT, **fields))


def unmeasured(model):
    """The same model with position offsets of zero, as a model built from a config has them."""
    if model.memory.kv.position_offsets is not None:
        torch.nn.init.zeros_(model.memory.kv.position_offsets)
        model.memory.kv._measured = False
    return model


def answering(name: str, **fields):
    """A tiny recurrent question-answering model with a state large enough to matter."""
    torch.manual_seed(0)
    fields = with_memory(**{"window": 14, "hidden_sizes": (16,), "pooled_layers": "last", **FRAME, **fields})
    model = cf.add_recurrence(base(name, "none"), head="question-answering", documents=TEXT, **fields)
    assert isinstance(model, cf.RecurrentForQuestionAnswering)
    with torch.no_grad():
        for weight in (*model.memory.parameters(), *model.kinds.parameters()):
            weight.normal_(std=0.5, generator=torch.Generator().manual_seed(1))
    return model.eval()


def documents(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids that avoid the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCABULARY, (batch, length), generator=generator)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients by parameter name. Resets them in the model."""
    by_name = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return by_name


def assert_same_gradients(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    assert a, "there are no gradients to compare"
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], rtol=tolerance * 10, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
