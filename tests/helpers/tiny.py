# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every supported architecture, made on the spot: no hub, no downloads, the same weights every time."""

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
WIDE = {"sliding_window": 64}  # what is kept is seen by every query, also of a layer that looks less far back

QUESTIONS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
FRAME = {"prefix": (2,), "separator": (3, 3), "suffix": (3,)}  # of a question and a document

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
    """A tiny recurrent model whose state is loud enough to be heard: the paper starts it near zero."""
    defaults = {"window": 8, "overlap": 2, "hidden_sizes": (12, 12)}
    if name in ENCODERS:
        defaults |= {"window": 11, "prefix": (2,), "suffix": (3, 3)}
    model = cf.add_recurrence(base(name, head, seed, **(settings or {})), **{**defaults, **fields})
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.recurrence.parameters():
            parameter.normal_(std=0.6)
    return model


def untrained(name: str, **fields):
    """A tiny causal model that carries keys and values, as `add_recurrence` makes it."""
    settings = WIDE if name in ("mistral", "gemma3_text") else {}
    return cf.add_recurrence(base(name, **settings), window=8, slots=0, **fields)


def answering(name: str, **fields):
    """A tiny recurrent model that answers questions, as loud."""
    torch.manual_seed(0)
    settings = {"window": 14, "hidden_sizes": (16,), **FRAME, **fields}
    model = cf.add_recurrence(base(name, "none"), head="question-answering", **settings)
    assert isinstance(model, cf.RecurrentForQuestionAnswering)
    with torch.no_grad():
        for weight in (*model.recurrence.parameters(), *model.kinds.parameters()):
            weight.normal_(std=0.5, generator=torch.Generator().manual_seed(1))
    return model.eval()


def documents(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids that avoid the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCABULARY, (batch, length), generator=generator)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients by name, and a clean model."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same_gradients(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    assert a, "there are no gradients to compare"
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], rtol=tolerance * 10, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
