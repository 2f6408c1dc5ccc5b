# SPDX-License-Identifier: Apache-2.0
"""Token documents: tokenised once, kept in a cache folder, read through a memory map.

`tokenise` streams a corpus through a tokenizer into a folder named by everything that decides its content, so an entry
is never out of date, only unused. A folder appears whole or not at all. Beside its tokens a document has the words,
bytes and line ends of exactly the text these tokens stand for, which perplexities are divided by. Windows and batches
are cut elsewhere.
"""

import errno
import json
import logging
import zipfile
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import Any, overload

import numpy as np

from ..utils.progress import Progress, bar
from . import cache as cache_folders
from .texts import Corpus, Text
from .tokenization import Encoded, Encoder, dtype_for

logger = logging.getLogger(__name__)

_FORMAT = 1  # of the cache; another number leaves old entries unused
_BATCH = 500_000  # characters that a thread gets at once: many short texts, or a book
_AHEAD = 1_000_000  # characters read ahead for each thread but one, so that others have work beside a long book
_COUNTS = ("lengths", "words", "bytes", "line_ends")


class Documents(Sequence[np.ndarray]):
    """Documents as arrays of token ids, which are views of one array or file.

    Attributes:
        lengths, words, bytes, line_ends: tokens, `len(text.split())`, UTF-8 bytes and "\\n" of each document (int64).
        names: the documents' names in their corpus.
        name, split: the corpus and its split.
        key: the name of the cache entry; empty for documents made in memory.
        max_tokens: how many of each document's first tokens were used; None where all were.
    """

    def __init__(
        self, tokens: np.ndarray, starts: np.ndarray, counts: dict[str, np.ndarray], names: Sequence[str],
        *, name: str = "", split: str = "", key: str = "", max_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self._tokens, self._starts = tokens, starts
        self.lengths, self.words, self.bytes, self.line_ends = (counts[count] for count in _COUNTS)
        self.names = list(names)
        self.name, self.split, self.key, self.max_tokens = name, split, key, max_tokens

    @classmethod
    def of(
        cls, token_lists: Iterable[Sequence[int]], *, words: Sequence[int] | None = None,
        bytes: Sequence[int] | None = None, line_ends: Sequence[int] | None = None, names: Sequence[str] | None = None,
    ) -> "Documents":  # fmt: skip
        """Documents made in memory; counts that are not given are 0, names are numbers."""
        arrays = [np.asarray(tokens, dtype=np.int64).reshape(-1) for tokens in token_lists]
        given = {"words": words, "bytes": bytes, "line_ends": line_ends, "names": names}
        for argument, values in given.items():
            if values is not None and len(values) != len(arrays):
                raise ValueError(f"{argument} has {len(values)} entries for {len(arrays)} documents: give one each.")
        tokens = np.concatenate([np.empty(0, np.int64), *arrays])
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < 1 << 32:
            raise ValueError(f"token_lists holds {tokens.min()} to {tokens.max()}: token ids are 0 to 2**32 - 1.")
        counts = {
            count: np.asarray(values if values is not None else [0] * len(arrays), dtype=np.int64)
            for count, values in [("lengths", [len(a) for a in arrays]), *given.items()]
            if count != "names"
        }
        return cls(
            tokens.astype(dtype_for(int(tokens.max(initial=0)) + 1)), _starts(counts["lengths"]), counts,
            names if names is not None else [str(i) for i in range(len(arrays))],
        )  # fmt: skip

    def about(self) -> dict[str, Any]:
        """As every result says what it was measured on."""
        return {
            "name": self.name,
            "split": self.split,
            "key": self.key,
            "documents": len(self),
            "tokens": int(self.lengths.sum()),
            "words": int(self.words.sum()),
            "bytes": int(self.bytes.sum()),
            "line_ends": int(self.line_ends.sum()),
            "max_tokens": self.max_tokens,
        }

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> "Documents": ...
    def __getitem__(self, index: int | slice) -> "np.ndarray | Documents":
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        start = self._starts[index]  # an IndexError is what iteration stops at
        return self._tokens[start : start + self.lengths[index]]

    def select(self, indices: Sequence[int]) -> "Documents":
        """Some of the documents, in the order given; no token is copied."""
        chosen = np.asarray(indices, dtype=np.int64).reshape(-1)
        counts = {count: getattr(self, count)[chosen] for count in _COUNTS}
        key = self.key and blake2b(self.key.encode() + chosen.tobytes(), digest_size=16).hexdigest()
        names = [self.names[i] for i in chosen]
        return Documents(
            self._tokens, self._starts[chosen], counts, names, name=self.name, split=self.split, key=key,
            max_tokens=self.max_tokens,
        )  # fmt: skip


def tokenise(
    corpus: Corpus, tokenizer: Any, *, cache: Path | None = None, max_tokens: int | None = None, bos: bool = False,
    progress: Progress | None = None,
) -> Documents:  # fmt: skip
    """The documents of a corpus as tokens, from the cache or into it.

    Args:
        corpus: what `open_corpus` gives.
        tokenizer: a Hugging Face tokenizer, fast or slow; it is left as it is.
        cache: where tokens are kept; else `$CARRYFORWARD_CACHE`, else `carryforward` in the user's cache folder.
        max_tokens: use only so many of each document's first tokens; else the corpus's own rule.
        bos: put the tokenizer's BOS token in front of each document, on top of `max_tokens`.
        progress: called with the bytes of text done and to do; None shows a bar if there is a terminal.
    """
    max_tokens = corpus.max_tokens if max_tokens is None else max_tokens
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} must be at least 1, or None for whole documents.")
    if bos and tokenizer.bos_token_id is None:
        raise ValueError(f"bos=True, but {type(tokenizer).__name__} has no BOS token: leave it out.")
    encoder = Encoder(tokenizer, max_tokens, tokenizer.bos_token_id if bos else None)
    identity = (_FORMAT, encoder.identity, corpus.fingerprint(), corpus.name, corpus.split, max_tokens, bos)
    key = blake2b(repr(identity).encode(), digest_size=16).hexdigest()
    folder = cache_folders.root(cache) / key
    found = _open(folder)
    if found is None:
        told = f"tokenising {corpus.name} ({corpus.split})"
        with cache_folders.beside(folder) as beside, bar(progress, told, after=1) as report:
            meta = {"format": _FORMAT, "key": key, "name": corpus.name, "split": corpus.split, "max_tokens": max_tokens}
            _write(beside, corpus, encoder, meta, report)
            found = cache_folders.put(beside, folder, _open)
    return found


