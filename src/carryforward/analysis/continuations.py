# SPDX-License-Identifier: Apache-2.0
"""Draw contexts from documents and let models continue them greedily (section 5.3 of the paper).

A context ends where a window ends. While a recurrent model writes the next window, it therefore knows the context only
through its state. The first new token is an exception: the context's last window predicts it. With the state removed,
that token is all that the new window starts from. A plain model also starts from one token, the context's last.

Continuations are saved while they are written, so that an interrupted run can be resumed.
"""

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from ..backbones.architectures import positions_of
from ..backbones.modes import eval_mode
from ..data.documents import load_documents
from ..models.causal_lm import RecurrentForCausalLM
from ..models.loading import Loaded, load_causal, need_state, usable_device
from ..models.model_files import version_of
from ..settings.commands import ContinuationSettings
from ..utils.arrays import read_arrays
from ..utils.files import atomic_write
from ..utils.parsing import parse_json
from ..utils.peft import get_recurrent_model
from ..utils.progress import ProgressBar

RECURRENT, REMOVED, PLAIN, TEXT = "recurrent", "state removed", "plain", "the text itself"  # writers
_SAVE_EVERY = 30  # seconds


# --- contexts --------------------------------------------------------------------------------------------------------


def draw_contexts(documents: Sequence[Any], tokens: int, count: int, *, seed: int = 0) -> np.ndarray:
    """Draw where contexts start, [count, 2]: the index of a document and of a token in it.

    Every position that has `tokens` tokens from there on is equally likely. None is drawn twice.
    """
    positions = np.array([max(len(document) - tokens + 1, 0) for document in documents], dtype=np.int64)
    ends = np.cumsum(positions)
    if not len(positions) or ends[-1] < count:
        available = f"there are only {ends[-1]:,}" if len(positions) and ends[-1] else "no document is that long"
        raise ValueError(
            f"{count:,} contexts of {tokens:,} tokens were requested, but {available}. Use longer documents, or fewer "
            "or shorter contexts."
        )
    drawn = np.random.default_rng(seed).choice(ends[-1], count, replace=False)
    document = np.searchsorted(ends, drawn, side="right")
    return np.stack([document, drawn - (ends - positions)[document]], axis=1)


def read_contexts(documents: Sequence[Any], starts: np.ndarray, tokens: int) -> np.ndarray:
    """The tokens of contexts, [count, tokens]; `starts` is from `draw_contexts`."""
    return np.stack([np.asarray(documents[i][start : start + tokens]) for i, start in starts]).astype(np.int64)


def check_context(model: RecurrentForCausalLM, tokens: int) -> None:
    """Refuse a context that does not end where a window ends: its last tokens would be visible in the new window."""
    recurrence = model.config.recurrence
    stride = recurrence.window - recurrence.overlap
    if tokens < recurrence.window or (tokens - recurrence.window) % stride:
        accepted = ", ".join(f"{recurrence.window + i * stride}" for i in range(3))
        raise ValueError(f"context_tokens={tokens}: a context must end where a window ends: use {accepted}, ...")


def check_positions(model: PreTrainedModel, tokens: int, new_tokens: int) -> None:
    """Refuse more tokens than a plain model has positions for."""
    positions = positions_of(model.config)
    if positions is not None and tokens + new_tokens > positions:
        raise ValueError(
            f"new_tokens={new_tokens}: the plain model has {positions - tokens} positions left after the context. Use "
            "fewer new tokens."
        )


# --- continuations ---------------------------------------------------------------------------------------------------


