# SPDX-License-Identifier: Apache-2.0
"""`add_recurrence`: turn a loaded Hugging Face model into a recurrent one."""

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto
from transformers.utils import logging

from ..backbones import quantization
from ..backbones.architectures import (
    Architecture,
    architecture_of,
    check_settings,
    is_discovered,
    is_known,
    store_architecture,
)
from ..backbones.attention import unwrapped_name
from ..backbones.discovery import NotUnderstood, discover
from ..backbones.modes import as_before_on_error
from ..config import RecurrenceConfig, RecurrentModelConfig, default_window
from ..data.tokenization import check_tokenizer, without_length_limit
from ..engine.run_policy import NO_MODEL_PARALLEL, is_split
from ..memories.kinds import MemoryChoice
from ..memories.reach import Reach, check_reach, memory_with_reach
from ..memories.vector import VectorMemoryConfig
from ..presets import PAPER_QA_WINDOW, PRESET_MEMORIES
from ..utils.checkpoints import fingerprint
from ..utils.checks import check_flag
from ..utils.peft import check_no_adapters
from . import verification
from .base import RecurrentPreTrainedModel
from .causal_lm import RecurrentForCausalLM
from .encoders import RecurrentForMaskedLM, RecurrentForSequenceClassification, RecurrentForTokenClassification
from .files.base_by_name import load_base
from .headless import RecurrentModel
from .position_offsets import built_in_documents, measure_position_offsets, needs_position_offsets
from .question_answering import RecurrentForQuestionAnswering

logger = logging.get_logger(__name__)

# transformers' own lists of the class with each head, by model type
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
    model: PreTrainedModel | str | Path,
    config: RecurrenceConfig | None = None,
    *,
    preset: str | None = None,
    memory: MemoryChoice | None = None,
    reach: Reach | None = None,
    tokenizer: Any = None,
    documents: Sequence[Any] | None = None,
    head: str | None = None,
    verify: bool | None = None,
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
    **fields: Any,
) -> RecurrentPreTrainedModel:
    """Turn a transformer into a recurrent one that reads documents of any length in the memory of one window.

    The model is used as it is, not copied: its weights are shared with the result, and it can still be called alone.

    Args:
        model: a Hugging Face model with a causal language model's head, a masked language model's, a token or sequence
            classifier's, a question-answering one, or none; or its name on the Hub, or its folder: it is then loaded
            with the head it was saved with, and with its tokenizer.
        config: the recurrence. By default `preset` and the arguments below decide.
        preset: "recommended" (the default): keys and values of half a window. "paper": a pooled vector, which must be
            trained; for question answering that of section 5.4.
        memory: what is carried, instead of the preset's: "kv", "vector", "tokens", "associative", a memory config, or
            a list of these.
        reach: how many positions of its past a window sees in all: a number (2000), or the memory that one row's state
            may take in the model's precision ("64MB", "1.5 GB"). It sets the size of the memory "kv", instead of
            `recent` and `far`: attention sinks, and the most recent positions. It may be more than a window.
        tokenizer: the model's tokenizer; a copy of it without a maximum length is saved with the model. The special
            tokens that an encoder's tokenizer puts around a text are put around every window.
        documents: texts, or token ids without special tokens, to measure position offsets on, if keys and values are
            carried and positions are learned. By default the built-in text, Python's documentation, is used.
        head: "question-answering" gives an encoder without a head a new one. For a model by its name, the head to load
            it with, called as transformers' pipelines are: "text-generation", "fill-mask", "token-classification",
            "text-classification", "question-answering", "feature-extraction" (none).
        verify: compare a few tokens read in windows with the model's own forward pass, and refuse a model that does not
            do with a state what it must. By default models are verified whose type is not in the table of known ones,
            and those whose weights are quantised.
        dtype, revision: for a model by its name, as for `from_pretrained`: its precision, by default that of its file,
            and its version on the Hub.
        **fields: further fields of `RecurrenceConfig`, on top of `config` if both are given. The default window leaves
            room for what is carried.

    Returns:
        an ordinary `PreTrainedModel` with the same head.

    Example:
        >>> model = add_recurrence("bundled", window=300, memory="vector")  # by name: with its tokenizer
        >>> model.config.recurrence.window
        300
    """
    if isinstance(model, str | Path):
        model, tokenizer = load_base(str(model), head=head, tokenizer=tokenizer, dtype=dtype, revision=revision)
        head = None  # it has it
    elif dtype is not None or revision is not None:
        given = f"dtype={dtype!r}" if dtype is not None else f"revision={revision!r}"
        raise ValueError(f"{given}: the model is loaded already. Give it to from_pretrained.")
    if isinstance(model, RecurrentPreTrainedModel):
        raise ValueError("model is recurrent already; its base model is model.base.")
    check_no_adapters(model)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model is a {type(model).__name__}; a transformers PreTrainedModel is expected.")
    if is_split(model.parameters()):
        raise ValueError(f"the model's weights are split among processes: {NO_MODEL_PARALLEL}")
    check_flag("verify", verify, optional=True)
    with as_before_on_error(model):
        quantization.prepare(model)
        _use_exact_attention(model)
        architecture = ensure_architecture(model)
        if head is not None:
            model = _with_head(model, head)
        cls = _head_of(model, architecture.causal)
        if tokenizer is not None:
            check_tokenizer(tokenizer, model.get_input_embeddings().weight.shape[0])  # type: ignore[index, arg-type]
            fields = {**_special_fields(cls, architecture.causal, tokenizer), **fields}
        recurrence = _choose(model, cls, config, preset, memory, reach, fields)
        if not architecture.causal and tokenizer is None and "prefix" not in fields and not recurrence.prefix:
            logger.warning(
                "%s windows get no special tokens. Give add_recurrence(tokenizer=...) to put its own around every "
                "window, or prefix=() for none.", model.config.model_type,
            )  # fmt: skip
        if verify is None:
            verify = is_discovered(model.config) or quantization.is_quantized(model)
        verified = _verified(model, cls) if verify else None
        result = _build(
            model, cls, RecurrentModelConfig(base_config=model.config, recurrence=recurrence, verified=verified)
        )
        if needs_position_offsets(result):
            _measure(result, documents, tokenizer)
    result.tokenizer = None if tokenizer is None else without_length_limit(tokenizer)
    result.config.initial_memory = {
        kind: fingerprint(module) for kind, module in result.memory.items() if recurrence.find(kind).needs_training
    }
    return result.train(model.training)


