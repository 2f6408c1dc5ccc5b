# SPDX-License-Identifier: Apache-2.0
"""Token documents: a corpus is tokenised once, stored in a cache folder and read through a memory map.

The name of a cache entry is a digest of everything its content depends on, so an entry is never out of date. Besides
its tokens, a document has the counts of words, bytes and line ends of exactly the text that its tokens cover:
perplexity per word and bits per byte are computed from them.

An entry records the digests of its files and of its record itself, which are checked whenever it is opened: an entry
that is damaged in any way is made again.
"""

import errno
import hashlib
import json
import logging
from collections import deque
from collections.abc import Generator, Iterable, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np

from ..utils.checks import check_callable, check_count, check_flag
from ..utils.digests import damaged_file, digest_files
from ..utils.progress import ProgressBar, ProgressCallback
from .cache import cache_root, open_or_create
from .corpora import open_corpus
from .texts import Corpus, Text, count_text
from .tokenization import Encoded, Encoder, batches, check_tokenizer, dtype_for, token_array

logger = logging.getLogger(__name__)

_FORMAT = 2  # version of the cache's format; entries of other versions are not used
_BATCH = 500_000  # characters that a thread tokenises at once: many short texts, or a book
_AHEAD = 1_000_000  # characters read ahead for each thread but one, so that no thread waits for a long book
_ALONE = 10_000_000  # characters of a text that is tokenised on its own and written as it is tokenised
_COUNTS = ("lengths", "words", "bytes", "line_ends")

_Batch = list[tuple[Text, Iterable[Encoded]]]  # texts and the parts of their tokens


