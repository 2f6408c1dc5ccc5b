# SPDX-License-Identifier: Apache-2.0
"""The files of a model by its name: found, checked, and read by a class's `from_pretrained`. Errors are sentences."""

import difflib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.utils import logging

from ..data import tokenization
from ..engine.graph_cache import first_line
from ..memories.base import is_int
from ..settings.recurrence import BUNDLED
from ..utils import checkpoints
from ..utils.checkpoints import RUN_FILE, run_of
from ..utils.digests import damaged_file
from ..utils.files import finish_replacement
from ..utils.parsing import read_json_object

logger = logging.get_logger(__name__)
_BUNDLED_FOLDER = Path(__file__).parent.parent / "bundled"
_HUB_TIMEOUT = 5  # seconds
_JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")


def load_config(name: str, **options: Any) -> PreTrainedConfig:
    """Load a model's config alone. `options` are for `from_pretrained`."""
    config = load_model(AutoConfig.from_pretrained, name, **options)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value: Any = getattr(config.get_text_config(), token, None)
        if any(is_int(one) and abs(one) >= 2**63 for one in (value if isinstance(value, list) else [value])):
            raise ValueError(f"model {name!r}: its config.json is damaged: {token}={value} is no token.")
    return config


def version_of(name: str) -> list[Any]:
    """What tells a model from an earlier one of the same name: its files, or its commit on the Hub."""
    where = Path(find(name)[0])
    if not where.is_dir():
        cached = try_to_load_from_cache(name, "config.json")
        return [Path(cached).parent.name] if isinstance(cached, str) else []
    kinds = (".safetensors", ".bin", ".gguf", ".json", ".model", ".txt")  # weights, config and tokenizer
    files = sorted(path for path in where.iterdir() if path.suffix in kinds)
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def load_model(load: Callable, name: str, **options: Any) -> Any:
    """What a class's `from_pretrained` makes of a name; what goes wrong is said in a sentence."""
    where, more = find(name)
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


def find(name: str) -> tuple[str, dict[str, Any]]:
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


def _no_model(path: Path) -> str:
    if not (path / RUN_FILE).exists():
        return f"model {str(path)!r}: this folder holds no model (config.json is missing)."
    found = [folder for folder in checkpoints.list_checkpoints(path) if checkpoints.is_complete(folder)]
    hint = f" Its newest checkpoint is {found[-1]}." if found else ""
    return f"model {str(path)!r}: this run is not finished. Run the same train command again to go on.{hint}"


# --- tokenizers ----------------------------------------------------------------------------------------------------


def load_tokenizer(name: str, config: PreTrainedConfig | None = None, **options: Any) -> Any:
    """Load a model's tokenizer. One that is missing, damaged or cannot be the model's is refused; one other than a
    recurrent model was saved with is warned of.

    Args:
        config: the model's config; by default it is loaded.
        **options: for `from_pretrained`.
    """
    config = load_config(name) if config is None else config
    where, more = find(name)
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