def _choose(
    model: PreTrainedModel,
    cls: type[RecurrentPreTrainedModel],
    config: RecurrenceConfig | None,
    preset: str | None,
    memory: MemoryChoice | None,
    reach: Reach | None,
    fields: dict[str, Any],
) -> RecurrenceConfig:
    """The recurrence that arguments of `add_recurrence` ask for."""
    if config is None:
        answers = cls is RecurrentForQuestionAnswering
        return recurrence_of(
            model.config, preset=preset, memory=memory, reach=reach, dtype=model.dtype, question_answering=answers,
            **fields,
        )  # fmt: skip
    recurrence = _override(config, preset, memory, fields)
    return recurrence if reach is None else _override_reach(recurrence, reach, model)


def _build(
    model: PreTrainedModel, cls: type[RecurrentPreTrainedModel], config: RecurrentModelConfig
) -> RecurrentPreTrainedModel:
    """The recurrent model, with what it adds where the model is."""
    quantization.leave_memory_alone(model)
    result = cls(config, base=model)
    quantization.adopt(result, model)
    if getattr(model, "generation_config", None) is not None:
        result.generation_config = savable(copy.deepcopy(model.generation_config))
    for part in result.children():
        if part is not model:
            part.to(device=model.device if model.device.type != "meta" else None, dtype=model.dtype)
    return result


def _verified(model: PreTrainedModel, cls: type[RecurrentPreTrainedModel]) -> dict[str, str]:
    verification.verify(model, cls)
    return verification.record_of(model)


