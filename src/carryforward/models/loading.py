# SPDX-License-Identifier: Apache-2.0
"""Models by name: the bundled one, a Hub name, a folder, a GGUF file, or a run of `carryforward train`."""

import contextlib
import copy
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from ..backbones.architectures import architecture_of, is_known, is_supported, store_architecture
from ..backbones.attention import unwrapped_name
from ..backbones.discovery import NotUnderstood, discover
from ..config import RecurrentModelConfig
from ..settings.recurrence import BUNDLED
from ..utils.checkpoints import run_of
from . import auto
from .add_recurrence import add_recurrence, ensure_architecture, savable
from .base import RecurrentPreTrainedModel
from .model_files import load_config, load_model, load_tokenizer
from .question_answering import RecurrentForQuestionAnswering

logger = logging.get_logger(__name__)

# What encoders are trained for: the ending of a class's name, and the class that loads such models.
_ENCODER_TASKS: dict[str, tuple[str, Any]] = {
    "masked-lm": ("ForMaskedLM", AutoModelForMaskedLM),
    "classification": ("ForSequenceClassification", AutoModelForSequenceClassification),
    "token-classification": ("ForTokenClassification", AutoModelForTokenClassification),
}


@dataclass
class Loaded:
    """A model with its tokenizer.

    Attributes:
        run: the record of the training run it comes from, if it comes from one.
        untrained: recurrence was added on loading: its state means nothing.
        stored: the precision of the weights in its file, where that is known.
    """

    name: str
    model: PreTrainedModel
    tokenizer: Any
    run: dict[str, Any] | None = None
    untrained: bool = False
    stored: torch.dtype | None = None

    @property
    def recurrent(self) -> bool:
        return isinstance(self.model, RecurrentPreTrainedModel)


def load_bundled() -> tuple[PreTrainedModel, Any]:
    """The small model that comes with the package, and its tokenizer: plain, for `add_recurrence` to make recurrent."""
    loaded = load_causal(BUNDLED)
    return loaded.model, loaded.tokenizer


def load_causal(name: str, dtype: torch.dtype = torch.float32) -> Loaded:
    """Load a causal language model, plain or recurrent, and its tokenizer."""
    is_gguf = Path(name).suffix == ".gguf"  # whose config takes seconds to read; none is an encoder's, or recurrent
    config, run = (None, run_of(name)) if is_gguf else _causal(name, load_config(name))
    model = load_model(AutoModelForCausalLM.from_pretrained, name, dtype=dtype)
    if not isinstance(model, RecurrentPreTrainedModel) and not is_known(model.config):
        _find_architecture(model.config, model)
        _refuse_encoder(name, model.config)
    if is_gguf:
        _make_plain(model)
    if getattr(model, "generation_config", None) is not None:
        _check_generation(name, model.generation_config)
        savable(model.generation_config)
    if isinstance(model, RecurrentPreTrainedModel) and not isinstance(config, RecurrentModelConfig):
        model = model.base
    tokenizer = load_tokenizer(name, config or model.config)
    return Loaded(name, _keep(model, tokenizer), tokenizer, run, stored=getattr(config, "dtype", None))


def _check_generation(name: str, config: Any) -> None:
    """Refuse values of a generation config that `generate` would stumble over."""
    kinds: dict[str, tuple[type, ...]] = {
        "do_sample": (bool,), "temperature": (int, float), "top_p": (int, float), "min_p": (int, float),
        "typical_p": (int, float), "repetition_penalty": (int, float), "top_k": (int,), "num_beams": (int,),
        "bos_token_id": (int,), "eos_token_id": (int,), "pad_token_id": (int,),
    }  # fmt: skip
    for key, types in kinds.items():
        value = getattr(config, key, None)
        for one in value if isinstance(value, list) and key == "eos_token_id" else [value]:
            if one is not None and (type(one) not in types or not abs(one) < 2**63):
                raise ValueError(
                    f"model {name!r}: its generation_config.json is damaged: {key}={reprlib.repr(value)}. Correct it."
                )


def describe(name: str) -> PreTrainedConfig:
    """A model's config, with its architecture: one that is not in the table is found in the model itself."""
    config = load_config(name)
    if not isinstance(config, RecurrentModelConfig) and not is_known(config):
        classes = [getattr(transformers, str(name), None) for name in config.architectures or []]
        cls = next((one for one in classes if isinstance(one, type) and issubclass(one, PreTrainedModel)), AutoModel)
        _find_architecture(config, load_model(cls.from_pretrained, name))
    return config


def _find_architecture(config: PreTrainedConfig, model: PreTrainedModel) -> None:
    """Discover the architecture of a model and write it into a config. What stands in the way is told when recurrence
    is added."""
    with contextlib.suppress(NotUnderstood):
        store_architecture(config, discover(model))