class Documents(Sequence[np.ndarray]):
    """A sequence of documents, each an array of token ids that is a view of one array or memory-mapped file.

    Attributes:
        lengths, words, bytes, line_ends: tokens, `len(text.split())`, UTF-8 bytes and "\\n" of each document (int64).
        names: the documents' names in their corpus.
        name, split: the corpus and its split.
        key: the name of the cache entry; empty for documents created in memory.
        max_tokens: the limit to which documents were truncated; None if there was none.
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
        """Create documents in memory. By default, counts are 0 and names are numbers."""
        if isinstance(token_lists, str) or not isinstance(token_lists, Iterable):
            raise ValueError(
                f"token_lists is a {type(token_lists).__name__}: give a list of token ids for each document."
            )
        arrays = [token_array(tokens, f"token_lists[{i}]") for i, tokens in enumerate(token_lists)]
        columns = {"words": words, "bytes": bytes, "line_ends": line_ends, "names": names}
        for argument, values in columns.items():
            if values is not None and (not isinstance(values, Sized) or isinstance(values, str)):
                raise ValueError(
                    f"{argument} is a {type(values).__name__}: give a list with one entry for each document."
                )
            if values is not None and len(values) != len(arrays):
                raise ValueError(f"{argument} has {len(values)} entries for {len(arrays)} documents: give one each.")
            if values is not None and argument != "names":
                token_array(values, argument)
        tokens = np.concatenate([np.empty(0, np.int64), *arrays])
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < 1 << 32:
            raise ValueError(f"token_lists holds {tokens.min()} to {tokens.max()}: token ids are 0 to 2**32 - 1.")
        counts = {
            count: np.asarray(values if values is not None else [0] * len(arrays), dtype=np.int64)
            for count, values in [("lengths", [len(a) for a in arrays]), *columns.items()]
            if count != "names"
        }
        return cls(
            tokens.astype(dtype_for(int(tokens.max(initial=0)) + 1)), _starts(counts["lengths"]), counts,
            names if names is not None else [str(i) for i in range(len(arrays))],
        )  # fmt: skip

    def about(self) -> dict[str, Any]:
        """Return a description of the data, as results record it."""
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
        start = self._starts[index]  # raises the IndexError that ends iteration
        return self._tokens[start : start + self.lengths[index]]

    def select(self, indices: Sequence[int]) -> "Documents":
        """Return the documents with these indices, in this order, without copying tokens."""
        chosen = np.asarray(indices, dtype=np.int64).reshape(-1)
        counts = {count: getattr(self, count)[chosen] for count in _COUNTS}
        key = self.key and blake2b(self.key.encode() + chosen.tobytes(), digest_size=16).hexdigest()
        names = [self.names[i] for i in chosen]
        return Documents(
            self._tokens, self._starts[chosen], counts, names, name=self.name, split=self.split, key=key,
            max_tokens=self.max_tokens,
        )  # fmt: skip


def load_documents(
    source: str, split: str, tokenizer: Any, *, text_field: str = "text", checksums: Path | str | None = None,
    max_tokens: int | None = None, bos: bool = False, require_targets: bool = False,
) -> Documents:  # fmt: skip
    """Open a corpus and tokenise it: `open_corpus` and `tokenise` in one call.

    Args:
        source, split, text_field, checksums: as of `open_corpus`.
        tokenizer, max_tokens, bos: as of `tokenise`.
        require_targets: raise a ValueError if no document has a second token, which would be the first to predict.
    """
    corpus = open_corpus(source, split, text_field=text_field, checksums=checksums)
    documents = tokenise(corpus, tokenizer, max_tokens=max_tokens, bos=bos)
    if require_targets and not (documents.lengths > 1).any():
        raise ValueError(f"{source}, split {split!r}: no document has a second token to predict. Use longer documents.")
    return documents


def tokenise(
    corpus: Corpus, tokenizer: Any, *, cache: Path | None = None, max_tokens: int | None = None, bos: bool = False,
    progress: ProgressCallback | None = None,
) -> Documents:  # fmt: skip
    """Tokenise a corpus, or load its tokens from the cache.

    Args:
        corpus: a corpus from `open_corpus`.
        tokenizer: a Hugging Face tokenizer, fast or slow. It is not changed.
        cache: the cache folder; by default `$CARRYFORWARD_CACHE`, or `carryforward` in the user's cache folder.
        max_tokens: truncate documents to so many tokens; by default, the corpus decides.
        bos: start each document with the tokenizer's BOS token, which does not count towards `max_tokens`.
        progress: called with the bytes of text done and in all; by default, a bar is shown on a terminal.
    """
    if not isinstance(corpus, Corpus):
        raise ValueError(f"corpus is a {type(corpus).__name__}: give what open_corpus returns.")
    check_tokenizer(tokenizer)
    check_flag("bos", bos)
    check_callable("progress", progress, optional=True)
    max_tokens = corpus.max_tokens if max_tokens is None else max_tokens
    check_count("max_tokens", max_tokens, optional=True)
    if bos and tokenizer.bos_token_id is None:
        raise ValueError(f"bos=True, but {type(tokenizer).__name__} has no BOS token: leave it out.")
    encoder = Encoder(tokenizer, max_tokens, tokenizer.bos_token_id if bos else None)
    identity = (_FORMAT, encoder.identity, corpus.fingerprint(), corpus.name, corpus.split, max_tokens, bos)
    key = blake2b(repr(identity).encode(), digest_size=16).hexdigest()
    meta = {"format": _FORMAT, "key": key, "name": corpus.name, "split": corpus.split, "max_tokens": max_tokens}
    write = partial(_write_entry, corpus=corpus, encoder=encoder, meta=meta, progress=progress)
    return open_or_create(cache_root(cache) / key, _open_entry, write)


def _write_entry(
    folder: Path, corpus: Corpus, encoder: Encoder, meta: dict[str, Any], progress: ProgressCallback | None
) -> None:
    """Tokenise the corpus into `folder`, one batch of texts at a time."""
    names: list[str] = []
    columns: dict[str, list[int]] = {count: [] for count in _COUNTS}
    done = skipped = 0
    label = f"{corpus.name} ({corpus.split})"
    bar = ProgressBar(f"tokenising {label}", corpus.size, "bytes", library=True, callback=progress)
    try:
        with bar, (folder / "tokens.bin").open("wb") as file, closing(_encode(corpus, encoder)) as encoded:
            for batch in encoded:
                for text, parts in batch:
                    counts = _write_parts(file, parts, bar)
                    done += count_text(text.text)[1] if encoder.max_tokens else counts["bytes"]
                    if not counts["lengths"]:
                        skipped += 1
                        continue
                    names.append(text.name)
                    for count in _COUNTS:
                        columns[count].append(counts[count])
                bar.update(done)
        index: dict[str, Any] = {count: np.array(values, np.int64) for count, values in columns.items()}
        np.savez(folder / "index.npz", **index)
        (folder / "names.json").write_text(json.dumps(names), encoding="utf-8")
        meta |= {"documents": len(names), "tokens": sum(columns["lengths"]), "left_out": skipped}
        meta |= {"dtype": encoder.dtype.name, "digests": digest_files(folder, sorted(folder.iterdir()))}
        meta["digest"] = _digest(meta)
        (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        reason = "A file may not be so large" if error.errno == errno.EFBIG else "The disk is full"
        written = sum(columns["lengths"]) * encoder.dtype.itemsize
        share = min(1.0, done / corpus.size) if corpus.size else 0
        needed = f"about {max(written / share / 1e6, 1):,.0f} MB" if written and share else "more than is free"
        raise OSError(
            f"{reason}: the tokens of {label} need {needed} in {folder.parent}. Free some space, or set "
            "CARRYFORWARD_CACHE to a folder on another disk."
        ) from error
    if skipped:
        logger.info("%s: %d documents have no tokens and are skipped.", label, skipped)
    if not names:
        raise ValueError(f"{corpus.source or corpus.name}, split {corpus.split!r}: no document has a token.")


def _write_parts(file: BinaryIO, parts: Iterable[Encoded], bar: ProgressBar) -> dict[str, int]:
    """Write the parts of a document and return its counts. Between two parts, the bar is updated."""
    counts, done = dict.fromkeys(_COUNTS, 0), bar.done
    for i, part in enumerate(parts):
        if i:
            bar.update(done + counts["bytes"])
        file.write(part.ids.tobytes())  # not `tofile`: its errors do not tell that the disk is full
        counts["lengths"] += len(part.ids)
        for count in _COUNTS[1:]:
            counts[count] += getattr(part, count)
    return counts


def _encode(corpus: Iterable[Text], encoder: Encoder) -> Generator[_Batch, None, None]:
    """Yield batches of texts with their tokens, in order. Several threads work on several batches: within one batch,
    cores would wait for its longest text. `_AHEAD` characters per thread plus one batch are in memory, at some 100
    bytes per character: 3 GB with 16 cores. A text of more than `_ALONE` characters is a batch of its own, whose
    parts are tokenised when they are iterated over."""

    def encode(batch: list[Text]) -> _Batch:
        return [(text, [encoded]) for text, encoded in zip(batch, encoder.encode([t.text for t in batch]), strict=True)]

    pool = ThreadPoolExecutor(encoder.threads)
    pending, characters = deque[tuple[int, Future[_Batch]]](), 0
    try:
        for batch in batches(corpus, lambda text: len(text.text), full=_BATCH, alone=_ALONE):
            size = sum(len(text.text) for text in batch)
            alone = size > _ALONE
            if not alone:
                pending.append((size, pool.submit(encode, batch)))
                characters += size
            while pending and (alone or characters > _AHEAD * (encoder.threads - 1)):
                done, future = pending.popleft()
                characters -= done
                yield future.result()
            if alone:
                yield [(text, encoder.encode_parts(text.text)) for text in batch]
        while pending:
            yield pending.popleft()[1].result()
    finally:
        pool.shutdown(cancel_futures=True)


def _open_entry(folder: Path) -> Documents | None:
    """Return the documents in a cache folder, or None if it does not exist or is damaged."""
    try:
        if not folder.is_dir():
            return None
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if not isinstance(meta, dict) or meta.pop("digest", None) != _digest(meta):
            raise ValueError("meta.json is not as it was written")
        if damaged := damaged_file(folder, meta["digests"]):
            raise ValueError(f"{damaged} is not as it was written")
        with np.load(folder / "index.npz") as index:
            counts = {count: index[count] for count in _COUNTS}
        names = json.loads((folder / "names.json").read_text(encoding="utf-8"))
        tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r", shape=(meta["tokens"],))
        if not meta["documents"] == len(names) == len(counts["lengths"]) or counts["lengths"].sum() != len(tokens):
            raise ValueError("its files do not match")
        if tokens.dtype not in (np.uint16, np.uint32):
            raise ValueError(f"its tokens are of type {tokens.dtype}")
        about = {name: meta[name] for name in ("name", "split", "key", "max_tokens")}
        return Documents(tokens, _starts(counts["lengths"]), counts, names, **about)
    except Exception as error:  # whatever is wrong with it, the entry can be made again
        logger.warning("%s is damaged (%s) and is created again.", folder, error)
        return None


def _digest(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)[: len(lengths)]