def _write(folder: Path, corpus: Corpus, encoder: Encoder, meta: dict[str, Any], report: Progress) -> None:
    """Stream the corpus into `folder`."""
    names: list[str] = []
    columns: dict[str, list[int]] = {count: [] for count in _COUNTS}
    done = left_out = 0
    try:
        with (folder / "tokens.bin").open("wb") as file, closing(_encoded(corpus, encoder)) as batches:
            for batch in batches:
                for text, encoded in batch:
                    done += len(text.text.encode())
                    if not len(encoded.ids):
                        left_out += 1
                        continue
                    file.write(encoded.ids.tobytes())  # not `tofile`, whose errors do not say that the disk is full
                    names.append(text.name)
                    columns["lengths"].append(len(encoded.ids))
                    for count in _COUNTS[1:]:
                        columns[count].append(getattr(encoded, count))
                report(done, corpus.size)
        index: dict[str, Any] = {count: np.array(values, np.int64) for count, values in columns.items()}
        np.savez(folder / "index.npz", **index)
        (folder / "names.json").write_text(json.dumps(names), encoding="utf-8")
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        meta |= {"documents": len(names), "tokens": sum(columns["lengths"]), "left_out": left_out}
        meta |= {"dtype": encoder.dtype.name, "sizes": sizes}
        (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        written = sum(columns["lengths"]) * encoder.dtype.itemsize
        share = min(1.0, done / corpus.size) if corpus.size else 0
        needed = f"about {max(written / share / 1e6, 1):,.0f} MB" if written and share else "more than there is"
        raise OSError(
            f"The disk is full: the tokens of {corpus.name} ({corpus.split}) need {needed} in {folder.parent}. Free "
            "some space, or set CARRYFORWARD_CACHE to a folder on another disk."
        ) from error
    if left_out:
        logger.info("%s (%s): %d documents have no tokens and are left out.", corpus.name, corpus.split, left_out)
    if not names:
        raise ValueError(f"{corpus.source or corpus.name}, split {corpus.split!r}: no document has a token.")


def _encoded(corpus: Iterable[Text], encoder: Encoder) -> Generator[list[tuple[Text, Encoded]], None, None]:
    """Batches with their tokens, in order, by several threads: one batch has too few long texts for all cores, and
    would leave them idle until its longest is done. At once there are `_AHEAD` characters a thread and a batch more,
    at some 100 bytes each in all: 3 GB with 16 cores."""

    def encode(batch: list[Text]) -> list[tuple[Text, Encoded]]:
        return list(zip(batch, encoder.encode([text.text for text in batch]), strict=True))

    pool = ThreadPoolExecutor(encoder.threads)
    begun, characters = deque[tuple[int, Future[list[tuple[Text, Encoded]]]]](), 0
    try:
        for batch, size in _batches(corpus):
            begun.append((size, pool.submit(encode, batch)))
            characters += size
            while characters > _AHEAD * (encoder.threads - 1):
                size, made = begun.popleft()
                characters -= size
                yield made.result()
        while begun:
            yield begun.popleft()[1].result()
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(corpus: Iterable[Text]) -> Iterator[tuple[list[Text], int]]:
    """Texts together as long as they are few characters, and how many these are."""
    batch, characters = list[Text](), 0
    for text in corpus:
        batch.append(text)
        characters += len(text.text)
        if characters >= _BATCH:
            yield batch, characters
            batch, characters = [], 0
    if batch:
        yield batch, characters


def _open(folder: Path) -> Documents | None:
    """The entry in a folder, or None if there is none or it is damaged."""
    if not folder.is_dir():
        return None
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        for file, size in meta["sizes"].items():
            if (folder / file).stat().st_size != size:
                raise ValueError(f"{file} has another size than was written")
        with np.load(folder / "index.npz") as index:
            counts = {count: index[count] for count in _COUNTS}
        names = json.loads((folder / "names.json").read_text(encoding="utf-8"))
        tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r", shape=(meta["tokens"],))
        if not meta["documents"] == len(names) == len(counts["lengths"]) or counts["lengths"].sum() != len(tokens):
            raise ValueError("its files do not fit each other")
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        logger.warning("%s is damaged (%s) and is made again.", folder, error)
        return None
    starts = _starts(counts["lengths"])
    about = {name: meta[name] for name in ("name", "split", "key", "max_tokens")}
    return Documents(tokens, starts, counts, names, **about)


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)[: len(lengths)]