def continue_greedily(
    model: PreTrainedModel, contexts: np.ndarray, new_tokens: int, *, use_state: bool = True
) -> np.ndarray:
    """Continue a batch of contexts of equal length by greedy decoding, [count, new_tokens].

    End-of-text tokens are never generated, so that all continuations have the same length.

    Args:
        model: a recurrent causal model, or any causal model of Hugging Face.
        contexts: token ids, [count, tokens]; those of a recurrent model must end where a window ends.
        use_state: False removes a recurrent model's state.
    """
    model = get_recurrent_model(model)
    recurrent = isinstance(model, RecurrentForCausalLM)
    if recurrent:
        check_context(model, contexts.shape[1])  # type: ignore[arg-type]
    else:
        check_positions(model, contexts.shape[1], new_tokens)
    ids = torch.from_numpy(contexts).to(model.device)
    generator: Any = model
    own_config = generator.generation_config
    greedy = GenerationConfig(  # only the end-of-text ids of the model's own config, which may forbid or force tokens
        do_sample=False, num_beams=1, min_new_tokens=new_tokens, max_new_tokens=new_tokens, pad_token_id=0,
        eos_token_id=own_config.eos_token_id,
    )  # fmt: skip
    options = {"use_state": use_state} if recurrent else {}
    generator.generation_config = greedy  # as an argument of `generate` it would be completed from the model's own
    try:
        with eval_mode(model), torch.inference_mode():
            generated = generator.generate(ids, attention_mask=torch.ones_like(ids), **options)
    finally:
        generator.generation_config = own_config
    return generated[:, contexts.shape[1] :].cpu().numpy()


@dataclass(frozen=True)
class Continuations:
    """Continuations of the same contexts by several models.

    Attributes:
        starts: where each context starts, [count, 2]: the index of a document and of a token in it.
        names: name of each context's document.
        contexts: texts of the contexts.
        written: texts written after them, by writer: `RECURRENT`, `REMOVED`, `PLAIN` if there is a plain model, and
            `TEXT`, the document's own continuation.
        metadata: models and data, as JSON values.
    """

    starts: np.ndarray
    names: list[str]
    contexts: list[str]
    written: dict[str, list[str]]
    metadata: dict[str, Any]


def generate_continuations(
    name: str, settings: ContinuationSettings, out: Path, *, device: str | None = None
) -> Continuations:
    """Draw contexts and continue them with a recurrent model, the same without its state, and optionally a plain one.

    Args:
        name: the recurrent model: a run, a folder or a Hub name.
        out: folder in which continuations are saved.
    """
    device = usable_device(device)
    loaded, plain = _load(name, settings)
    model: Any = loaded.model
    recurrence = model.config.recurrence
    tokens = settings.context_tokens or recurrence.window
    check_context(model, tokens)
    documents = load_documents(settings.data, settings.split, loaded.tokenizer, text_field=settings.text_field)
    starts = draw_contexts(documents, tokens + settings.new_tokens, settings.contexts, seed=settings.seed)
    contexts, following = np.split(read_contexts(documents, starts, tokens + settings.new_tokens), [tokens], axis=1)
    identity = {
        "model": [name, version_of(name)], "plain": settings.plain and [settings.plain, version_of(settings.plain)],
        "data": [settings.data, settings.split, documents.key], "contexts": settings.contexts, "context_tokens": tokens,
        "new_tokens": settings.new_tokens, "bf16": settings.bf16, "seed": settings.seed,
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)  # after all that can be refused
    for used in (loaded, plain):
        if used is not None:
            used.model.to(device)  # type: ignore[arg-type]
    writers = _writers(model, None if plain is None else plain.model, contexts, settings.new_tokens)
    written = _Store(out / "continuations.npz", identity).fill(writers, settings.contexts, settings.batch_size)
    written = {**written, TEXT: following}
    return Continuations(
        starts,
        [documents.names[i] for i in starts[:, 0]],
        [_decode(loaded.tokenizer, ids) for ids in contexts],
        {writer: [_decode_after(loaded.tokenizer, *pair) for pair in zip(contexts, new, strict=True)]
         for writer, new in written.items()},
        {"model": {**_describe(loaded), "window": recurrence.window, "overlap": recurrence.overlap,
                   "carried": recurrence.extra_positions},
         "plain": plain and _describe(plain), "context_tokens": tokens,
         "data": documents.about()},
    )  # fmt: skip


def _writers(
    model: Any, plain: PreTrainedModel | None, contexts: np.ndarray, new_tokens: int
) -> dict[str, Callable[[slice], np.ndarray]]:
    """Functions that continue some of the contexts, by writer."""
    writers: dict[str, Callable[[slice], np.ndarray]] = {
        RECURRENT: lambda rows: continue_greedily(model, contexts[rows], new_tokens),
        REMOVED: lambda rows: continue_greedily(model, contexts[rows], new_tokens, use_state=False),
    }
    if plain is not None:
        writers[PLAIN] = lambda rows: continue_greedily(plain, contexts[rows, -1:], new_tokens)
    return writers


