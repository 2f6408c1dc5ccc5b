# SPDX-License-Identifier: Apache-2.0
"""Models by name: the bundled one, a Hub name, a folder, a GGUF file, or a run of `carryforward train`."""

import difflib
import functools
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from ..backbones.architectures import architecture_of, is_supported
from ..config import RecurrentModelConfig
from ..data import tokenization
from ..engine.graph_cache import first_line
from ..memories.base import is_int
from ..settings import BUNDLED
from ..utils import checkpoints
from ..utils.checkpoints import RUN_FILE, run_of
from ..utils.digests import damaged_file
from ..utils.files import finish_replacement
from ..utils.parsing import read_json_object
from . import auto
from .add_recurrence import add_recurrence, savable
from .base import RecurrentPreTrainedModel
from .question_answering import RecurrentForQuestionAnswering

logger = logging.get_logger(__name__)

_BUNDLED_FOLDER = Path(__file__).parent.parent / "bundled"
_HUB_TIMEOUT = 5  # seconds
_JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")


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
    config, run = (None, run_of(name)) if is_gguf else describe_causal(name)
    model = load_model(AutoModelForCausalLM.from_pretrained, name, dtype=dtype)
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


def describe_causal(name: str) -> tuple[PreTrainedConfig, dict[str, Any] | None]:
    """What `load_causal` would load, without its weights: the config, and the record of its run. Refuses encoders,
    before transformers gives them a head that was never trained."""
    config, run = load_config(name), run_of(name)
    base: Any = config.base_config if isinstance(config, RecurrentModelConfig) else config
    if is_supported(base) and not architecture_of(base).causal:
        raise ValueError(
            f"{name} is an encoder ({base.model_type}), and this needs a causal language model. Encoders are for "
            "`carryforward embed` and `carryforward qa`."
        )
    if run is not None and not run["settings"].get("recurrence", True):
        return base, run  # a checkpoint of a plain model's run: its recurrence was never trained
    return config, run


def load_recurrent(name: str, *, window: int | None = None, device: str | None = None) -> Loaded:
    """Load a recurrent model with the head it was saved with; a plain model without its head, made recurrent."""
    config = load_config(name)
    cls = auto.classes()[_architecture(name, config)] if isinstance(config, RecurrentModelConfig) else None
    tokenizer = load_tokenizer(name, config)
    if isinstance(config, RecurrentModelConfig) and cls is not None:
        check_window(name, config, window)
        model = load_model(cls.from_pretrained, name, dtype=torch.float32)
        loaded = Loaded(name, _keep(model, tokenizer), tokenizer, run_of(name))
    else:
        positions = architecture_of(config).max_positions(config)
        plain = load_model(AutoModel.from_pretrained, name, dtype=torch.float32)
        window = window or min(positions, 512)
        model = add_recurrence(plain, tokenizer=tokenizer, window=window, memory="vector")  # its state is not used
        loaded = Loaded(name, model, tokenizer, untrained=True)
    loaded.model.to(usable_device(device)).eval()  # type: ignore[arg-type]
    return loaded


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
    config = load_config(name)
    if isinstance(config, RecurrentModelConfig):
        if config.architectures != [RecurrentForQuestionAnswering.__name__]:
            head = ", ".join(config.architectures or ["model without a head"])
            raise ValueError(f"{name} is a {head}, which finds no answers. Train an encoder: `carryforward qa train`.")
        check_window(name, config, window)
    elif architecture_of(config).answer is None:
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