def ensure_architecture(model: PreTrainedModel) -> Architecture:
    """A model's architecture; that of a type which is not in the table is discovered."""
    check_settings(model.config)
    if not is_known(model.config):
        try:
            store_architecture(model.config, discover(model))
        except NotUnderstood as error:
            raise ValueError(
                f"Recurrence cannot be added to a model of type {model.config.model_type!r}: {error}. Models whose "
                f"attention is transformers' AttentionInterface, in a list of like layers, are supported."
            ) from error
    return architecture_of(model.config)


def recurrence_of(
    base: PreTrainedConfig,
    *,
    preset: str | None = None,
    memory: MemoryChoice | None = None,
    reach: Reach | None = None,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    question_answering: bool = False,
    **fields: Any,
) -> RecurrenceConfig:
    """The recurrence for a base model, with defaults that depend on it: the window, and the paper's module for question
    answering. Arguments as in `add_recurrence`; `dtype` is the model's, for a reach that is an amount of memory."""
    preset = "recommended" if preset is None else preset
    if preset not in PRESET_MEMORIES:
        raise ValueError(f"preset={preset!r}: there are {', '.join(map(repr, PRESET_MEMORIES))}.")
    memory = PRESET_MEMORIES[preset] if memory is None else memory
    choices = memory if isinstance(memory, list | tuple) else [memory]
    if question_answering:
        choices = [_question_answering_default(choice, base) for choice in choices]  # type: ignore[arg-type]
    if reach is not None:
        choices = [memory_with_reach(reach, choices, base, dtype)]  # type: ignore[arg-type]
    if window is None:
        window = default_window(base, choices)  # type: ignore[arg-type]
        if question_answering:
            only_vector = all(_kind(choice) == VectorMemoryConfig.kind for choice in choices)
            window = min(PAPER_QA_WINDOW, architecture_of(base).max_positions(base) if only_vector else window)
    if reach is not None:
        check_reach(reach, choices[0], window, base)  # type: ignore[arg-type]
    return RecurrenceConfig(window=window, memory=choices, **fields)  # type: ignore[arg-type]


def _question_answering_default(choice: Any, base: PreTrainedConfig) -> Any:
    """The vector memory of section 5.4 pools the last layer and has one hidden layer of the model's width."""
    if _kind(choice) != VectorMemoryConfig.kind or isinstance(choice, VectorMemoryConfig):
        return choice
    values = {} if isinstance(choice, str) else choice
    return {"kind": "vector", "pooled_layers": "last", "hidden_sizes": (base.hidden_size,), **values}


def _kind(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    return choice.get("kind") if isinstance(choice, dict) else getattr(choice, "kind", None)


def _override(
    config: RecurrenceConfig | dict[str, Any], preset: str | None, memory: MemoryChoice | None, fields: dict[str, Any]
) -> RecurrenceConfig:
    """A config with some fields replaced."""
    if preset is not None:
        raise ValueError(f"preset={preset!r}: config is given too. Leave one out.")
    if not isinstance(config, RecurrenceConfig | dict):
        raise ValueError(f"config={config!r}: give a RecurrenceConfig, or its fields as a dictionary.")
    config = RecurrenceConfig(**config) if isinstance(config, dict) else config
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return RecurrenceConfig(**{**values, **({} if memory is None else {"memory": memory}), **fields})


def _override_reach(config: RecurrenceConfig, reach: Reach, model: PreTrainedModel) -> RecurrenceConfig:
    """A config with another reach."""
    memory = memory_with_reach(reach, config.memory, model.config, model.dtype)
    check_reach(reach, memory, config.window, model.config)
    return dataclasses.replace(config, memory=memory)


def _measure(model: RecurrentPreTrainedModel, documents: Sequence[Any] | None, tokenizer: Any) -> None:
    """Measure position offsets, so that a model is never returned that cannot read what it carries."""
    if model.base.device.type == "meta":
        raise ValueError(
            "model has no weights (meta device), and position offsets cannot be measured. Load its weights first, or "
            "use memory='vector'."
        )
    if documents is None:
        documents = built_in_documents(model, tokenizer)
    elif isinstance(documents, str | dict) or not hasattr(documents, "__len__"):
        raise ValueError(f"documents is a {type(documents).__name__}: give a list of texts or of token ids.")
    elif len(documents) and isinstance(documents[0], str):
        if tokenizer is None:
            raise ValueError("documents are texts: give tokenizer=... as well, or token ids.")
        documents = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in documents]
    measure_position_offsets(model, documents)