def describe_causal(name: str) -> tuple[PreTrainedConfig, dict[str, Any] | None]:
    """What `load_causal` would load, without its weights: the config, and the record of its run. Refuses encoders,
    before transformers gives them a head that was never trained."""
    return _causal(name, describe(name))


def _causal(name: str, config: PreTrainedConfig) -> tuple[PreTrainedConfig, dict[str, Any] | None]:
    run, base = run_of(name), config.base_config if isinstance(config, RecurrentModelConfig) else config
    _refuse_encoder(name, base)
    return base if _of_plain_run(run) else config, run


def _refuse_encoder(name: str, base: PreTrainedConfig) -> None:
    if is_supported(base) and not architecture_of(base).causal:
        raise ValueError(
            f"{name} is an encoder ({base.model_type}), and this needs a causal language model. Encoders are for "
            "`carryforward train`, `evaluate`, `embed` and `qa`."
        )


def task_of(name: str) -> str | None:
    """What a model is for, one of `presets.TASKS`, by its config alone. None for an encoder without a head for one of
    these tasks. A type that nothing is known of counts as causal."""
    if Path(name).suffix == ".gguf":
        return "causal-lm"
    config = load_config(name)
    base = config.base_config if isinstance(config, RecurrentModelConfig) else config
    saved_as = str((config.architectures or [""])[0])
    if is_known(base) and architecture_of(base).causal:
        return "causal-lm"
    task = next((task for task, (ending, _) in _ENCODER_TASKS.items() if saved_as.endswith(ending)), None)
    if task is None and not is_known(base) and not saved_as.endswith(("ForCausalLM", "LMHeadModel")):
        base = describe(name)
    is_encoder = task is not None or (is_supported(base) and not architecture_of(base).causal)
    return task if is_encoder else "causal-lm"


def describe_encoder(name: str) -> tuple[PreTrainedConfig, dict[str, Any] | None]:
    """What `load_encoder` would load, without its weights: the config, and the record of its run."""
    config, run = describe(name), run_of(name)
    recurrent = isinstance(config, RecurrentModelConfig)
    return config.base_config if recurrent and _of_plain_run(run) else config, run


def _of_plain_run(run: dict[str, Any] | None) -> bool:
    """Whether a model comes from a run without recurrence, whose checkpoints hold a recurrence that was not trained."""
    return run is not None and not run["settings"].get("recurrence", True)


def load_encoder(name: str, task: str, classes: Sequence[str] | None = None) -> Loaded:
    """Load an encoder with the head of a task, plain or recurrent, and its tokenizer.

    Args:
        task: "masked-lm", "classification" or "token-classification".
        classes: the names of a classifier's classes; by default the model's own. A model without a head for the task
            gets a new one.
    """
    own_task, (config, run) = task_of(name), describe_encoder(name)
    labels: dict[str, Any] = {}
    if classes is not None:
        names = dict(enumerate(classes))
        labels = {"id2label": names, "label2id": {label: number for number, label in names.items()}}
    if own_task != task:
        logger.warning("%s has no head for %s: a new one is made, which must be trained.", name, task)
    if isinstance(config, RecurrentModelConfig):
        cls = auto.classes()[_architecture(name, config)]
        model = load_model(cls.from_pretrained, name, dtype=torch.float32)
        model = model if own_task == task else _change_head(model, task, labels)
        for one in (model.config, model.config.base_config):
            for field, value in labels.items():
                setattr(one, field, value)
    else:
        with _without_warnings() if own_task != task else contextlib.nullcontext():  # of weights of another head
            model = load_model(_ENCODER_TASKS[task][1].from_pretrained, name, dtype=torch.float32, **labels)
        model = model.base if isinstance(model, RecurrentPreTrainedModel) else model
        if not is_known(model.config):
            _find_architecture(model.config, model)
    tokenizer = load_tokenizer(name, config)
    return Loaded(name, _keep(model, tokenizer), tokenizer, run)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """transformers' warnings are not shown."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _change_head(model: RecurrentPreTrainedModel, task: str, labels: dict[str, Any]) -> RecurrentPreTrainedModel:
    """The same encoder and memory with a new head for a task."""
    config = copy.deepcopy(model.config.base_config)
    for field, value in labels.items():
        setattr(config, field, value)
    attention = unwrapped_name(config._attn_implementation)
    headed = _ENCODER_TASKS[task][1].from_config(config, attn_implementation=attention).to(model.dtype)
    headed.base_model.load_state_dict(model.backbone.state_dict(), strict=False)  # a pooler may be new, as the head is
    recurrence = RecurrentModelConfig(
        base_config=headed.config, recurrence=model.config.recurrence, initial_memory=model.config.initial_memory,
        verified=model.config.verified,
    )  # fmt: skip
    ending = _ENCODER_TASKS[task][0]
    cls = next(cls for one, cls in auto.classes().items() if one.endswith(ending))
    result = cls(recurrence, base=headed)
    result.memory = model.memory
    return result


def load_recurrent(name: str, *, window: int | None = None, device: str | None = None) -> Loaded:
    """Load a recurrent model with the head it was saved with; a plain model without its head, made recurrent."""
    config = describe(name)
    cls = auto.classes()[_architecture(name, config)] if isinstance(config, RecurrentModelConfig) else None
    tokenizer = load_tokenizer(name, config)
    if isinstance(config, RecurrentModelConfig) and cls is not None:
        check_window(name, config, window)
        model = load_model(cls.from_pretrained, name, dtype=torch.float32)
        loaded = Loaded(name, _keep(model, tokenizer), tokenizer, run_of(name))
    else:
        plain = load_model(AutoModel.from_pretrained, name, dtype=torch.float32)
        loaded = Loaded(name, read_in_windows(plain, tokenizer, window), tokenizer, untrained=True)
    loaded.model.to(usable_device(device)).eval()  # type: ignore[arg-type]
    return loaded


def read_in_windows(plain: PreTrainedModel, tokenizer: Any, window: int | None = None) -> RecurrentPreTrainedModel:
    """A plain model without its head that reads documents in windows. Its state means nothing and must not be used."""
    positions = ensure_architecture(plain).max_positions(plain.config)
    return add_recurrence(plain, tokenizer=tokenizer, window=window or min(positions, 512), memory="vector")


def _architecture(name: str, config: RecurrentModelConfig) -> str:
    """The name of the class that a recurrent model was saved from."""
    known, names = [*auto.classes()], config.architectures
    if not isinstance(names, list) or len(names) != 1 or names[0] not in known:
        raise ValueError(
            f"model {name!r}: its config.json has architectures={names!r}, not one of {', '.join(known)}. Save the "
            "model again."
        )
    return names[0]


def check_window(name: str, config: RecurrentModelConfig, window: int | None) -> None:
    """Refuse another window than a recurrent model's own."""
    if window not in (None, config.recurrence.window):
        raise ValueError(f"--window {window}: {name} reads {config.recurrence.window} tokens at once. Leave it out.")