def load_tokenizer(name: str, config: PreTrainedConfig | None = None, **options: Any) -> Any:
    """Load a model's tokenizer. One that is missing, damaged or cannot be the model's is refused; one other than a
    recurrent model was saved with is warned of.

    Args:
        config: the model's config; by default it is loaded.
        **options: for `from_pretrained`.
    """
    config = load_config(name) if config is None else config
    where, more = _find(name)
    advice = f"Save the model's own tokenizer there: tokenizer.save_pretrained({where!r})."
    if Path(where).is_dir() and not more and not _tokenizer_files(Path(where)):
        raise ValueError(f"model {name!r} has no tokenizer files. {advice}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **more, **options)
    except Exception as error:  # of many kinds: damaged files make transformers and tokenizers fail anywhere
        files = ", ".join(_tokenizer_files(Path(where))) or "on the Hub"
        raise ValueError(
            f"model {name!r}: its tokenizer ({files}) cannot be loaded ({first_line(error)}). {advice}"
        ) from error
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    tokenization.check_tokenizer(tokenizer, vocabulary, name=f"the tokenizer of {name}", advice=advice)
    recorded = getattr(config, "tokenizer_fingerprint", None)
    if recorded is not None and tokenization.fingerprint(tokenizer) != recorded:
        logger.warning("The tokenizer of %s is not the one that the model was saved with. %s", name, advice)
    return tokenizer


def _tokenizer_files(folder: Path) -> list[str]:
    """The names of files that may be a tokenizer's."""
    patterns = ("tokenizer*", "vocab*", "merges*", "*.model", "*.tiktoken", "*.spm", "spiece*", "*bpe*", "tekken*")
    return sorted({path.name for pattern in patterns for path in folder.glob(pattern)})


def _keep(model: Any, tokenizer: Any) -> Any:
    """The model, which saves its tokenizer with it if it is recurrent."""
    if isinstance(model, RecurrentPreTrainedModel):
        model.tokenizer = tokenizer
    return model


def load_config(name: str) -> PreTrainedConfig:
    """Load a model's config alone."""
    config = load_model(AutoConfig.from_pretrained, name)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value: Any = getattr(config.get_text_config(), token, None)
        if any(is_int(one) and abs(one) >= 2**63 for one in (value if isinstance(value, list) else [value])):
            raise ValueError(f"model {name!r}: its config.json is damaged: {token}={value} is no token.")
    return config


def version_of(name: str) -> list[Any]:
    """What tells a model from an earlier one of the same name: its files, or its commit on the Hub."""
    where = Path(_find(name)[0])
    if not where.is_dir():
        cached = try_to_load_from_cache(name, "config.json")
        return [Path(cached).parent.name] if isinstance(cached, str) else []
    kinds = (".safetensors", ".bin", ".gguf", ".json", ".model", ".txt")  # weights, config and tokenizer
    files = sorted(path for path in where.iterdir() if path.suffix in kinds)
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def load_model(load: Callable, name: str, **options: Any) -> Any:
    """What a class's `from_pretrained` makes of a name; what goes wrong is said in a sentence."""
    where, more = _find(name)
    if getattr(load, "__self__", None) not in _PARTS:  # weights are read
        _check_digests(name)
    try:
        return load(where, trust_remote_code=False, **options, **more)  # None would ask, and then run it
    except SafetensorError as error:
        raise ValueError(
            f"model {name!r}: a weights file is cut short or damaged ({error}). Copy or save it again."
        ) from error
    except OSError as error:
        text = " ".join(str(error).split())
        if Path(name).exists() or name == BUNDLED:
            raise OSError(f"model {name!r}: {text}") from error
        near = _near(Path(name))
        raise OSError(f"model {name!r} is no folder here and cannot be had from the Hub:{near} {text}") from error
    except (ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers raises errors of every type for damaged files
        raise ValueError(_load_error(load, name, error)) from error


_PARTS: dict[Any, str] = {AutoConfig: "its config.json", AutoTokenizer: "its tokenizer"}


def _load_error(load: Callable, name: str, error: Exception) -> str:
    """A sentence for an error of transformers, which may name neither the model nor the file."""
    text, loader = " ".join(str(error).split()), getattr(load, "__self__", None)
    part = _PARTS.get(loader, "its config.json or weights")
    if "Unrecognized configuration class" in text:  # a list of some 200 classes follows
        cls, model_type = getattr(loader, "__name__", "transformers"), load_config(name).model_type
        return f"model {name!r} is of type {model_type!r}, which {cls} cannot load. Use another model."
    if isinstance(error, ValueError) and part not in _PARTS.values():
        return text if name in text else f"model {name!r}: {text}"
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"model {name!r}: {part} cannot be read and may be damaged ({kind}{text[:300]}). Copy or save it again."


def _check_digests(name: str) -> None:
    """Refuse a checkpoint or the model of a finished run if a file of it has changed since it was written."""
    folder = Path(name)
    if not folder.is_dir():
        return
    if checkpoints.is_sealed(folder):
        damage = checkpoints.find_damage(folder)
        if damage is not None:
            raise ValueError(f"model {name!r}: this checkpoint is {damage}. Use another checkpoint of the run.")
    elif (folder / RUN_FILE).is_file() and (run := run_of(name)) is not None and run.get("status") == "finished":
        file = damaged_file(folder, run.get("files") or {})
        if file is not None:
            raise ValueError(
                f"model {name!r}: {file} is damaged or was changed after training. Copy the model again, or take "
                f"{RUN_FILE} away to use it as it is."
            )


def _find(name: str) -> tuple[str, dict[str, Any]]:
    """What `from_pretrained` must be given for a name."""
    if name == BUNDLED:
        return str(_BUNDLED_FOLDER), {}
    path = Path(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"model {name!r}: there is no such file.")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_file():
        raise ValueError(f"model {name!r} is a file: give its folder, or a .gguf file.")
    if path.is_dir() and not (path / "config.json").exists():
        finish_replacement(path)  # saving may have been interrupted
    if path.is_dir() and not (path / "config.json").exists():
        raise ValueError(_no_model(path))
    on_hub = not path.is_absolute() and name.count("/") < 2 and (path.parent == Path() or not path.parent.is_dir())
    if path.exists():
        for file in _JSON_FILES:
            if (path / file).is_file():
                read_json_object(path / file, "Copy or save it again.")
        return name, {}
    if not on_hub:
        raise ValueError(f"model {name!r}: there is no such folder.{_near(path)}")
    return name, _hub_options(name)


def _near(path: Path) -> str:
    """A folder beside a path that does not exist, whose name is nearly the same."""
    try:
        folders = [one.name for one in path.absolute().parent.iterdir() if one.is_dir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, folders, n=1)
    return f" Did you mean {str(path.with_name(close[0]))!r}?" if close else ""


@functools.cache
def _hub_options(name: str) -> dict[str, Any]:
    """What `from_pretrained` must be told of a name on the Hub.

    One request without retries finds out whether the Hub can be reached: transformers would retry for half a minute.
    """
    if huggingface_hub.constants.is_offline_mode():
        return {}
    try:
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, "config.json"), timeout=_HUB_TIMEOUT)
    except HfHubHTTPError:  # it has answered: transformers says what is wrong
        return {}
    except Exception as error:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return {"local_files_only": True}
        raise ValueError(
            f"model {name!r} is no folder here and is not in the Hub's cache, and the Hub cannot be reached "
            f"({type(error).__name__}).{_near(Path(name))}"
        ) from error
    return {}


def _make_plain(model: PreTrainedModel) -> None:
    """A model read from GGUF holds ordinary weights, but says it is quantised and then refuses to be saved."""
    for owner in (model.config, model):
        for attribute in ("quantization_config", "hf_quantizer", "quantization_method", "is_quantized"):
            if hasattr(owner, attribute):
                delattr(owner, attribute)


def _no_model(path: Path) -> str:
    if not (path / RUN_FILE).exists():
        return f"model {str(path)!r}: this folder holds no model (config.json is missing)."
    found = [folder for folder in checkpoints.list_checkpoints(path) if checkpoints.is_complete(folder)]
    hint = f" Its newest checkpoint is {found[-1]}." if found else ""
    return f"model {str(path)!r}: this run is not finished. Run the same train command again to go on.{hint}"
