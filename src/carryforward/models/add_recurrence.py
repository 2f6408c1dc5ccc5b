# SPDX-License-Identifier: Apache-2.0
"""`add_recurrence`: from a Hugging Face model that is already loaded to a recurrent one."""

import copy
import dataclasses
import logging
from typing import Any, Literal

import transformers
from transformers import GenerationConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto

from ..backbones.architectures import architecture_of
from ..backbones.attention import unwrapped_name
from ..config import RecurrenceConfig, RecurrentModelConfig
from ..utils.peft import refuse_adapters
from .base import RecurrentPreTrainedModel
from .causal_lm import RecurrentForCausalLM
from .encoders import RecurrentForMaskedLM, RecurrentForSequenceClassification, RecurrentForTokenClassification
from .headless import RecurrentModel
from .question_answering import RecurrentForQuestionAnswering

logger = logging.getLogger(__name__)

# transformers' own lists of which class has which head, by model type
_Heads = dict[type[RecurrentPreTrainedModel], Any]
_CAUSAL_HEADS: _Heads = {
    RecurrentForCausalLM: auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    RecurrentModel: auto.MODEL_MAPPING_NAMES,
}
_ENCODER_HEADS: _Heads = {
    RecurrentForMaskedLM: auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    RecurrentForQuestionAnswering: auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    RecurrentForTokenClassification: auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    RecurrentForSequenceClassification: auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    RecurrentModel: auto.MODEL_MAPPING_NAMES,
}


def add_recurrence(
    model: PreTrainedModel,
    config: RecurrenceConfig | None = None,
    *,
    tokenizer: Any = None,
    head: Literal["question-answering"] | None = None,
    **fields: Any,
) -> RecurrentPreTrainedModel:
    """Turn a transformer into a recurrent one that reads documents of any length in the memory of one window.

    The model is used as it is, not copied: its weights are shared with the result, and it can still be called alone.

    Args:
        model: a Hugging Face model with a causal language model's head, a masked language model's, a token or sequence
            classifier's, a question-answering one, or none.
        config: the recurrence; or give its fields as keywords.
        tokenizer: for encoders: the special tokens it puts around a text are put around every window.
        head: "question-answering" gives an encoder without a head a new one. Unless told otherwise, the recurrence of
            question answering is that of the paper's section 5.4, with windows of up to 512 tokens.
        **fields: fields of `RecurrenceConfig`, on top of `config` if both are given.

    Returns:
        an ordinary `PreTrainedModel` with the same head.

    Example:
        >>> model = add_recurrence(AutoModelForCausalLM.from_pretrained("gpt2"), window=300)  # doctest: +SKIP
    """
    if isinstance(model, RecurrentPreTrainedModel):
        raise ValueError("model is recurrent already; its base model is model.base.")
    refuse_adapters(model)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model is a {type(model).__name__}; a transformers PreTrainedModel is expected.")
    if isinstance(config, dict):
        config = RecurrenceConfig(**config)
    architecture = architecture_of(model.config)
    if head is not None:
        model = _with_head(model, head)
    cls = _head_of(model, architecture.causal)
    _check_attention(model)
    if tokenizer is not None and cls is RecurrentForQuestionAnswering:
        prefix, separator, suffix = pair_tokens(tokenizer)
        fields = {"prefix": prefix, "separator": separator, "suffix": suffix, **fields}
    elif tokenizer is not None:
        prefix, suffix = ((), ()) if architecture.causal else special_tokens(tokenizer)
        fields = {"prefix": prefix, "suffix": suffix, **fields}
    if config is None and cls is RecurrentForQuestionAnswering:
        own = {"window": min(512, architecture.positions(model.config)), "pooled_layers": "last"}
        fields = {**own, "hidden_sizes": (model.config.hidden_size,), **fields}
    recurrence = RecurrenceConfig(**{**(_fields(config) if config else {}), **fields})
    if not architecture.causal and tokenizer is None and "prefix" not in fields and not recurrence.prefix:
        logger.warning(
            "%s windows get no special tokens. Give add_recurrence(tokenizer=...) to put its own around every window, "
            "or prefix=() to say that none are wanted.", model.config.model_type,
        )  # fmt: skip
    result = cls(RecurrentModelConfig(base_config=model.config, recurrence=recurrence), base=model)
    if getattr(model, "generation_config", None) is not None:
        result.generation_config = savable(copy.deepcopy(model.generation_config))
    for part in result.children():
        if part is not model:
            part.to(device=model.device if model.device.type != "meta" else None, dtype=model.dtype)
    return result.train(model.training)


def special_tokens(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a tokenizer puts before and behind a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return tuple(whole[:start]), tuple(whole[start + len(bare) :])
    raise ValueError(
        f"tokenizer={type(tokenizer).__name__} does not put its special tokens around a text ({bare} becomes {whole}): "
        "give prefix and suffix instead."
    )


def pair_tokens(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """What a tokenizer puts before, between and behind a question and a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole, size = tokenizer("a", "a")["input_ids"], len(bare)
    places = [i for i in range(len(whole) - size + 1) if whole[i : i + size] == bare]
    if len(places) != 2:
        raise ValueError(
            f"tokenizer={type(tokenizer).__name__} does not put its special tokens around a pair of texts ({bare} "
            f"twice becomes {whole}): give prefix, separator and suffix instead."
        )
    first, second = places
    return tuple(whole[:first]), tuple(whole[first + size : second]), tuple(whole[second + size :])


def _with_head(model: PreTrainedModel, head: str) -> PreTrainedModel:
    """A new head on a model without one, whose modules it shares."""
    if head != "question-answering":
        raise ValueError(f"head={head!r}: only 'question-answering' can be added.")
    if _head_of(model, architecture_of(model.config).causal) is not RecurrentModel:
        raise ValueError(
            f"head={head!r}: {type(model).__name__} has a head already. Give its encoder, model.base_model."
        )
    if architecture_of(model.config).answer is None:
        raise ValueError(f"head={head!r}: {model.config.model_type} is causal. Answers are found by encoders.")
    made = transformers.AutoModelForQuestionAnswering.from_config(model.config).to(model.device, model.dtype)
    body = made.base_model
    for name, _ in list(body.named_children()):
        setattr(body, name, getattr(model, name))
    return made.train(model.training)


def _head_of(model: PreTrainedModel, causal: bool) -> type[RecurrentPreTrainedModel]:
    names = {cls.__name__ for cls in type(model).__mro__}
    heads = _CAUSAL_HEADS if causal else _ENCODER_HEADS
    supported = {cls: mapping.get(model.config.model_type) for cls, mapping in heads.items()}
    for cls, name in supported.items():
        if name in names:
            return cls
    raise ValueError(
        f"Recurrence cannot be added to the head of {type(model).__name__}. "
        f"Supported for {model.config.model_type!r}: {', '.join(name for name in supported.values() if name)}."
    )


def _check_attention(model: PreTrainedModel) -> None:
    used = unwrapped_name(model.config._attn_implementation)
    if used not in ("sdpa", "eager"):
        raise ValueError(
            f"attn_implementation={used!r} cannot show the state to every query. "
            'Call model.set_attn_implementation("sdpa") first ("eager" works too).'
        )


def savable(config: GenerationConfig) -> GenerationConfig:
    """A generation config that transformers will save: published ones set how to sample and forget to say that one
    does, which is found out when the first checkpoint is written."""
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True
    return config


def _fields(config: RecurrenceConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
