# SPDX-License-Identifier: Apache-2.0
"""Models continue contexts of a corpus, and what they wrote is kept: an interrupted run goes on where it was."""

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from ..data.corpora import open_corpus
from ..data.documents import tokenise
from ..models.loading import Loaded, load_causal, need_state, usable_device, version_of
from ..settings import ContinuationSettings
from ..utils import console
from ..utils.files import atomic_write
from .greedy_continuation import check_context, check_room, continue_greedily, draw, read_contexts

RECURRENT, REMOVED, PLAIN, TEXT = "recurrent", "state removed", "plain", "the text itself"
_SAVE_EVERY = 30  # seconds


@dataclass(frozen=True)
class Continuations:
    """What models wrote after the same contexts.

    Attributes:
        places: where each context begins, [count, 2]: the number of a document, a token of it.
        names: the documents' names, one for each context.
        contexts: their texts.
        written: the texts written after them, by writer: `RECURRENT`, `REMOVED` and, if there is one, `PLAIN`; and, to
            compare with, how the text goes on, `TEXT`.
        about: what they are of, as JSON can hold it.
    """

    places: np.ndarray
    names: list[str]
    contexts: list[str]
    written: dict[str, list[str]]
    about: dict[str, Any]


def continued(name: str, settings: ContinuationSettings, out: Path, *, device: str | None = None) -> Continuations:
    """Draw contexts and let a recurrent model, the same without its state and perhaps a plain one go on from them."""
    device = usable_device(device)
    loaded, plain = _load(name, settings)
    out.mkdir(parents=True, exist_ok=True)  # or what is written would have nowhere to go
    model: Any = loaded.model
    recurrence = model.config.recurrence
    tokens = settings.context_tokens or recurrence.window
    check_context(model, tokens)
    corpus = open_corpus(settings.data, settings.split, text_field=settings.text_field)
    documents = tokenise(corpus, loaded.tokenizer)
    places = draw(documents, tokens + settings.new_tokens, settings.contexts, seed=settings.seed)
    read = read_contexts(documents, places, tokens + settings.new_tokens)
    contexts, following = read[:, :tokens], read[:, tokens:]
    # a plain model's one token is the last: it writes from the same place on
    writers: dict[str, Callable[[slice], np.ndarray]] = {
        RECURRENT: lambda rows: continue_greedily(model, contexts[rows], settings.new_tokens),
        REMOVED: lambda rows: continue_greedily(model, contexts[rows], settings.new_tokens, use_state=False),
    }
    if plain is not None:
        beside = plain.model
        writers[PLAIN] = lambda rows: continue_greedily(beside, contexts[rows, -1:], settings.new_tokens)
    identity = {
        "model": [name, version_of(name)], "plain": settings.plain and [settings.plain, version_of(settings.plain)],
        "data": [settings.data, settings.split, documents.key], "contexts": settings.contexts, "context_tokens": tokens,
        "new_tokens": settings.new_tokens, "bf16": settings.bf16, "seed": settings.seed,
    }  # fmt: skip
    for one in (loaded, plain):
        if one is not None:
            one.model.to(device)  # type: ignore[arg-type]
    written = _Store(out / "continuations.npz", identity).fill(writers, settings.contexts, settings.batch_size)
    written = {**written, TEXT: following}
    return Continuations(
        places,
        [documents.names[i] for i in places[:, 0]],
        [_text(loaded.tokenizer, ids) for ids in contexts],
        {writer: [_following(loaded.tokenizer, *pair) for pair in zip(contexts, new, strict=True)]
         for writer, new in written.items()},
        {"model": {**_about(loaded), "window": recurrence.window, "overlap": recurrence.overlap,
                   "kept": recurrence.seen},
         "plain": plain and _about(plain), "context_tokens": tokens,
         "data": documents.about()},
    )  # fmt: skip


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
        raise ValueError(
            f"--plain {settings.plain} has another vocabulary than {name}: they cannot read the same tokens."
        )
    check_room(plain.model, 1, settings.new_tokens)
    return loaded, plain


def _about(loaded: Loaded) -> dict[str, Any]:
    """A model's name, and how many tokens it was trained on, if it is a run's."""
    return {"name": Path(loaded.name).name, "trained_tokens": None if loaded.run is None else loaded.run.get("tokens")}


class _Store:
    """Tokens written so far, in a file."""

    def __init__(self, path: Path, identity: dict[str, Any]):
        self.path, self.identity = path, json.loads(json.dumps(identity))
        self.written: dict[str, np.ndarray] = {}
        if path.exists():
            self._load()

    def _load(self) -> None:
        try:
            with np.load(self.path) as arrays:
                before = json.loads(str(arrays["identity"]))
                self.written = {name: arrays[name] for name in arrays.files if name != "identity"}
        except (ValueError, KeyError, EOFError, BadZipFile) as error:
            raise ValueError(f"{self.path} is damaged ({error}). Take it away, or use another --out.") from error
        differing = [_differing(name, before.get(name), value) for name, value in self.identity.items()
                     if before.get(name) != value]  # fmt: skip
        if differing:
            raise ValueError(
                f"{self.path.parent} holds continuations of other settings, data or weights ({'; '.join(differing)}). "
                "Give the same, or use another --out."
            )

    def fill(
        self, writers: dict[str, Callable[[slice], np.ndarray]], count: int, batch_size: int
    ) -> dict[str, np.ndarray]:
        """Let every writer write what is missing."""
        saved, total = time.monotonic(), len(writers) * count
        with console.Bar("continuing", total, "contexts", done=sum(map(len, self.written.values()))) as bar:
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
                told = f"interrupted: {bar.done:,} of {total:,} continuations are kept; the same command goes on."
                raise KeyboardInterrupt(told) from None
            finally:
                self._save()
        return self.written

    def _save(self) -> None:
        if not self.written:  # nothing that would be lost: other settings may be tried
            return
        with atomic_write(self.path) as beside:
            np.savez(beside, identity=np.array(json.dumps(self.identity)), **self.written)  # type: ignore[arg-type]


def _differing(setting: str, before: Any, now: Any) -> str:
    """What of a setting is other than it was; models and data are a name and what tells them from others of it."""
    there, here = (" ".join(one[:-1]) if isinstance(one, list) else str(one) for one in (before, now))
    told = f"{there} there, {here} here" if there != here else f"{here}, which is not what it was"
    return f"{setting.replace('_', ' ')}: {told}"


def _text(tokenizer: Any, ids: np.ndarray) -> str:
    return tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _following(tokenizer: Any, before: np.ndarray, ids: np.ndarray) -> str:
    """The text of tokens behind others, with the space between them if there is one."""
    whole, first = _text(tokenizer, np.concatenate([before, ids])), _text(tokenizer, before)
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(whole, first, strict=False))
    return whole[sum(1 for _ in alike) :]  # a character may be cut between them