def _load(name: str, settings: ContinuationSettings) -> tuple[Loaded, Loaded | None]:
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    need_state(name)
    loaded = load_causal(name, dtype)
    if settings.plain is None:
        return loaded, None
    plain = load_causal(settings.plain, dtype)
    if plain.recurrent:
        raise ValueError(f"--plain {settings.plain} is a recurrent model: give a plain one, or leave it out.")
    if plain.tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        raise ValueError(f"--plain {settings.plain} has another vocabulary than {name}: both must have the same.")
    check_positions(plain.model, 1, settings.new_tokens)
    return loaded, plain


def _describe(loaded: Loaded) -> dict[str, Any]:
    """A model's name, and the number of tokens it was trained on if it is a training run."""
    return {"name": Path(loaded.name).name, "trained_tokens": None if loaded.run is None else loaded.run.get("tokens")}


class _Store:
    """Tokens written so far, saved in a file. `identity` tells runs with other settings, data or weights apart."""

    def __init__(self, path: Path, identity: dict[str, Any]):
        self.path, self.identity = path, json.loads(json.dumps(identity))
        self.written: dict[str, np.ndarray] = {}
        if path.exists():
            self._load()

    def _load(self) -> None:
        remedy = "Delete it, or use another --out."
        arrays = read_arrays(self.path, remedy)
        try:
            saved = parse_json(str(arrays.pop("identity")), "identity")
            if not isinstance(saved, dict) or any(one.ndim != 2 or one.dtype != np.int32 for one in arrays.values()):
                raise ValueError("it does not hold continuations")
        except (KeyError, ValueError) as error:
            raise ValueError(f"{self.path} is damaged ({error}). {remedy}") from error
        self.written = arrays
        differences = [_difference(name, saved.get(name), value) for name, value in self.identity.items()
                       if saved.get(name) != value]  # fmt: skip
        if differences:
            raise ValueError(
                f"{self.path.parent} holds continuations of other settings, data or weights ({'; '.join(differences)})."
                " Use the same, or another --out."
            )

    def fill(
        self, writers: dict[str, Callable[[slice], np.ndarray]], count: int, batch_size: int
    ) -> dict[str, np.ndarray]:
        """Let every writer write the continuations that are missing; return all."""
        saved, total = time.monotonic(), len(writers) * count
        with ProgressBar("continuing", total, "contexts", done=sum(map(len, self.written.values()))) as bar:
            try:
                for name, write in writers.items():
                    while (done := len(self.written.get(name, ()))) < count:
                        new = write(slice(done, min(done + batch_size, count))).astype(np.int32)
                        self.written[name] = np.concatenate([self.written[name], new]) if done else new
                        bar.advance(len(new))
                        if time.monotonic() - saved > _SAVE_EVERY:
                            self._save()
                            saved = time.monotonic()
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"interrupted: {bar.done:,} of {total:,} continuations are saved. Run the same command to resume."
                ) from None
            finally:
                self._save()
        return self.written

    def _save(self) -> None:
        if not self.written:  # an empty file would only block other settings in this folder
            return
        with atomic_write(self.path) as temporary:
            np.savez(temporary, identity=np.array(json.dumps(self.identity)), **self.written)  # type: ignore[arg-type]


def _difference(setting: str, saved: Any, current: Any) -> str:
    """Describe how a setting differs. Models and data are lists whose last item is a version."""
    before, now = (" ".join(value[:-1]) if isinstance(value, list) else str(value) for value in (saved, current))
    change = f"{before} before, {now} now" if before != now else f"{now} has changed"
    return f"{setting.replace('_', ' ')}: {change}"


def _decode(tokenizer: Any, ids: np.ndarray) -> str:
    return tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _decode_after(tokenizer: Any, context: np.ndarray, ids: np.ndarray) -> str:
    """Decode tokens that follow a context, including a space between them if there is one."""
    whole, before = _decode(tokenizer, np.concatenate([context, ids])), _decode(tokenizer, context)
    # the common prefix, not len(before): the tokens of one character can be split between context and continuation
    common = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(whole, before, strict=False))
    return whole[sum(1 for _ in common) :]