def need_state(name: str) -> None:
    """Refuse a causal model that has no state, by its config alone."""
    if not isinstance(describe_causal(name)[0], RecurrentModelConfig):
        raise ValueError(
            f"{name} is a plain model: it has no state. Make it recurrent with `carryforward add` or "
            "`carryforward train`."
        )


def load_question_answering(name: str, *, window: int | None = None, device: str | None = None) -> Loaded:
    """Load a model that finds answers: a recurrent one, or a plain question-answering one, read in windows."""
    config = describe_question_answering(name, window=window)
    tokenizer = load_tokenizer(name, config)
    model = load_model(AutoModelForQuestionAnswering.from_pretrained, name, dtype=torch.float32)
    if not isinstance(config, RecurrentModelConfig):
        fields: dict[str, Any] = {} if window is None else {"window": window}
        model = add_recurrence(model, tokenizer=tokenizer, preset="paper", **fields)
        model.config.use_state = False
    loaded = Loaded(name, _keep(model, tokenizer), tokenizer, run_of(name), untrained=not model.config.use_state)
    loaded.model.to(usable_device(device)).eval()  # type: ignore[arg-type]
    return loaded


def describe_question_answering(name: str, *, window: int | None = None) -> PreTrainedConfig:
    """The config of what `load_question_answering` would load; refuses what finds no answers."""
    config = describe(name)
    if isinstance(config, RecurrentModelConfig):
        if config.architectures != [RecurrentForQuestionAnswering.__name__]:
            head = ", ".join(config.architectures or ["model without a head"])
            raise ValueError(f"{name} is a {head}, which finds no answers. Train an encoder: `carryforward qa train`.")
        check_window(name, config, window)
    elif architecture_of(config).causal:
        raise ValueError(f"{name} is causal ({config.model_type}): answers are found by encoders.")
    elif not any("ForQuestionAnswering" in one for one in config.architectures or []):
        raise ValueError(f"{name} has no question-answering head: train one with `carryforward qa train`.")
    return config


def usable_device(name: str | None) -> str:
    """The device asked for, or the best there is."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # unknown, or not on this machine
        raise ValueError(f"--device {name}: PyTorch finds no such device here. Leave it out, or use cpu.") from error
    return name


def _keep(model: Any, tokenizer: Any) -> Any:
    """The model, which saves its tokenizer with it if it is recurrent."""
    if isinstance(model, RecurrentPreTrainedModel):
        model.tokenizer = tokenizer
    return model


def _make_plain(model: PreTrainedModel) -> None:
    """A model read from GGUF holds ordinary weights, but says it is quantised and then refuses to be saved."""
    for owner in (model.config, model):
        for attribute in ("quantization_config", "hf_quantizer", "quantization_method", "is_quantized"):
            if hasattr(owner, attribute):
                delattr(owner, attribute)