def _special_fields(cls: type[RecurrentPreTrainedModel], causal: bool, tokenizer: Any) -> dict[str, Any]:
    """The fields of `RecurrenceConfig` for a tokenizer's special tokens."""
    if cls is RecurrentForQuestionAnswering:
        prefix, separator, suffix = pair_tokens(tokenizer)
        return {"prefix": prefix, "separator": separator, "suffix": suffix}
    prefix, suffix = ((), ()) if causal else special_tokens(tokenizer)
    return {"prefix": prefix, "suffix": suffix}


def special_tokens(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The special tokens that a tokenizer puts before and after a text."""
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
    """The special tokens that a tokenizer puts before, between and after a question and a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole, size = tokenizer("a", "a")["input_ids"], len(bare)
    starts = [i for i in range(len(whole) - size + 1) if whole[i : i + size] == bare]
    if len(starts) != 2:
        raise ValueError(
            f"tokenizer={type(tokenizer).__name__} does not put its special tokens around a pair of texts ({bare} "
            f"twice becomes {whole}): give prefix, separator and suffix instead."
        )
    first, second = starts
    return tuple(whole[:first]), tuple(whole[first + size : second]), tuple(whole[second + size :])


def _with_head(model: PreTrainedModel, head: str) -> PreTrainedModel:
    """A new head on a model without one; modules are shared."""
    if head != "question-answering":
        raise ValueError(
            f"head={head!r}: only 'question-answering' can be added to a loaded model. Load it with its head, or give "
            "its name."
        )
    if _head_of(model, architecture_of(model.config).causal) is not RecurrentModel:
        raise ValueError(
            f"head={head!r}: {type(model).__name__} has a head already. Give its encoder, model.base_model."
        )
    if architecture_of(model.config).causal:
        raise ValueError(f"head={head!r}: {model.config.model_type} is causal. Answers are found by encoders.")
    if model.config.model_type not in auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES:
        raise ValueError(f"head={head!r}: transformers has none for models of type {model.config.model_type!r}.")
    headed = transformers.AutoModelForQuestionAnswering.from_config(model.config).to(model.device, model.dtype)
    backbone = headed.base_model
    for name, _ in list(backbone.named_children()):
        setattr(backbone, name, getattr(model, name))
    quantization.adopt(headed, model)
    return headed.train(model.training)


def _head_of(model: PreTrainedModel, causal: bool) -> type[RecurrentPreTrainedModel]:
    names = {cls.__name__ for cls in type(model).__mro__}
    heads = _CAUSAL_HEADS if causal else _ENCODER_HEADS
    supported = {cls: mapping.get(model.config.model_type) for cls, mapping in heads.items()}
    for cls, name in supported.items():
        if name in names:
            return cls
    raise ValueError(
        f"Recurrence cannot be added to the head of {type(model).__name__}. "
        f"Supported for {model.config.model_type!r}: {', '.join(name for name in supported.values() if name)}. Load it "
        "with one of these; head=... says which to load by name."
    )


def _use_exact_attention(model: PreTrainedModel) -> None:
    """Switch a model from an attention function that cannot show the state to every query."""
    implementation = unwrapped_name(model.config._attn_implementation)
    if implementation in ("sdpa", "eager"):
        return
    exact = "sdpa" if model._supports_sdpa else "eager"
    model.set_attn_implementation(exact)
    if model.config._attn_implementation != exact:
        raise ValueError(
            f"attn_implementation={implementation!r} cannot show a state to every query, and {type(model).__name__} "
            f"keeps the one that it was loaded with: load it with attn_implementation={exact!r}."
        )
    logger.warning("attn_implementation=%r cannot show a state to every query: %r is used.", implementation, exact)


def savable(config: GenerationConfig) -> GenerationConfig:
    """A generation config that transformers will save: some published ones set sampling parameters without do_sample,
    and saving them fails."""
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True
    return config
